"""Where replicas that are jobs of their own (islands) meet: a folder or an object store, and no process that all depend on.

    place.json                            whose meetings these are
    round_00000003/from_0.safetensors     what an island has moved by since round 2
    round_00000003/members.json           of whom the round is: written once, by whoever comes first; all others read it
    round_00000003/agreed.safetensors     what came of it, for those who catch up
    joining/island_1.json                 the round from which a returning island is waited for

An island writes what it has moved by, waits until all that are expected have, or until its patience ends, and then tries to
create `members.json` with those that are there. A store lets one of them succeed. The outer step is the same arithmetic on the
same bytes in every island, so all hold the same parameters afterwards, bit by bit, and nobody has to send them. Who was left out
takes over what was agreed, and is waited for again once it says so.
"""

import dataclasses
import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import xxhash
from safetensors import SafetensorError
from safetensors.numpy import load, save

from ..core.errors import CheckpointError
from ..stores import Claiming, MissingError
from .settings import Islands

Arrays = Mapping[str, npt.NDArray[np.generic]]

PLACE, MEMBERS, AGREED = "place.json", "members.json", "agreed.safetensors"
ROUNDS_KEPT = 3
"""Newest rounds whose objects are kept: what was agreed can be computed again where a member dies before it has written it."""

LOOK_SECONDS = 0.2
_OWN = re.compile(r"round_(\d{8})/(from_\d+\.safetensors|members\.json|agreed\.safetensors)")


@dataclasses.dataclass(frozen=True)
class Member:
    """An island's part in a round: a digest of the bytes that it wrote, and of what it began from."""

    index: int
    digest: str
    base: str


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
        """The number of the last round that was decided; 0 where there is none."""
        numbers = sorted(
            (int(name[6:]) for name in self._store.folders() if re.fullmatch(r"round_\d{8}", name)), reverse=True
        )
        return next((number for number in numbers if number and self.members(number) is not None), 0)

    def members(self, number: int) -> tuple[Member, ...] | None:
        """Of whom a round is; None where that is not decided."""
        try:
            raw = json.loads(self._store.read(f"{_round(number)}/{MEMBERS}"))
            return tuple(Member(int(each["index"]), str(each["digest"]), str(each["base"])) for each in raw["members"])
        except MissingError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self._store.url}/{_round(number)}/{MEMBERS} is damaged: {error}; stop all islands, and start them with "
                "another "
                f"comms.islands.place"
            ) from error

    def contribute(self, number: int, base: str, arrays: Arrays) -> None:
        """Write what this island has moved by.

        Args:
            base: The digest of what it began from.
        """
        data = save(dict(arrays), metadata={"base": base, "index": str(self._islands.index)})
        self._store.write(_from(number, self._islands.index), [data])

    def decide(self, number: int, base: str) -> tuple[Member, ...]:
        """Of whom a round is; waits for those that are expected, as long as the settings say."""
        expected = self._expected(number)
        patience = self._islands.start_seconds if number == 1 else self._islands.wait_seconds
        until = self._clock() + patience
        while True:
            members = self.members(number)
            if members is not None:
                return members
            present = self._present(number)
            if expected <= present or self._clock() >= until or self._hurry():
                found = [
                    member for index in sorted(present) if (member := self._member(number, index, base)) is not None
                ]
                raw = {
                    "members": [dataclasses.asdict(member) for member in found],
                    "by": self._islands.index,
                    "at": uuid.uuid4().hex,
                }
                self._store.create(f"{_round(number)}/{MEMBERS}", json.dumps(raw, indent=1).encode())
                continue
            self._sleep(LOOK_SECONDS)

    def read_from(self, number: int, member: Member) -> Arrays:
        """What a member has moved by.

        Raises:
            CheckpointError: The bytes are not those that it wrote.
        """
        path = _from(number, member.index)
        data = self._store.read(path)
        if xxhash.xxh3_64_hexdigest(data) != member.digest:
            raise CheckpointError(
                f"{self._store.url}/{path} is damaged: its bytes are not those that island {member.index} wrote; restart "
                "this island, which "
                f"then takes over what the others agreed on"
            )
        return _loaded(data, f"{self._store.url}/{path}")

    def publish(self, number: int, arrays: Arrays) -> None:
        """Write what came of a round, for those who catch up, and remove what is older than they need."""
        self._store.create(f"{_round(number)}/{AGREED}", save(dict(arrays)))
        old = [
            entry.path
            for entry in self._store.list()
            if (match := _OWN.fullmatch(entry.path)) and int(match[1]) <= number - ROUNDS_KEPT
        ]
        self._store.delete(old)

    def agreed(self, number: int) -> Arrays | None:
        """What came of a round, where a member has written it."""
        path = f"{_round(number)}/{AGREED}"
        try:
            data = self._store.read(path)
        except MissingError:
            return None
        return _loaded(data, f"{self._store.url}/{path}")

    def announce(self, number: int) -> None:
        """Have the others wait for this island in a round."""
        self._store.write(f"joining/island_{self._islands.index}.json", [json.dumps({"round": number}).encode()])

    def _expected(self, number: int) -> set[int]:
        if number == 1:
            return set(range(self._islands.count))
        before = self.members(number - 1) or ()
        return {member.index for member in before} | {self._islands.index} | self._joining(number)

    def _joining(self, number: int) -> set[int]:
        found = set()
        for index in range(self._islands.count):
            try:
                if json.loads(self._store.read(f"joining/island_{index}.json"))["round"] == number:
                    found.add(index)
            except (MissingError, ValueError, KeyError, TypeError):
                # A note that can't be read asks for nothing: nobody is waited for.
                continue
        return found

    def _present(self, number: int) -> set[int]:
        found = (
            re.fullmatch(r"round_\d{8}/from_(\d+)\.safetensors", entry.path)
            for entry in self._store.list(_round(number))
        )
        return {int(match[1]) for match in found if match and int(match[1]) < self._islands.count}

    def _member(self, number: int, index: int, base: str) -> Member | None:
        """An island that began from the same; None where it began from something else, and has to take over what is agreed."""
        data = self._store.read(_from(number, index))
        try:
            began = _metadata(data).get("base", "")
        except ValueError:
            return None
        return Member(index, xxhash.xxh3_64_hexdigest(data), began) if began == base else None


def digest_of(arrays: Arrays) -> str:
    """A digest of numbers by name, their types and shapes included."""
    found = xxhash.xxh3_64()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        found.update(f"{name} {array.dtype} {array.shape};".encode())
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.hexdigest()


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


def _metadata(data: bytes) -> dict[str, str]:
    """What stands in a safetensors file's header beside the arrays."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]).get("__metadata__", {})


def _loaded(data: bytes, name: str) -> Arrays:
    try:
        return load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{name} is damaged: {error}; restart this island") from error
