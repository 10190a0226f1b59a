"""Growing vocabularies: the table row of a key, and the row assigned to a new key.

Each device holds the vocabulary of its shard of a table, in blocks of rows: a key's hash selects its block,
and so the device that decides. All keys of a batch are gathered on all devices. The owner of a block finds
the keys that have a row in it, and assigns each of the others, in key order, the least recently used row that
this step does not use. The decision depends only on the block and the batch's keys, not on the mesh or the
number of processes.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from ..core.layout.declarations import tag_comm
from ..core.params.counter_rng import mix
from ..spmd.collectives import all_gather, all_reduce, axis_index, token_axes
from ..spmd.in_place import read_before_write
from .row_placement import TablePlacement

NO_ROW = -1
"""Row index of a key without a row."""


class ShardVocabulary(NamedTuple):
    """The vocabulary of a device's shard of a table.

    Attributes:
        keys: Key of each row; zeros for a free row.
        asked: Step in which the row was last used; -1 for a free row.
    """

    keys: UInt32[Array, "row 2"]
    asked: Int[Array, " row"]


class RowAssignments(NamedTuple):
    """Assignments of one step in a device's shard.

    Attributes:
        rows: Assigned rows of the shard, each once; padded with the shard's number of rows.
        keys: Their new keys.
        num_assigned: Number of rows assigned, over all devices.
        num_evicted: Number of those taken from another key.
        num_crowded: Number of keys without a row, because all rows of their blocks are in use: each reads another
            key's row.
        before: The vocabulary's entries before the step.
    """

    rows: Int[Array, " keys"]
    keys: UInt32[Array, "keys 2"]
    num_assigned: Int[Array, ""]
    num_evicted: Int[Array, ""]
    num_crowded: Int[Array, ""]
    before: "VocabularyLookup"


class VocabularyLookup(NamedTuple):
    """Vocabulary entries of the rows that a step uses.

    Attributes:
        rows: Rows of the shard, each once; padded with the shard's number of rows.
        keys: As in `ShardVocabulary`.
        asked: As in `ShardVocabulary`.
    """

    rows: Int[Array, " keys"]
    keys: UInt32[Array, "keys 2"]
    asked: Int[Array, " keys"]


class BlockKeys(NamedTuple):
    """Distinct keys, ascending by block.

    Attributes:
        keys: Zeros past the last one.
        block: Block of each key; the number of blocks past the last one.
    """

    keys: UInt32[Array, "keys 2"]
    block: Int[Array, " keys"]


def assign_blocks(keys: UInt32[Array, "keys 2"], blocks: int) -> Int[Array, " keys"]:
    """Return the block of each key; `blocks` for the zero key."""
    hashed = mix(keys[:, 0] ^ mix(keys[:, 1] + jnp.uint32(0x9E3779B9)))
    return jnp.where((keys != 0).any(axis=1), (hashed % jnp.uint32(blocks)).astype(jnp.int32), blocks)


def distinct_keys(
    keys: UInt32[Array, "keys 2"], block: Int[Array, " keys"], blocks: int
) -> tuple[BlockKeys, Int[Array, " keys"]]:
    """Return the distinct keys of valid blocks, and the index of each key among them.

    Args:
        block: Block of each key; `blocks` for a key to drop, with an index past the last.
    """
    count = keys.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    block, high, low, index = jax.lax.sort((block, keys[:, 1], keys[:, 0], index), num_keys=3)
    ordered = jnp.stack([low, high], axis=1)
    # No real key is all zeros, so the first key always counts as new.
    before = jnp.concatenate([jnp.zeros((1, 2), jnp.uint32), ordered[:-1]])
    new = (ordered != before).any(axis=1) & (block < blocks)
    place = jnp.where(block < blocks, jnp.cumsum(new, dtype=jnp.int32) - 1, count)
    distinct = jnp.zeros((count, 2), jnp.uint32).at[place].set(ordered, mode="drop")
    where = jnp.full(count, blocks, jnp.int32).at[place].set(block, mode="drop")
    return BlockKeys(distinct, where), jnp.zeros(count, jnp.int32).at[index].set(place)


@dataclasses.dataclass(frozen=True)
class VocabularyBlocks:
    """Static configuration of a table's vocabulary.

    Attributes:
        placement: Sharding of the table; its columns are not sharded.
        shard_blocks: Blocks per shard.
        ways: Rows per block.
        idle_steps: As in `GrowingVocab`.
    """

    placement: TablePlacement
    shard_blocks: int
    ways: int
    idle_steps: int

    @classmethod
    def of(cls, placement: TablePlacement, shard: tuple[int, ...], ways: int, idle_steps: int) -> "VocabularyBlocks":
        """Derive the number of blocks from the shard's rows.

        Args:
            shard: Shape of a device's shard of the table, or of an array with its rows.
        """
        return cls(placement, shard[0] // ways, ways, idle_steps)

    @property
    def rows(self) -> int:
        """Rows per shard."""
        return self.shard_blocks * self.ways

    def lookup(self, vocabulary: ShardVocabulary, keys: UInt32[Array, "ids 2"]) -> Int[Array, " ids"]:
        """Return the row of each key in the whole table; -1 for a key without a row."""
        lookup = self._gather_keys(keys)
        return lookup.rows_of_ids(self._rows_of(vocabulary, lookup.mine))

    def assign(
        self, vocabulary: ShardVocabulary, keys: UInt32[Array, "ids 2"], step: Int[Array, ""]
    ) -> tuple[Int[Array, " ids"], ShardVocabulary, RowAssignments]:
        """Return the row of each key in the whole table, assigning rows to new keys; also the updated
        vocabulary and the decisions.

        Args:
            step: Number of this step.
        """
        lookup = self._gather_keys(keys)
        mine, block = lookup.mine.keys, lookup.mine.block
        real = block < self.shard_blocks
        had = self._rows_of(vocabulary, lookup.mine)
        asked_before, marked = read_before_write(vocabulary.asked, had, jnp.where(had >= 0, had, self.rows))
        # Mark rows in use before looking for idle ones, so that no key of this batch loses its row.
        last = vocabulary.asked.at[marked].set(step, mode="drop")
        of_block = last.reshape(self.shard_blocks, self.ways).at[block].get(mode="clip")
        idle = (of_block < 0) | (step - of_block > self.idle_steps)
        new = real & (had < 0)
        # The i-th new key of a block takes its i-th least recently used row.
        number = jnp.cumsum(new, dtype=jnp.int32) - new.astype(jnp.int32)
        number -= number[jnp.searchsorted(block, block).astype(jnp.int32)]
        order = jnp.argsort(jnp.where(idle, of_block, jnp.iinfo(jnp.int32).max), axis=1)
        way = jnp.take_along_axis(order, jnp.minimum(number, self.ways - 1)[:, None], axis=1)[:, 0].astype(jnp.int32)
        gets = new & (number < idle.sum(axis=1))
        row = block * self.ways + way
        asked_before = jnp.where(gets, jnp.take_along_axis(of_block, way[:, None], axis=1)[:, 0], asked_before)
        lost = gets & (asked_before >= 0)
        # A key without a row reads one of its block's rows, chosen by hash.
        by_chance = (mix(mine[:, 0] + jnp.uint32(1)) % jnp.uint32(self.ways)).astype(jnp.int32)
        reads = jnp.where(gets, row, jnp.where(new, block * self.ways + by_chance, had))
        keys_before, place = read_before_write(vocabulary.keys, row, jnp.where(gets, row, self.rows))
        touched = jnp.where(gets, row, jnp.where(had >= 0, had, self.rows))
        before = VocabularyLookup(touched, jnp.where(gets[:, None], keys_before, mine), asked_before)
        after = ShardVocabulary(
            vocabulary.keys.at[place].set(mine, mode="drop", unique_indices=True),
            last.at[place].set(step, mode="drop", unique_indices=True),
        )
        counts = jnp.stack([gets.sum(), lost.sum(), (new & ~gets).sum()]).astype(jnp.int32)
        with tag_comm("assigned ids of a vocabulary"):
            counts = all_reduce(counts, self.placement.rows)
        return lookup.rows_of_ids(reads), after, RowAssignments(place, mine, counts[0], counts[1], counts[2], before)

    def _gather_keys(self, keys: UInt32[Array, "ids 2"]) -> "_KeyLookup":
        ways = jax.lax.axis_size(self.placement.rows) if self.placement.rows else 1
        blocks, first = self.shard_blocks * ways, axis_index(self.placement.rows) * self.shard_blocks
        request, place = distinct_keys(keys, assign_blocks(keys, blocks), blocks)
        with tag_comm("keys of tables"):
            everyone = all_gather(request.keys, token_axes(), 0)
        block = assign_blocks(everyone, blocks) - first
        is_mine = (block >= 0) & (block < self.shard_blocks)
        mine, among = distinct_keys(everyone, jnp.where(is_mine, block, self.shard_blocks), self.shard_blocks)
        return _KeyLookup(self, mine, is_mine, among, place, request.keys.shape[0], first * self.ways)

    def _rows_of(self, vocabulary: ShardVocabulary, mine: BlockKeys) -> Int[Array, " keys"]:
        """Return the row of each key in this shard; -1 for a key without a row."""
        of_block = vocabulary.keys.reshape(self.shard_blocks, self.ways, 2).at[mine.block].get(mode="clip")
        same: Bool[Array, "keys way"] = (of_block == mine.keys[:, None]).all(axis=2) & (mine.block < self.shard_blocks)[
            :, None
        ]
        way = jnp.argmax(same, axis=1).astype(jnp.int32)
        return jnp.where(same.any(axis=1), mine.block * self.ways + way, NO_ROW)


class _KeyLookup(NamedTuple):
    """Keys that devices look up, gathered on all devices.

    Attributes:
        mine: The distinct keys of this device's blocks.
        is_mine: Mask, over the keys of all devices, of those in this device's blocks.
        among: Index in `mine` of each of those keys.
        place: For each id that this device looks up, the index of its key among the device's distinct keys.
        num_sent: Number of keys sent by each device.
        first: First row of this shard in the table.
    """

    blocks: VocabularyBlocks
    mine: BlockKeys
    is_mine: Bool[Array, " everyone"]
    among: Int[Array, " everyone"]
    place: Int[Array, " ids"]
    num_sent: int
    first: Int[Array, ""]

    def rows_of_ids(self, rows: Int[Array, " keys"]) -> Int[Array, " ids"]:
        """Return the row in the whole table for each id, from the rows in their owners' shards."""
        row = rows.at[self.among].get(mode="clip")
        # Count from 1: each key has one owner, and the other devices contribute 0 to the sum.
        global_rows = jnp.where(self.is_mine & (row >= 0), self.first + row + 1, 0)
        with tag_comm("rows of keys"):
            global_rows = all_reduce(global_rows, self.blocks.placement.rows)
        mine = jax.lax.dynamic_slice_in_dim(global_rows, axis_index(token_axes()) * self.num_sent, self.num_sent)
        rows_from_one = mine.at[self.place].get(mode="fill", fill_value=0)
        return rows_from_one - 1
