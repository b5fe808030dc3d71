"""Golden frames: every encoding is as in the file, and the comparison notices each kind of change."""

import copy
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints
from unittest.mock import patch

import msgspec
import pytest

from faults.lane_ends import HEADER
from faults.sealing import FAR_KEYS, LANE_RECORDS, NEAR_KEYS, Opener, Sealer
from llm_datadist import _statistics_page as pages
from llm_datadist._links import messages, versions
from llm_datadist._links.identity import Transcript
from llm_datadist._transfer import handles
from llm_datadist._transport import address, lanes, nixl, rendezvous
from llm_datadist.errors import ProtocolError
from llm_datadist.integrations.references import ReferenceKeys
from llm_datadist.types.grant import GRANT_VERSION, Grant
from tests.golden.__main__ import main
from tests.golden.frames import FILE, Difference, Frame, Group, Stored, compare, load, text_of, updated
from tests.golden.groups import GREETINGS, groups
from tests.golden.lane_frames import FRAMES

GROUPS, STORED = groups(), load()
NEWEST: int = STORED["protocol"]["version"]
KINDS: dict[str, tuple[Any, ...]] = {
    "protocol": (
        *get_args(messages.AnyMessage),
        *get_args(get_type_hints(handles.decode_handle)["return"]),
        *get_args(nixl._ask_decoder.type),
        *get_args(nixl._Answer),
    ),
    "rendezvous": get_args(get_type_hints(rendezvous.decode)["return"]),
}
OF_KIND = [(group, kind) for group, kinds in KINDS.items() for kind in kinds]


def bytes_of(group: str, name: str) -> bytes:
    entry = STORED[group]["frames"][name]
    return entry["text"].encode() if "text" in entry else bytes.fromhex(entry["hex"])


def only(group: str, frames: Mapping[str, Frame], *, raised: int = 0) -> tuple[dict[str, Group], Stored]:
    """Return one group with these frames, its version ``raised``, and what the file has of them."""
    stored = {"version": STORED[group]["version"], "frames": {name: STORED[group]["frames"][name] for name in frames}}
    whole = GROUPS[group]
    return {group: replace(whole, frames=frames, version=whole.version + raised)}, {group: stored}


def forbidden(found: list[Difference]) -> list[str]:
    return [str(each) for each in found if each.forbidden]


def check_refused(group: str, frames: Mapping[str, Frame]) -> None:
    """Check that these changes need a new version, which is named, and that they pass with one."""
    (texts,) = {tuple(forbidden(compare(*only(group, frames))))}
    assert texts, f"nothing of {list(frames)} has changed"
    constant = GROUPS[group].constant
    assert all(f"raise {constant} above {GROUPS[group].version}" in text for text in texts), texts
    with pytest.raises(ValueError, match="restore the encoding"):
        updated(*only(group, frames))
    there, stored = only(group, {name: replace(frame, read=None) for name, frame in frames.items()}, raised=1)
    assert forbidden(compare(there, stored)) == []
    assert compare(there, stored), "the file is older"
    assert compare(there, updated(there, stored)) == []


# What the file says of this build


def test_every_encoding_is_as_in_the_file() -> None:
    assert "\n".join(map(str, compare(GROUPS, STORED))) == ""


def test_the_file_is_as_the_command_writes_it() -> None:
    assert text_of(updated(GROUPS, STORED)) == FILE.read_text()


@pytest.mark.parametrize(("group", "kind"), OF_KIND)
def test_every_kind_has_a_frame_with_each_field_set(group: str, kind: Any) -> None:
    found = [frame.value for frame in GROUPS[group].frames.values() if type(frame.value) is kind]
    assert found, f"{kind.__name__} has no golden frame: give it a value in tests/golden/values.py"
    for name in kind.__struct_fields__:
        assert any(getattr(value, name) not in (None, False, 0, b"", "", [], {}, (0, 0)) for value in found), name


def test_elements_and_features_of_later_releases_are_ignored() -> None:
    for name in ("Hello", "Welcome"):
        data = bytes_of("protocol", f"{name} of a later release")
        elements = msgspec.msgpack.decode(data[4:])
        assert elements[-2:] == ["of a later release", {"more": [1, None]}]
        assert messages.decode(data[4:]) == messages.decode(bytes_of("protocol", name)[4:])
    hello = cast(messages.Hello, messages.decode(bytes_of("protocol", "Hello of a later release")[4:]))
    assert hello.features == ["reads-by-key", "of a later release"]
    hello = msgspec.structs.replace(hello, versions=(versions.VERSIONS[1], versions.VERSIONS[1] + 1))
    known = frozenset({"reads-by-key"}.intersection(versions.FEATURES))
    assert versions.agree(7, hello) == (versions.VERSIONS[1], known)


@pytest.mark.parametrize("kind", get_args(messages.AnyMessage))
def test_elements_at_the_end_of_every_message_are_ignored_and_none_is_missing_without_a_default(kind: Any) -> None:
    least = 1 + sum(field.required for field in msgspec.structs.fields(kind))
    for value in (frame.value for frame in GROUPS["protocol"].frames.values() if type(frame.value) is kind):
        elements = msgspec.msgpack.decode(messages.encode(value))
        assert messages.decode(msgspec.msgpack.encode([*elements, "later", {"x": [1]}])) == value
        rest = [field.default for field in msgspec.structs.fields(kind)[least - 1 :]]
        shortest = messages.decode(msgspec.msgpack.encode(elements[:least]))
        assert [getattr(shortest, name) for name in kind.__struct_fields__[least - 1 :]] == rest
        with pytest.raises(ProtocolError):
            messages.decode(msgspec.msgpack.encode(elements[: least - 1]))


def test_encrypted_lane_frames_are_the_plain_ones_under_the_cipher() -> None:
    for near, keys in ((True, NEAR_KEYS), (False, FAR_KEYS)):
        names = [name for name, (_, is_near, _) in FRAMES.items() if is_near is near]
        plain, encrypted = (
            b"".join(bytes_of("protocol", f"lane, {kind}: {name}") for name in names) for kind in ("plain", "encrypted")
        )
        with closing(Opener(keys[0])) as opener:
            opener.feed(encrypted)
            assert opener.plain == plain
        with closing(Sealer(keys[0])) as sealer:
            again, at = b"", 0
            for record in LANE_RECORDS.records_of(encrypted):
                size = len(record) - LANE_RECORDS.overhead
                again, at = again + sealer.record(plain[at : at + size]), at + size
        assert again == encrypted


# The comparison notices a changed encoding


def mutants(value: msgspec.Struct, most: int | None = None) -> Iterator[tuple[str, msgspec.Struct]]:
    """Yield the value in kinds like its own: two of the first fields swapped, one less, one more, another tag."""
    names, config = value.__struct_fields__[:most], value.__struct_config__
    orders = {f"{b} before {a}": [*names[:i], b, a, *names[i + 2 :]] for i, (a, b) in enumerate(pairwise(names))}
    orders |= {f"no {names[-1]}": [*names[:-1]]} if names else {}
    orders |= {"one more": [*names, "more"]}
    other = f"{config.tag}x" if isinstance(config.tag, str) else 50
    tags = dict.fromkeys(orders, config.tag) | {"tag": other}
    for what, tag in tags.items():
        fields = orders.get(what, list(names))
        kind = msgspec.defstruct(type(value).__name__, fields, array_like=config.array_like, tag=tag)
        yield what, kind(*(getattr(value, name, 1) for name in fields))


@pytest.mark.parametrize(("group", "kind"), OF_KIND)
def test_a_changed_kind_needs_a_version(group: str, kind: Any) -> None:
    """Each change is noticed by one frame of the kind at least."""
    frames = {name: frame for name, frame in GROUPS[group].frames.items() if type(frame.value) is kind}
    changes: dict[str, dict[str, Frame]] = {}
    for name, frame in frames.items():
        for what, mutant in mutants(frame.value):
            changed = Frame(mutant, frame.write)
            if frame.write(mutant) != bytes_of(group, name):
                changes.setdefault(what, {})[name] = changed
    fields = len(kind.__struct_fields__)
    assert len(changes) == max(fields - 1, 0) + (fields > 0) + 2, sorted(changes)
    for changed_frames in changes.values():
        check_refused(group, changed_frames)


@pytest.mark.parametrize("name", ["Hello of 0.2.0", "Welcome of 0.2.0", "Refused of 0.2.0"])
def test_a_greeting_changes_under_the_wire_major_only_but_for_more_elements(name: str) -> None:
    frame = GROUPS["wire major"].frames[name]
    for what, mutant in mutants(frame.value, GREETINGS[name][1] - 1):
        changed = {name: Frame(mutant, frame.write)}
        if what == "one more":
            assert forbidden(compare(*only("wire major", changed))) == []
        else:
            check_refused("wire major", changed)


def swapped(elements: list[Any], i: int, j: int) -> list[Any]:
    elements[i], elements[j] = elements[j], elements[i]
    return elements


def reencoded(data: bytes, i: int, j: int) -> bytes:
    return msgspec.msgpack.encode(swapped(msgspec.msgpack.decode(data), i, j))


def patches() -> dict[str, tuple[str, list[str], Callable[[], AbstractContextManager[Any]]]]:
    """Return changes in the code by name: group and frames that notice, and the change."""
    header, expand, sign, of = pages._HEADER, lanes._expand, ReferenceKeys.sign, Transcript.of
    encode, to_bytes = pages._encode, Grant.to_bytes
    plain = [f"preamble, {name}" for name in ("plain", "lane", "TLS")]
    return {
        "preamble: purpose before wire major": (
            "wire major",
            plain,
            lambda: patch.object(
                address, "preamble", lambda p: b"ODATDIST" + struct.pack(">HH", p, address.WIRE_MAJOR)
            ),
        ),
        "frame: a little-endian length": (
            "protocol",
            list(GROUPS["protocol"].frames)[:5],
            lambda: patch.object(messages, "FRAME_HEADER", struct.Struct("<I")),
        ),
        "lane join: proof and keys in another order": (
            "protocol",
            ["lane, encrypted: dialer joins"],
            lambda: patch.object(lanes, "_expand", lambda *how: expand(*how)[::-1]),
        ),
        "greetings: digest with the listener first": (
            "protocol",
            ["agreed: digest of the greetings", "proof of the same process: initiator"],
            lambda: patch.object(Transcript, "of", lambda hello, welcome: of(welcome, hello)),
        ),
        "rendezvous: a field of another name": (
            "rendezvous",
            ["RendezvousHello"],
            lambda: patch.object(rendezvous, "_encoder", _Renaming({"shut_out": "no_cma"})),
        ),
        "page: a big-endian header": (
            "statistics page",
            ["header"],
            lambda: patch.object(pages, "_HEADER", struct.Struct(header.format.replace("<", ">"))),
        ),
        "page: a field of another name": (
            "statistics page",
            ["body"],
            lambda: patch.object(pages, "_encode", lambda *a, **k: encode(*a, **k).replace(b'"pins"', b'"held"')),
        ),
        "grant: slot and generation swapped": (
            "grant",
            ["grant"],
            lambda: patch.object(
                Grant, "to_bytes", lambda self: bytes([GRANT_VERSION]) + reencoded(to_bytes(self)[1:], 3, 4)
            ),
        ),
        "offer: groups and ranks swapped": (
            "reference",
            ["offer, as a reference", "token of its grants"],
            lambda: patch.object(ReferenceKeys, "sign", lambda self, payload: sign(self, reencoded(payload, 1, 2))),
        ),
        "reference: another use of the secret": (
            "reference",
            ["offer, as a reference"],
            lambda: patch("llm_datadist.integrations.references._digest", _other_digest),
        ),
    }


class _Renaming:
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def encode(self, value: Any) -> bytes:
        fields = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        return msgspec.msgpack.encode({self._names.get(name, name): of for name, of in fields.items()})


def _other_digest(secret: Any, use: str, head: str) -> bytes:
    return bytes(32)


@pytest.mark.parametrize("what", patches())
def test_a_changed_encoder_needs_a_version(what: str) -> None:
    group, names, change = patches()[what]
    with change():
        frames = {name: Frame(frame.value, frame.write) for name, frame in groups()[group].frames.items()}
        frames = {name: frames[name] for name in names}
        for name in names:
            check_refused(group, {name: frames[name]})


def test_another_nonce_of_a_lane_record_needs_a_version() -> None:
    """As if records were numbered from 1."""
    names = [name for name, (_, near, _) in FRAMES.items() if near]
    with closing(Sealer(NEAR_KEYS[0])) as sealer:
        sealer.record(b"x")
        for name in names:
            plain = bytes_of("protocol", f"lane, plain: {name}")
            data, at = b"", 0
            for record in LANE_RECORDS.records_of(bytes_of("protocol", f"lane, encrypted: {name}")):
                size = len(record) - LANE_RECORDS.overhead
                data, at = data + sealer.record(plain[at : at + size]), at + size
            check_refused("protocol", {f"lane, encrypted: {name}": Frame(data, bytes)})


def test_another_order_in_a_lane_header_needs_a_version() -> None:
    data = bytes_of("protocol", "lane, plain: READ")
    *fields, last = HEADER.unpack_from(data)
    moved = HEADER.pack(*swapped(fields, 4, 5), last) + data[HEADER.size :]
    check_refused("protocol", {"lane, plain: READ": Frame(moved, bytes)})


def test_a_reader_that_takes_fields_for_others_is_noticed() -> None:
    frame = GROUPS["protocol"].frames["Release"]

    def read(data: bytes) -> object:
        pin, first, count = msgspec.structs.astuple(messages.decode(data[4:]))
        return messages.Release(pin=pin, first=count, count=first)

    (text,) = forbidden(compare(*only("protocol", {"Release": replace(frame, read=read)})))
    assert "is read as Release(pin=78, first=40, count=2), not as Release(pin=78, first=2, count=40)" in text


# The command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "frames.json"
    path.write_text(FILE.read_text())
    return path


def edited(file: Path, edit: Callable[[Stored], None]) -> str:
    stored = copy.deepcopy(STORED)
    edit(stored)
    file.write_text(text_of(stored))
    return file.read_text()


def test_the_command_refuses_a_change_without_a_version(file: Path) -> None:
    before = edited(
        file, lambda stored: stored["protocol"]["frames"]["Beat"].update(hex="0000000b92a462656174ce00011171")
    )
    with pytest.raises(SystemExit) as refused:
        main(file)
    assert f"as before:\nprotocol: Beat: the bytes changed, and the version is {NEWEST}: " in str(refused.value)
    assert "from byte 14 on 71 became 70" in str(refused.value)
    assert file.read_text() == before


def test_the_command_adds_a_frame_without_a_version(file: Path) -> None:
    edited(file, lambda stored: stored["protocol"]["frames"].pop("Beat"))
    assert [(each.frame, each.forbidden) for each in compare(GROUPS, load(file))] == [("protocol: Beat", False)]
    main(file)
    assert compare(GROUPS, load(file)) == []


def test_a_frame_that_is_gone_and_a_lower_version_are_refused(file: Path) -> None:
    for edit, text in (
        (
            lambda stored: stored["protocol"]["frames"].update(Old={"value": "Old()", "hex": "00"}),
            "Old: the encoding is",
        ),
        (
            lambda stored: stored["grant"].update(version=GRANT_VERSION + 1),
            f"grant: version: {GRANT_VERSION + 1} in the file, {GRANT_VERSION} in ",
        ),
        (lambda stored: stored.update(old={"version": 1, "frames": {}}), "old: the group is gone"),
    ):
        edited(file, edit)
        with pytest.raises(SystemExit, match=text):
            main(file)


def raised(frame: Frame, *, oldest: int = NEWEST) -> dict[str, Group]:
    frames = {"Beat": frame, "Ping": GROUPS["protocol"].frames["Ping"]}
    return {"protocol": Group("VERSIONS", NEWEST + 1, frames, oldest)}


def test_older_frames_stay_as_long_as_links_speak_their_version() -> None:
    """The next version of a heartbeat has one element more."""

    class Newer(msgspec.Struct, array_like=True, frozen=True, tag="beat"):
        count: int
        more: int = 0

    decode = msgspec.msgpack.Decoder(Newer).decode
    newer = Frame(Newer(3, 4), msgspec.msgpack.encode, lambda data: decode(data.removeprefix(b"\0\0\0\x0b")))
    stored = only("protocol", {name: GROUPS["protocol"].frames[name] for name in ("Beat", "Ping")})[1]
    found = updated(raised(newer), stored)
    passing = updated(raised(replace(newer, lasting=False)), stored)
    assert "older" not in passing["protocol"]
    assert found["protocol"]["older"] == {str(NEWEST): {"Beat": STORED["protocol"]["frames"]["Beat"]}}
    assert compare(raised(newer), found) == []
    assert updated(raised(newer), found) == found
    ping = {"Ping": GROUPS["protocol"].frames["Ping"]}
    with pytest.raises(ValueError, match=f"^protocol: Beat: version {NEWEST}: the encoding is gone, and this build"):
        updated({"protocol": replace(raised(newer)["protocol"], frames=ping)}, stored)
    strict = msgspec.msgpack.Decoder(tuple[str, int, int]).decode
    (text,) = forbidden(compare(raised(replace(newer, value=("beat", 3, 4), read=strict)), found))[-1:]
    assert text.startswith(
        f"protocol: Beat: version {NEWEST}: this build speaks that version, and cannot read 0000000b92a4"
    )
    assert "older" not in updated(raised(newer, oldest=NEWEST + 1), found)["protocol"]


def test_the_command_writes_a_whole_file(file: Path) -> None:
    file.unlink()
    main(file)
    assert {name: group["frames"] for name, group in load(file).items()} == {
        name: group["frames"] for name, group in STORED.items()
    }
