"""A job that continues with fewer nodes and takes them in again: the supervisor, with processes that pretend to train."""

import json
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

import panax.cluster.supervisor.roster
from panax.cluster.job import Job, RestartPolicy
from panax.cluster.node.local import LocalAgents
from panax.cluster.supervisor.job_layout import CORDONED, LAYOUTS, JobShape, JobShapes, cordon, read_cordoned, uncordon
from panax.core.errors import LaunchError


class Played:
    """Faults of a job while it runs; each waits for its condition."""

    def __init__(self, launched, play: Callable[["Played"], None]):
        self.launched = launched
        self._thread = threading.Thread(target=self._run, args=(play,), daemon=True)
        self.failure: BaseException | None = None

    def _run(self, play: Callable[["Played"], None]) -> None:
        try:
            play(self)
        except BaseException as error:
            self.failure = error
        (self.launched.folder / "finish").touch()

    def run(self, **settings) -> int:
        self._thread.start()
        code = self.launched.run("elastic", **settings)
        self._thread.join(30)
        if self.failure is not None:
            raise self.failure
        return code

    def until(self, what: Callable[[dict], bool], seconds: float = 30.0) -> dict:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            path = self.launched.folder / "job/status.json"
            if path.exists():
                world = json.loads(path.read_text())
                if world["step"] >= 0 and world["state"] == "running" and what(world):
                    return world
            time.sleep(0.05)
        raise AssertionError(f"did not come: {self.launched.out.getvalue()}")

    def agents(self) -> dict[int, psutil.Process]:
        found = [each for each in psutil.Process().children() if "panax.cluster.node.agent" in each.cmdline()]
        return {int(each.environ()["PANAX_NODE"]): each for each in found}

    def arguments(self, attempt: int) -> list[list[str]]:
        """Of each of its processes."""
        paths = sorted(self.launched.folder.glob(f"arguments_{attempt}_*"))
        return [path.read_text().split() for path in paths]


def on(nodes: list[int]) -> Callable[[dict], bool]:
    return lambda status: status["nodes"]["running"] == nodes


def test_a_node_is_taken_out_and_put_back(launched):
    place = launched.folder / "job"

    def play(job: Played) -> None:
        job.until(on([0, 1, 2]))
        cordon(JobShapes.from_folder(place), place, [0], "a fan is loud", total=3)
        assert job.until(on([1, 2]))["nodes"] == {"running": [1, 2], "of": 3, "layout": "fsdp=2, 2 micro-batches"}
        uncordon(place, [0], total=3)
        assert job.until(on([0, 1, 2]))["restarts"] == 0

    job = Played(launched, play)
    assert job.run(processes=3, nodes=3) == 0
    assert [len(job.arguments(attempt)) for attempt in (1, 2, 3)] == [3, 2, 3]
    assert job.arguments(2)[0][-4:] == ["--mesh.tensor", "1", "--step.micro-batches", "2"]
    assert not any("--mesh" in each for attempt in (1, 3) for each in job.arguments(attempt)[0])
    assert [one["cause"] for one in launched.incidents] == ["new layout"] * 2
    assert [one["message"] for one in launched.incidents] == ["node 0 was taken out of the job", "node 0 is back"]
    for one in launched.incidents:
        assert one["restart"] is not None and one["first_step"] is not None


@pytest.mark.parametrize("lost", [0, 2])
def test_a_job_continues_without_a_lost_node_and_readmits_it(launched, lost, monkeypatch):
    """The engine gives it back when it is asked for the second time."""
    requests = []
    replace = LocalAgents.replace

    def later(self, node: int) -> None:
        requests.append(node)
        if len(requests) > 1:
            replace(self, node)

    monkeypatch.setattr(LocalAgents, "replace", later)
    monkeypatch.setattr(panax.cluster.supervisor.roster, "ASK_AGAIN_SECONDS", 2.0)
    left = [node for node in range(3) if node != lost]

    def play(job: Played) -> None:
        job.until(on([0, 1, 2]))
        job.agents()[lost].kill()
        job.until(on(left))
        job.until(on([0, 1, 2]))

    job = Played(launched, play)
    assert job.run(processes=3, nodes=3, policy={"replace_seconds": 0.5}) == 0
    assert requests == [lost, lost]
    assert [one["cause"] for one in launched.incidents] == ["lost host", "new layout"]
    assert launched.status["restarts"] == 1


def test_a_node_that_comes_back_in_time_changes_nothing(launched):
    def play(job: Played) -> None:
        job.until(on([0, 1]))
        job.agents()[1].kill()
        job.until(lambda status: status["attempt"] == 2)

    job = Played(launched, play)
    assert job.run(processes=2, nodes=2) == 0
    assert [len(job.arguments(attempt)) for attempt in (1, 2)] == [2, 2]
    assert [one["cause"] for one in launched.incidents] == ["lost host"]


@pytest.fixture
def job(tmp_path) -> Iterator[Job]:
    (tmp_path / "job").mkdir()
    yield Job(arguments=(), folder=tmp_path, processes=8, nodes=4, policy=RestartPolicy(min_nodes=2))


def layouts(job: Job, **counts: object) -> None:
    mesh = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1)
    found = {n.removeprefix("of"): ranked for n, ranked in counts.items()}
    ranked = {n: [{"mesh": {**mesh, "fsdp": int(n)}, "micro_batches": 1}] if r is True else r for n, r in found.items()}
    (job.place / LAYOUTS).write_text(json.dumps({"processes": 8, "layouts": ranked}))


def test_the_largest_world_that_the_model_can_be_laid_out_on(job):
    worlds = JobShapes.of(job)
    assert worlds.best([0, 1, 2, 3]) == JobShape((0, 1, 2, 3)), "nothing is known yet, and nothing needed"
    assert worlds.best([0, 1, 3]) is None
    layouts(job, of6=[], of4=True, of2=True)
    world = worlds.best([0, 1, 3])
    assert world is not None and world.nodes == (0, 1) and world.layout is not None and world.layout.mesh["fsdp"] == 4
    assert worlds.best([3]) is None, "fewer than min_nodes"
    cordon(JobShapes.of(job), job.place, [0], "test", total=4)
    world = worlds.best([0, 1, 2, 3])
    assert world is not None and world.nodes == (1, 2)


def test_a_layout_that_was_refused_is_not_taken_again(job):
    mesh = dict.fromkeys(("replica", "stage", "fsdp", "expert", "context", "tensor"), 1)
    two = [{"mesh": {**mesh, "fsdp": 6}, "micro_batches": 1}, {"mesh": {**mesh, "replica": 6}, "micro_batches": 1}]
    layouts(job, of6=two, of4=True)
    worlds, taken = JobShapes.of(job), []
    while (found := worlds.best([0, 1, 3])) is not None and found.layout is not None:
        taken.append((found.nodes, str(found.layout)))
        worlds.reject(found.layout)
    assert taken == [((0, 1, 3), "fsdp=6"), ((0, 1, 3), "replica=6"), ((0, 1), "fsdp=4")]


def test_where_the_smaller_layout_fails_the_node_is_waited_for(launched, monkeypatch):
    """On two of three nodes the first step raises: the job does not end, and continues when the third is back."""
    requests = []
    replace = LocalAgents.replace

    def later(self, node: int) -> None:
        requests.append(node)
        if len(requests) > 1:
            replace(self, node)

    monkeypatch.setattr(LocalAgents, "replace", later)
    monkeypatch.setattr(panax.cluster.supervisor.roster, "ASK_AGAIN_SECONDS", 1.0)

    def play(job: Played) -> None:
        job.until(on([0, 1, 2]))
        (launched.folder / "too_small").touch()
        job.agents()[1].kill()
        job.until(lambda status: status["attempt"] > 2 and status["nodes"]["running"] == [0, 1, 2])

    job = Played(launched, play)
    assert job.run(processes=3, nodes=3, policy={"replace_seconds": 0.5, "min_nodes": 2}) == 0
    assert "the layout fsdp=2, 2 micro-batches can't be used" in " ".join(launched.out.getvalue().split())
    assert [one["cause"] for one in launched.incidents] == ["lost host", "user error"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"processes": 6, "layouts": {"4": []}}',
        '{"processes": 8, "layouts": {"4": [{"mesh": {"fsdp": 4}, "micro_batches": 1}]}}',
        '{"processes": 8, "layouts": {"4": [{"mesh": {"replica": 1, "stage": 1, "fsdp": "4 --data /etc", "expert": 1, '
        '"context": 1, "tensor": 1}, "micro_batches": 1}]}}',
        '{"processes": 8, "layouts": {"4": [7]}}',
    ],
)
def test_a_file_that_is_no_list_of_layouts_lays_nothing_out(job, text):
    (job.place / LAYOUTS).write_text(text)
    assert JobShapes.of(job).best([0, 1]) is None


def test_what_is_cordoned(job):
    def out(nodes, why="test"):
        cordon(JobShapes.of(job), job.place, nodes, why, total=4)

    with pytest.raises(LaunchError, match="nodes 0 to 3; there is no node 4"):
        out([4])
    with pytest.raises(
        LaunchError, match="node 1 can't be taken out: the job has not yet taken a step on all of its nodes"
    ):
        out([1])
    layouts(job, of6=[], of4=True)
    with pytest.raises(
        LaunchError, match=r"node 1, 2, 3 can't be taken out: 1 of 4 nodes would be left, .* --min-nodes 2"
    ):
        out([1, 2, 3])
    layouts(job, of6=[], of4=[])
    with pytest.raises(LaunchError, match="node 3 can't be taken out: the run can't be laid out on 3 of 4 nodes"):
        out([3])
    layouts(job, of6=True, of4=True)
    out([1], "loud")
    out([3], "hot")
    assert read_cordoned(job.place) == {1: "loud", 3: "hot"}
    with pytest.raises(LaunchError, match="all 4 nodes"):
        out([0, 2])
    with pytest.raises(LaunchError, match="nodes taken out: 1, 3"):
        uncordon(job.place, [0], total=4)
    uncordon(job.place, [3], total=4)
    assert read_cordoned(job.place) == {1: "loud"}
    for text in ("[2]", "[" * 50_000, '{"1e400": "x"}', "\xff", '{"7": 1'):
        (job.place / CORDONED).write_text(text)
        assert read_cordoned(job.place) == {}


def test_nodes_that_were_taken_out_stay_where_the_job_can_not_continue_without_them(job):
    layouts(job, of6=True)
    worlds = JobShapes.of(job)
    cordon(worlds, job.place, [1], "test", total=4)
    world = worlds.best([0, 1, 2, 3])
    assert world is not None and world.nodes == (0, 2, 3) and world.layout is not None
    worlds.reject(world.layout)  # as a run does whose settings need more devices
    assert worlds.best([0, 1, 2, 3]) == JobShape((0, 1, 2, 3))
    assert worlds.best([0, 1, 2]) is None and worlds.best_without([0, 1, 2, 3], {1}) is None
    (job.place / LAYOUTS).write_text("[" * 50_000)
    assert worlds.best([0, 1, 2]) is None and worlds.best([0, 1, 2, 3]) == JobShape((0, 1, 2, 3))


def test_fewer_nodes_than_the_job_has(tmp_path):
    with pytest.raises(LaunchError, match="--min-nodes 3; expected at most --nodes 2"):
        Job(arguments=(), folder=tmp_path, processes=2, nodes=2, policy=RestartPolicy(min_nodes=3))


def test_a_node_that_is_asked_to_end_is_left_out_after_a_save(launched, monkeypatch):
    """As a pod that is evicted: SIGTERM to its agent alone."""
    ends = []
    replace = LocalAgents.replace

    def again(self, node: int) -> None:
        ends.append((node, self._agents[node].wait(10)))
        replace(self, node)

    monkeypatch.setattr(LocalAgents, "replace", again)
    marker = launched.folder / "taken_0"

    def play(job: Played) -> None:
        job.until(on([0, 1, 2]))
        job.agents()[2].terminate()
        job.until(lambda status: status["attempt"] == 2 and on([0, 1, 2])(status))

    job = Played(launched, play)
    assert job.run(processes=3, nodes=3) == 0
    # It was not told that the job is done: an engine starts it again.
    assert ends == [(2, 75)]
    [incident] = launched.incidents
    assert incident["cause"] == "new layout" and incident["message"] == "node 2 was asked to end"
    assert launched.status["restarts"] == 0 and 0 < incident["step"] <= int(marker.read_text())


def test_a_job_all_of_whose_nodes_are_asked_to_end_saves_and_ends(launched):
    def play(job: Played) -> None:
        job.until(on([0, 1]))
        for agent in job.agents().values():
            agent.terminate()
        for agent in psutil.wait_procs(job.agents().values(), 20)[0]:
            assert agent.returncode in (75, None)

    job = Played(launched, play)
    assert job.run(processes=2, nodes=2) == 143
    assert launched.status["end"]["message"].startswith("stopped by SIGTERM after step")
    assert len({(launched.folder / f"taken_{index}").read_text() for index in (0, 1)}) <= 2 and not launched.incidents


def test_a_job_that_has_too_few_nodes_left_is_started_over_by_the_engine(launched, monkeypatch):
    """A node is lost before there are layouts, and does not come back."""
    monkeypatch.setattr(LocalAgents, "replace", lambda self, node: None)
    monkeypatch.setattr(LocalAgents, "start_over", lambda self, *, preempted=False: 75)

    def play(job: Played) -> None:
        job.until(on([0, 1]))
        (launched.folder / "job" / LAYOUTS).unlink()
        job.agents()[1].kill()

    job = Played(launched, play)
    assert job.run(processes=2, nodes=2, policy={"agents_seconds": 2.0}) == 75
    assert launched.status["end"]["message"].startswith("1 of 2 nodes connected within 2 s")
    assert launched.status["end"]["message"].endswith("the engine starts the job again")


def test_a_job_that_is_asked_to_end_before_a_first_step_ends(launched):
    """By the signals that Slurm sends to all of a job."""

    def play() -> None:
        deadline = time.monotonic() + 30
        while len(launched.pids()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        world = [each for each in psutil.Process().children() if "panax.cluster.node.agent" in each.cmdline()]
        for agent in world:
            agent.terminate()

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    assert launched.run("prepares", processes=2, nodes=2, policy={"stall_seconds": 60.0}) == 143
    thread.join(30)
    assert "before a first step" in launched.status["end"]["message"] and not launched.incidents


def test_a_node_that_is_lost_before_a_layout_is_known_ends_the_job_with_its_cause(launched, monkeypatch):
    def broken(self, node: int) -> None:
        raise LaunchError(f"the machine of node {node} is broken")

    def kill_an_agent() -> None:
        while not list(launched.folder.glob("pid_1_1")):
            time.sleep(0.05)
        Played(launched, lambda job: None).agents()[1].kill()

    monkeypatch.setattr(LocalAgents, "replace", broken)
    thread = threading.Thread(target=kill_an_agent, daemon=True)
    thread.start()
    assert launched.run("prepares", processes=2, nodes=2) == 6
    end = launched.status["end"]
    assert end["cause"] == "lost host" and end["advice"]
    assert "process 1 with it; node 1 could not be replaced (the machine of node 1 is broken)" in end["message"]
    assert [one["cause"] for one in launched.incidents] == ["lost host"]
