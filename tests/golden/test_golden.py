"""Golden frames: every encoding is as in the file, and a change without a new version is noticed."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pytest

from llm_datadist.errors import ProtocolError
from llm_datadist.types.grant import GRANT_VERSION
from tests.golden.__main__ import FILE, Stored, load, main, text_of, updated
from tests.golden.encodings import GREETINGS, Frame, Group, groups
from tests.support.wire import messages

GROUPS: Final = groups()
STORED: Final = load()
NEWEST: Final[int] = STORED["protocol"]["version"]
#: By kind of message: its group, and the names of its frames.
KINDS: Final[dict[Any, tuple[str, list[str]]]] = {}
for _group in ("protocol", "rendezvous"):
    for _name, _frame in GROUPS[_group].frames.items():
        if isinstance(_frame.value, msgspec.Struct):
            KINDS.setdefault(type(_frame.value), (_group, []))[1].append(_name)


def test_every_encoding_is_as_in_the_file() -> None:
    assert text_of(updated(GROUPS, STORED)) == FILE.read_text(), "new frames: run `python -m tests.golden`"


def refuses(group: str, frames: dict[str, Frame]) -> bool:
    """Return True if these changed frames need a new version; check that they pass with one."""
    file = {group: STORED[group] | {"frames": {name: STORED[group]["frames"][name] for name in frames}}}
    whole = replace(GROUPS[group], frames={name: replace(frame, read=None) for name, frame in frames.items()})
    newer = {group: replace(whole, version=whole.version + 1)}
    assert updated(newer, updated(newer, file)) == updated(newer, file)
    try:
        updated({group: whole}, file)
    except ValueError as error:
        return f"restore the encoding, or raise {whole.constant} above {whole.version}" in str(error)
    return False


@pytest.mark.parametrize("kind", get_args(messages.AnyMessage))
def test_elements_at_the_end_of_every_message_are_ignored_and_none_is_missing_without_a_default(kind: Any) -> None:
    least = 1 + sum(field.required for field in msgspec.structs.fields(kind))
    for value in (GROUPS["protocol"].frames[name].value for name in KINDS[kind][1]):
        elements = msgspec.msgpack.decode(messages.encode(value))
        assert messages.decode(msgspec.msgpack.encode([*elements, "later", {"x": [1]}])) == value
        rest = [field.default for field in msgspec.structs.fields(kind)[least - 1 :]]
        shortest = messages.decode(msgspec.msgpack.encode(elements[:least]))
        assert [getattr(shortest, name) for name in kind.__struct_fields__[least - 1 :]] == rest
        with pytest.raises(ProtocolError):
            messages.decode(msgspec.msgpack.encode(elements[: least - 1]))


def mutants(value: Any, most: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield the value in kinds like its own: two of the first fields swapped, one less, one more, another tag."""
    names, config = list(value.__struct_fields__)[:most], value.__struct_config__
    orders = {f"{b} before {a}": [*names[:i], b, a, *names[i + 2 :]] for i, (a, b) in enumerate(pairwise(names))}
    orders |= {f"no {names[-1]}": names[:-1]} if names else {}
    for what, fields in (orders | {"one more": [*names, "more"], "another tag": names}).items():
        other = f"{config.tag}x" if isinstance(config.tag, str) else 50
        tag = other if what == "another tag" else config.tag
        kind = msgspec.defstruct(type(value).__name__, fields, array_like=config.array_like, tag=tag)
        yield what, kind(*(getattr(value, name, 1) for name in fields))


def test_a_changed_kind_of_message_needs_a_version() -> None:
    """One of its frames notices."""
    for kind, (group, names) in KINDS.items():
        frames = {name: GROUPS[group].frames[name] for name in names}
        changes = {what for what, _ in mutants(frames[names[0]].value)}
        noticed = {
            what
            for name, frame in frames.items()
            for what, mutant in mutants(frame.value)
            if refuses(group, {name: Frame(mutant, frame.write)})
        }
        assert noticed == changes, kind


def test_a_greeting_changes_under_the_wire_major_only_but_for_more_elements() -> None:
    for kind, count in GREETINGS.items():
        name = f"{kind.__name__} of 0.2.0"
        frame = GROUPS["wire major"].frames[name]
        for what, mutant in mutants(frame.value, count - 1):
            assert refuses("wire major", {name: Frame(mutant, frame.write)}) == (what != "one more"), (kind, what)


def test_a_reader_that_takes_fields_for_others_is_noticed() -> None:
    frame = GROUPS["protocol"].frames["Release"]

    def read(data: bytes) -> object:
        pin, first, count = msgspec.structs.astuple(messages.decode(data[4:]))
        return messages.Release(pin=pin, first=count, count=first)

    with pytest.raises(ValueError, match=r"^protocol: Release: \w+ is read as Release"):
        updated({"protocol": replace(GROUPS["protocol"], frames={"Release": replace(frame, read=read)})}, {})


# --- the command ---


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda file: file["protocol"]["frames"].update(Beat="00"), f"Beat: 00 became .* the version is {NEWEST}: "),
        (lambda file: file["protocol"]["frames"].update(Old="00"), "Old: 00 became None"),
        (lambda file: file["grant"].update(version=GRANT_VERSION + 1), f"version: {GRANT_VERSION + 1} in the file"),
        (lambda file: file.update(old={"version": 1, "frames": {}}), "old: the group is gone"),
        (lambda file: file["protocol"]["frames"].pop("Beat"), None),
        (dict.clear, None),
    ],
)
def test_the_command_adds_frames_and_changes_none(
    tmp_path: Path, edit: Callable[[Stored], None], text: str | None
) -> None:
    file, stored = tmp_path / "frames.json", copy.deepcopy(STORED)
    edit(stored)
    file.write_text(before := text_of(stored))
    if text is not None:
        with pytest.raises(SystemExit, match=f"(?s)as before:\n.*{text}"):
            main(file)
        assert file.read_text() == before
    else:
        main(file)
        assert file.read_text() == FILE.read_text()


def test_older_frames_stay_as_long_as_links_speak_their_version() -> None:
    """The next version of a heartbeat has one element more."""
    beat = STORED["protocol"]["frames"]["Beat"]
    stored = {"protocol": {"version": NEWEST, "frames": {"Beat": beat}}}

    def newer(kind: Any, oldest: int = NEWEST, *, lasting: bool = True) -> dict[str, Group]:
        def read(data: bytes) -> object:
            return msgspec.msgpack.decode(data[data.index(b"\xa4beat") - 1 :], type=kind)

        frame = Frame(("beat", 3, 4), msgspec.msgpack.encode, read, lasting)
        return {"protocol": Group("VERSIONS", NEWEST + 1, {"Beat": frame}, oldest)}

    strict, lenient = tuple[str, int, int], newer(tuple[Any, ...])
    found = updated(lenient, stored)
    assert found["protocol"]["older"] == {str(NEWEST): {"Beat": beat}}
    assert updated(lenient, found) == found
    for passing, before in ((newer(strict, lasting=False), stored), (newer(strict, NEWEST + 1), found)):
        assert "older" not in updated(passing, before)["protocol"]
    gone = {"protocol": replace(lenient["protocol"], frames={})}
    for without, before in ((newer(strict), stored), (newer(strict), found), (gone, stored)):
        with pytest.raises(ValueError, match=f"Beat: this build speaks version {NEWEST}, and cannot read its {beat}"):
            updated(without, before)
