"""The JobSet that Kubernetes is given, by the published schemas; how kubectl is used; and what each pod runs, as processes."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from engine_runs import command, equals, steps
from kubelet import launched

from panax.cluster.engines import Resources, make_engine
from panax.cluster.engines.client import ClientProcess
from panax.cluster.engines.kubernetes import FINAL_CODES, jobset_name
from panax.cluster.engines.pod import pod_command
from panax.cluster.supervisor.job_folder import read_incidents
from panax.core import errors
from panax.core.errors import LaunchError

SCHEMAS = Path(__file__).parent / "schemas"
LAUNCH = ["launch", "gpt2", "--on", "kubernetes", "--nodes", "2"]
GIVEN = {"nodes": 2, "processes": 8, "image": "registry.example/panax:1", "claim": "runs"}
TOKEN = "a token of mine"


def published(kind: str) -> jsonschema.Draft7Validator:
    """Accepts the requests that the API server would accept, and no others."""
    definitions = json.loads((SCHEMAS / "kubernetes_1.32.json").read_text())["definitions"]
    if kind == "JobSet":
        schema = json.loads((SCHEMAS / "jobset_v1alpha2.json").read_text())
    else:
        schema = {"$ref": f"#/definitions/io.k8s.api.core.v1.{kind}"}
    return jsonschema.Draft7Validator({**schema, "definitions": definitions})


def manifest(**more) -> dict:
    engine = make_engine(
        "kubernetes", Resources(**{**GIVEN, **more}), environment={"HF_TOKEN": TOKEN, "HOME": "/home/me"}
    )
    return json.loads(engine.render_submission(LAUNCH, Path("runs/gpt2")))


@pytest.mark.parametrize(
    "more",
    [
        {},
        {
            "accelerator": "gpu",
            "devices": 1,
            "memory": "512G",
            "time": "2-00:00:00",
            "queue": "research",
            "env": ("HF_TOKEN",),
        },
        {
            "accelerator": "tpu",
            "devices": 4,
            "processes": 2,
            "namespace": "train",
            "node_selector": ("cloud.google.com/gke-tpu-topology=2x4",),
        },
    ],
    ids=["cpu", "gpu", "tpu"],
)
def test_the_jobset_is_of_the_published_schema(more):
    found = manifest(**more)
    assert [error.message for error in published("JobSet").iter_errors(found)] == []
    text = json.dumps(found)
    assert TOKEN not in text and "/home/me" not in text


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "failurePolicy", "rules", 0, "action"), "Fail"),
        (("spec", "replicatedJobs", 0, "template", "spec", "podFailurPolicy"), {}),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers", 0, "image"), 7),
        (
            ("spec", "replicatedJobs", 0, "template", "spec", "podFailurePolicy", "rules", 1, "onExitCodes"),
            {"values": [1]},
        ),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "containers"), [{"image": "x"}]),
    ],
)
def test_the_schema_refuses_what_is_not_of_it(path, value):
    found = part = manifest()
    for step in path[:-1]:
        part = part[step]
    part[path[-1]] = value
    assert not published("JobSet").is_valid(found)


def test_the_jobset_states_what_was_asked_for():
    jobset = manifest(
        accelerator="gpu", devices=2, memory="512G", time="01:00:00", queue="research", node_selector=("a=b",)
    )
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (2, 2, "Indexed")
    assert job["activeDeadlineSeconds"] == 3600
    pod = job["template"]["spec"]
    assert (
        pod["restartPolicy"] == "Never" and pod["securityContext"]["runAsNonRoot"] and pod["nodeSelector"] == {"a": "b"}
    )
    assert pod["terminationGracePeriodSeconds"] == 120
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "512Gi"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    assert container["command"][2:] == ["panax.cluster.engines.pod", *LAUNCH] and container["workingDir"] == "/runs"
    assert container["envFrom"] == [{"secretRef": {"name": jobset["metadata"]["name"]}}]
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}
    # The first pod's host name is made by Kubernetes of these, and has 63 characters at most.
    assert container["env"][0]["value"] == "panax-gpt2-nodes-0-0.panax-gpt2:7733"
    assert len(f"{jobset_name(Path('x' * 200))}-nodes-0-99999") <= 63


def test_no_error_of_a_user_is_tried_again():
    final = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")} - {1}
    assert final <= set(FINAL_CODES) and 0 not in FINAL_CODES


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"image": ""}, "image is empty; Kubernetes needs the container image"),
        ({"claim": ""}, "claim is empty; Kubernetes needs the volume claim"),
        ({"mount": "runs"}, "mount='runs'; expected an absolute path"),
    ],
)
def test_what_kubernetes_needs(more, expected):
    with pytest.raises(LaunchError, match=expected):
        manifest(**more)


KUBECTL = """#!/bin/sh
echo "$*" >> {folder}/words
case "$*" in
*current-context*) {context} ;;
*api-resources*) echo {kinds} ;;
*persistentvolumeclaim*) {claim} ;;
*create*json*) cat > {folder}/jobset; {create} ;;
*create*) cat > {folder}/secret; {secret} ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path):
    """Makes a kubectl that answers so, and an engine that uses it."""

    def make(**answers: str):
        usual = {"context": "echo here", "kinds": "jobsets.jobset.x-k8s.io", "claim": "echo pvc/runs", "secret": ":"}
        usual["create"] = """echo '{"metadata": {"uid": "u-1"}}'"""
        (tmp_path / "kubectl").write_text(KUBECTL.format(folder=tmp_path, **usual | answers))
        (tmp_path / "kubectl").chmod(0o755)
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_TOKEN": TOKEN}
        return make_engine(
            "kubernetes", Resources(**GIVEN, env=("HF_TOKEN",), namespace="train"), environment=environment
        )

    return make


def test_submitting_creates_a_jobset_and_the_secret_that_it_owns(kubectl, tmp_path):
    engine = kubectl()
    engine.check()
    assert engine.is_queued() and engine.submit(LAUNCH, Path("runs/gpt2")) == "panax-gpt2"
    jobset, secret = (json.loads((tmp_path / name).read_text()) for name in ("jobset", "secret"))
    assert published("JobSet").is_valid(jobset) and published("Secret").is_valid(secret)
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "u-1" and secret["stringData"]["HF_TOKEN"] == TOKEN
    assert len(secret["stringData"]["PANAX_SECRET"]) == 64
    # Neither is on a command line.
    words = (tmp_path / "words").read_text()
    assert TOKEN not in words and secret["stringData"]["PANAX_SECRET"] not in words
    assert all("--namespace=train" in line for line in words.splitlines() if "config" not in line)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"context": "echo error: current-context is not set >&2; exit 1"}, "kubectl has no context; .*use-context"),
        ({"kinds": ""}, "the cluster has no JobSet; its administrator installs it"),
        (
            {"claim": "echo 'Error from server (NotFound)' >&2; exit 1"},
            "there is no volume claim 'runs' in the namespace",
        ),
    ],
)
def test_a_cluster_that_does_not_fit(kubectl, answers, expected):
    with pytest.raises(LaunchError, match=expected):
        kubectl(**answers).check()


def test_who_may_not_look_at_claims_may_use_them(kubectl):
    kubectl(claim="echo 'Error from server (Forbidden)' >&2; exit 1").check()


def test_a_job_of_the_same_name_and_a_secret_that_is_refused(kubectl, tmp_path):
    with pytest.raises(LaunchError, match="a job 'panax-gpt2' exists already"):
        kubectl(create="echo 'Error from server (AlreadyExists)' >&2; exit 1").submit(LAUNCH, Path("runs/gpt2"))
    with pytest.raises(LaunchError, match="quota"):
        kubectl(secret="echo 'exceeded quota' >&2; exit 1").submit(LAUNCH, Path("runs/gpt2"))
    assert "delete jobset panax-gpt2" in (tmp_path / "words").read_text()


def test_kubectl_that_is_not_there(tmp_path):
    with pytest.raises(LaunchError, match="kubectl is not on PATH; install kubectl"):
        make_engine("kubernetes", Resources(**GIVEN), environment={"PATH": str(tmp_path)}).check()


@pytest.mark.slow
def test_the_real_kubectl_without_a_context_or_a_server(tmp_path):
    assert shutil.which("kubectl"), "the test needs kubectl: tests/engines/install.sh kubernetes"
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    with pytest.raises(LaunchError, match="kubectl has no context"):
        make_engine("kubernetes", Resources(**GIVEN), environment=environment).check()
    server = {"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}
    context = {"name": "x", "context": {"cluster": "x", "user": ""}}
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "clusters": [server], "contexts": [context]}
    (tmp_path / "none").write_text(json.dumps(config))
    with pytest.raises(LaunchError, match=r"kubectl api-resources.*127.0.0.1:9.*refused"):
        make_engine("kubernetes", Resources(**GIVEN), environment=environment).check()


AGENT = """
import os, socket
host, port = os.environ["PANAX_SUPERVISOR"].rsplit(":", 1)
connection = socket.create_connection((host, int(port)))
connection.sendall((os.environ["PANAX_SECRET"] + " " + os.environ["JOB_COMPLETION_INDEX"]).encode())
connection.recv(1)
"""


def test_pods_are_a_supervisor_with_its_agent_and_other_agents(tmp_path):
    """The first pod places its own agent alone, with the Secret's secret; another pod becomes an agent when that one listens."""
    (tmp_path / "agent.py").write_text(AGENT)
    agent = (sys.executable, str(tmp_path / "agent.py"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        environment = {**os.environ, "PANAX_SECRET": "s" * 64, "PANAX_SUPERVISOR": address, "PANAX_POD_IP": "127.0.0.1"}
        first, second = ({**environment, "JOB_COMPLETION_INDEX": index} for index in "01")
        engine = make_engine("kubernetes", Resources(**GIVEN), agent=agent, environment=first)
        engine.check()
        assert not engine.is_queued() and engine.secret() == "s" * 64 and engine.listen_address() == ("127.0.0.1", 7733)
        assert pod_command(LAUNCH, first) == [sys.executable, "-m", "panax", *LAUNCH]
        assert pod_command(LAUNCH, second)[1:] == ["-m", "panax.cluster.node.agent"]
        # That was the look whether somebody listens.
        listener.accept()[0].close()
        placed, other = engine.start_agents(address, engine.secret()), ClientProcess(agent, second)
        connections = [listener.accept()[0] for _ in range(2)]
        assert sorted(connection.recv(99).decode() for connection in connections) == ["s" * 64 + " 0", "s" * 64 + " 1"]
        placed.replace(1)
        assert placed.failure() == ""
        placed.replace(0)
        connections.append(listener.accept()[0])
        for connection in connections:
            connection.close()
        placed.close()
        other.close()
        assert other.failure() == "" and other.log_tail() == ""


def test_a_pod_without_a_number_or_a_first_one():
    with pytest.raises(LaunchError, match="JOB_COMPLETION_INDEX=''; expected a pod's number"):
        pod_command(LAUNCH, {})
    run = subprocess.run(
        [sys.executable, "-m", "panax.cluster.engines.pod", *LAUNCH],
        capture_output=True,
        text=True,
        env=dict(os.environ),
    )
    assert run.returncode == 75 and run.stderr.startswith("panax: JOB_COMPLETION_INDEX=''")


def test_the_first_pod_does_not_come(monkeypatch):
    monkeypatch.setattr("panax.cluster.engines.pod.FIRST_SECONDS", 0.1)
    with pytest.raises(LaunchError, match=r"the job's first pod did not listen at 127.0.0.1:9"):
        pod_command(LAUNCH, {"JOB_COMPLETION_INDEX": "1", "PANAX_SUPERVISOR": "127.0.0.1:9"})


FLAGS = ("--on", "kubernetes", "--nodes", "2", "--processes", "2", "--devices", "1", "--image", "x", "--claim", "runs")
ASKED = Resources(nodes=2, processes=2, devices=1, image="x", claim="runs")


@pytest.mark.slow
def test_a_run_in_pods_is_that_of_one_process(alone, tmp_path):
    """Each pod is a process here: its command, its environment and its folder are the manifest's."""
    words = command("launch", "pods", *steps(), *FLAGS)[3:]
    with launched(words, ASKED, tmp_path / "runs/pods") as pods:
        pods.until(lambda: not pods.pods, "all pods end", 200.0)
        assert [code for _, code, _ in pods.ends] == [0, 0], pods.said()
    equals(tmp_path / "runs/pods", alone)


@pytest.mark.slow
def test_evicted_pods_save_and_the_run_resumes_from_that_very_step(tmp_path):
    """An agent's pod, then the supervisor's: no step is lost, and none is taken again."""
    folder = tmp_path / "runs/pods"
    words = command("launch", "pods", *steps(900), *FLAGS, "--checkpoint.every", "100_000")[3:]
    with launched(words, ASKED, folder) as pods:

        def trained(beyond: int) -> None:
            pods.until(lambda: max(logged(folder), default=0) > beyond, f"step {beyond + 1}", 150.0)

        saved = []
        for index in (1, 0):
            trained(5 + max(saved, default=0))
            pods.evict(index)
            pods.until(lambda index=index: index in {each[0] for each in pods.ends}, "the pod ends", 60.0)
            saved.append(max(kept(folder)))
            trained(saved[-1])
        pods.until(lambda: not pods.pods, "all pods end", 300.0)
        ends = pods.ends
    # The agent is told that its job goes on elsewhere; the supervisor saves and ends, and then the agent is of no use.
    assert ends[0] == (1, 75, "Ignore")
    assert set(ends[1:3]) == {(0, 143, "Ignore"), (1, 75, "Ignore")}
    assert sorted(ends[3:]) == [(0, 0, "done"), (1, 0, "done")]
    assert logged(folder) == list(range(1, 901)), "each step is taken once"
    said = (folder / "job/logs/process_0000.log").read_text()
    assert set(saved) <= set(map(int, re.findall(r"resuming from step (\d+)", said)))
    assert {one["cause"] for one in read_incidents(folder / "job")} == {"new layout"}


def logged(folder: Path) -> list[int]:
    """Steps as they were taken."""
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return [row["step"] for row in rows if "train/loss" in row]


def kept(folder: Path) -> list[int]:
    """Steps of committed checkpoints."""
    return [int(path.parent.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*/manifest.json")]
