"""Everything that this build encodes for another process, with its versions."""

import os
import socket
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, cast, get_args, get_type_hints
from unittest.mock import patch

import msgspec
import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from llm_datadist import _statistics_page as pages
from llm_datadist._deadline import Deadline
from llm_datadist._links import credentials, messages, ranktable, versions
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.identity import DIALER, LISTENER, PeerSecrets, Transcript
from llm_datadist._links.renewal import Renewal
from llm_datadist._memory.guards import SLOT_BYTES, GuardTable
from llm_datadist._memory.write_intents import WriteIntents
from llm_datadist._native import Plan
from llm_datadist._native.plan import PlanSide, digest
from llm_datadist._transfer import resolution
from llm_datadist._transport import address
from llm_datadist._transport.nixl import messages as nixl
from llm_datadist._transport.samehost import rendezvous
from llm_datadist._transport.samehost.shm import ShmTransport
from llm_datadist.integrations import references
from llm_datadist.metrics import Statistics
from llm_datadist.testing.scene import tensors_over
from llm_datadist.types import grant as grants
from tests.golden import lane
from tests.golden.values import made, named, some


@dataclass(frozen=True)
class Frame:
    """One value, and its encoding by this build. Without ``read``, both sides compute the bytes."""

    value: Any
    write: Callable[[Any], bytes]
    read: Callable[[bytes], object] | None = None


@dataclass(frozen=True)
class Group:
    """Encodings of one version, and the constant that has it."""

    constant: str
    version: int
    frames: Mapping[str, Frame]


def groups() -> dict[str, Group]:
    return {
        "wire major": Group("WIRE_MAJOR of _transport/address.py", address.WIRE_MAJOR, _wire_major()),
        "protocol": Group("the newest of VERSIONS of _links/versions.py", versions.VERSIONS[1], _protocol()),
        "rendezvous": Group("VERSION of _transport/samehost/rendezvous.py", rendezvous.VERSION, _rendezvous()),
        "statistics page": Group("PAGE_VERSION of _statistics_page.py", pages.PAGE_VERSION, _page()),
        "grant": Group("GRANT_VERSION of types/grant.py", grants.GRANT_VERSION, _grant()),
        "reference": Group("_VERSION of integrations/references.py", int(references._VERSION), _reference()),
    }


def _each(kinds: tuple[Any, ...], write: Callable[[Any], bytes], read: Callable[[bytes], object]) -> dict[str, Frame]:
    """Return two frames of each kind."""
    names = ("", ", least")
    return {named(kind) + names[least]: Frame(made(kind, least), write, read) for kind in kinds for least in (0, 1)}


# --- wire major: what must be readable before both sides know a version ---


#: Elements of a greeting, with its tag, that every release of this wire major has, in this order.
GREETINGS: Final[dict[type[messages.Message], int]] = {messages.Hello: 16, messages.Welcome: 13, messages.Refused: 4}
#: A later release's elements at the end of a greeting.
_LATER: Final = ("of a later release", {"more": [1, None]})


def _wire_major() -> dict[str, Frame]:
    frames = {
        f"preamble, {name}": Frame(purpose, address.preamble) for purpose, name in enumerate(("plain", "lane", "TLS"))
    }
    for kind, count in GREETINGS.items():
        for least, name in enumerate(("", ", least")):
            whole = made(kind, least)  # of which later releases' fields stay as if missing
            value = kind(*(getattr(whole, each) for each in kind.__struct_fields__[: count - 1]))
            write = partial(_elements, count=count)
            frames[f"{kind.__name__} of 0.2.0{name}"] = Frame(value, write, _message)
    frames["authority of a shared secret: its name, its key"] = Frame(some("a secret", 32), _authority)
    return frames


def _authority(secret: bytes) -> bytes:
    """Return what TLS authenticates by, before any greeting; serial numbers are random."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    credentials._derived([credentials.Secret("one", secret)])(context)
    (certificate,) = (x509.load_der_x509_certificate(each) for each in context.get_ca_certs(binary_form=True))
    key = certificate.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return certificate.subject.rfc4514_string().encode() + b" " + key


def _elements(value: messages.Message, count: int | None = None, more: tuple[object, ...] = ()) -> bytes:
    """Return the frame of a release that has only the first elements, or ``more`` of them."""
    payload = msgspec.msgpack.encode([*msgspec.msgpack.decode(messages.encode(value))[:count], *more])
    return messages.FRAME_HEADER.pack(len(payload)) + payload


def _message(data: bytes) -> messages.Message:
    parser = FrameParser()
    parser.feed(data)
    payload = parser.take()
    if payload is None or parser.rest():
        raise ValueError("not one frame")
    return messages.decode(payload)


# --- protocol ---


def _protocol() -> dict[str, Frame]:
    frames = _each(get_args(messages.AnyMessage), messages.frame, _message)
    later = partial(_elements, more=_LATER)
    for kind in (messages.Hello, messages.Welcome):
        frames[f"{kind.__name__} of a later release"] = Frame(made(kind), later, _message)
    kinds = get_args(get_type_hints(resolution.decode_handle)["return"])
    frames |= _each(kinds, resolution.encode_handle, resolution.decode_handle)
    for kinds, decode in (
        (get_args(nixl.Request), nixl.read_request),
        (get_args(nixl.Answer), nixl.read_answer),
    ):
        frames |= {f"nixl: {name}": each for name, each in _each(kinds, nixl.encode, decode).items()}
    for verb, write in (("read", False), ("write", True)):
        frames[f"request to {verb}"] = Frame(lane.REQUEST, partial(lane.request, write=write), lane.request_of)
    for how, secret in (("plain", b""), ("encrypted", some("a lane's secret", 32))):
        frames |= {f"lane, {how}: {name}": Frame(name, partial(lane.sent, secret)) for name in lane.NAMES}
    return frames | _computed()


def _computed() -> dict[str, Frame]:
    """Return what both sides of a link compute, and have to find equal."""
    hello, welcome = made(messages.Hello), made(messages.Welcome)
    transcript = Transcript.of(hello, welcome)
    known = PeerSecrets()
    known.agree(b"peer", some("dialer's share", 32), some("listener's share", 32), transcript)

    def digests(data: bytes) -> bytes:
        plan = Plan(0, 0, 1, np.array([[0, 0, 100], [200, 200, 1500]], np.uint64), False, 1600)
        found = digest(PlanSide(plan, tensors_over(np.frombuffer(data, np.uint8)), True), None, 2**63 - 1, some("key"))
        assert found is not None
        return found.astype("<u8").tobytes()

    def ports(name: str) -> bytes:
        with patch.dict(os.environ, {ranktable.PORTS_VARIABLE: "27000-31999"}):
            return np.array(ranktable.ports(name, 7), "<u2").tobytes()

    table = """{"server_list": [{"server_id": "10.0.0.1", "device": [{"rank_id": "0"}]}], "versiön": 1}"""
    frames = {
        "agreed: digest of the greetings": Frame(transcript, Transcript.digest),
        "secret of a link, of two shares": Frame(some("both shares", 64), transcript.secret),
        "digest of a rank table": Frame(table, lambda value: ranktable.RankTable.parse(value).digest),
        "ports of a communicator": Frame("prefill", ports),
        "digests of a Verified": Frame(some("memory", 2000), digests),
    }
    for side in (DIALER, LISTENER):
        prove = partial(known.prove, b"peer", side)
        frames[f"proof of the same process: {side.decode()}"] = Frame(transcript, prove)
        renewal = Renewal(cast(Any, None), cast(Any, None), some("a link's secret", 32), dialled=True)
        for part in (b"question", b"answer"):
            frames[f"proof of a renewal: {side.decode()}, {part.decode()}"] = Frame(part, partial(renewal._proof, side))
    return frames


# --- rendezvous, and the memory that it shares ---


def _rendezvous() -> dict[str, Frame]:
    kinds = get_args(get_type_hints(rendezvous.decode)["return"])
    frames = _each(kinds, _packet, rendezvous.decode)
    with_device = {}
    for name, each in list(frames.items()):
        if "Hello" in name:
            on_host = [msgspec.structs.replace(region, device=b"") for region in each.value.regions]
            of_host = msgspec.structs.replace(each.value, version=rendezvous.VERSION, regions=on_host)
            of_device = msgspec.structs.replace(each.value, version=rendezvous.WITH_DEVICES)
            frames[name] = Frame(of_host, _packet, each.read)
            with_device[f"{name}, regions of a GPU"] = Frame(of_device, _packet, each.read)
    return (
        frames
        | with_device
        | {
            "offer of shm, in a Welcome": Frame("@a rendezvous", _shm_offer),
            "guard table: cookie, two generations": Frame([3, 1], _guard_table),
            "page of write intents: a writer, one that has ended, a reader": Frame([3, 4, 5], _intents),
        }
    )


def _shm_offer(name: str) -> bytes:
    shm: Any = SimpleNamespace(rendezvous=SimpleNamespace(expect=lambda *how: None, name=name))
    guards = SimpleNamespace(cookie=some("cookie"))
    meeting: Any = SimpleNamespace(
        exports=SimpleNamespace(guards=guards), dialled=False, token=b"", offered=None, both_have_devices=True
    )
    return ShmTransport.offer(shm, meeting)


def _packet(value: Any) -> bytes:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        rendezvous.send_packet(here, value, [])
        with rendezvous.Packet.receive(there) as packet:
            return packet.data


def _guard_table(generations: list[int]) -> bytes:
    with patch("secrets.token_bytes", partial(some, "cookie")), closing(GuardTable(4)) as table:
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
        with first, ExitStack() as later:
            with second:
                later.enter_context(third)
            content = page.segment.view(0, 64 * 4).tobytes()
    finally:
        page.retire()
    return content


# --- statistics page ---


class Page(NamedTuple):
    """One page of statistics, and what its header says."""

    pid: int
    cluster_id: int
    published_at: float
    role: str
    truncated: bool
    statistics: Statistics


def _page() -> dict[str, Frame]:
    page = made(Page)._replace(pid=4713, cluster_id=2**64 - 3, truncated=False)
    return {"page": Frame(page, _written, _page_of)}


def _written(value: Page) -> bytes:
    page = pages.StatisticsPage(value.cluster_id, lambda: (value.role, value.statistics))
    clock = SimpleNamespace(time=lambda: value.published_at)
    with closing(page), patch.object(pages, "time", clock), patch("os.getpid", lambda: value.pid):
        page.write()
        return os.pread(page.fd, pages._CAPACITY, 0).rstrip(b"\0")


def _page_of(data: bytes) -> Page:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        seen = pages.read_page(file.fileno())
    statistics = msgspec.convert(seen.pop("statistics"), Statistics)
    del seen["age_seconds"]
    return Page(**seen, statistics=statistics)


# --- grants and references ---


def _grant() -> dict[str, Frame]:
    wire = msgspec.structs.replace(made(grants._Wire), blocks=[2, 300, 70_000])  # ascending
    read = grants.Grant.from_bytes
    return {"grant": Frame(_granted(wire), lambda value: value.to_bytes(), read)}


def _granted(wire: Any) -> grants.Grant:
    where = wire.cluster_id, wire.incarnation, wire.cache_id, (wire.slot, wire.generation)
    return grants.Grant(*where, wire.token, wire.blocks)


def _reference() -> dict[str, Frame]:
    """Return the offer of vLLM's connector, and what goes with it."""
    offer, prompt_digest = _connector()
    prompt = SimpleNamespace(
        prompt_token_ids=[1, 70_000],
        prompt_embeds=None,
        lora_request=None,
        mm_features=[SimpleNamespace(identifier="an image")],
        cache_salt="salt",
    )

    def sign(value: Any) -> tuple[bytes, bytes]:
        with _keys() as keys:
            reference, token = value.sign(keys)
            return reference.encode(), token

    def read(data: bytes) -> object:
        with _keys() as keys:
            return offer.read(data.decode(), keys)[0]

    return {
        "offer, as a reference": Frame(offer, lambda value: sign(value)[0], read),
        "token of its grants": Frame(offer, lambda value: sign(value)[1]),
        "digest of its prompt": Frame(prompt, lambda value: prompt_digest(value, _Adapters())),
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
    """A module of vLLM, or torch, whose every name is an empty class: what is read here uses none."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {"__init__": lambda self, *args: None})


@cache
def _connector() -> tuple[Any, Callable[..., bytes]]:
    """Return an offer of the connector, and its digest of prompts, with or without vLLM."""
    package = ModuleType("llm_datadist.integrations.vllm")  # its own file registers the connector at vLLM
    package.__path__ = [str(Path(references.__file__).parent / "vllm")]
    connector = "vllm.distributed.kv_transfer.kv_connector.v1"
    used = [f"{connector}.base", f"{connector}.metrics", "vllm.v1.metrics.utils", "vllm.v1.kv_cache_interface", "torch"]
    used += ["vllm.v1.request", "vllm.logger", "vllm.version", "vllm.platforms"]
    absent = {
        ".".join(parts[:count]): _Absent("vllm")
        for parts in (name.split(".") for name in used)
        for count in range(1, len(parts) + 1)
    }
    others = {name: each for name, each in sys.modules.items() if not name.startswith(package.__name__)}
    with patch.dict(sys.modules, others | absent | {package.__name__: package}, clear=True):
        offers, scheduler = (import_module(f"{package.__name__}.{name}") for name in ("offers", "scheduler"))
        return made(offers.KvOffer), scheduler._prompt_digest
