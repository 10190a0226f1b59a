"""Each single fault of an S3 store during each part of a save and of a restore: nothing is lost, nothing is silently wrong."""

import jax
import numpy as np
import pytest
import store_faults
from servers import Fault
from store_faults import Case, cases, go_on, same, save

from panax.checkpoint import Checkpointer, restore
from panax.core import PanaxError
from panax.mesh import MeshShape, Placement
from panax.stores.objects import ObjectStore

READ = "read"
COMMITTED = "committed"
FAILED = "failed, saying so; the ones before are whole"
ERROR = "an error that says so; nothing is read from an older one"
OLDER = "the one before is used, saying so"


def expected(case: Case) -> set[str]:
    """What may come of a fault."""
    if not case.stays:
        return {COMMITTED if case.during == "save" else READ}
    if case.place == "removal":
        return {"committed; an old one not removed, saying so", "committed, saying so"}
    if case.during == "save":
        # The server may have done what it never answered.
        unanswered = case.kind in ("lost", "slow") and case.place == "manifest"
        return {FAILED, "said to have failed; it is there and whole"} if unanswered else {FAILED}
    if case.kind == "404":
        return {ERROR if case.place == "list" else OLDER}
    if case.kind == "flip_read":
        # A list has no checksum: what flips in it decides.
        return {ERROR, OLDER, READ} if case.place == "list" else {OLDER}
    return {ERROR}


def quick(case: Case) -> bool:
    """One of each kind and of each place: the others are slow ones."""
    return (case.kind in ("flip_write", "flip_read", "403") and case.place in ("data", "manifest")) or (
        (case.kind, case.stays, case.place)
        in {
            ("cut", False, "data"), ("404", False, "data"), ("503", False, "list"), ("503", True, "manifest"),
            ("lost", True, "manifest"), ("404", True, "manifest"), ("503", True, "removal"), ("429", False, "manifest"),
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[] if quick(case) else pytest.mark.slow) for case in cases()]
)
def test_a_fault_loses_nothing(case, proxy, bucket):
    assert store_faults.run(case, proxy, bucket) in expected(case)


@pytest.mark.parametrize("kind", ["flip_read", "404"])
def test_damage_names_the_file_and_the_bytes_and_the_checkpoint_before_is_used(kind, proxy, bucket):
    said: list[str] = []
    store = ObjectStore.open(f"{bucket}/run", store_faults.POLICY)
    for step in (1, 2):
        assert save(Checkpointer(store, say=said.append), step) is None
    [first, *_] = [chunk for entry in Checkpointer(store).open(2).manifest.arrays.values() for chunk in entry.chunks]
    proxy.faults.set(Fault(kind=kind, method="GET", path=r"step_00000002/.*\.bin", times=None))
    step, restored = go_on(Checkpointer(store, say=said.append))
    assert step == 1 and same(restored, 1)
    where = f"{bucket}/run/step_00000002/{first.file}"
    if kind == "404":
        assert f"step 2 is not used: {where} is missing" in said[0]
    else:
        assert f"step 2 is not used: {where} is damaged: bytes {first.offset} to" in said[0]


def test_a_store_that_can_not_be_read_is_no_reason_to_go_back(proxy, bucket):
    """Of the newest checkpoint, only the manifest can't be read: the one before must not be taken for the newest."""
    store = ObjectStore.open(f"{bucket}/run", store_faults.POLICY)
    for step in (1, 2):
        assert save(Checkpointer(store), step) is None
    proxy.faults.set(Fault(kind="503", path=r"step_00000002/manifest.json", times=None))
    checkpointer = Checkpointer(store)
    with pytest.raises(PanaxError, match=r"step_00000002/manifest.json can't be read: the server answers status 503"):
        go_on(checkpointer)
    proxy.faults.set()
    # What failed is not remembered as an empty place.
    assert checkpointer.steps() == [1, 2] and go_on(checkpointer)[0] == 2


def test_a_manifest_that_is_listed_and_not_found_does_not_get_its_files_swept(proxy, bucket):
    store = ObjectStore.open(f"{bucket}/run", store_faults.POLICY)
    assert save(Checkpointer(store), 1) is None
    proxy.faults.set(Fault(kind="404", method="GET", path=r"manifest.json", times=None))
    Checkpointer(store).sweep()
    proxy.faults.set()
    assert store_faults.assert_whole(store) == [1]


@pytest.mark.parametrize("replicas", [1, 4])
def test_bytes_read_from_the_store_do_not_grow_with_the_replicas(replicas, proxy, bucket):
    """As the proxy counts them. Of several processes: `tests/processes/test_checkpoints_of_many.py`, by what each has read."""
    store = ObjectStore.open(f"{bucket}/run", store_faults.POLICY)
    placement = Placement.create(MeshShape(replica=replicas, fsdp=2), devices=jax.devices()[: 2 * replicas])
    values = np.random.default_rng(0).standard_normal((512, 64)).astype(np.float32)
    tree = {
        "w": jax.device_put(values, placement.sharding("fsdp")),
        "b": jax.device_put(values[0], placement.sharding()),
    }
    checkpointer = Checkpointer(store)
    checkpointer.save(tree, 1, {})
    checkpointer.finish()
    checkpoint = checkpointer.open(1)
    proxy.faults.forget()
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    restored = restore(checkpoint, abstract, jax.tree.map(lambda x: x.sharding, tree))
    np.testing.assert_array_equal(restored["w"], values)
    read = {path: count for path, count in proxy.faults.counts.bytes_read.items() if path.endswith(".bin")}
    assert sum(read.values()) == values.nbytes + values[0].nbytes == checkpoint.bytes_read
