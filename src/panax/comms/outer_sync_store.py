"""Shared storage through which islands (replicas that are separate jobs) synchronize, without a process that
all depend on.

    place.json                            identity of the run
    newest.json                           number of the last round, for stores with delayed listings
    round_00000003/from_0.safetensors     an island's update since round 2
    round_00000003/members.json           members, and why others are excluded; written once, by the first
    round_00000003/agreed.safetensors     the result, for islands that catch up
    joining/island_1.json                 the round from which to wait for a returning island

An island writes its update and waits until all expected islands have done so, or until a timeout. It then
tries to create `members.json` with the islands that are present and have valid updates
(`comms/admission.py`); the store lets exactly one island succeed. Every island performs the same outer step
with the same arithmetic on the same bytes, so that parameters are bitwise equal afterwards without being sent.
An excluded island adopts the result; the others wait for it again once it announces itself.
"""

import contextlib
import dataclasses
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from ..core.errors import CheckpointError, StoreError
from ..stores import ExclusiveStore, ObjectNotFoundError
from ..system import json_reader
from .admission import Arrays, Update, compute_digest, find_outliers, parse_update
from .settings import Islands

PLACE, NEWEST, MEMBERS, AGREED = "place.json", "newest.json", "members.json", "agreed.safetensors"
ROUNDS_KEPT = 3
"""Number of recent rounds with objects that are kept, so that a result can be recomputed if a member dies
before it has written it.
"""

LOOK_SECONDS = 0.2
_MOST_BYTES, _MOST_WHY = 1 << 24, 200
_OWN = re.compile(r"round_(\d{8})/(from_\d+\.safetensors|members\.json|agreed\.safetensors)")


@dataclasses.dataclass(frozen=True)
class Member:
    """An island's part in a round.

    Attributes:
        digest: Digest of the bytes of its update.
        base: Digest of the parameters that the island started from.
        norm: Norm of its update.
    """

    index: int
    digest: str
    base: str
    norm: float


@dataclasses.dataclass(frozen=True)
class OuterRound:
    """A round that was decided.

    Attributes:
        members: Islands with updates that count, by index.
        base: Digest of the parameters that the deciding island started from.
        by: Index of the deciding island.
        left_out: Index of each excluded island to the reason.
    """

    members: tuple[Member, ...]
    base: str
    by: int
    left_out: Mapping[int, str]

    @classmethod
    def from_json(cls, data: bytes, count: int) -> "OuterRound":
        """Parse the output of `to_json`.

        Raises:
            ValueError: The data is not a round.
        """
        raw = json_reader.parse_as(dict, data, max_bytes=_MOST_BYTES)
        try:
            members = tuple(
                Member(int(one["index"]), str(one["digest"]), str(one["base"]), float(one["norm"]))
                for one in raw["members"]
            )
            left_out = {int(index): str(why)[:_MOST_WHY] for index, why in raw["left_out"].items()}
            outer_round = cls(members, str(raw["base"]), int(raw["by"]), left_out)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it names no members: {error!r}") from error
        indices = [member.index for member in members]
        if sorted({*indices}) != indices or not {*indices, outer_round.by, *left_out} <= {*range(count)}:
            raise ValueError(
                f"it names islands {indices}, by {outer_round.by}; expected some of 0 to {count - 1}, in order"
            )
        return outer_round

    def to_json(self) -> bytes:
        """Return the round as JSON, with a random id that makes it unique to this island."""
        return json.dumps({**dataclasses.asdict(self), "at": uuid.uuid4().hex}, indent=1).encode()


class OuterSyncStore:
    """One island's access to the shared storage."""

    def __init__(
        self,
        store: ExclusiveStore,
        islands: Islands,
        *,
        hurry: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """Set up access; `clock` and `sleep` are replaceable for tests.

        Args:
            hurry: Called while waiting for others; returns True if this island must stop soon.
        """
        self._store, self._islands, self._hurry, self._clock, self._sleep = store, islands, hurry, clock, sleep
        self._known = 0
        self._updates: dict[tuple[int, int], Update] = {}

    def open(self, identity: str, *, fresh: bool) -> None:
        """Claim the storage for a run, or verify that this run already owns it.

        Args:
            identity: Text that is the same in all islands of a run, and in no other run.
            fresh: True if the run starts over, so there must be no rounds yet.

        Raises:
            CheckpointError: The storage belongs to another run, or to an earlier start of this run.
        """
        expected = json.dumps({"format": 1, "run": identity, "islands": self._islands.count}, sort_keys=True)
        if not self._store.create(PLACE, expected.encode()):
            owner = self._store.read(PLACE).decode(errors="replace")
            if owner != expected:
                raise CheckpointError(
                    f"{self._store.url} is used by another run's islands ({owner[:200]}; this is {expected}); set "
                    "comms.islands.store to "
                    f"another location"
                )
        if fresh and self.latest_round() > 0:
            raise CheckpointError(
                f"{self._store.url} holds {self.latest_round()} rounds of an earlier start of this run; remove it, or set "
                f"comms.islands.store to another location, to start over"
            )

    def latest_round(self) -> int:
        """Return the number of the last decided round; 0 before the first.

        Store listings may be delayed: listed rounds are verified by name, and so are the rounds after them.
        """
        listed = [int(name[6:]) for name in self._store.folders() if re.fullmatch(r"round_\d{8}", name)]
        number = max(
            (one for one in {*listed, self._noted(), self._known} if one == 0 or self._exists(one, MEMBERS)), default=0
        )
        while self._exists(number + 1, MEMBERS):
            number += 1
        self._known = number
        return number

    def read_round(self, number: int) -> OuterRound | None:
        """Return the decision on a round; None if it is not decided yet.

        Raises:
            CheckpointError: The round's record is damaged.
        """
        path = f"{_round(number)}/{MEMBERS}"
        try:
            return OuterRound.from_json(self._store.read(path), self._islands.count)
        except ObjectNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{self._store.url}/{path} is damaged: {error}") from error

    def contribute(self, number: int, base: str, arrays: Arrays) -> None:
        """Write this island's update.

        Args:
            base: Digest of the parameters that the island started from.
        """
        about = {"base": base, "index": str(self._islands.index), "digest": compute_digest(arrays)}
        self._store.write(_from(number, self._islands.index), [save(dict(arrays), metadata=about)])

    def decide(self, number: int, base: str, norm: Callable[[Arrays], float]) -> OuterRound:
        """Decide the members of a round, after waiting for the expected islands as long as the settings
        allow.

        Args:
            base: Digest of the parameters that this island started from.
            norm: Returns the norm of an update as sent; raises KeyError or ValueError for the update of another
                model.

        Raises:
            CheckpointError: The round was decided, but its record is damaged.
        """
        expected = self._expected(number)
        patience = self._islands.start_seconds if number == 1 else self._islands.wait_seconds
        until = self._clock() + patience
        while True:
            decided = self.read_round(number)
            if decided is not None:
                return decided
            present = self._present(number)
            if expected <= present or self._clock() >= until or self._hurry():
                decided = self._evaluate_updates(number, base, present, norm)
                if self._store.create(f"{_round(number)}/{MEMBERS}", decided.to_json()):
                    self._store.write(NEWEST, [json.dumps({"round": number}).encode()])
                    return decided
                continue
            self._sleep(LOOK_SECONDS)

    def read_update(self, number: int, member: Member) -> Arrays:
        """Return a member's update.

        Raises:
            ObjectNotFoundError: The update no longer exists.
            ValueError: The bytes differ from those that the round was decided on.
        """
        kept = self._updates.get((number, member.index))
        if kept is not None and kept.digest == member.digest:
            return kept.arrays
        update = parse_update(self._store.read(_from(number, member.index)))
        if update.digest != member.digest:
            raise ValueError("its bytes are not those on which the round was decided")
        return update.arrays

    def publish(self, number: int, arrays: Arrays) -> None:
        """Write the result of a round for islands that catch up, and delete the objects of older rounds."""
        self._store.create(
            f"{_round(number)}/{AGREED}", save(dict(arrays), metadata={"digest": compute_digest(arrays)})
        )
        old = [
            entry.path
            for entry in self._store.list()
            if (match := _OWN.fullmatch(entry.path)) and int(match[1]) <= number - ROUNDS_KEPT
        ]
        self._store.delete(old)

    def drop_updates(self) -> None:
        """Release the updates that this island read to decide a round."""
        self._updates = {}

    def read_result(self, number: int) -> Arrays | None:
        """Return the result of a round, if it has been written.

        Raises:
            ValueError: The result is damaged.
        """
        try:
            return parse_update(self._store.read(f"{_round(number)}/{AGREED}")).arrays
        except ObjectNotFoundError:
            return None

    def announce(self, number: int) -> None:
        """Ask the other islands to wait for this one in a round."""
        self._store.write(f"joining/island_{self._islands.index}.json", [json.dumps({"round": number}).encode()])

    def _expected(self, number: int) -> set[int]:
        if number == 1:
            return set(range(self._islands.count))
        return self._members(number - 1) | {self._islands.index} | self._joining(number)

    def _members(self, number: int) -> set[int]:
        try:
            decided = self.read_round(number)
        except CheckpointError:
            return set()  # Damaged: wait for no island.
        return {member.index for member in decided.members} if decided else set()

    def _joining(self, number: int) -> set[int]:
        return {
            index for index in range(self._islands.count) if self._number_in(f"joining/island_{index}.json") == number
        }

    def _noted(self) -> int:
        return self._number_in(NEWEST) or 0

    def _number_in(self, path: str) -> int | None:
        """Return the round number in a note; None if it is missing or unreadable."""
        try:
            found = json_reader.parse_as(dict, self._store.read(path), max_bytes=_MOST_BYTES).get("round")
        except (ObjectNotFoundError, ValueError):
            return None
        return found if type(found) is int and 0 <= found < 10**8 else None

    def _present(self, number: int) -> set[int]:
        """Return the islands that have written an update; each file is looked up by name."""
        return {index for index in range(self._islands.count) if self._exists(number, f"from_{index}.safetensors")}

    def _exists(self, number: int, name: str) -> bool:
        try:
            self._store.read(f"{_round(number)}/{name}", 0, 1)
        except ObjectNotFoundError:
            return False
        except StoreError:  # It exists, but is shorter; a full read will report the problem.
            return True
        return True

    def _evaluate_updates(
        self, number: int, base: str, present: set[int], norm: Callable[[Arrays], float]
    ) -> OuterRound:
        """Return a round of the islands with valid updates."""
        self._updates, norms, left_out = {}, {}, {}
        for index in sorted(present):
            try:
                update = parse_update(self._store.read(_from(number, index)))
                if update.base != base:
                    raise ValueError(
                        "it started from other parameters, and must first adopt the result of the last round"
                    )
                norms[index] = norm(update.arrays)
            except ObjectNotFoundError:
                continue
            except (KeyError, ValueError) as error:
                reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                left_out[index] = reason[:_MOST_WHY]
            else:
                self._updates[number, index] = update
        left_out |= find_outliers(norms, self._norms_before(number))
        members = tuple(
            Member(index, update.digest, update.base, norms[index])
            for (_, index), update in self._updates.items()
            if index not in left_out
        )
        return OuterRound(members, base, self._islands.index, left_out)

    def _norms_before(self, number: int) -> list[float]:
        norms = []
        for earlier in range(max(1, number - ROUNDS_KEPT), number):
            with contextlib.suppress(CheckpointError):
                decided = self.read_round(earlier)
                norms += [member.norm for member in decided.members] if decided else []
        return norms


def average_updates(moved: Sequence[Arrays]) -> dict[str, npt.NDArray[np.float32]]:
    """Return the mean of the members' updates, summed in member order, so that it is bitwise equal
    everywhere.
    """
    total = {name: np.array(array, np.float32) for name, array in moved[0].items()}
    for arrays in moved[1:]:
        for name, array in arrays.items():
            total[name] += np.asarray(array, np.float32)
    return {name: array / np.float32(len(moved)) for name, array in total.items()}


def _round(number: int) -> str:
    return f"round_{number:08d}"


def _from(number: int, index: int) -> str:
    return f"{_round(number)}/from_{index}.safetensors"
