"""Golden frames: every encoding is as in the file, and a change without a new version is noticed."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, get_args

import msgspec
import pytest

from llm_datadist.errors import ProtocolError
from tests.golden.__main__ import FILE, load, text_of, updated
from tests.golden.encodings import GREETINGS, Frame, groups
from tests.support.wire import messages

GROUPS: Final = groups()
STORED: Final = load()
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
