"""Hardware profile: measured speeds of devices, links, disks and clocks, as a value and as a JSON file."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from ...core.errors import PanaxError, RecipeError
from ...core.validation import Validated
from ...mesh.rules import MeshAxes
from ...system import json_reader
from ...system.files import expand_user
from ...system.replacement import replace_file

SCHEMA_VERSION = 1

_LARGEST_BYTES = 64 * 2**20
"""Maximum size of a file to read: 100,000 devices have about 40 MB."""


class ProfileError(RecipeError):
    """A hardware profile can't be read, or is of other hardware."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceRates(Validated):
    """Measurements of one device.

    Attributes:
        name: Its kind and its index in the job, as `cpu:0` or `NVIDIA H100 80GB HBM3:5`.
        matrix_flops: FLOP/s of the fastest of several large matrix multiplications.
        memory_bandwidth: Bytes per second, read and written, of the fastest of several copies of a large
            array.
        slowest_ratio: Time of the slowest of these multiplications relative to the fastest.
    """

    name: str
    process: int
    host: str
    matrix_flops: float
    memory_bandwidth: float
    slowest_ratio: float = 1.0

    def __post_init__(self) -> None:
        _check_positive(self, "matrix_flops", "memory_bandwidth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CollectiveRates(Validated):
    """Measurements of one kind of collective over one or more mesh axes, in the slowest group.

    Attributes:
        kind: One of `plan.collectives.KINDS`.
        axes: Its mesh axes.
        ways: Number of devices in one collective.
        sent_bytes: Bytes that each device sent in the large collective, counted for a ring.
        latency_seconds: Time of a collective that sends almost nothing.
        bandwidth: Bytes per second that each device sends.
    """

    kind: str
    axes: MeshAxes
    ways: int
    sent_bytes: int
    latency_seconds: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive(self, "ways", "bandwidth", "latency_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkRates(Validated):
    """Measurements of messages from one device to its neighbor along a mesh axis.

    Attributes:
        axes: The mesh axes along which they are neighbors.
        source: The device that sends; an index into the profile's `places`.
        target: The device that receives.
        sent_bytes: The size of the large message.
        latency_seconds: Half of the round-trip time of a small message.
        bandwidth: Bytes per second of the large message.
    """

    axes: MeshAxes
    source: int
    target: int
    sent_bytes: int
    latency_seconds: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive(self, "bandwidth", "latency_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiskRates(Validated):
    """Measurements of a host's disk or store.

    Attributes:
        place: The folder or the store's address.
        written_bytes: The size of the file that was written, read and removed.
        write_bandwidth: Bytes per second, the flush to the disk included.
        read_bandwidth: Bytes per second.
    """

    place: str
    host: str
    written_bytes: int
    write_bandwidth: float
    read_bandwidth: float

    def __post_init__(self) -> None:
        _check_positive(self, "written_bytes", "write_bandwidth", "read_bandwidth")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessFacts(Validated):
    """Measurements of one process and its host.

    Attributes:
        clock_offset_seconds: Offset of its clock relative to that of process 0.
        clock_error_seconds: Error bound of the offset.
        cores: Number of the host's cores, as counted by the system.
        stolen_cores: Number of cores used by other programs and other virtual machines during the measurement.
        stolen_by: The programs that used the most cores, as far as visible to the process.
        versions: Name to version: libraries, driver, kernel, processor.
    """

    index: int
    host: str
    clock_offset_seconds: float = 0.0
    clock_error_seconds: float = 0.0
    cores: int = 1
    stolen_cores: float = 0.0
    stolen_by: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceLocation(Validated):
    """Location of a device."""

    process: int
    host: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareProfile(Validated):
    """All measurements of a pre-flight check, with the hardware.

    Attributes:
        made: Time of the check, as `2026-11-23T02:40:00+00:00`.
        platform: JAX's name: cpu, gpu, tpu.
        device_kind: JAX's name.
        matrix_dtype: Dtype of the matrix multiplications.
        mesh: Mesh axis to size.
        places: Location of each device of the mesh, in the mesh's order.
        seconds: Duration of the check.
    """

    made: str
    platform: str
    device_kind: str
    matrix_dtype: str
    mesh: Mapping[str, int]
    places: tuple[DeviceLocation, ...]
    devices: tuple[DeviceRates, ...]
    processes: tuple[ProcessFacts, ...]
    collectives: tuple[CollectiveRates, ...] = ()
    links: tuple[LinkRates, ...] = ()
    disks: tuple[DiskRates, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        count = len(self.places)
        if not self.devices or not self.processes:
            raise ProfileError("HardwareProfile.devices or .processes is empty; expected at least one of each")
        strange = {each.process for each in (*self.places, *self.devices)} - {each.index for each in self.processes}
        if strange:
            raise ProfileError(f"HardwareProfile.processes lacks process {min(strange)}, which has devices")
        if math.prod(self.mesh.values()) != count:
            raise ProfileError(f"HardwareProfile.mesh has {math.prod(self.mesh.values())} devices, places has {count}")
        if any(not 0 <= end < count for link in self.links for end in (link.source, link.target)):
            raise ProfileError(f"HardwareProfile.links names a device that is not one of its {count} places")

    @property
    def matrix_flops(self) -> float:
        """Return the FLOP/s of the slowest device, which a step waits for."""
        return min(device.matrix_flops for device in self.devices)

    @property
    def memory_bandwidth(self) -> float:
        """Return the bytes per second of the slowest device."""
        return min(device.memory_bandwidth for device in self.devices)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(place.host for place in self.places))

    def collective(self, kind: str, axes: MeshAxes) -> CollectiveRates | None:
        """Return the measurements of a collective: of this kind, or else of the slowest kind over the same
        axes; None if there are none."""
        over = [each for each in self.collectives if each.axes == tuple(axes)]
        same = [each for each in over if each.kind == kind]
        return min(same or over, key=lambda each: each.bandwidth, default=None)

    def to_json(self) -> str:
        """Serialize the profile as JSON."""
        return json.dumps({"schema_version": SCHEMA_VERSION} | dataclasses.asdict(self), indent=1)

    def save(self, path: str | Path) -> None:
        """Write the profile atomically, replacing an existing file; folders are created.

        Raises:
            OSError: The file can't be written.
        """
        path = expand_user(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, self.to_json(), private=True)


def read_profile(path: str | Path) -> HardwareProfile:
    """Read a profile from a file.

    Raises:
        ProfileError: The file does not exist, is truncated, is of another version, or has other content; the
            message gives advice.
    """
    path = expand_user(path)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ProfileError(f"{path} is larger than 64 MiB, so it is not a hardware profile; {_MAKE}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"the hardware profile {path} can't be read: {error.strerror or error}; {_MAKE}") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not a hardware profile: it is not text; {_MAKE}") from error
    try:
        content = json_reader.parse(text, constants=True)
    except ValueError as error:
        raise ProfileError(f"{path} is cut short or is not a hardware profile: {error}; {_MAKE}") from error
    if not isinstance(content, dict) or "schema_version" not in content:
        raise ProfileError(f"{path} is not a hardware profile: schema_version is missing; {_MAKE}")
    version = content.pop("schema_version")
    if version != SCHEMA_VERSION:
        raise ProfileError(
            f"{path} is a hardware profile of version {version!r}, and this Panax reads version {SCHEMA_VERSION}; {_MAKE}"
        )
    try:
        return _built(HardwareProfile, content, "the profile")
    except (PanaxError, OverflowError, RecursionError) as error:
        raise ProfileError(f"{path} is an incomplete hardware profile: {error}; {_MAKE}") from error


_MAKE = "`panax check --save FILE` makes one"

_Made = TypeVar("_Made")


def _built(cls: type[_Made], content: Any, where: str) -> _Made:
    """Build a dataclass from its JSON object."""
    if not isinstance(content, dict):
        raise ProfileError(f"{where} is not an object")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    strange = sorted(content.keys() - fields.keys())
    if strange:
        raise ProfileError(f"{where} has {strange[0]!r}, which is not part of it")
    missing = [
        name
        for name, field in fields.items()
        if name not in content and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ProfileError(f"{where} lacks {missing[0]!r}")
    hints = get_type_hints(cls)
    return cls(**{name: _value(hints[name], value, name) for name, value in content.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """Convert a field's JSON value."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        if not isinstance(value, list):
            raise ProfileError(f"{where} is not a list")
        if dataclasses.is_dataclass(inner[0]) and isinstance(inner[0], type):
            return tuple(_built(inner[0], each, where) for each in value)
        return tuple(_value(inner[0], each, where) for each in value)
    if origin is Mapping:
        if not isinstance(value, dict):
            raise ProfileError(f"{where} is not an object")
        return {name: _value(inner[1], each, f"{where}.{name}") for name, each in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ProfileError(f"{where} is {value}; expected a finite number")
        return float(value)
    if type(value) is not hint:
        raise ProfileError(f"{where} is {value!r:.80}; expected {_WORDS[hint]}")
    return value


_WORDS = {int: "a whole number", float: "a number", str: "text"}


def _check_positive(rates: Any, *names: str) -> None:
    for name in names:
        value = getattr(rates, name)
        if not (math.isfinite(value) and value > 0):
            raise ProfileError(f"{type(rates).__name__}.{name}={value}; expected a finite number above 0")


def profile_in(folder: str | Path) -> Path:
    """Return the path, in a run's folder, of the profile of the devices on which the run was checked."""
    return Path(folder) / "hardware.json"


def profiles_folder() -> Path:
    """Return the default folder of profiles: `hardware` in Panax's cache."""
    from ...system.cache_directory import cache_directory

    return cache_directory() / "hardware"


def profile_path(profile: HardwareProfile) -> Path:
    """Return the path in the cache of a profile of these devices, laid out in this mesh."""
    mesh = "-".join(f"{axis}{size}" for axis, size in profile.mesh.items() if size > 1) or "one"
    kind = "".join(each if each.isalnum() else "_" for each in profile.device_kind.lower())
    hosts = "" if len(profile.hosts) == 1 else f"-{len(profile.hosts)}hosts"
    return profiles_folder() / f"{kind}x{len(profile.places)}{hosts}-{mesh}.json"


def newest_profile(
    device_kind: str, mesh: Mapping[str, int], paths: Iterable[Path]
) -> tuple[HardwareProfile, Path] | None:
    """Return the newest profile of this kind and number of devices, preferably in this mesh; None if there is
    none.

    A file that can't be read, or has other content, is ignored.
    """
    candidates: list[tuple[bool, str, HardwareProfile, Path]] = []
    for path in paths:
        try:
            profile = read_profile(path)
        except ProfileError:
            continue
        if profile.device_kind == device_kind and len(profile.places) == math.prod(mesh.values()):
            candidates.append((_sizes(profile.mesh) == _sizes(mesh), profile.made, profile, path))
    newest = max(candidates, key=lambda each: each[:2], default=None)
    return None if newest is None else newest[2:]


def _sizes(mesh: Mapping[str, int]) -> dict[str, int]:
    return {axis: size for axis, size in mesh.items() if size > 1}
