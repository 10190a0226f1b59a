"""The store of outer synchronizations trusts no island: updates that are torn, damaged, not finite, of another model or far too
large are left out."""

import json

import numpy as np
import pytest
from safetensors.numpy import load, save

from panax.comms import Comms, Islands
from panax.comms.admission import compute_digest, find_outliers, parse_update, update_norm
from panax.comms.outer import GroupUpdate, decode_update
from panax.comms.outer_sync_store import OuterRound, OuterSyncStore, average_updates
from panax.core.errors import CheckpointError
from panax.stores import open_store

LIKE = {"w": np.ones((3, 4), np.float32), "b": np.ones(2, np.float32)}
BASE = compute_digest(LIKE)


class Late:
    """A store with lists that show nothing written since."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def list(self, prefix=""):
        return []

    def folders(self, prefix=""):
        return []


def place(folder, index=0, count=3, late=False):
    store = open_store(str(folder))
    islands = Islands(count=count, index=index, store=str(folder), wait_seconds=0.2, start_seconds=0.2)
    return OuterSyncStore(
        Late(store) if late else store,  # type: ignore[arg-type]
        islands,
        sleep=lambda seconds: None,
    )


def update(scale=1.0):
    return {name: np.full(x.shape, 0.1 * scale, np.float32) for name, x in LIKE.items()}


def norm(arrays):
    return update_norm(decode_update(arrays, None, LIKE))


def file_of(folder, number, index):
    return folder / f"round_{number:08d}" / f"from_{index}.safetensors"


def header(text):
    data = text.encode()
    return len(data).to_bytes(8, "little") + data


def flipped(data):
    return data[:-3] + bytes([data[-3] ^ 64]) + data[-2:]


def another(change, **about):
    arrays = update()
    change(arrays)
    return save(arrays, metadata={"base": BASE, "digest": compute_digest(arrays)} | about)


BAD = {
    "NaN": lambda data: another(lambda x: x["w"].fill(np.nan)),
    "minus infinity in one number": lambda data: another(lambda x: x["b"].__setitem__(1, -np.inf)),
    "a million times as large": lambda data: another(lambda x: x["w"].fill(1e5)),
    "another shape": lambda data: another(lambda x: x.update(w=np.ones((3, 5), np.float32))),
    "an array lacks": lambda data: another(lambda x: x.pop("b")),
    "complex numbers": lambda data: another(lambda x: x.update(w=np.ones((3, 4), np.complex64) * 1j)),
    "of other numbers": lambda data: another(lambda x: None, base="00"),
    "no digest": lambda data: save(update(), metadata={"base": BASE}),
    "no metadata": lambda data: save(update()),
    "a flipped bit": flipped,
    "torn": lambda data: data[:-5],
    "torn in its header": lambda data: data[:20],
    "empty": lambda data: b"",
    "a header that is a list": lambda data: header("[1]"),
    "metadata that is a list": lambda data: header('{"__metadata__": [1]}'),
    "nested deep": lambda data: header("[" * 50_000),
    "a header of 2**63 bytes": lambda data: (2**63).to_bytes(8, "little") + b"{}",
    "infinite offsets": lambda data: header(
        '{"__metadata__": {}, "w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e400]}}'
    ),
}


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("case", BAD)
def test_an_update_that_can_not_be_used_is_left_out_and_reported(case, tmp_path):
    for index in range(3):
        place(tmp_path, index).contribute(1, BASE, update(1 + index))
    path = file_of(tmp_path, 1, 1)
    path.write_bytes(BAD[case](path.read_bytes()))
    decided = place(tmp_path).decide(1, BASE, norm)
    assert [member.index for member in decided.members] == [0, 2]
    assert decided.left_out.keys() == {1} and decided.left_out[1]
    # All others read the same.
    assert place(tmp_path, 2).decide(1, BASE, norm) == decided
    moved = [place(tmp_path, 2).read_update(1, member) for member in decided.members]
    result = GroupUpdate.initial(LIKE).apply_outer_step(average_updates(moved), Comms(local_steps=2))
    assert all(np.isfinite(x).all() for x in result.params.values())


def test_an_island_whose_own_update_is_not_finite_leaves_itself_out(tmp_path):
    own = place(tmp_path, 1)
    place(tmp_path, 0).contribute(1, BASE, update())
    own.contribute(1, BASE, {name: x * np.nan for name, x in update().items()})
    decided = own.decide(1, BASE, norm)
    assert [member.index for member in decided.members] == [0] and "not finite" in decided.left_out[1]


def test_nobody_is_a_decision_too(tmp_path):
    own = place(tmp_path)
    own.contribute(1, BASE, {name: x * np.inf for name, x in update().items()})
    decided = own.decide(1, BASE, norm)
    assert decided.members == () and decided.base == BASE and own.latest_round() == 1


def test_alone_an_update_is_compared_with_the_rounds_before(tmp_path):
    island = place(tmp_path)
    for number, scale in enumerate([1.0, 2.0, 30.0, 1e3, 1e3, 1e3, 1e3], 1):
        island.contribute(number, BASE, update(scale))
        decided = island.decide(number, BASE, norm)
        assert bool(decided.members) == (scale < 1e3 or number == 7), number
        assert decided.members or "more than 16 times" in decided.left_out[0]
    # A rate that rose for all leaves nobody out, nor does a first step of a rate of 0.
    assert find_outliers({0: 100.0, 1: 90.0, 2: 120.0}, [1.0]) == {} == find_outliers({0: 5.0}, [0.0, 0.0])
    assert find_outliers({0: 1.0, 1: 1.0, 2: 17.0}, []).keys() == {2}


def test_a_store_with_late_lists_decides_nothing_wrong(tmp_path):
    for index in range(3):
        place(tmp_path, index, late=True).contribute(1, BASE, update())
    island = place(tmp_path, late=True)
    assert [member.index for member in island.decide(1, BASE, norm).members] == [0, 1, 2]
    assert island.latest_round() == 1 == place(tmp_path, 1, late=True).latest_round()
    island.contribute(2, BASE, update())
    island.decide(2, BASE, norm)
    (tmp_path / "newest.json").write_text("[" * 50_000)
    assert place(tmp_path, 1, late=True).latest_round() == 2  # by name, from the first on
    island.publish(1, LIKE)
    island.publish(4, LIKE)


@pytest.mark.parametrize(
    "text",
    ["", "[1]", "[" * 50_000, '{"members": [{"index": 1e400}]}', '{"members": 3}', "{}", '{"members": [[]], "by": 0}'],
)
def test_a_damaged_record_of_a_round_is_one_error_and_waits_for_nobody(text, tmp_path):
    island = place(tmp_path)
    island.contribute(1, BASE, update())
    island.decide(1, BASE, norm)
    (tmp_path / "round_00000001" / "members.json").write_text(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        island.read_round(1)
    assert island.latest_round() == 1
    island.contribute(2, BASE, update())
    assert [member.index for member in island.decide(2, BASE, norm).members] == [0]


@pytest.mark.parametrize("members", [[0, 0], [1, 0], [3], [-1]])
def test_a_record_that_names_islands_twice_or_none_is_damaged(members):
    raw = {
        "members": [{"index": n, "digest": "", "base": "", "norm": 1.0} for n in members],
        "base": "",
        "by": 0,
        "left_out": {},
    }
    with pytest.raises(ValueError, match="expected some of 0 to 2, in order"):
        OuterRound.from_json(json.dumps(raw).encode(), 3)


def test_what_was_agreed_is_read_as_it_was_written_or_not_at_all(tmp_path):
    island = place(tmp_path)
    assert island.read_result(1) is None
    island.publish(1, LIKE)
    outcome = island.read_result(1)
    assert outcome is not None and all((outcome[name] == LIKE[name]).all() for name in LIKE)
    path = tmp_path / "round_00000001" / "agreed.safetensors"
    usual = path.read_bytes()
    for data in (flipped(usual), usual[:-1], b"", header("[1]"), save(load(usual))):
        path.write_bytes(data)
        with pytest.raises(ValueError):
            island.read_result(1)


def test_bytes_that_changed_after_the_decision_are_not_taken(tmp_path):
    island, other = place(tmp_path), place(tmp_path, 1)
    island.contribute(1, BASE, update())
    [member] = island.decide(1, BASE, norm).members
    path = file_of(tmp_path, 1, 0)
    path.write_bytes(another(lambda x: x["w"].fill(0.2)))
    with pytest.raises(ValueError, match="not those on which the round was decided"):
        other.read_update(1, member)
    assert (island.read_update(1, member)["w"] == update()["w"]).all()  # who decided it has read them
    island.drop_updates()
    with pytest.raises(ValueError):
        island.read_update(1, member)
    assert parse_update(path.read_bytes()).base == BASE


def test_notes_that_are_hostile_ask_for_nothing(tmp_path):
    own = place(tmp_path)
    own.contribute(1, BASE, update())
    own.decide(1, BASE, norm)
    (tmp_path / "joining").mkdir()
    for index, text in enumerate(["[" * 50_000, '{"round": 1e400}', '{"round": "2"}']):
        (tmp_path / "joining" / f"island_{index}.json").write_text(text)
    own.contribute(2, BASE, update())
    assert [member.index for member in own.decide(2, BASE, norm).members] == [0]
