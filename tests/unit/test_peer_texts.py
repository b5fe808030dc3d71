"""Texts of peers are one printable line wherever they enter: terminals obey what is in exceptions, logs and tables."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Final, cast, get_args

import msgspec
import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._cache.geometry import Geometry, decode_geometry
from llm_datadist._checks import clean
from llm_datadist._links import messages
from llm_datadist._links.credentials import Credentials
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._statistics_page import PAGE_VERSION, cleaned
from llm_datadist._transfer.resolution import decode_handle
from llm_datadist._transport.moves import refusal, status_of
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist._transport.nixl.messages import read_answer
from llm_datadist._transport.samehost import rendezvous
from llm_datadist.errors import AuthFailed, LLMException, ProtocolError
from llm_datadist.tools.cli.top_source import Remote, SourceError

EVIL: Final = "x\x1b]0;owned\x07\x1b[2J\n\r\u202eFATAL\x9b31m\x85y"
TAME: Final = "x?]0;owned??[2J ?FATAL?31m y"
#: Texts that are compared, or looked up, and never shown but as repr.
COMPARED: Final = {"features", "transport", "private", "offers", "name"}


def texts_of(kind: type[Any]) -> set[str]:
    """Return the fields of a message that hold texts."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.encode_name for field in info.fields if "StrType" in repr(field.type)}


@pytest.mark.parametrize("kind", get_args(messages.AnyMessage), ids=lambda kind: kind.__name__)
def test_each_text_of_a_message_is_cleaned_or_only_compared(kind: type[Any]) -> None:
    """A new message with a text fails here until ``_TEXTS`` names it."""
    shown = texts_of(kind) - COMPARED - {"communicator"}
    assert shown == set(messages._TEXTS.get(kind, {})) - COMPARED


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (messages.Failed(1, 2, EVIL), "text"),
        (messages.Refused(1, EVIL), "text"),
        (messages.ClaimOver(1, EVIL, 3), "why"),
        (messages.TransportChoice(EVIL, "", 1, bytes(16)), "transport"),
        (messages.TransportChoice("", EVIL, 1, bytes(16)), "reason"),
    ],
)
def test_a_decoded_message_has_one_printable_line(message: messages.Message, field: str) -> None:
    assert getattr(messages.decode(messages.encode(message)), field) == TAME
    long = msgspec.structs.replace(message, **{field: "\x1b" * 4096})
    assert getattr(messages.decode(messages.encode(long)), field) == "?" * 4096


def test_texts_of_any_length_are_cut() -> None:
    assert (clean("ab" * 10, 5), clean(" a \t b "), clean("é 漢 ☃")) == ("ababa", "a b", "é 漢 ☃")
    with pytest.raises(ProtocolError) as caught:
        messages.decode(msgspec.msgpack.encode([EVIL * 40_000]))
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 5000


def text_of(error: type[Exception], function: Any, *args: Any) -> str:
    with pytest.raises(error) as caught:
        function(*args)
    return str(caught.value)


def test_what_is_no_message_is_named_in_one_printable_line() -> None:
    """The decoder's errors quote tags, names of fields and values of the peer."""
    geometry = dict.fromkeys(Geometry.__struct_fields__, EVIL)
    for decode, value in (
        (messages.decode, [EVIL]),
        (rendezvous.decode, {"type": EVIL}),
        (rendezvous.decode, {"type": "refusal", "reason": 1, EVIL: 1}),
        (decode_handle, [EVIL]),
        (decode_geometry, geometry),
        (read_answer, [EVIL]),
    ):
        text = text_of(ProtocolError, decode, msgspec.msgpack.encode(value))
        assert text.isprintable(), decode


def test_refusals_of_transports_are_one_printable_line() -> None:
    refused = rendezvous.decode(msgspec.msgpack.encode(rendezvous.Refusal(EVIL)))
    assert refused == rendezvous.Refusal(TAME)
    refused_by = partial(refusal, int(LLMStatusCode.LLM_FAILED), EVIL, "pull")
    assert str(refused_by(untouched=True)) == f"pull: the peer refused: {TAME}"
    assert str(refused_by(untouched=False)).startswith(f"pull: the peer refused: {TAME}; ")
    assert str(NixlFailed(EVIL)) == TAME
    assert status_of(LLMException(EVIL, status_code=LLMStatusCode.LLM_FAILED)) == (int(LLMStatusCode.LLM_FAILED), TAME)


def test_names_in_a_certificate_are_cleaned_to_be_shown_and_never_to_be_compared() -> None:
    files: Any = SimpleNamespace(secrets=None)
    credentials = cast("Any", SimpleNamespace(_files=files))
    tls = cast("TlsSession", SimpleNamespace(names=lambda: ("datadist://cluster/7\n", EVIL)))
    text = text_of(AuthFailed, Credentials.check, credentials, tls, 7)
    assert text == f"it says it is cluster 7, its certificate names datadist://cluster/7 , {TAME}"


def test_texts_of_another_host_are_cleaned_before_top_shows_them() -> None:
    page = {"pid": 1, EVIL: [EVIL, 2, {"a": EVIL}]}
    assert cleaned(page) == {"pid": 1, TAME: [TAME, 2, {"a": TAME}]}
    remote = Remote("host", "llm-datadist")
    line = msgspec.json.encode({"page_version": PAGE_VERSION, "instances": [page]})
    assert remote._decode(line) == [cleaned(page)]
    assert text_of(SourceError, remote._decode, f"{EVIL}{{".encode("utf-8", "surrogatepass")).isprintable()
