"""Where replicas that are jobs of their own (islands) meet: a folder or an object store, and no process that all depend on.

    place.json                            whose meetings these are
    newest.json                           the last round, for stores whose lists are late
    round_00000003/from_0.safetensors     what an island has moved by since round 2
    round_00000003/members.json           of whom the round is, and who is left out why: written once, by whoever comes first
    round_00000003/agreed.safetensors     what came of it, for those who catch up
    joining/island_1.json                 the round from which a returning island is waited for

An island writes what it has moved by, waits until all that are expected have, or until its patience ends, and then tries to
create `members.json` with those that are there and whose updates can be used (`comms/admission.py`). A store lets one of them
succeed. The outer step is the same arithmetic on the same bytes in every island, so all hold the same parameters afterwards, bit
by bit, and nobody has to send them. Who was left out takes over what was agreed, and is waited for again once it says so.
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
from ..stores import Claiming, MissingError
from ..system import json_reader
from .admission import Arrays, Update, digest_of, too_large, whole
from .settings import Islands

PLACE, NEWEST, MEMBERS, AGREED = "place.json", "newest.json", "members.json", "agreed.safetensors"
ROUNDS_KEPT = 3
"""Newest rounds whose objects are kept: what was agreed can be computed again where a member dies before it has written it."""

LOOK_SECONDS = 0.2
_MOST_BYTES, _MOST_WHY = 1 << 24, 200
_OWN = re.compile(r"round_(\d{8})/(from_\d+\.safetensors|members\.json|agreed\.safetensors)")


@dataclasses.dataclass(frozen=True)
class Member:
    """An island's part in a round.

    Attributes:
        digest: Of the bytes that it wrote.
        base: Of what it began from.
        norm: Of what it has moved by.
    """

    index: int
    digest: str
    base: str
    norm: float


@dataclasses.dataclass(frozen=True)
class OuterRound:
    """A round that was decided.

    Attributes:
        members: Whose updates count, by index.
        base: Of what whoever decided it began from.
        by: Who decided it.
        left_out: Island to why its update does not count.
    """

    members: tuple[Member, ...]
    base: str
    by: int
    left_out: Mapping[int, str]

    @classmethod
    def read(cls, data: bytes, count: int) -> "OuterRound":
        """What `text` wrote.

        Raises:
            ValueError: It is something else.
        """
        raw = json_reader.parse_as(dict, data, most_bytes=_MOST_BYTES)
        try:
            members = tuple(
                Member(int(one["index"]), str(one["digest"]), str(one["base"]), float(one["norm"]))
                for one in raw["members"]
            )
            left_out = {int(index): str(why)[:_MOST_WHY] for index, why in raw["left_out"].items()}
            found = cls(members, str(raw["base"]), int(raw["by"]), left_out)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"it names no members: {error!r}") from error
        indices = [member.index for member in members]
        if sorted({*indices}) != indices or not {*indices, found.by, *left_out} <= {*range(count)}:
            raise ValueError(f"it names islands {indices}, by {found.by}; expected some of 0 to {count - 1}, in order")
        return found

    def text(self) -> bytes:
        """As JSON, which no other island would write."""
        return json.dumps({**dataclasses.asdict(self), "at": uuid.uuid4().hex}, indent=1).encode()


class MeetingPlace:
    """One island's view of the place."""

    def __init__(
        self,
        store: Claiming,
        islands: Islands,
        *,
        hurry: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        """
        Args:
            hurry: Asked while others are waited for: true where this island has to stop soon.
        """
        self._store, self._islands, self._hurry, self._clock, self._sleep = store, islands, hurry, clock, sleep
        self._known = 0
        self._updates: dict[tuple[int, int], Update] = {}

    def open(self, identity: str, *, fresh: bool) -> None:
        """Claim the place for a run, or find that it is its own.

        Args:
            identity: The same text in all islands of a run, and in no other.
            fresh: The run starts over: there may be no meetings yet.

        Raises:
            CheckpointError: It is another run's, or of an earlier start of this one.
        """
        wanted = json.dumps({"format": 1, "run": identity, "islands": self._islands.count}, sort_keys=True)
        if not self._store.create(PLACE, wanted.encode()):
            found = self._store.read(PLACE).decode(errors="replace")
            if found != wanted:
                raise CheckpointError(
                    f"{self._store.url} is where another run's islands meet ({found[:200]}; this is {wanted}); set "
                    "comms.islands.place to "
                    f"another place"
                )
        if fresh and self.newest() > 0:
            raise CheckpointError(
                f"{self._store.url} holds {self.newest()} meetings of an earlier start of this run; remove it, or set "
                f"comms.islands.place to another place, to start over"
            )

    def newest(self) -> int:
        """The number of the last round that was decided; 0 where there is none.

        A store's lists may be late: what they say is looked up by name, and so are the rounds that follow.
        """
        listed = [int(name[6:]) for name in self._store.folders() if re.fullmatch(r"round_\d{8}", name)]
        number = max(
            (one for one in {*listed, self._noted(), self._known} if one == 0 or self._there(one, MEMBERS)), default=0
        )
        while self._there(number + 1, MEMBERS):
            number += 1
        self._known = number
        return number

    def round(self, number: int) -> OuterRound | None:
        """What was decided; None where nothing is yet.

        Raises:
            CheckpointError: The record of it is damaged.
        """
        path = f"{_round(number)}/{MEMBERS}"
        try:
            return OuterRound.read(self._store.read(path), self._islands.count)
        except MissingError:
            return None
        except ValueError as error:
            raise CheckpointError(f"{self._store.url}/{path} is damaged: {error}") from error

    def contribute(self, number: int, base: str, arrays: Arrays) -> None:
        """Write what this island has moved by.

        Args:
            base: The digest of what it began from.
        """
        about = {"base": base, "index": str(self._islands.index), "digest": digest_of(arrays)}
        self._store.write(_from(number, self._islands.index), [save(dict(arrays), metadata=about)])

    def decide(self, number: int, base: str, norm: Callable[[Arrays], float]) -> OuterRound:
        """Of whom a round is; waits for those that are expected, as long as the settings say.

        Args:
            base: The digest of what this island began from.
            norm: The norm of an update as it travelled; raises KeyError or ValueError where it is not one of this model.

        Raises:
            CheckpointError: It was decided, and the record is damaged.
        """
        expected = self._expected(number)
        patience = self._islands.start_seconds if number == 1 else self._islands.wait_seconds
        until = self._clock() + patience
        while True:
            decided = self.round(number)
            if decided is not None:
                return decided
            present = self._present(number)
            if expected <= present or self._clock() >= until or self._hurry():
                decided = self._judged(number, base, present, norm)
                if self._store.create(f"{_round(number)}/{MEMBERS}", decided.text()):
                    self._store.write(NEWEST, [json.dumps({"round": number}).encode()])
                    return decided
                continue
            self._sleep(LOOK_SECONDS)

    def read_from(self, number: int, member: Member) -> Arrays:
        """What a member has moved by.

        Raises:
            MissingError: It is gone.
            ValueError: The bytes are not those that it wrote.
        """
        kept = self._updates.get((number, member.index))
        if kept is not None and kept.digest == member.digest:
            return kept.arrays
        update = whole(self._store.read(_from(number, member.index)))
        if update.digest != member.digest:
            raise ValueError("its bytes are not those on which the round was decided")
        return update.arrays

    def publish(self, number: int, arrays: Arrays) -> None:
        """Write what came of a round, for those who catch up, and remove what is older than they need."""
        self._store.create(f"{_round(number)}/{AGREED}", save(dict(arrays), metadata={"digest": digest_of(arrays)}))
        old = [
            entry.path
            for entry in self._store.list()
            if (match := _OWN.fullmatch(entry.path)) and int(match[1]) <= number - ROUNDS_KEPT
        ]
        self._store.delete(old)

    def forget(self) -> None:
        """Let go of the updates that this island read to decide a round."""
        self._updates = {}

    def agreed(self, number: int) -> Arrays | None:
        """What came of a round, where it has been written.

        Raises:
            ValueError: It is damaged.
        """
        try:
            return whole(self._store.read(f"{_round(number)}/{AGREED}")).arrays
        except MissingError:
            return None

    def announce(self, number: int) -> None:
        """Have the others wait for this island in a round."""
        self._store.write(f"joining/island_{self._islands.index}.json", [json.dumps({"round": number}).encode()])

    def _expected(self, number: int) -> set[int]:
        if number == 1:
            return set(range(self._islands.count))
        return self._members(number - 1) | {self._islands.index} | self._joining(number)

    def _members(self, number: int) -> set[int]:
        try:
            decided = self.round(number)
        except CheckpointError:
            return set()  # damaged: nobody is waited for
        return {member.index for member in decided.members} if decided else set()

    def _joining(self, number: int) -> set[int]:
        return {
            index for index in range(self._islands.count) if self._number_in(f"joining/island_{index}.json") == number
        }

    def _noted(self) -> int:
        return self._number_in(NEWEST) or 0

    def _number_in(self, path: str) -> int | None:
        """The round that a note names; one that can't be read names none."""
        try:
            found = json_reader.parse_as(dict, self._store.read(path), most_bytes=_MOST_BYTES).get("round")
        except (MissingError, ValueError):
            return None
        return found if type(found) is int and 0 <= found < 10**8 else None

    def _present(self, number: int) -> set[int]:
        """Who has written an update; each is asked for by name."""
        return {index for index in range(self._islands.count) if self._there(number, f"from_{index}.safetensors")}

    def _there(self, number: int, name: str) -> bool:
        try:
            self._store.read(f"{_round(number)}/{name}", 0, 1)
        except MissingError:
            return False
        except StoreError:  # it is there, and shorter; whoever reads it whole says what is wrong
            return True
        return True

    def _judged(self, number: int, base: str, present: set[int], norm: Callable[[Arrays], float]) -> OuterRound:
        """A round of those whose updates can be used."""
        self._updates, norms, left_out = {}, {}, {}
        for index in sorted(present):
            try:
                update = whole(self._store.read(_from(number, index)))
                if update.base != base:
                    raise ValueError("it began from other numbers, and has to take over what was agreed on")
                norms[index] = norm(update.arrays)
            except MissingError:
                continue
            except (KeyError, ValueError) as error:
                lacking = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                left_out[index] = lacking[:_MOST_WHY]
            else:
                self._updates[number, index] = update
        left_out |= too_large(norms, self._norms_before(number))
        members = tuple(
            Member(index, update.digest, update.base, norms[index])
            for (_, index), update in self._updates.items()
            if index not in left_out
        )
        return OuterRound(members, base, self._islands.index, left_out)

    def _norms_before(self, number: int) -> list[float]:
        found = []
        for earlier in range(max(1, number - ROUNDS_KEPT), number):
            with contextlib.suppress(CheckpointError):
                decided = self.round(earlier)
                found += [member.norm for member in decided.members] if decided else []
        return found


def mean_of(moved: Sequence[Arrays]) -> dict[str, npt.NDArray[np.float32]]:
    """The mean of what members have moved by, added up in their order, so that it is the same bits everywhere."""
    total = {name: np.array(array, np.float32) for name, array in moved[0].items()}
    for arrays in moved[1:]:
        for name, array in arrays.items():
            total[name] += np.asarray(array, np.float32)
    return {name: array / np.float32(len(moved)) for name, array in total.items()}


def _round(number: int) -> str:
    return f"round_{number:08d}"


def _from(number: int, index: int) -> str:
    return f"{_round(number)}/from_{index}.safetensors"
