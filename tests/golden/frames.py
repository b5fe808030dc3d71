"""Golden frames: the bytes of every encoding for fixed values, and the version under which each group was written.

``frames.json`` has them. An encoding may change only with the version of its group. ``python -m tests.golden`` then
writes the file again; without a new version it adds frames, and refuses to change any.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

FILE: Final = Path(__file__).with_name("frames.json")
COMMAND: Final = "python -m tests.golden"
Stored = dict[str, dict[str, Any]]
"""By group ``version``, ``frames`` by name, and by version ``older`` frames that links still have to read."""


@dataclass(frozen=True)
class Frame:
    """One value, and its encoding by this build.

    Without ``read``, both sides compute the bytes. ``lasting``: later builds have to read them from this one.
    """

    value: Any
    write: Callable[[Any], bytes]
    read: Callable[[bytes], object] | None = None
    lasting: bool = True


@dataclass(frozen=True)
class Group:
    """Encodings of one version, and the constant that has it. ``oldest``: a version that this build still reads."""

    constant: str
    version: int
    frames: Mapping[str, Frame]
    oldest: int | None = None


@dataclass(frozen=True)
class Difference:
    """Difference of this build from the file. ``forbidden``: the command does not write it."""

    frame: str  # group and name
    forbidden: bool
    text: str

    def __str__(self) -> str:
        return f"{self.frame}: {self.text}"


def load(path: Path = FILE) -> Stored:
    return msgspec.json.decode(path.read_bytes(), type=Stored) if path.exists() else {}


def compare(groups: Mapping[str, Group], stored: Stored) -> list[Difference]:
    """Return all differences; none if every encoding is as in the file."""
    found = [Difference(name, True, "the group is gone, the file has it") for name in stored if name not in groups]
    for name, group in groups.items():
        there = stored.get(name, {"version": group.version, "frames": {}})
        found += (Difference(f"{name}: {each}", no, text) for each, no, text in _differences(group, there))
    return found


def _differences(group: Group, stored: Mapping[str, Any]) -> Iterator[tuple[str, bool, str]]:
    """Yield name, whether it is forbidden, and text."""
    was, now, constant = stored["version"], group.version, group.constant
    raised = now > was
    if raised:
        yield "version", False, f"{was} in the file, {now} in {constant}: run `{COMMAND}`"
    elif now < was:
        yield "version", True, f"{was} in the file, {now} in {constant}: versions only rise"
    rule = (
        f"run `{COMMAND}`" if raised else f"restore the encoding, or raise {constant} above {now} and run `{COMMAND}`"
    )
    for name in sorted(stored["frames"].keys() - group.frames.keys()):
        yield name, not raised, f"the encoding is gone, and the version is {now}: {rule}"
    for name, frame in group.frames.items():
        try:
            written = frame.write(frame.value)
        except Exception as error:  # noqa: BLE001 (any error of a changed encoding is a difference)
            yield name, True, f"it cannot be written: {error!r}"
            continue
        if (entry := stored["frames"].get(name)) is None:
            yield name, False, f"it has no golden frame: give it a feature or a new {constant}, then run `{COMMAND}`"
        elif written != (golden := _bytes_of(entry)):
            yield name, not raised, f"the bytes changed, and the version is {now}: {rule}; {_change(golden, written)}"
        elif entry["value"] != shown(frame.value):
            yield name, False, f"the file tells another value, {entry['value']}: run `{COMMAND}`"
        if frame.read is not None:
            yield from ((name, True, text) for text in _unread(frame, written))
    for version, frames in stored.get("older", {}).items():
        for name, entry in frames.items():
            yield from ((name, True, f"version {version}: {why}") for why in _unreadable(group, version, name, entry))


def _unread(frame: Frame, data: bytes) -> Iterator[str]:
    """Yield what is wrong where bytes are read, and the value is written again."""
    assert frame.read is not None
    try:
        value = frame.read(data)
        again = frame.write(value)
    except Exception as error:  # noqa: BLE001 (as above)
        yield f"{data.hex()} cannot be read: {error!r}"
        return
    if value != frame.value:
        yield f"{data.hex()} is read as {shown(value)}, not as {shown(frame.value)}"
    elif again != data:
        yield f"it is written again as {again.hex()}, not as {data.hex()}"


def _unreadable(group: Group, version: str, name: str, entry: Mapping[str, str]) -> Iterator[str]:
    """Yield why an older release's frame cannot be read, if links may have to."""
    frame = group.frames.get(name)
    if group.oldest is None or int(version) < group.oldest or (frame is not None and frame.read is None):
        return
    if frame is None or frame.read is None:
        yield f"the encoding is gone, and this build speaks version {group.oldest} on: keep it, or raise the oldest"
        return
    try:
        frame.read(_bytes_of(entry))
    except Exception as error:  # noqa: BLE001 (as above)
        yield f"this build speaks that version, and cannot read {_bytes_of(entry).hex()}: {error!r}"


def updated(groups: Mapping[str, Group], stored: Stored) -> Stored:
    """Return the new content of the file. Raises ValueError, which has the forbidden differences."""
    _check(groups, stored)
    new = {name: _updated(group, stored.get(name)) for name, group in groups.items()}
    _check(groups, new)  # what was changed now has to be read from older builds
    return new


def _check(groups: Mapping[str, Group], stored: Stored) -> None:
    if forbidden := [str(each) for each in compare(groups, stored) if each.forbidden]:
        raise ValueError("\n".join(forbidden))


def _updated(group: Group, stored: Mapping[str, Any] | None) -> dict[str, Any]:
    frames = {
        name: {"value": shown(frame.value), **_entry(frame.write(frame.value))} for name, frame in group.frames.items()
    }
    new: dict[str, Any] = {"constant": group.constant, "version": group.version, "frames": frames}
    if stored is not None and group.oldest is not None:
        older = dict(stored.get("older", {}))
        if group.version > stored["version"]:
            passing = {name for name, frame in group.frames.items() if frame.read is None or not frame.lasting}
            older[str(stored["version"])] = {
                name: entry
                for name, entry in stored["frames"].items()
                if name not in passing and not _same(entry, frames.get(name))
            }
        older = {version: frames for version, frames in older.items() if frames and int(version) >= group.oldest}
        new |= {"older": older} if older else {}
    return new


def text_of(stored: Stored) -> str:
    return json.dumps(stored, indent=1, ensure_ascii=False) + "\n"


def _same(entry: Mapping[str, str], other: Mapping[str, str] | None) -> bool:
    return other is not None and _bytes_of(entry) == _bytes_of(other)


def _entry(data: bytes) -> dict[str, str]:
    """Return bytes for the file: as text where a person can read it."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = "\n"
    return {"text": text} if text.isprintable() else {"hex": data.hex()}


def _bytes_of(entry: Mapping[str, str]) -> bytes:
    return entry["text"].encode() if "text" in entry else bytes.fromhex(entry["hex"])


def _change(golden: bytes, written: bytes) -> str:
    pairs = enumerate(zip(golden, written, strict=False))
    at = next((at for at, (old, new) in pairs if old != new), min(len(golden), len(written)))
    return f"from byte {at} on {golden[at:].hex() or 'nothing'} became {written[at:].hex() or 'nothing'}"


def shown(value: object) -> str:
    """Return a value for people: names of fields, and bytes in hexadecimal."""
    if isinstance(value, msgspec.Raw):
        return f"msgpack {shown(msgspec.msgpack.decode(bytes(value)))}"
    if isinstance(value, bytes):
        return f"h'{value.hex()}'"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{each!r}: {shown(of)}" for each, of in value.items()) + "}"
    names = getattr(value, "__struct_fields__", None) or getattr(value, "_fields", None)
    if names is not None:
        return f"{type(value).__name__}({', '.join(f'{name}={shown(getattr(value, name))}' for name in names)})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(shown(each) for each in value)}]"
    return repr(value)
