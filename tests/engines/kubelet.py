"""Stands in for the cluster that runs a JobSet: each pod is a process here, and is replaced by the manifest's rules."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine_runs import environment


class Kubelet:
    """The pods of one job.

    Attributes:
        pods: By their index; those that have ended well are not there any more.
        ends: (index, exit code, why it counts or does not) of all that have ended.
    """

    def __init__(self, jobset: dict[str, Any], folder: Path):
        self._job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
        self._pod = self._job["template"]["spec"]
        (self._container,) = self._pod["containers"]
        variables = {each["name"]: each.get("value", "127.0.0.1") for each in self._container["env"]}
        # Kubernetes' name service has a name of the first pod; this machine has none.
        variables["PANAX_SUPERVISOR"] = f"127.0.0.1:{variables['PANAX_SUPERVISOR'].rpartition(':')[2]}"
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._environment = environment(folder, PANAX_SECRET="s" * 64, PATH=path) | variables
        self._folder = folder
        self._evicted: dict[int, float] = {}
        self._failures = 0
        self.ends: list[tuple[int, int, str]] = []
        self.pods: dict[int, subprocess.Popen[bytes]] = {}
        for index in reversed(range(self._job["completions"])):
            self._start(index)

    def __enter__(self) -> "Kubelet":
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods.values():
            pod.kill()
            pod.wait()

    def evict(self, index: int) -> None:
        """As a drain does it: SIGTERM, and SIGKILL after the grace period."""
        self._evicted[index] = time.monotonic() + self._pod["terminationGracePeriodSeconds"]
        self.pods[index].send_signal(signal.SIGTERM)

    def turn(self) -> bool:
        """Replace pods that have ended; whether any is left."""
        for index, pod in list(self.pods.items()):
            if pod.poll() is None and time.monotonic() > self._evicted.get(index, float("inf")):
                pod.kill()
                pod.wait()
            if pod.poll() is None:
                continue
            del self.pods[index]
            disrupted = self._evicted.pop(index, None) is not None
            action = "done" if pod.returncode == 0 and not disrupted else self._action(pod.returncode, disrupted)
            self.ends.append((index, pod.returncode, action))
            assert action != "FailJob", f"{self.ends}\n{self.said()}"
            self._failures += action == "Count"
            assert self._failures <= self._job["backoffLimit"]
            if action != "done":
                self._start(index)
        return bool(self.pods)

    def until(self, condition, what: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}\n{self.ends}\n{self.said()}"
            self.turn()
            time.sleep(0.05)

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("pod*")))

    def _action(self, code: int, disrupted: bool) -> str:
        """Of the first rule that fits, as the API's documentation says."""
        for rule in self._job["podFailurePolicy"]["rules"]:
            wanted = rule.get("onExitCodes", {})
            if any(each["type"] == "DisruptionTarget" for each in rule.get("onPodConditions", ())) and disrupted:
                return rule["action"]
            if wanted and wanted["operator"] == "In" and code in wanted["values"]:
                return rule["action"]
        return "Count"

    def _start(self, index: int) -> None:
        own = self._environment | {"JOB_COMPLETION_INDEX": str(index)}
        with open(self._folder / f"pod{index}", "a") as said:
            self.pods[index] = subprocess.Popen(
                self._container["command"], cwd=self._folder, env=own, stdout=said, stderr=said
            )


def launched(words: list[str], asked, folder: Path) -> Kubelet:
    """The pods of a launch."""
    from panax.cluster.engines import make_engine

    return Kubelet(json.loads(make_engine("kubernetes", asked).render_submission(words, folder)), folder.parents[1])
