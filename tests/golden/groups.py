"""Everything that this build encodes for another process, with its versions."""

import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, cast
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from llm_datadist import _statistics_page as pages
from llm_datadist._deadline import Deadline
from llm_datadist._links import credentials, handshake, messages, ranktable, versions
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.identity import DIALER, LISTENER, PeerSecrets, Transcript
from llm_datadist._links.renewal import Renewal
from llm_datadist._memory.guards import SLOT_BYTES, GuardTable
from llm_datadist._memory.write_intents import WriteIntents
from llm_datadist._native import Plan
from llm_datadist._native.plan import PlanSide, digest
from llm_datadist._transfer import handles
from llm_datadist._transport import address, nixl, rendezvous
from llm_datadist._transport.shm import ShmTransport
from llm_datadist.integrations import references
from llm_datadist.metrics import Statistics
from llm_datadist.testing.scene import tensors_over
from llm_datadist.types import grant as grants
from llm_datadist.types.grant import Grant
from tests.golden import values
from tests.golden.frames import Frame, Group
from tests.golden.lane_frames import (
    FRAMES,
    JOINS,
    REQUEST,
    Join,
    dialled,
    exchange,
    join_of,
    listened,
    request_of,
    written,
)
from tests.golden.values import some, words

#: Elements of a greeting, with its tag, that every release of this wire major has, in this order.
GREETINGS: Final[dict[str, tuple[messages.Message, int]]] = {
    "Hello of 0.2.0": (values.HELLO, 16),
    "Hello of 0.2.0, least": (values.LEAST_HELLO, 16),
    "Welcome of 0.2.0": (values.WELCOME, 13),
    "Welcome of 0.2.0, least": (values.LEAST_WELCOME, 13),
    "Refused of 0.2.0": (values.REFUSED, 4),
}
#: What a digest of a prompt is made of.
PROMPT: Final = SimpleNamespace(
    prompt_token_ids=[1, 70_000],
    prompt_embeds=None,
    lora_request=None,
    mm_features=[SimpleNamespace(identifier="an image")],
    cache_salt="salt",
)
TABLE: Final = """{"server_list": [{"server_id": "10.0.0.1", "device": [{"rank_id": "0"}]}], "versiön": 1}"""
#: A later release's elements at the end of a greeting.
LATER: Final = ("of a later release", {"more": [1, None]})


def groups() -> dict[str, Group]:
    return {
        "wire major": Group("WIRE_MAJOR of _transport/address.py", address.WIRE_MAJOR, _wire_major()),
        "protocol": Group(
            "the newest of VERSIONS of _links/versions.py", versions.VERSIONS[1], _protocol(), versions.VERSIONS[0]
        ),
        "rendezvous": Group("VERSION of _transport/rendezvous.py", rendezvous.VERSION, _rendezvous()),
        "statistics page": Group("PAGE_VERSION of _statistics_page.py", pages.PAGE_VERSION, _page()),
        "grant": Group("GRANT_VERSION of types/grant.py", grants.GRANT_VERSION, _grant()),
        "reference": Group("_VERSION of integrations/references.py", int(references._VERSION), _reference()),
    }


# Greetings


def _wire_major() -> dict[str, Frame]:
    frames = {
        f"preamble, {name}": Frame(purpose, address.preamble) for purpose, name in enumerate(("plain", "lane", "TLS"))
    }
    for name, (value, count) in GREETINGS.items():
        frames[name] = Frame(value, partial(_first, count), _read)
    frames["authority of a shared secret: its name, its key"] = Frame(some(0, 32), _authority)
    return frames


def _authority(secret: bytes) -> bytes:
    """Return what TLS authenticates by, before any greeting; serial numbers are random."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    credentials._derived([credentials.Secret("one", secret)])(context)
    (certificate,) = (x509.load_der_x509_certificate(each) for each in context.get_ca_certs(binary_form=True))
    key = certificate.public_key()
    assert isinstance(key, Ed25519PublicKey)
    return certificate.subject.rfc4514_string().encode() + b" " + key.public_bytes_raw()


def _first(count: int, value: messages.Message) -> bytes:
    """Return the frame with the first elements, as a release sends it that has no more."""
    return _framed(_elements(value)[:count])


def _with_more(value: messages.Message) -> bytes:
    return _framed([*_elements(value), *LATER])


def _elements(value: messages.Message) -> list[Any]:
    return cast(list[Any], msgspec.msgpack.decode(messages.encode(value)))


def _framed(elements: list[Any]) -> bytes:
    payload = msgspec.msgpack.encode(elements)
    return messages.FRAME_HEADER.pack(len(payload)) + payload


def _read(data: bytes) -> messages.Message:
    parser = FrameParser()
    parser.feed(data)
    payload = parser.take()
    if payload is None or parser.rest():
        raise ValueError("not one frame")
    return messages.decode(payload)


# Protocol


def _protocol() -> dict[str, Frame]:
    frames = {name: Frame(value, messages.frame, _read) for name, value in values.MESSAGES.items()}
    for name in ("Hello", "Welcome"):
        frames[f"{name} of a later release"] = Frame(values.MESSAGES[name], _with_more, _read, lasting=False)
    for name, handle in values.HANDLES.items():
        frames[name] = Frame(handle, handles.encode_handle, handles.decode_handle)
    for decode, some_values in zip((nixl._ask_decoder.decode, nixl._decode_answer), values.NIXL, strict=True):
        frames |= {f"nixl: {name}": Frame(value, nixl._encode, decode) for name, value in some_values.items()}
    frames["request to read"] = Frame(REQUEST, written, request_of)
    frames["request to write"] = Frame(REQUEST, partial(written, write=True), request_of)
    return frames | _lanes() | _computed()


def _lanes() -> dict[str, Frame]:
    frames = {}
    for kind, encrypted in (("plain", False), ("encrypted", True)):
        sent = cache(partial(exchange, encrypted=encrypted))
        for name, (value, *_) in FRAMES.items():

            def write(_: object, name: str = name, sent: Callable[..., Any] = sent) -> bytes:
                return cast(bytes, sent()[name][0])

            def read(data: bytes, name: str = name, encrypted: bool = encrypted) -> object:
                return exchange(encrypted=encrypted, instead={name: data})[name][1]

            frames[f"lane, {kind}: {name}"] = Frame(value, write, read)
    for kind, join in JOINS.items():
        there, back = _joining(join)
        frames |= {f"lane, {kind}: dialer joins": there, f"lane, {kind}: listener answers": back}
    frames["lane, encrypted: keys"] = Frame(JOINS["encrypted"], lambda value: b"".join(dialled(value)[1] or ()))
    return frames


def _joining(join: Join) -> tuple[Frame, Frame]:
    return (
        Frame(join, lambda value: dialled(value)[0], lambda data: join_of(join, dialer=data)),
        Frame(join, lambda value: listened(value, dialled(value)[0])[0], lambda data: join_of(join, listener=data)),
    )


def _computed() -> dict[str, Frame]:
    """Return what both sides of a link compute, and have to find equal."""
    transcript = Transcript.of(values.HELLO, values.WELCOME)
    known = PeerSecrets()
    known.agree(some(1), some(2, 32), some(3, 32), transcript)

    def secret(shares: bytes) -> bytes:
        meeting: Any = SimpleNamespace(hear=lambda *heard: None)
        handshake._hear(meeting, values.WELCOME, transcript, shares)
        return cast(bytes, meeting.secret)

    def digests(data: bytes) -> bytes:
        plan = Plan(0, 0, 1, np.array([[0, 0, 100], [200, 200, 1500]], np.uint64), False, 1600)
        found = digest(PlanSide(plan, tensors_over(np.frombuffer(data, np.uint8)), True), None, 2**63 - 1, some(5))
        assert found is not None
        return found.astype("<u8").tobytes()

    def ports(name: str) -> bytes:
        with patch.dict(os.environ, {ranktable.PORTS_VARIABLE: "27000-31999"}):
            return words(*ranktable.ports(name, 7), size="<u2")

    frames = {
        "agreed: digest of the greetings": Frame(transcript, lambda value: value.digest()),
        "secret of a link, of two shares": Frame(some(1, 64), secret),
        "digest of a rank table": Frame(TABLE, lambda value: ranktable.RankTable.parse(value).digest),
        "ports of a communicator": Frame("prefill", ports),
        "digests of a Verified": Frame(some(0, 250) * 8, digests),
    }
    for side in (DIALER, LISTENER):
        prove = partial(known.prove, some(1), side)
        frames[f"proof of the same process: {side.decode()}"] = Frame(transcript, prove)
        renewal = Renewal(cast(Any, None), cast(Any, None), some(6, 32), dialled=True)
        for part in (b"question", b"answer"):
            frames[f"proof of a renewal: {side.decode()}, {part.decode()}"] = Frame(part, partial(renewal._proof, side))
    return frames


# Rendezvous, and the memory that it shares


def _rendezvous() -> dict[str, Frame]:
    hello = msgspec.structs.replace(values.RENDEZVOUS_HELLO, version=rendezvous.VERSION)
    return {
        "RendezvousHello": Frame(hello, _packet, rendezvous.decode),
        "Refusal": Frame(values.REFUSAL, _packet, rendezvous.decode),
        "offer of shm, in a Welcome": Frame((some(0x51), "@a rendezvous"), _shm_offer),
        "guard table: cookie, two generations": Frame([some(0x51), 3, 1], _guard_table),
        "page of write intents: a writer, one that has ended, a reader": Frame([3, 4, 5], _intents),
    }


def _shm_offer(value: tuple[bytes, str]) -> bytes:
    cookie, name = value
    shm: Any = SimpleNamespace(rendezvous=SimpleNamespace(expect=lambda *how: None, name=name))
    guards = SimpleNamespace(cookie=cookie)
    meeting: Any = SimpleNamespace(exports=SimpleNamespace(guards=guards), dialled=False, token=b"", offered=None)
    return ShmTransport.offer(shm, meeting)


def _packet(value: Any) -> bytes:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        rendezvous.send_packet(here, value, [])
        with rendezvous.Packet.receive(there) as packet:
            return packet.data


def _guard_table(value: list[Any]) -> bytes:
    cookie, *generations = value
    with patch("secrets.token_bytes", lambda nbytes: cookie[:nbytes]), closing(GuardTable(4)) as table:
        for generation in generations:
            guard = table.allocate()
            for _ in range(generation - guard.generation):
                table.advance(guard.slot)
        return table.segment.view(0, SLOT_BYTES * (1 + len(generations))).tobytes()


def _intents(guards: list[int]) -> bytes:
    intents = WriteIntents()
    page = intents.open()
    try:
        assert page.segment is not None
        writer, until = page.intent_writer(), Deadline(1000)
        first, second, third = (writer.announce(guard, until, reading=guard == guards[-1]) for guard in guards)
        second.end()
        content = page.segment.view(0, 64 * 4).tobytes()
        first.end()
        third.end()
    finally:
        page.retire()
    return content


# Statistics page


def _page() -> dict[str, Frame]:
    size = pages._HEADER.size
    return {
        "header": Frame(
            values.PAGE,
            lambda value: _written(value)[:size],
            lambda data: _page_of(data + _written(values.PAGE)[size:]),
        ),
        "body": Frame(
            values.PAGE,
            lambda value: _written(value)[size:],
            lambda data: _page_of(_written(values.PAGE)[:size] + data),
        ),
    }


def _written(value: values.Page) -> bytes:
    page = pages.StatisticsPage(value.cluster_id, lambda: (value.role, value.statistics))
    clock = SimpleNamespace(time=lambda: value.published_at)
    with closing(page), patch.object(pages, "time", clock), patch("os.getpid", lambda: value.pid):
        page.write()
        return os.pread(page.fd, pages._CAPACITY, 0).rstrip(b"\0")


def _page_of(data: bytes) -> values.Page:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        seen = pages.read_page(file.fileno())
    statistics = msgspec.convert(seen.pop("statistics"), Statistics)
    del seen["age_seconds"]
    return values.Page(**seen, statistics=statistics)


# Grants and references


def _grant() -> dict[str, Frame]:
    grant = Grant(
        cluster_id=2**64 - 5,
        incarnation=some(0x71),
        cache_id=25,
        guard=(26, 2**63),
        token=some(0x81),
        blocks=[300, 2, 70_000],
    )
    return {"grant": Frame(grant._wire, _grant_bytes, lambda data: Grant.from_bytes(data)._wire)}


def _grant_bytes(wire: Any) -> bytes:
    where = wire.cluster_id, wire.incarnation, wire.cache_id, (wire.slot, wire.generation)
    return Grant(*where, wire.token, wire.blocks).to_bytes()


def _reference() -> dict[str, Frame]:
    vllm = _connector()
    rank = partial(vllm.RankEndpoint, incarnation="5051", host="10.0.0.1")
    layout = vllm.Layout(
        identity={"dtype": "bfloat16", "weights": "0123456789abcdef"},
        block_tokens=16,
        pages=2,
        heads=4,
        row_bytes=4096,
        places=[["layer.0"], ["layer.1", "layer.2"]],
        ranks=8,
        divisible=True,
    )
    offer = vllm.KvOffer(
        prompt=some(0x11),
        groups=[(3, [70, 71]), (0, [72])],
        ranks=[rank(cluster_id=27, port=26_000), rank(cluster_id=28, port=26_001)],
        layout=layout,
        nonce=some(0x91),
    )

    def sign(value: Any) -> tuple[bytes, bytes]:
        with _keys() as keys:
            reference, token = value.sign(keys)
            return reference.encode(), token

    def read(data: bytes) -> object:
        with _keys() as keys:
            return vllm.KvOffer.read(data.decode(), keys)[0]

    return {
        "offer, as a reference": Frame(offer, lambda value: sign(value)[0], read),
        "token of its grants": Frame(offer, lambda value: sign(value)[1]),
        "digest of its prompt": Frame(PROMPT, partial(vllm.prompt_digest, adapters=_Adapters())),
    }


class _Adapters:
    """Of one adapter, without files."""

    def parts(self, _: object) -> list[Any]:
        return ["a lora", "its digest", False, ["None"]]


@contextmanager
def _keys() -> Iterator[references.ReferenceKeys]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "secrets")
        path.touch(0o600)
        path.write_text("one AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n")
        yield references.ReferenceKeys(path)


class _Absent(ModuleType):
    """A module of vLLM, whose every name is an empty class: what is read here uses none."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {"__init__": lambda self, *args: None})


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@cache
def _connector() -> Any:
    """Return what is used of the connector for vLLM, with or without vLLM."""
    package = ModuleType("llm_datadist.integrations.vllm")  # its own file registers the connector at vLLM
    package.__path__ = [str(Path(references.__file__).parent / "vllm")]
    others = {name: module for name, module in sys.modules.items() if name.partition(".")[0] != "vllm"}
    others = {name: module for name, module in others.items() if not name.startswith(package.__name__)}
    with patch.dict(sys.modules, others, clear=True), patch.object(sys, "meta_path", [_Finder(), *sys.meta_path]):
        sys.modules[package.__name__] = package
        layout, offers, scheduler = (
            import_module(f"{package.__name__}.{name}") for name in ("layout", "offers", "scheduler")
        )
        return SimpleNamespace(
            Layout=layout.Layout,
            RankEndpoint=offers.RankEndpoint,
            KvOffer=offers.KvOffer,
            prompt_digest=scheduler._prompt_digest,
        )
