"""A Ray cluster of three nodes on this machine: it prints its address, and loses or gains a node on request.

python ray_cluster.py CPUS    lines on its input: `lose`, `gain`; it ends with its input
"""

import os
import sys

if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    # Ray rewrites 127.0.0.1. A node that is lost is known to be after a second and a half.
    cpus, address = int(sys.argv[1]), "127.0.0.2"
    seen_soon = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 1000,
        "health_check_failure_threshold": 3,
    }
    head = {"num_cpus": cpus, "node_ip_address": address, "include_dashboard": False, "_system_config": seen_soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = [cluster.add_node(num_cpus=cpus, node_ip_address=address) for _ in range(2)]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line == "lose\n":
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=cpus, node_ip_address=address))
        print("done", flush=True)
    cluster.shutdown()
