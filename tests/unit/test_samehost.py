"""The same-host rendezvous: what it yields, what it refuses, and that a refusal leaves nothing open."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import queue
import secrets
import socket
import stat
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist._transport import Choice, PeerMemory, SameHostListener, choose, exchange_memory, peer_memory, samehost
from llm_datadist._transport.rendezvous import (
    VERSION,
    MemoryOffer,
    Packet,
    Refusal,
    RendezvousHello,
    decode,
    send_packet,
)
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused, LLMException, ParamError
from llm_datadist.testing.peers import REGION_BYTES, close_exports, loop_thread, new_exports
from llm_datadist.testing.scene import residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist._memory.exports import Exports

TOKEN = b"0123456789abcdef"


class Stage:
    """A started listener on a loop of its own, the exports of both ends, and what its callbacks got."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: str | None, idle_timeout: float) -> None:
        self.loop = loop
        self.theirs, self.ours = new_exports(writable=True), new_exports(writable=False)
        self.offer = MemoryOffer(self.ours, TOKEN)
        self.listener = SameHostListener(self.theirs, folder, idle_timeout=idle_timeout)
        self.results: queue.Queue[PeerMemory | LinkError] = queue.Queue()
        self.on_loop(lambda: self.listener.start(loop))

    def on_loop(self, call: Callable[[], Any]) -> Any:
        """Run a call on the loop's thread and return its result."""
        done: Future[Any] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 - handed to the test
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(10)

    def dial(self, token: bytes = TOKEN) -> PeerMemory:
        return exchange_memory(self.listener.name, token, self.ours, Deadline(10_000))

    def raw(self) -> socket.socket:
        """Return a connected socket that speaks as the test wants."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(samehost._address(self.listener.name))
        return sock

    def hello(self, **changes: Any) -> tuple[RendezvousHello, list[int]]:
        """Return our own offer with some fields replaced."""
        return msgspec.structs.replace(self.offer.hello, **changes), list(self.offer.fds)

    def refused(self, hello: object, fds: list[int]) -> str:
        """Send a hello, expect a refusal, and return its reason after it reached the callback too."""
        self.listener.expect(TOKEN, self.results.put)
        with self.raw() as sock:
            send_packet(sock, hello, fds)  # type: ignore[arg-type] # on purpose
            with Packet.receive(sock) as packet:
                answer = decode(packet.data)
                assert packet.fds == []
        assert isinstance(answer, Refusal)
        self.listener.forget(TOKEN)
        self.settled()
        return answer.reason

    def settled(self) -> None:
        """Return when the loop has done what it was told so far."""
        self.on_loop(lambda: None)

    def close(self) -> None:
        self.listener.close()
        self.offer.take_page().retire()
        close_exports(self.theirs)
        close_exports(self.ours)


@contextmanager
def staged(folder: str | None = None, idle_timeout: float = 30.0) -> Iterator[Stage]:
    with loop_thread() as loop:
        stage = Stage(loop, folder, idle_timeout)
        try:
            yield stage
        finally:
            stage.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """Yield a stage, and check after the test that nothing is left of it nor of its refusals."""
    before = residue()
    with staged() as stage:
        yield stage
        assert stage.results.empty(), "a result that the test did not look at"
    assert settled(before) == before


@contextmanager
def unchanged() -> Iterator[None]:
    """Check that what happens inside leaves no descriptor, mapping or thread."""
    before = residue()
    yield
    assert settled(before) == before


# What it yields


@pytest.mark.parametrize("in_folder", [False, True])
def test_both_ends_get_the_other_ends_memory(socket_folder: Path, in_folder: bool) -> None:
    before = residue()
    with staged(str(socket_folder) if in_folder else None) as stage:
        stage.listener.expect(TOKEN, stage.results.put)
        with stage.dial() as got, expect_peer(stage) as given:
            check_is(got, stage.theirs, writable=True)
            check_is(given, stage.ours, writable=False)
            assert got.alive()
        assert not got.alive()
        got.close()  # again: nothing
    assert settled(before) == before
    assert list(socket_folder.iterdir()) == []


def expect_peer(stage: Stage) -> PeerMemory:
    peer = stage.results.get(timeout=10)
    assert isinstance(peer, PeerMemory)
    return peer


def check_is(peer: PeerMemory, exports: Exports, *, writable: bool) -> None:
    assert peer.pid == os.getpid()
    assert peer.uid == os.geteuid()
    assert not os.get_inheritable(peer.pidfd)
    assert peer.cookie == exports.guards.cookie
    assert peer.incarnation == exports.incarnation
    assert peer.guards.nbytes == exports.guards.segment.nbytes
    assert not peer.guards.writable
    assert {region: segment.nbytes for region, segment in peer.regions.items()} == REGION_BYTES
    for region, segment in peer.regions.items():
        assert segment.writable is writable
        exports.regions[region].view()[100] = 17 * region
        assert segment.view()[100] == 17 * region


def test_a_listener_in_a_folder_is_a_private_socket_file_until_it_closes(socket_folder: Path) -> None:
    with staged(str(socket_folder)) as stage:
        (path,) = socket_folder.iterdir()
        assert stage.listener.name == str(path)
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(socket_folder.iterdir()) == []


def test_socket_files_of_killed_processes_are_removed_and_nothing_else(socket_folder: Path) -> None:
    code = (
        "import os, sys\n"
        "from llm_datadist.testing.peers import new_exports\n"
        "from llm_datadist._transport import SameHostListener\n"
        "listener = SameHostListener(new_exports(writable=False), sys.argv[1])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(socket_folder)], check=False).returncode == -9
    (stale,) = socket_folder.iterdir()
    (socket_folder / "llm-datadist-note.sock").write_text("not a socket")
    with staged(str(socket_folder)) as living, staged(str(socket_folder)) as second:
        left = {path.name for path in socket_folder.iterdir()}
        assert stale.name not in left
        assert left == {"llm-datadist-note.sock", Path(living.listener.name).name, Path(second.listener.name).name}
        living.settled()


def test_a_folder_that_cannot_hold_a_socket_is_a_parameter_error(socket_folder: Path) -> None:
    exports = new_exports(writable=False)
    with unchanged():
        for folder in (socket_folder / "missing", socket_folder / ("x" * 120)):
            with pytest.raises(ParamError, match=r"llm\.ShmSocketDir"):
                SameHostListener(exports, str(folder))
    close_exports(exports)


def test_many_peers_at_once(stage: Stage) -> None:
    tokens = [secrets.token_bytes(32) for _ in range(24)]
    for token in tokens:
        stage.listener.expect(token, stage.results.put)
    found: list[PeerMemory] = []
    threads = [threading.Thread(target=lambda token=token: found.append(stage.dial(token))) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(tokens)
    for peer in found:
        peer.close()
        expect_peer(stage).close()


# What the listener refuses


def test_wrong_token(stage: Stage) -> None:
    stage.listener.expect(TOKEN, stage.results.put)
    with pytest.raises(LinkRefused, match="unknown or already used token"):
        stage.dial(b"another token 16")
    stage.dial().close()  # the right one still works
    expect_peer(stage).close()


def test_replayed_token(stage: Stage) -> None:
    stage.listener.expect(TOKEN, stage.results.put)
    stage.dial().close()
    expect_peer(stage).close()
    with pytest.raises(LinkRefused, match="unknown or already used token"):
        stage.dial()


def test_forgotten_token(stage: Stage) -> None:
    stage.listener.expect(TOKEN, stage.results.put)
    stage.listener.forget(TOKEN)
    stage.listener.forget(TOKEN)
    with pytest.raises(LinkRefused, match="unknown or already used token"):
        stage.dial()


def test_tokens_are_long_and_expected_once(stage: Stage) -> None:
    for token in (b"short", b"x" * 65):
        with pytest.raises(ParamError, match="16 to 64"):
            stage.listener.expect(token, stage.results.put)
    stage.listener.expect(TOKEN, stage.results.put)
    with pytest.raises(ParamError, match="already"):
        stage.listener.expect(TOKEN, lambda result: None)


@pytest.mark.parametrize(
    "data",
    [
        b"\xc1garbage",
        b"\x00",
        b"x" * 5000,
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "eval", "code": "1"}),
        msgspec.msgpack.encode(Refusal("no")),
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode(RendezvousHello(VERSION + 1, TOKEN, b"i", b"c" * 16, 64, [])),
        msgspec.msgpack.encode(RendezvousHello(VERSION, TOKEN, b"i", b"short", 64, [])),
        msgspec.msgpack.encode(RendezvousHello(VERSION, b"", b"i", b"c" * 16, 64, [])),
        msgspec.msgpack.encode(RendezvousHello(VERSION, TOKEN, b"i", b"c" * 16, -1, [])),
        msgspec.msgpack.encode(
            RendezvousHello(VERSION, TOKEN, b"i", b"c" * 16, 64, [RegionDescriptor(0, 1, "x", True)])
        ),
        msgspec.msgpack.encode(
            RendezvousHello(VERSION, TOKEN, b"i", b"c" * 16, 64, [RegionDescriptor(1, 1, "x" * 65, True)])
        ),
        msgspec.msgpack.encode(
            RendezvousHello(VERSION, TOKEN, b"i", b"c" * 16, 64, [RegionDescriptor(1, 1, "x", True)] * 2)
        ),
        msgspec.msgpack.encode(
            RendezvousHello(
                VERSION, TOKEN, b"i", b"c" * 16, 64, [RegionDescriptor(i + 1, 1, "x", True) for i in range(33)]
            )
        ),
    ],
)
def test_garbage(stage: Stage, data: bytes) -> None:
    """Refused with a reason, with descriptors beside it, and the token is not used up."""
    stage.listener.expect(TOKEN, stage.results.put)
    with unchanged(), stage.raw() as sock:
        socket.send_fds(sock, [data], [0, 1, 2])
        with Packet.receive(sock) as packet:
            assert isinstance(decode(packet.data), Refusal)
        stage.settled()
    stage.dial().close()
    expect_peer(stage).close()


@pytest.mark.parametrize(
    ("data", "count"), [(b"", 3), (b"x" * (17 << 10), 3), (b"x", 35), (b"x", 200), (b"x" * (17 << 10), 200)]
)
def test_packets_beyond_the_limits_are_dropped_with_their_descriptors(stage: Stage, data: bytes, count: int) -> None:
    with unchanged(), stage.raw() as sock:
        socket.send_fds(sock, [data], [0] * count)
        assert sock.recv(100) == b""
        stage.settled()


def test_received_descriptors_are_not_inherited_and_closed_unless_taken() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, unchanged():
        send_packet(ours, Refusal("x"), [0, 1, 2])
        with Packet.receive(theirs) as packet:
            assert not any(os.get_inheritable(fd) for fd in packet.fds)
            taken = packet.take()
        os.fstat(taken)
        os.close(taken)


def test_a_dialer_that_leaves_before_the_answer(stage: Stage) -> None:
    stage.listener.expect(TOKEN, stage.results.put)
    with unchanged():
        gate = threading.Event()
        stage.loop.call_soon_threadsafe(gate.wait)
        try:
            sock = stage.raw()
            send_packet(sock, *stage.hello())
            sock.close()
        finally:
            gate.set()
        result = stage.results.get(timeout=10)
        assert isinstance(result, LinkRefused)
        assert "left before the answer" in str(result)


def memfd(nbytes: int, seals: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.mark.parametrize(
    ("nbytes", "seals", "reason"),
    [
        (REGION_BYTES[1], 0, "seals"),
        (REGION_BYTES[1], fcntl.F_SEAL_SHRINK, "seals"),
        (REGION_BYTES[1], fcntl.F_SEAL_GROW, "seals"),
        (REGION_BYTES[1] - 4096, SIZE_SEALS, "announced as"),
        (REGION_BYTES[1] + 4096, SIZE_SEALS, "announced as"),
        (0, SIZE_SEALS, "announced as"),
    ],
)
def test_unsealed_or_wrongly_sized_memory(stage: Stage, nbytes: int, seals: int, reason: str) -> None:
    fd = memfd(nbytes, seals)
    hello, fds = stage.hello()
    with unchanged():
        text = stage.refused(hello, [*fds[:2], fd, fds[3]])
        assert reason in text
        assert "'pool-1'" in text
        assert "\n" not in text
        assert isinstance(stage.results.get(timeout=10), LinkRefused)
    os.close(fd)


def test_a_descriptor_that_is_no_memory(stage: Stage, tmp_path: Path) -> None:
    hello, fds = stage.hello()
    path = tmp_path / "file"
    path.write_bytes(bytes(REGION_BYTES[2]))
    with unchanged(), path.open("rb") as file:
        for fd in (0, file.fileno()):
            assert "not acceptable" in stage.refused(hello, [*fds[:3], fd])
            assert isinstance(stage.results.get(timeout=10), LinkRefused)


def test_memory_announced_as_writable_that_is_not(stage: Stage) -> None:
    hello, fds = stage.hello()
    lie = [msgspec.structs.replace(described, writable=True) for described in hello.regions]
    with unchanged():
        assert "not acceptable" in stage.refused(msgspec.structs.replace(hello, regions=lie), fds)
        assert isinstance(stage.results.get(timeout=10), LinkRefused)


@pytest.mark.parametrize("count", [0, 1, 3, 5, 33])
def test_too_few_or_too_many_descriptors(stage: Stage, count: int) -> None:
    hello, fds = stage.hello()
    with unchanged():
        assert f"sent {count} descriptors" in stage.refused(hello, (fds * 11)[:count])
        assert isinstance(stage.results.get(timeout=10), LinkRefused)


def test_cookie_mismatch(stage: Stage) -> None:
    hello, fds = stage.hello(cookie=bytes(16))
    with unchanged():
        assert "another cookie" in stage.refused(hello, fds)
        assert isinstance(stage.results.get(timeout=10), LinkRefused)


def test_a_guard_table_without_a_header(stage: Stage) -> None:
    fd = memfd(8, SIZE_SEALS)
    hello, fds = stage.hello(guards_nbytes=8)
    with unchanged():
        assert "header" in stage.refused(hello, [fd, *fds[1:]])
        assert isinstance(stage.results.get(timeout=10), LinkRefused)
    os.close(fd)


def test_out_of_descriptors_when_they_arrive(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel could not install is a refusal too, and what it could is closed."""
    real = socket.socket.recvmsg

    def truncated(sock: socket.socket, *arguments: int) -> tuple[bytes, list[Any], int, Any]:
        data, ancillary, flags, address = real(sock, *arguments)
        return data, ancillary, flags | socket.MSG_CTRUNC, address

    hello, fds = stage.hello()
    with unchanged(), stage.raw() as sock, monkeypatch.context() as patch:
        patch.setattr(socket.socket, "recvmsg", truncated)
        send_packet(sock, hello, fds)
        stage.settled()
        assert sock.recv(100) == b""


def test_another_users_process(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"runs as uid {os.geteuid()}, this process as uid 12345"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with unchanged():
        with pytest.raises(LinkRefused, match=text):
            stage.dial()
        with stage.raw() as sock:
            assert sock.recv(100) == b"", "the listener does not even hear it"
        stage.settled()


def test_a_silent_peer_is_dropped() -> None:
    before = residue()
    with staged(idle_timeout=0.05) as stage, stage.raw() as silent, stage.raw() as other:
        assert silent.recv(100) == b""
        assert other.recv(100) == b""
        stage.settled()
        assert repr(stage.listener) == f"<SameHostListener {stage.listener.name}: 0 expected, 0 pending>"
    assert settled(before) == before


def test_no_more_than_64_silent_peers(stage: Stage) -> None:
    sockets = [stage.raw() for _ in range(samehost.MAX_PENDING)]
    while "64 pending" not in repr(stage.listener):
        stage.settled()
    with stage.raw() as one_more:
        assert one_more.recv(100) == b""
    sockets.pop().close()
    while "63 pending" not in repr(stage.listener):
        stage.settled()
    stage.listener.expect(TOKEN, stage.results.put)
    stage.dial().close()
    expect_peer(stage).close()
    for sock in sockets:
        sock.close()
    stage.settled()


def test_a_listener_that_cannot_accept_pauses(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors the loop is not kept busy, and the peer that waits is served afterwards."""
    monkeypatch.setattr(samehost, "_ACCEPT_PAUSE_S", 0.05)

    real, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    stage.listener.expect(TOKEN, stage.results.put)
    stage.dial().close()
    expect_peer(stage).close()
    assert not failures
    assert "cannot accept and pauses" in caplog.text


# What the dialer refuses


@pytest.mark.parametrize(
    "name",
    [
        "@llm-datadist-0000000000000000",
        "/nowhere/llm-datadist-0.sock",
        "/" + "x" * 200 + "/llm-datadist-0.sock",
    ],
)
def test_nobody_by_that_name(stage: Stage, name: str) -> None:
    with unchanged(), pytest.raises(LinkRefused, match="another host or in another network namespace"):
        exchange_memory(name, TOKEN, stage.ours, Deadline(1000))


@pytest.mark.parametrize("name", ["", "@", "llm-datadist-1", "@/run/dbus", "/run/docker.sock", "@llm-datadist-\0x"])
def test_names_that_are_no_listeners_are_not_dialled(stage: Stage, name: str) -> None:
    with unchanged(), pytest.raises(LinkRefused, match="is not the name of a same-host listener"):
        exchange_memory(name, TOKEN, stage.ours, Deadline(1000))


def test_a_closed_listener(stage: Stage) -> None:
    stage.listener.close()
    stage.listener.close()
    assert "closed" in repr(stage.listener)
    with pytest.raises(LinkRefused, match="no same-host listener"):
        stage.dial()


@contextmanager
def liar(answer: Callable[[socket.socket, RendezvousHello], object]) -> Iterator[str]:
    """Run a listener that answers one hello as the test wants; yield its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind("\0llm-datadist-liar-" + secrets.token_hex(4))
        server.listen(1)

        def serve() -> None:
            sock, _ = server.accept()
            with sock, Packet.receive(sock) as packet:
                hello = decode(packet.data)
                assert isinstance(hello, RendezvousHello)
                answer(sock, hello)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield "@" + server.getsockname()[1:].decode()
        finally:
            thread.join()


LIES: dict[str, tuple[Callable[[Stage, socket.socket, RendezvousHello], object], str]] = {
    "nothing": (lambda stage, sock, hello: None, "without a word"),
    "garbage": (lambda stage, sock, hello: socket.send_fds(sock, [b"\xc1"], [0, 1]), "nonsense"),
    "refusal": (lambda stage, sock, hello: send_packet(sock, Refusal("not\ntoday"), [0]), "refused: not today"),
    "another token": (
        lambda stage, sock, hello: send_packet(sock, *stage.hello(token=b"another token 16")),
        "another token",
    ),
    "another cookie": (lambda stage, sock, hello: send_packet(sock, *stage.hello(cookie=bytes(16))), "another cookie"),
    "no descriptors": (lambda stage, sock, hello: send_packet(sock, stage.hello()[0], []), "sent 0 descriptors"),
    "all the same descriptor": (lambda stage, sock, hello: send_packet(sock, stage.hello()[0], [0] * 4), "acceptable"),
    "too many descriptors": (
        lambda stage, sock, hello: send_packet(sock, stage.hello()[0], [0] * 100),
        "more than 34 descriptors",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_listeners(stage: Stage, lie: str) -> None:
    answer, reason = LIES[lie]
    with (
        unchanged(),
        liar(lambda sock, hello: answer(stage, sock, hello)) as name,
        pytest.raises(LinkRefused, match=reason) as caught,
    ):
        exchange_memory(name, TOKEN, stage.ours, Deadline(10_000))
    assert "\n" not in str(caught.value)


def test_deadline_without_an_answer(stage: Stage) -> None:
    gate = threading.Event()
    with (
        unchanged(),
        liar(lambda sock, hello: gate.wait(10)) as name,
    ):
        with pytest.raises(DeadlineExceeded) as caught:
            exchange_memory(name, TOKEN, stage.ours, Deadline(30))
        gate.set()
    assert caught.value.phase == "link"


def test_deadline_in_a_full_backlog(stage: Stage) -> None:
    with unchanged(), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind("\0llm-datadist-full")
        server.listen(0)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as first:
            first.connect("\0llm-datadist-full")
            with pytest.raises(DeadlineExceeded):
                exchange_memory("@llm-datadist-full", TOKEN, stage.ours, Deadline(30))


def test_a_passed_deadline(stage: Stage) -> None:
    with unchanged(), pytest.raises(DeadlineExceeded):
        exchange_memory(stage.listener.name, TOKEN, stage.ours, Deadline(0))


# Ends, forks, processes


def test_pidfd_without_so_peerpidfd(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels before 6.5 do not know the option: the pid is opened then."""
    monkeypatch.setattr(peer_memory, "_SO_PEERPIDFD", 9999)
    stage.listener.expect(TOKEN, stage.results.put)
    with stage.dial() as got, expect_peer(stage) as given:
        assert got.alive()
        assert given.alive()


def test_an_ended_peer_is_not_alive(stage: Stage) -> None:
    code = (
        "import sys\n"
        "from llm_datadist._deadline import Deadline\n"
        "from llm_datadist.testing.peers import close_exports, new_exports\n"
        "from llm_datadist._transport import exchange_memory\n"
        "exports = new_exports(writable=False)\n"
        "peer = exchange_memory(sys.argv[1], bytes.fromhex(sys.argv[2]), exports, Deadline(10_000))\n"
        "sys.stdin.read()\n"
        "peer.close(); close_exports(exports)\n"
    )
    stage.listener.expect(TOKEN, stage.results.put)
    with (
        subprocess.Popen(
            [sys.executable, "-c", code, stage.listener.name, TOKEN.hex()], stdin=subprocess.PIPE
        ) as child,
        expect_peer(stage) as peer,
    ):
        assert peer.pid == child.pid
        assert peer.alive()
        assert child.stdin is not None
        child.stdin.close()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not peer.alive(), "an ended process that is not reaped yet"


def test_close_with_silent_peers_from_the_loop_and_from_outside(socket_folder: Path) -> None:
    before = residue()
    for close in ("on loop", "outside", "loop stopped"):
        with staged(str(socket_folder)) as stage, stage.raw() as silent:
            while "1 pending" not in repr(stage.listener):
                stage.settled()
            if close == "on loop":
                stage.on_loop(stage.listener.close)
            elif close == "outside":
                stage.listener.close()
            if close != "loop stopped":
                assert list(socket_folder.iterdir()) == []
                assert silent.recv(10) == b""
        assert list(socket_folder.iterdir()) == []
    assert settled(before) == before


def test_close_after_the_loop_is_closed() -> None:
    before = residue()
    exports = new_exports(writable=False)
    loop = asyncio.new_event_loop()
    listener = SameHostListener(exports, None)
    listener.start(loop)
    loop.close()
    listener.close()
    close_exports(exports)
    assert settled(before) == before


def test_a_forgotten_close_is_a_warning(socket_folder: Path) -> None:
    exports = new_exports(writable=False)
    with unchanged():
        with pytest.warns(ResourceWarning, match="unclosed <SameHostListener"):
            SameHostListener(exports, str(socket_folder))
        assert list(socket_folder.iterdir()) == []
    close_exports(exports)


def test_a_forked_child_that_closes_the_listener_does_not_disturb_its_parent(socket_folder: Path) -> None:
    with staged(str(socket_folder)) as stage:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            pid = os.fork()
        if pid == 0:
            os._exit(close_in_child(stage.listener))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert Path(stage.listener.name).exists()
        stage.listener.expect(TOKEN, stage.results.put)
        stage.dial().close()
        expect_peer(stage).close()


def close_in_child(listener: SameHostListener) -> int:
    try:
        listener.close()
        listener.close()
    except BaseException:  # noqa: BLE001 - whatever it is, the child must leave through _exit
        return 1
    return 0 if listener._socket.fileno() == -1 else 2


# The choice


def test_choose() -> None:
    peer = object.__new__(PeerMemory)
    peer.pid, peer.regions, peer.pidfd = 7, {}, -1
    assert choose(same_process=True, same_host=None, forced=None).name == "inproc"
    assert choose(same_process=False, same_host=peer, forced=None) == Choice(
        "shm",
        "tcp",
        "the peer (pid 7) is on this host, 0 regions mapped; not inproc: the peer is in another process; private "
        "memory by tcp, not by cma: nobody tried",
    )
    assert choose(same_process=False, same_host=peer, forced=None, private=None).private == "cma"
    assert choose(same_process=True, same_host=peer, forced="shm").private is None
    assert choose(same_process=True, same_host=peer, forced="shm").name == "shm"
    with pytest.raises(LinkRefused, match="'inproc' cannot reach the peer: not inproc: the peer is in another process"):
        choose(same_process=False, same_host=peer, forced="inproc")
    with pytest.raises(LinkRefused, match="not shm: no such socket"):
        choose(same_process=True, same_host=LinkRefused("no such socket"), forced="shm")
    for reason in (None, LinkRefused("no such socket")):
        choice = choose(same_process=False, same_host=reason, forced=None)
        assert (choice.name, choice.private) == ("tcp", "tcp")
        assert f"not shm: {reason or 'no same-host rendezvous was made'}" in choice.reason
    assert choose(same_process=True, same_host=peer, forced="tcp").name == "tcp"
    assert choose(same_process=False, same_host=peer, forced="cma", private=None) == Choice(
        "cma", "cma", "the kernel lets us into the peer's memory"
    )
    with pytest.raises(LinkRefused, match="'cma' cannot reach the peer: not cma: it runs as uid 5"):
        choose(same_process=False, same_host=peer, forced="cma", private="it runs as uid 5")
    with pytest.raises(ParamError, match="known are inproc, shm, cma, tcp"):
        choose(same_process=True, same_host=None, forced="rdma")


def test_every_refusal_is_of_this_library() -> None:
    assert issubclass(LinkRefused, LinkError)
    assert issubclass(LinkError, LLMException)
