"""Vocabularies that grow: which row of a table a key has, and which row a new key gets.

Each device holds the vocabulary of its own shard of a table, whose rows are blocks: a key's hash names its block, and so the
device that decides. All devices are told all keys of a batch; the owner of a block finds those that have a row in it, and
gives each of the others, in the order of the keys, the row that was asked for longest ago, and not in this step. What it decides
depends on the block and the batch's keys alone: not on the mesh, nor on how many processes there are.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from ..core.counter_hash import mix
from ..core.expected import tag_comm
from ..spmd.collectives import all_gather, all_reduce, axis_index, token_axes
from ..spmd.in_place import read_first
from .row_places import Lies

NONE = -1
"""The row of no key."""


class ShardVocabulary(NamedTuple):
    """Of a device's shard of a table.

    Attributes:
        keys: Of each row; zeros where nobody has it.
        asked: The step in which it was asked for last; -1 where nobody has it.
    """

    keys: UInt32[Array, "row 2"]
    asked: Int[Array, " row"]


class Decided(NamedTuple):
    """What one step has given out, of a device's shard.

    Attributes:
        rows: In the shard, each once; its number of rows in places that hold none.
        keys: Whose they are now.
        given: Rows that were given out, over all devices.
        taken: Of these, rows that another key has lost.
        crowded: Keys that have got none, since all rows of their blocks were in use: each reads one of another key's.
        before: What the vocabulary said before.
    """

    rows: Int[Array, " keys"]
    keys: UInt32[Array, "keys 2"]
    given: Int[Array, ""]
    taken: Int[Array, ""]
    crowded: Int[Array, ""]
    before: "Said"


class Said(NamedTuple):
    """What a vocabulary says of the rows that a step asks for.

    Attributes:
        rows: In a device's shard, each once; its number of rows in places that hold none.
        keys: As of `ShardVocabulary`.
        asked: The same.
    """

    rows: Int[Array, " keys"]
    keys: UInt32[Array, "keys 2"]
    asked: Int[Array, " keys"]


class BlockKeys(NamedTuple):
    """Distinct keys by their blocks, ascending.

    Attributes:
        keys: Zeros past the last one.
        block: Of each; the number of blocks past the last one.
    """

    keys: UInt32[Array, "keys 2"]
    block: Int[Array, " keys"]


def block_of(keys: UInt32[Array, "keys 2"], blocks: int) -> Int[Array, " keys"]:
    """The block that each key belongs to; `blocks` for none."""
    hashed = mix(keys[:, 0] ^ mix(keys[:, 1] + jnp.uint32(0x9E3779B9)))
    return jnp.where((keys != 0).any(axis=1), (hashed % jnp.uint32(blocks)).astype(jnp.int32), blocks)


def distinct_keys(
    keys: UInt32[Array, "keys 2"], block: Int[Array, " keys"], blocks: int
) -> tuple[BlockKeys, Int[Array, " keys"]]:
    """The distinct keys of real blocks, and the place of each key among them.

    Args:
        block: Of each key; `blocks` for one that is left out, whose place is past the last.
    """
    count = keys.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    block, high, low, index = jax.lax.sort((block, keys[:, 1], keys[:, 0], index), num_keys=3)
    ordered = jnp.stack([low, high], axis=1)
    # No real key is zeros, so that the first one counts.
    before = jnp.concatenate([jnp.zeros((1, 2), jnp.uint32), ordered[:-1]])
    new = (ordered != before).any(axis=1) & (block < blocks)
    place = jnp.where(block < blocks, jnp.cumsum(new, dtype=jnp.int32) - 1, count)
    once = jnp.zeros((count, 2), jnp.uint32).at[place].set(ordered, mode="drop")
    where = jnp.full(count, blocks, jnp.int32).at[place].set(block, mode="drop")
    return BlockKeys(once, where), jnp.zeros(count, jnp.int32).at[index].set(place)


@dataclasses.dataclass(frozen=True)
class VocabularyBlocks:
    """The static half.

    Attributes:
        lies: Where the table lies; its columns are whole.
        here: Blocks of a shard.
        ways: Rows of a block.
        idle_steps: As of `Growing`.
    """

    lies: Lies
    here: int
    ways: int
    idle_steps: int

    @classmethod
    def of(cls, lies: Lies, shard: tuple[int, ...], ways: int, idle_steps: int) -> "VocabularyBlocks":
        """
        Args:
            shard: A device's shape of the table, or of what has its rows.
        """
        return cls(lies, shard[0] // ways, ways, idle_steps)

    @property
    def rows(self) -> int:
        """Of a shard."""
        return self.here * self.ways

    def found(self, vocabulary: ShardVocabulary, keys: UInt32[Array, "ids 2"]) -> Int[Array, " ids"]:
        """The row of each key in the whole table, -1 for one that has none."""
        asked = self._asked(keys)
        return asked.answers(self._rows_of(vocabulary, asked.mine))

    def given(
        self, vocabulary: ShardVocabulary, keys: UInt32[Array, "ids 2"], step: Int[Array, ""]
    ) -> tuple[Int[Array, " ids"], ShardVocabulary, Decided]:
        """The row of each key in the whole table, given to it now if it has none; the vocabulary after that.

        Args:
            step: The number of this step.
        """
        asked = self._asked(keys)
        mine, block = asked.mine.keys, asked.mine.block
        real = block < self.here
        had = self._rows_of(vocabulary, asked.mine)
        asked_before, marked = read_first(vocabulary.asked, had, jnp.where(had >= 0, had, self.rows))
        last = vocabulary.asked.at[marked].set(step, mode="drop")
        of_block = last.reshape(self.here, self.ways).at[block].get(mode="clip")
        idle = (of_block < 0) | (step - of_block > self.idle_steps)
        new = real & (had < 0)
        # The first new key of a block takes the row that was asked for longest ago, and so on.
        number = jnp.cumsum(new, dtype=jnp.int32) - new.astype(jnp.int32)
        number -= number[jnp.searchsorted(block, block).astype(jnp.int32)]
        order = jnp.argsort(jnp.where(idle, of_block, jnp.iinfo(jnp.int32).max), axis=1)
        way = jnp.take_along_axis(order, jnp.minimum(number, self.ways - 1)[:, None], axis=1)[:, 0].astype(jnp.int32)
        gets = new & (number < idle.sum(axis=1))
        row = block * self.ways + way
        asked_before = jnp.where(gets, jnp.take_along_axis(of_block, way[:, None], axis=1)[:, 0], asked_before)
        lost = gets & (asked_before >= 0)
        by_chance = (mix(mine[:, 0] + jnp.uint32(1)) % jnp.uint32(self.ways)).astype(jnp.int32)
        reads = jnp.where(gets, row, jnp.where(new, block * self.ways + by_chance, had))
        keys_before, place = read_first(vocabulary.keys, row, jnp.where(gets, row, self.rows))
        touched = jnp.where(gets, row, jnp.where(had >= 0, had, self.rows))
        before = Said(touched, jnp.where(gets[:, None], keys_before, mine), asked_before)
        after = ShardVocabulary(
            vocabulary.keys.at[place].set(mine, mode="drop", unique_indices=True),
            last.at[place].set(step, mode="drop", unique_indices=True),
        )
        counts = jnp.stack([gets.sum(), lost.sum(), (new & ~gets).sum()]).astype(jnp.int32)
        with tag_comm("what a vocabulary gave out"):
            counts = all_reduce(counts, self.lies.rows)
        return asked.answers(reads), after, Decided(place, mine, counts[0], counts[1], counts[2], before)

    def _asked(self, keys: UInt32[Array, "ids 2"]) -> "_Asked":
        ways = jax.lax.axis_size(self.lies.rows) if self.lies.rows else 1
        blocks, first = self.here * ways, axis_index(self.lies.rows) * self.here
        own, place = distinct_keys(keys, block_of(keys, blocks), blocks)
        with tag_comm("keys of tables"):
            everyone = all_gather(own.keys, token_axes(), 0)
        block = block_of(everyone, blocks) - first
        is_mine = (block >= 0) & (block < self.here)
        mine, among = distinct_keys(everyone, jnp.where(is_mine, block, self.here), self.here)
        return _Asked(self, mine, is_mine, among, place, own.keys.shape[0], first * self.ways)

    def _rows_of(self, vocabulary: ShardVocabulary, mine: BlockKeys) -> Int[Array, " keys"]:
        """In this shard; -1 where a key has none."""
        of_block = vocabulary.keys.reshape(self.here, self.ways, 2).at[mine.block].get(mode="clip")
        same: Bool[Array, "keys way"] = (of_block == mine.keys[:, None]).all(axis=2) & (mine.block < self.here)[:, None]
        way = jnp.argmax(same, axis=1).astype(jnp.int32)
        return jnp.where(same.any(axis=1), mine.block * self.ways + way, NONE)


class _Asked(NamedTuple):
    """Keys that devices have asked for.

    Attributes:
        mine: The distinct ones of this device's blocks.
        is_mine: Of the keys of all devices, those of this device's blocks.
        among: Their places in `mine`.
        place: Of each id that this device asks for, its key's place among the device's own.
        own: As many keys each device has sent.
        first: This shard's first row in the table.
    """

    blocks: VocabularyBlocks
    mine: BlockKeys
    is_mine: Bool[Array, " everyone"]
    among: Int[Array, " everyone"]
    place: Int[Array, " ids"]
    own: int
    first: Int[Array, ""]

    def answers(self, rows: Int[Array, " keys"]) -> Int[Array, " ids"]:
        """For each id the row in the whole table, from the rows in their owners' shards."""
        row = rows.at[self.among].get(mode="clip")
        # From 1: each key has one owner, and the others say 0.
        told = jnp.where(self.is_mine & (row >= 0), self.first + row + 1, 0)
        with tag_comm("rows of keys"):
            told = all_reduce(told, self.blocks.lies.rows)
        mine = jax.lax.dynamic_slice_in_dim(told, axis_index(token_axes()) * self.own, self.own)
        found = mine.at[self.place].get(mode="fill", fill_value=0)
        return found - 1
