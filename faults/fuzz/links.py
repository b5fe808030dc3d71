"""Fuzz targets with links behind them: the dispatcher and every handler, and answers to an initiator."""

import itertools
import secrets
import select
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec

from faults.fuzz import Finding, Targets, Verdicts, trial
from faults.fuzz.forge import HANDSHAKE, LINK, Forge, located, mutated, resolved, wild
from faults.fuzz.greetings import Hostile, check_bounded, secured
from faults.fuzz.stage import PATIENCE_SECONDS, VICTIM, Stage, drain
from faults.strangers import Plain, Tls
from llm_datadist._cache.registry import MAX_PINS_PER_PEER
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.credentials import Credentials
from llm_datadist._links.handshake import NewLink
from llm_datadist._links.link import Link, LinkOrigin, Peer
from llm_datadist._links.messages import FRAME_HEADER, Linked, Located, Message, Resolve, Resolved, decode
from llm_datadist._links.renewal import Renewal
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._links.versions import FEATURES, VERSIONS, Spoken
from llm_datadist._transfer.addresses import offsets_in
from llm_datadist._transfer.engine import Engine
from llm_datadist._transfer.resolution import open_answer
from llm_datadist._transport.choose import Choice
from llm_datadist.errors import LLMException, NotLinked
from llm_datadist.types import BlocksCacheKey
from tests.support.probe import Probe, socket_of

_STRANGER: Final = 666


# --- the dispatcher and its handlers ---------------------------------------------------------------------------------


def fuzz_handlers(frames: int, seed: int, *, rca: bool = False, sealed: bool = False) -> Verdicts:
    """Be many linked peers in turn that send anything to the real links, handlers and tables of the victim.

    ``sealed``: behind TLS, with wrong frames, odd records, or records that somebody changes on their way.
    """
    forge = Forge(seed, LINK, wrong=0.02)
    odd = Forge(seed + 1, LINK | HANDSHAKE, wrong=0.5)
    name = "sealed handlers" if sealed else "handlers, RCA" if rca else "handlers"
    with (
        secured() if sealed else nullcontext() as sessions,
        Stage(rca=rca) as stage,
        trial(name, seed) as verdicts,
        _counting(stage, verdicts) as taken,
    ):
        session = 0
        while verdicts.judged < frames:
            if session % 100 == 0:
                stage.settled()
                stage.publish()
            session += 1
            # Few sessions live longer: their first wrong frame ends them.
            said = [forge.frame() for _ in range(1 << forge.rng.randrange(7))]
            if session % 3 == 0:
                said.append(odd.frame())
            taken.clear()
            if sessions is None:
                _speak(stage, session, verdicts, Hostile(forge, Plain()), said)
                continue
            strange = forge.rng.random() < 0.05
            tls, victim, *writer = sessions.odd_pair(server_side=False) if strange else sessions.fresh_pair()
            peer = Hostile(forge, Tls(tls), *writer)
            peer.heard(_speak(stage, session, verdicts, peer, said, victim, sessions.foreign))
            check_bounded(victim)
            if not strange:
                _check_taken(taken, said)
        _hoard(stage, verdicts)
        stage.settled()
    return verdicts


@contextmanager
def _counting(stage: Stage, verdicts: Verdicts) -> Iterator[list[Message]]:
    """Count what the victim's dispatcher took, and yield the list of it; the friend's messages are not counted."""
    links: Any = stage.engine.links
    taken: list[Message] = []
    dispatch = links.dispatch

    def counted(link: Link, message: Message) -> None:
        counts = link.peer.cluster_id == _STRANGER
        if counts:  # now: a handler may end the link, which the peer sees before the handler returns
            taken.append(message)
        try:
            dispatch(link, message)
        except BaseException:
            if counts:
                taken.pop()
            raise
        if counts:
            verdicts.take(message)

    links.dispatch = counted
    try:
        yield taken
    finally:
        del links.dispatch


def join(
    stage: Stage, sock: socket.socket, sequence: int, tls: TlsSession | None = None, believed: Credentials | None = None
) -> Link:
    """Make a link of the victim out of a socket, as its listener does after a handshake.

    ``tls`` is what all bytes go through, ``believed`` what it was made of.
    """
    engine = stage.engine

    def install() -> Link:
        own = engine.caches.exports
        peer = Peer(_STRANGER, secrets.token_bytes(16), 1, "fuzz")
        with closing(engine.transports.meet(secrets.token_bytes(16), dialled=False)) as meeting:
            meeting.here, meeting.choice = own, Choice("inproc", "inproc", "fuzz")
            renewal = None
            if believed is not None:
                renewal = Renewal(believed.session, lambda _: None, b"secret", dialled=False)
            connection = meeting.open()
            origin = LinkOrigin(False, 0, sequence)
            spoken = Spoken(VERSIONS[1], frozenset(FEATURES))
            link = Link(peer, connection, meeting.choice, origin, spoken, renewal)
            engine.links.install(NewLink(link, sock, b"", tls), partial(Linked, agreed=bytes(16)))
        return engine.links.get(_STRANGER)

    return stage.probe.on_control(install)


def _speak(stage: Stage, number: int, verdicts: Verdicts, peer: Hostile, said: list[bytes], *sealed: Any) -> bytes:
    """One peer says its piece, hears what it is answered, and goes."""
    ours, theirs = socket.socketpair()
    with ours:
        link = join(stage, theirs, number, *sealed)
        say(ours, peer.put(said))
        heard = drain(ours)
    reason = link.channel.reason if link.channel is not None else ""
    if "tampered" in reason or reason.startswith("not authenticated again"):
        verdicts.refuse("AuthFailed")
    elif "closed the connection" not in reason and "broke" not in reason:  # its peer has not just gone
        verdicts.refuse("ProtocolError" if "peer" in reason or "not allowed" in reason else reason)
    return heard


def say(sock: socket.socket, data: bytes) -> None:
    """Send everything, taking the answers meanwhile, then end our half."""
    sock.setblocking(False)
    rest, limit = memoryview(data), time.monotonic() + PATIENCE_SECONDS
    with suppress(ConnectionError):
        while rest:
            readable, writable, _ = select.select([sock], [sock], [], PATIENCE_SECONDS)
            if readable and not sock.recv(1 << 16):
                return
            if writable:
                with suppress(BlockingIOError):
                    rest = rest[sock.send(rest) :]
            if time.monotonic() > limit:
                raise Finding(f"a peer that takes its answers is not read from: {len(rest)} bytes left")
        sock.shutdown(socket.SHUT_WR)


def _hoard(stage: Stage, verdicts: Verdicts) -> None:
    stage.publish()
    ours, theirs = socket.socketpair()
    question = ["resolve", 1, False, None, stage.published[0].cache_id, 0, 60_000]
    payload = msgspec.msgpack.encode(question)
    with ours:
        link = join(stage, theirs, 1 << 40)
        ours.setblocking(False)
        say(ours, (FRAME_HEADER.pack(len(payload)) + payload) * (MAX_PINS_PER_PEER + 500))
        drain(ours)
    if verdicts.accepted["Resolve"] < MAX_PINS_PER_PEER:
        raise Finding(f"{link!r} ended before it had asked for {MAX_PINS_PER_PEER} pins")


# --- answers to an initiator -----------------------------------------------------------------------------------------


def fuzz_answers(frames: int, seed: int) -> Verdicts:
    """Answer the questions of a real initiator with lies, over shm; a few travel, most are opened where they are."""
    forge = Forge(seed, LINK)
    with Stage() as stage, trial("answers", seed) as verdicts:
        engine = Probe(stage.friend).engine
        for lie in itertools.count():
            if verdicts.judged >= frames:
                break
            link = _linked(stage)
            for _ in range(40):
                _open_one(engine, link, forge, verdicts)
            _place_some(forge, verdicts)
            link.caches.cached.clear()  # the last lie is not to be believed for ever
            _lie(stage, forge, verdicts)
            if lie % 64 == 0:
                link.caches.cached.clear()
                stage.look()
        _linked(stage).caches.cached.clear()
        stage.settled()
    return verdicts


def _linked(stage: Stage) -> Link:
    """Return the friend's link to the victim; a lie may end it after the call that it was for has timed out."""
    links = Probe(stage.friend).engine.links
    while True:
        try:
            return links.get(VICTIM)
        except NotLinked:
            stage.link()


def _answer(forge: Forge, number: int) -> bytes:
    rng = forge.rng
    fields = resolved(rng, number)
    if rng.random() < 0.5:
        fields[rng.randrange(2, len(fields))] = wild(rng)
    if rng.random() < 0.2 and isinstance(fields[3], list) and fields[3]:
        fields[3][rng.randrange(len(fields[3]))] = wild(rng)
    data = msgspec.msgpack.encode(fields)
    return mutated(data, rng) if rng.random() < 0.15 else data


def _open_one(engine: Engine, link: Link, forge: Forge, verdicts: Verdicts) -> None:
    try:
        answer = decode(_answer(forge, 1))
        if not isinstance(answer, Resolved):
            verdicts.refuse("another message")
            return
        remote = open_answer(link, answer, "fuzz", push=forge.rng.random() < 0.3)
        if remote.guard_set is not None:
            remote.tensors.connection.guards_unchanged(remote.guard_set)
    except LLMException as error:
        verdicts.refuse(error)
    else:
        verdicts.take(answer)


def _place_some(forge: Forge, verdicts: Verdicts) -> None:
    """Read an answer to a Locate; what it says of a cache is judged when that is resolved."""
    rng = forge.rng
    fields = located(rng, 1, rng.choice((2, 2, 2, 0, 3)))
    if rng.random() < 0.5:
        fields[rng.randrange(2, len(fields))] = wild(rng)
    data = msgspec.msgpack.encode(fields)
    try:
        answer = decode(mutated(data, rng) if rng.random() < 0.2 else data)
        if isinstance(answer, Located):
            offsets_in(answer, 2, "fuzz")
    except LLMException as error:
        verdicts.refuse(error)
    else:
        verdicts.take(answer)


def _lie(stage: Stage, forge: Forge, verdicts: Verdicts) -> None:
    """The victim of the stage lies here: its handler of questions is replaced while the friend pulls once."""
    friend = Probe(stage.friend).engine
    options = friend.options

    def lie(link: Link, message: Resolve, _: object) -> None:
        data = _answer(forge, message.id)
        with suppress(OSError):
            socket_of(link).send(FRAME_HEADER.pack(len(data)) + data)

    friend.options = replace(options, sync_kv_timeout_ms=500)  # a lie that answers another question is waited for
    try:
        with stage.probe.answered(Resolve, lie):
            stage.friend.cache_manager.pull_blocks(BlocksCacheKey(VICTIM, 5), stage.paged, [0, 1], [2, 3])
    except LLMException as error:
        verdicts.refuse(error)
    else:
        verdicts.accepted["pull"] += 1
    finally:
        friend.options = options
    for end in (stage.friend, stage.victim):
        if not end.statistics().links:
            stage.link()


def _check_taken(taken: list[Message], said: list[bytes]) -> None:
    """Raise Finding where the victim took a message that was not said, or not in its turn."""
    parser = FrameParser()
    parser.feed(b"".join(said))
    for message in taken:
        payload = parser.take()
        if payload is None or decode(payload) != message:
            raise Finding(f"{message} was taken, and was not said")


TARGETS: Final[Targets] = {
    "handlers": (0.1, fuzz_handlers),
    "handlers, RCA": (0.04, lambda frames, seed: fuzz_handlers(frames, seed, rca=True)),
    "answers": (0.1, fuzz_answers),
    "sealed handlers": (0.05, lambda frames, seed: fuzz_handlers(frames, seed, sealed=True)),
}
