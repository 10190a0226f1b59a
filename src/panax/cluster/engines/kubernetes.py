"""Kubernetes: a JobSet of one indexed job, with one pod per node; the first pod launches again and supervises
the others.

The manifest is JSON, which `kubectl` accepts like YAML. Secrets are in a Secret object, owned by the JobSet.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import LaunchError
from ...system import json_reader
from ...system.json_reader import JsonError
from ..node.agent import RESTART_EXIT_CODE
from .client import ClientProcess, require, run_client
from .engine import AGENT_COMMAND
from .environment import SECRET, SUPERVISOR
from .pod import INDEX_VARIABLE
from .resources import SIGNAL_SECONDS, Resources, parse_time_limit

USED_RESOURCES = frozenset({"cpus", "memory", "time", "image", "namespace", "claim", "mount", "queue", "node_selector"})

INSTALL_ADVICE = "install kubectl and give it a context of your cluster"

API = "jobset.x-k8s.io/v1alpha2"

PORT = 7733
"""Port at which the first pod listens: each pod has a separate address."""

JOB, CONTAINER = "nodes", "panax"
"""Names in the manifest; a pod's host name consists of the JobSet's name, the job's and its index."""

FINAL_CODES = [2, 3, 4, 5, 6, 129, 130, 143]
"""Exit codes after which the same run would fail again, or was stopped by a user; the supervisor has retried
the others."""

POD_FAILURES_PER_NODE, RESTARTS = 10, 3
"""Number of pods that Kubernetes replaces while the job continues, and of restarts of the whole JobSet."""

_POD_IP = "PANAX_POD_IP"
_RESOURCE_OF = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}
_UNIT = {"M": "Mi", "G": "Gi", "T": "Ti"}
_LONGEST_NAME = 40


class Kubernetes:
    """Outside the cluster, a JobSet is submitted; in a job's first pod, the job is supervised."""

    agents_seconds = 600.0

    def __init__(
        self, resources: Resources, *, agent: Sequence[str] = AGENT_COMMAND, environment: Mapping[str, str] = os.environ
    ):
        for name, what in (
            ("image", "the container image that has Panax in it"),
            ("claim", "the volume claim for the run's folder"),
        ):
            if not getattr(resources, name):
                raise LaunchError(f"{name} is empty; Kubernetes needs {what}")
        if not resources.mount.startswith("/"):
            raise LaunchError(f"mount={resources.mount!r}; expected an absolute path in the container: /runs")
        self._resources, self._agent, self._environment = resources, tuple(agent), dict(environment)

    def check(self) -> None:
        if not self.is_queued():
            return
        require("kubectl", INSTALL_ADVICE, self._environment)
        try:
            run_client(["kubectl", "config", "current-context"], self._environment)
        except LaunchError as error:
            raise LaunchError(
                f"kubectl has no context; choose one with `kubectl config use-context NAME`\n{error}"
            ) from error
        kinds = self._kubectl("api-resources", "--api-group=jobset.x-k8s.io", "--output=name")
        if "jobsets" not in kinds:
            raise LaunchError(
                "the cluster has no JobSet; its administrator installs it: jobset.sigs.k8s.io/docs/installation"
            )
        try:
            self._kubectl("get", "persistentvolumeclaim", self._resources.claim, "--output=name")
        except LaunchError as error:
            # A user without permission to view claims may still use them.
            if "NotFound" in str(error):
                raise LaunchError(
                    f"there is no volume claim {self._resources.claim!r} in the namespace; create it, or name another"
                ) from error

    def render_submission(self, arguments: Sequence[str], folder: Path) -> str:
        return json.dumps(self._jobset(arguments, folder), indent=2) + "\n"

    def is_queued(self) -> bool:
        return INDEX_VARIABLE not in self._environment

    def submit(self, arguments: Sequence[str], folder: Path) -> str:
        jobset = self._jobset(arguments, folder)
        name = jobset["metadata"]["name"]
        try:
            created = json_reader.parse_as(
                dict, self._kubectl("create", "--filename=-", "--output=json", input_text=json.dumps(jobset))
            )
        except JsonError as error:
            raise LaunchError(f"kubectl made the JobSet {name!r}, and its answer can't be read: {error}") from error
        except LaunchError as error:
            if "AlreadyExists" in str(error):
                raise LaunchError(
                    f"a job {name!r} exists already; see it with `kubectl get jobset {name}`, or delete it"
                ) from error
            raise
        # Pods wait for it. It is deleted with the JobSet.
        secret = self._secret(name, created["metadata"]["uid"])
        try:
            self._kubectl("create", "--filename=-", "--output=name", input_text=json.dumps(secret))
        except LaunchError:
            self._kubectl("delete", "jobset", name, "--wait=false")
            raise
        return name

    def secret(self) -> str:
        return self._environment.get(SECRET) or secrets.token_hex(32)

    def listen_address(self) -> tuple[str, int]:
        return self._resources.address or self._environment.get(_POD_IP, "127.0.0.1"), PORT

    def start_agents(self, supervisor: str, secret: str) -> "KubernetesAgents":
        if self.is_queued():
            raise LaunchError(
                f"{INDEX_VARIABLE} is not set; agents are placed in a job's first pod, and a job is submitted from elsewhere"
            )
        return KubernetesAgents(
            self._agent, {**self._environment, SUPERVISOR: supervisor, SECRET: secret}, self._resources.nodes
        )

    def _kubectl(self, *words: str, input_text: str | None = None) -> str:
        where = [f"--namespace={self._resources.namespace}"] if self._resources.namespace else []
        return run_client(
            ["kubectl", *words, *where, "--request-timeout=10s"], self._environment, input_text=input_text
        )

    def _secret(self, name: str, uid: str) -> dict[str, Any]:
        named = {each: self._environment[each] for each in self._resources.env if each in self._environment}
        owner = {"apiVersion": API, "kind": "JobSet", "name": name, "uid": uid}
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name, "ownerReferences": [owner]},
            "type": "Opaque",
            "immutable": True,
            "stringData": {**named, SECRET: secrets.token_hex(32)},
        }

    def _jobset(self, arguments: Sequence[str], folder: Path) -> dict[str, Any]:
        resources = self._resources
        name = jobset_name(folder)
        job: dict[str, Any] = {
            "completionMode": "Indexed",
            "completions": resources.nodes,
            "parallelism": resources.nodes,
            "backoffLimit": POD_FAILURES_PER_NODE * resources.nodes,
            "podFailurePolicy": {
                "rules": [
                    # A drained or preempted pod is replaced, and not counted.
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    # The same for one that has only lost the others.
                    {
                        "action": "Ignore",
                        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [RESTART_EXIT_CODE]},
                    },
                    {
                        "action": "FailJob",
                        "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": FINAL_CODES},
                    },
                ]
            },
            "template": {"spec": self._pod(arguments, name)},
        }
        if resources.time:
            job["activeDeadlineSeconds"] = parse_time_limit(resources.time)
        return {
            "apiVersion": API,
            "kind": "JobSet",
            "metadata": {
                "name": name,
                **({"namespace": resources.namespace} if resources.namespace else {}),
                **({"labels": {"kueue.x-k8s.io/queue-name": resources.queue}} if resources.queue else {}),
            },
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": RESTARTS,
                    "rules": [
                        {
                            "name": "final",
                            "action": "FailJobSet",
                            "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                        }
                    ],
                },
                "successPolicy": {"operator": "All"},
                "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
            },
        }

    def _pod(self, arguments: Sequence[str], name: str) -> dict[str, Any]:
        resources = self._resources
        labels = dict(each.split("=", 1) for each in resources.node_selector)
        return {
            # Failed pods are replaced by the job, which sees the reason.
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": SIGNAL_SECONDS + 30,
            "automountServiceAccountToken": False,
            # The pod's first process reaps orphaned processes.
            "shareProcessNamespace": True,
            "securityContext": {"runAsNonRoot": True, "fsGroup": 1000, "seccompProfile": {"type": "RuntimeDefault"}},
            **({"nodeSelector": labels} if labels else {}),
            "containers": [
                {
                    "name": CONTAINER,
                    "image": resources.image,
                    "command": ["python", "-m", "panax.cluster.engines.pod", *arguments],
                    "workingDir": resources.mount,
                    "ports": [{"name": "supervisor", "containerPort": PORT}],
                    "env": [
                        {"name": SUPERVISOR, "value": f"{name}-{JOB}-0-0.{name}:{PORT}"},
                        {"name": _POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
                    ],
                    "envFrom": [{"secretRef": {"name": name}}],
                    "resources": self._limits(),
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [
                        {"name": "runs", "mountPath": resources.mount},
                        {"name": "shared-memory", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": resources.claim}},
                {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            ],
        }

    def _limits(self) -> dict[str, dict[str, str]]:
        asked = self._resources
        requests, limits = {"cpu": str(asked.cpus_per_node)}, {}
        if asked.memory:
            requests["memory"] = limits["memory"] = asked.memory[:-1] + _UNIT[asked.memory[-1]]
        if asked.accelerators_per_node:
            # A device is requested by its limit alone.
            limits[_RESOURCE_OF[asked.accelerator]] = str(asked.accelerators_per_node)
        return {"requests": requests, **({"limits": limits} if limits else {})}


class KubernetesAgents:
    """The agent of the first pod; agents of other pods connect by themselves, and Kubernetes replaces their
    pods."""

    def __init__(self, agent: Sequence[str], environment: Mapping[str, str], nodes: int):
        self._command, self._environment, self._nodes = list(agent), dict(environment), nodes
        self._agent = ClientProcess(self._command, self._environment)

    def failure(self) -> str:
        return self._agent.failure()

    def log_tail(self) -> str:
        return self._agent.log_tail()

    def replace(self, node: int) -> None:
        if not 0 <= node < self._nodes:
            raise LaunchError(f"the job has nodes 0 to {self._nodes - 1}; there is no node {node}")
        if node == 0:
            self._agent.close(0.0)
            self._agent = ClientProcess(self._command, self._environment)

    def start_over(self, *, preempted: bool = False) -> int | None:
        """Let Kubernetes replace the pod, which then supervises the job again; an evicted pod is replaced in
        any case."""
        return None if preempted else RESTART_EXIT_CODE

    def close(self) -> None:
        self._agent.close()


def jobset_name(folder: Path) -> str:
    """Return the JobSet's name for a run: short enough for the host names derived from it.

    >>> jobset_name(Path("runs/GPT2_small.v1"))
    'panax-gpt2-small-v1'
    """
    word = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-") or "run"
    return f"panax-{word}"[:_LONGEST_NAME].rstrip("-")
