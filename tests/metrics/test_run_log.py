"""`log.txt`: what a terminal shows of a run, with the time of each line."""

import re

from panax.metrics.run_log import NAME, RunLog, tee

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  "


def test_lines_wait_for_the_folder_and_have_their_time(tmp_path):
    log = RunLog()
    log.say("warning: first")
    assert not list(tmp_path.iterdir())
    log.open(tmp_path)
    log.tracker.begin(3, 5, None)
    log.tracker.record(3, {"memory/bytes": 2**30, "train/loss": 1.5})
    log.tracker.record(3, {"own/value": 2.0})
    log.tracker.record(5, {"evaluation/loss": 2.5})
    log.tracker.close()
    lines = (tmp_path / NAME).read_text().splitlines()
    assert [re.sub(STAMP, "", line) for line in lines] == [
        "warning: first",
        "     3/5  loss 1.5000  1.00 GiB",
        "     5/5  held-out loss 2.5000",
    ]
    assert all(re.match(STAMP, line) for line in lines)
    again = RunLog()
    again.open(tmp_path)
    again.say("a second session")
    assert len((tmp_path / NAME).read_text().splitlines()) == 4


def test_nothing_is_written_through_a_link_and_a_disk_that_takes_none_is_no_error(tmp_path):
    (tmp_path / "other").write_text("theirs")
    (tmp_path / NAME).symlink_to(tmp_path / "other")
    log = RunLog()
    log.open(tmp_path)
    log.say("mine")
    assert (tmp_path / "other").read_text() == "theirs"
    log.open(tmp_path / "absent")
    log.say("lost")


def test_the_second_place_gets_what_the_first_one_fails_on():
    told = []

    def fails(line):
        raise OSError("full")

    try:
        tee(fails, told.append)("line")
    except OSError:
        told.append("raised")
    assert told == ["line", "raised"]


def test_a_notebook_is_no_reason_to_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    log = RunLog()
    log.open(tmp_path)
    log.say("a line")
    assert (tmp_path / NAME).read_text().endswith("  a line\n")
