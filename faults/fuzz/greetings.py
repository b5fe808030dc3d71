"""Fuzz targets before a link exists: both roles of the handshake, and the same-host rendezvous."""

from __future__ import annotations

import array
import os
import socket
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from faults.fuzz import Target, Verdicts, trial
from faults.fuzz.forge import HANDSHAKE, LINK, Forge, mutated
from faults.fuzz.readers import packet
from faults.fuzz.stage import PATIENCE_SECONDS, Stage, drain
from llm_datadist._deadline import Deadline
from llm_datadist._links.handshake import Dial
from llm_datadist._links.messages import (
    CONTROL_PREAMBLE,
    FRAME_HEADER,
    PREAMBLE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Linked,
    Welcome,
    decode,
    frame,
)
from llm_datadist._native import readable
from llm_datadist._transport import inproc
from llm_datadist.errors import LinkError, LLMException

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist._transport.peer_memory import PeerMemory


def fuzz_greetings(frames: int, seed: int) -> Verdicts:
    """Connect to the listener of the victim with bad greetings: the target role of the handshake. Counts greetings."""
    forge = Forge(seed, HANDSHAKE, wrong=0.15)
    rng = forge.rng
    with Stage() as stage, trial("greetings", seed) as verdicts:
        while verdicts.judged < frames:
            if verdicts.judged % 500 == 0:
                stage.settled()
            frames_said = b"".join(forge.frame() for _ in range(rng.randrange(1, 4)))
            preamble = CONTROL_PREAMBLE if rng.random() < 0.9 else mutated(CONTROL_PREAMBLE, rng)
            heard = _greet(stage.port, preamble + frames_said)
            _count_greeting(heard, verdicts)
        stage.settled()
    return verdicts


def _greet(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as sock:
        with suppress(OSError):  # it may have hung up before it has heard all of this
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        return drain(sock)


def _count_greeting(heard: bytes, verdicts: Verdicts) -> None:
    if not heard:
        verdicts.refuse("hung up")
        return
    (length,) = FRAME_HEADER.unpack_from(heard)
    message = decode(heard[FRAME_HEADER.size : FRAME_HEADER.size + length])
    verdicts.refuse("Refused") if type(message).__name__ == "Refused" else verdicts.take(message)


def fuzz_dials(frames: int, seed: int) -> Verdicts:
    """Be a listener that answers nonsense: the initiator role of the handshake. Counts dials."""
    forge = Forge(seed, HANDSHAKE | {"welcome": (60, HANDSHAKE["welcome"][1])}, wrong=0.15)
    with Stage() as stage, trial("dials", seed) as verdicts, _nonsense(forge, stage) as address:
        # Not held to shm, so that a welcome in the name of a peer of this process can come to something.
        endpoint = replace(stage.engine.links._endpoint, transport=None)
        while verdicts.judged < frames:
            try:
                with Dial(endpoint, address, Deadline(2_000)) as dial:
                    dial.greet(None)
                    verdicts.accepted["Welcome"] += 1
                    dial.settle(1)
                    verdicts.accepted["Linked"] += 1
            except LLMException as error:
                verdicts.refuse(error)
        stage.settled()
    return verdicts


def good_welcome(incarnation: bytes) -> Welcome:
    """Return a Welcome of cluster 9 that could be meant, by the process that has this incarnation."""
    return Welcome(
        PROTOCOL_VERSION,
        9,
        incarnation,
        remote_accessible=False,
        pid=1,
        host="fuzz",
        cookie=bytes(16),
        transport=None,
        nonce=bytes(16),
        lane_share=b"",
        fabric="",
        rendezvous="@x",
        lane_token=bytes(16),
        proof=b"",
    )


@contextmanager
def _nonsense(forge: Forge, stage: Stage) -> Iterator[tuple[str, int]]:
    """Yield the address of a listener that answers everybody, seldom well, and hangs up."""
    assert stage.friend._engine is not None
    exports = stage.friend._engine.store.exports
    welcome = good_welcome(exports.incarnation)

    def answer() -> bytes:
        first, second = forge.frame(), forge.frame()
        choice = forge.rng.random()
        if choice < 0.3:
            first = frame(welcome)
        if choice < 0.1:
            second = frame(Linked(7, b""))
        return first + second

    def serve() -> None:
        while True:
            sock, _ = server.accept()
            with sock, suppress(ConnectionError):
                if not (heard := sock.recv(1 << 16)):
                    return
                hello = decode(heard[PREAMBLE_BYTES + FRAME_HEADER.size :])
                assert isinstance(hello, Hello)
                inproc.accept(hello.token, exports)  # it is in this process, so that a welcome can come to something
                sock.sendall(answer())

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, name="llm-datadist-nonsense")
        thread.start()
        try:
            yield server.getsockname()[:2]
        finally:
            with socket.create_connection(server.getsockname()[:2], PATIENCE_SECONDS):
                pass  # the empty visit ends it
            thread.join()


def fuzz_rendezvous(frames: int, seed: int) -> Verdicts:
    """Send packets with descriptors of all kinds to the victim's rendezvous, with a token that is expected."""
    forge = Forge(seed, LINK)
    with Stage() as stage, trial("rendezvous", seed) as verdicts, _descriptors() as descriptors:
        listener = stage.engine.links._rendezvous
        met: list[PeerMemory | LinkError] = []
        while verdicts.judged < frames:
            # The token of the packets the forge makes.
            stage.engine._control.call(listener.expect, bytes(16), met.append)
            chosen = forge.rng.choices(descriptors, k=forge.rng.randrange(6))
            _send(listener.name, packet(forge.rng), chosen)
            stage.engine._control.call(listener.forget, bytes(16))
            outcome = met.pop() if met else "dropped"
            if isinstance(outcome, str | LinkError):
                verdicts.refuse(outcome)
            else:
                verdicts.take(outcome)
                outcome.close()
        stage.settled()
    return verdicts


@contextmanager
def _descriptors() -> Iterator[list[int]]:
    """Yield descriptors that a stranger might send: none of them is a sealed memfd of the right size."""
    small, sealed = os.memfd_create("fuzz"), os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 4096)
    found = [small, sealed, *os.pipe(), os.open(os.devnull, os.O_RDWR), os.open("/", os.O_RDONLY), os.eventfd(0)]
    try:
        yield found
    finally:
        for each in found:
            os.close(each)


def _send(name: str, data: bytes, descriptors: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect("\0" + name[1:] if name.startswith("@") else name)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with suppress(ConnectionError):
            while not readable(sock.fileno()):
                with suppress(PermissionError):  # until the listener has admitted this process
                    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                    break
            sock.recv(1 << 16)


TARGETS: Final[dict[str, Target]] = {"greetings": fuzz_greetings, "dials": fuzz_dials, "rendezvous": fuzz_rendezvous}
