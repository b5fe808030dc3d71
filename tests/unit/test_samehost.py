"""The same-host rendezvous: what it yields, what it refuses, and that a refusal leaves nothing open."""

import asyncio
import errno
import os
import queue
import secrets
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.cuda import CudaDevice, DeviceSegment
from llm_datadist._memory.exports import Exports, RegionDescriptor
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._native import DeviceMemory, readable
from llm_datadist._transport.choose import Choice, Verdict, choose, yield_to
from llm_datadist._transport.registry import transports_for
from llm_datadist._transport.samehost import listener, peer_memory, rendezvous
from llm_datadist._transport.samehost.listener import SameHostListener, exchange_memory
from llm_datadist._transport.samehost.peer_memory import PeerMemory
from llm_datadist._transport.samehost.rendezvous import MemoryOffer, Packet, Refusal, RendezvousHello, decode
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused, ParamError
from llm_datadist.testing.peers import REGION_BYTES, close_exports, loop_thread, new_exports
from llm_datadist.testing.scene import residue, settled
from tests.support import fakecuda
from tests.unit.holder import in_a_forked_child


def send(sock: socket.socket, value: RendezvousHello | Refusal, fds: list[int]) -> None:
    admitted(sock, lambda: rendezvous.send_packet(sock, value, fds))


def admitted(sock: socket.socket, action: Callable[[], object]) -> None:
    """Send once the listener has admitted this process: until then the kernel refuses descriptors."""
    while not readable(sock.fileno()):
        with suppress(PermissionError):
            action()
            return


TOKEN, OTHER_TOKEN = b"0123456789abcdef", b"another token 16"


class Stage:
    """A started listener on a loop of its own, the exports of both ends, and what its callbacks got."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: str | None, idle_timeout: float) -> None:
        self.loop = loop
        self.theirs, self.ours = new_exports(writable=True), new_exports(writable=False)
        self.offer = MemoryOffer(self.ours, TOKEN)
        self.fds = self.offer.fds
        self.listener = SameHostListener(self.theirs, folder, idle_timeout=idle_timeout)
        self.results: queue.Queue[PeerMemory | LinkError] = queue.Queue()
        self.on_loop(lambda: self.listener.start(loop))

    def on_loop(self, call: Callable[[], Any] = lambda: None) -> None:
        """Run a call on the loop's thread, after all that the loop was told so far."""
        done: Future[Any] = Future()
        self.loop.call_soon_threadsafe(lambda: done.set_result(call()))
        done.result(10)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the loop's thread waiting for the length of the block."""
        gate = threading.Event()
        self.loop.call_soon_threadsafe(gate.wait, 10)
        yield
        gate.set()

    def pending(self, count: int) -> None:
        """Return when so many peers are accepted and silent."""
        while f"{count} pending" not in repr(self.listener):
            self.on_loop()

    def dial(self, token: bytes = TOKEN) -> PeerMemory:
        return exchange_memory(self.listener.name, token, self.ours, Deadline(10_000))

    def expect(self) -> None:
        self.listener.expect(TOKEN, self.results.put)

    def links(self) -> None:
        """Check that the listener serves a peer with the right token, which it expects."""
        self.dial().close()
        peer = self.results.get(timeout=10)
        assert isinstance(peer, PeerMemory)
        peer.close()

    def raw(self) -> socket.socket:
        """Return a connected socket that speaks as the test wants."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(10)
        sock.connect(listener._address(self.listener.name))
        return sock

    def hello(self, **changes: Any) -> RendezvousHello:
        """Return our own offer with some fields replaced."""
        return msgspec.structs.replace(self.offer.hello, **changes)

    def refused(self, data: bytes, fds: list[int]) -> str:
        """Send a packet, expect a refusal that leaves nothing open, and return its reason."""
        with unchanged(), self.raw() as sock:
            admitted(sock, partial(socket.send_fds, sock, [data], fds))
            with Packet.receive(sock) as packet:
                answer = decode(packet.data)
                assert packet.fds == []
            self.on_loop()
        assert isinstance(answer, Refusal)
        assert "\n" not in answer.reason
        return answer.reason

    def close(self) -> None:
        self.on_loop(self.listener.close)
        self.offer.__exit__()
        close_exports(self.theirs)
        close_exports(self.ours)


@contextmanager
def staged(folder: str | None = None, idle_timeout: float = 30.0) -> Iterator[Stage]:
    """Yield a stage; afterwards nothing is left of it nor of its refusals."""
    with unchanged(), loop_thread() as loop:
        stage = Stage(loop, folder, idle_timeout)
        try:
            yield stage
        finally:
            stage.close()
        assert stage.results.empty(), "a result that the test did not look at"


@pytest.fixture
def stage() -> Iterator[Stage]:
    with staged() as stage:
        yield stage


@contextmanager
def unchanged() -> Iterator[None]:
    """Check that what happens inside leaves no descriptor, mapping or thread."""
    before = residue()
    yield
    assert settled(before) == before


@pytest.mark.parametrize(("in_folder", "new_kernel"), [(False, True), (True, False)])
def test_both_ends_get_the_other_ends_memory(
    socket_folder: Path, in_folder: bool, new_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through an abstract name or a private socket file; kernels before 6.5 have no SO_PEERPIDFD, only the pid."""
    if not new_kernel:
        monkeypatch.setattr(peer_memory, "_SO_PEERPIDFD", 9999)
    with staged(str(socket_folder) if in_folder else None) as stage:
        files = list(socket_folder.iterdir())
        assert [str(path) for path in files] == [stage.listener.name] * in_folder
        assert [path.stat().st_mode for path in files] == [stat.S_IFSOCK | 0o600] * in_folder
        stage.expect()
        with stage.dial() as got, stage.results.get(timeout=10) as given:  # type: ignore[union-attr]
            check_is(got, stage.theirs, writable=True)
            check_is(given, stage.ours, writable=False)
        assert not got.alive()
        got.close()  # again: nothing
    assert list(socket_folder.iterdir()) == []


def check_is(peer: PeerMemory, exports: Exports, *, writable: bool) -> None:
    assert (peer.pid, peer.uid, peer.alive()) == (os.getpid(), os.geteuid(), True)
    assert not os.get_inheritable(peer.pidfd)
    assert (peer.hello.cookie, peer.hello.incarnation) == (exports.guards.cookie, exports.incarnation)
    assert (peer.guards.nbytes, peer.guards.writable) == (exports.guards.segment.nbytes, False)
    assert {region: segment.nbytes for region, segment in peer.regions.items()} == REGION_BYTES
    for region, segment in peer.regions.items():
        assert segment.writable is writable
        exports.regions[region].view()[100] = 17 * region
        assert segment.view()[100] == 17 * region


def test_a_folder_loses_the_socket_files_of_killed_processes_only_and_one_that_cannot_hold_any_is_an_error(
    socket_folder: Path,
) -> None:
    exports = new_exports(writable=False)
    SameHostListener(exports, str(socket_folder))._close_descriptors()  # as a kill does
    close_exports(exports)
    (stale,) = socket_folder.iterdir()
    note = socket_folder / "llm-datadist-note.sock"
    note.write_text("not a socket")
    with staged(str(socket_folder)) as living, staged(str(socket_folder)) as second:
        assert set(socket_folder.iterdir()) == {note, Path(living.listener.name), Path(second.listener.name)} - {stale}
        for _ in range(2):
            living.on_loop()  # the second has dialled it, to see whether it lives
        (long := socket_folder / ("x" * 90)).mkdir()
        for folder, rule in ((socket_folder / "missing", "No such file"), (long, "107 bytes at most, so .* has 72")):
            with unchanged(), pytest.raises(ParamError, match=rf"^llm\.ShmSocketDir.*{rule}.*; give a folder"):
                SameHostListener(living.ours, str(folder))
        long.rmdir()
        with unchanged(), pytest.warns(ResourceWarning, match="unclosed <SameHostListener"):
            SameHostListener(living.ours, str(socket_folder))
    assert list(socket_folder.iterdir()) == [note]


def test_a_token_is_expected_once_used_once_and_may_be_forgotten(stage: Stage) -> None:
    def unknown(token: bytes) -> None:
        with pytest.raises(LinkRefused, match="unknown or already used token"):
            stage.dial(token)

    stage.expect()
    with pytest.raises(ParamError, match="already"):
        stage.listener.expect(TOKEN, lambda result: None)
    unknown(OTHER_TOKEN)
    stage.links()  # the right one still works
    unknown(TOKEN)
    stage.expect()
    stage.listener.forget(TOKEN)
    stage.listener.forget(TOKEN)
    unknown(TOKEN)


def test_nonsense_is_refused_with_its_descriptors_and_uses_no_token_up(stage: Stage) -> None:
    region = RegionDescriptor(1, 1, "x", True)
    hellos: list[dict[str, object]] = [
        {"version": rendezvous.WITH_DEVICES + 1},
        {"cookie": b"short"},
        {"token": b""},
        {"guards_nbytes": -1},
        {"regions": [RegionDescriptor(0, 1, "x", True)]},
        {"regions": [RegionDescriptor(1, 1, "x" * 65, True)]},
        {"regions": [region] * 2},
        {"regions": [RegionDescriptor(each + 1, 1, "x", True) for each in range(33)]},
    ]
    later = {"type": "hello", "version": rendezvous.WITH_DEVICES + 1, "another": "shape"}
    text = f"packets of version {later['version']} are not understood here, only {rendezvous.VERSION}"
    assert text in stage.refused(msgspec.msgpack.encode(later), [])
    others = [{"type": "hello"}, {"type": "eval", "code": "1"}, Refusal("no"), [1, 2, 3]]
    values = [stage.hello(**changes) for changes in hellos] + others
    stage.expect()
    for data in [b"\xc1garbage", b"\x00", b"x" * 5000, *map(msgspec.msgpack.encode, values)]:
        assert stage.refused(data, [0, 1, 2])
    for data, count in ((b"", 3), (b"x" * (17 << 10), 3), (b"x", 35), (b"x", 200), (b"x" * (17 << 10), 200)):
        with unchanged(), stage.raw() as sock:  # beyond the limits: dropped without an answer
            admitted(sock, partial(socket.send_fds, sock, [data], [0] * count))
            assert sock.recv(100) == b""
            stage.on_loop()
    stage.links()


def test_a_dialer_that_leaves_before_the_answer(stage: Stage) -> None:
    stage.expect()
    with unchanged():
        with stage.raw() as sock:
            stage.pending(1)
            with stage.held():
                send(sock, stage.hello(), stage.fds)
                sock.close()
        result = stage.results.get(timeout=10)
        assert isinstance(result, LinkRefused)
        assert "left before the answer" in str(result)


def test_memory_that_is_not_what_was_announced_is_refused_at_both_ends(stage: Stage) -> None:
    """The seals and sizes by themselves: test_segment.py."""
    fds = stage.fds
    lie = [msgspec.structs.replace(described, writable=True) for described in stage.hello().regions]
    segment = SharedSegment.create("small", 8, peers_may_write=True)
    with segment, open(os.memfd_create("unsealed"), "r+b") as unsealed:
        unsealed.truncate(REGION_BYTES[1])
        cases: list[tuple[tuple[str, ...], dict[str, Any], list[int]]] = [
            (("not acceptable",), {"regions": lie}, fds),
            (("another cookie",), {"cookie": bytes(16)}, fds),
            (("header",), {"guards_nbytes": 8}, [segment.fd, *fds[1:]]),
            (("not acceptable",), {}, [*fds[:3], 0]),
            (("'pool-1'", "seals"), {}, [*fds[:2], unsealed.fileno(), fds[3]]),
            (("'pool-1'", "announced as"), {}, [*fds[:2], segment.fd, fds[3]]),
            *[((f"sent {count} descriptors",), {}, (fds * 11)[:count]) for count in (0, 3, 5, 33)],
        ]
        for parts, changes, sent in cases:
            stage.expect()
            text = stage.refused(msgspec.msgpack.encode(stage.hello(**changes)), sent)
            assert [part for part in parts if part not in text] == []
            assert isinstance(stage.results.get(timeout=10), LinkRefused)


def test_another_users_process(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"runs as uid {os.geteuid()}, this process as uid 12345"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with unchanged():
        with pytest.raises(LinkRefused, match=text):
            stage.dial()
        with stage.raw() as sock:
            assert text in str(decode(sock.recv(1000)))
            assert sock.recv(100) == b"", "the listener does not even hear it"
        stage.on_loop()


def test_a_silent_peer_is_dropped() -> None:
    with staged(idle_timeout=0.05) as stage, stage.raw() as silent, stage.raw() as other:
        assert silent.recv(100) == other.recv(100) == b""
        stage.pending(0)


def test_no_more_than_64_silent_peers(stage: Stage) -> None:
    sockets = [stage.raw() for _ in range(listener.MAX_PENDING)]
    stage.pending(64)
    with stage.raw() as one_more:
        assert "have not said anything yet" in str(decode(one_more.recv(1000)))
    sockets.pop().close()
    stage.pending(63)
    stage.expect()
    stage.links()
    for sock in sockets:
        sock.close()
    stage.on_loop()


def test_a_listener_that_cannot_accept_pauses(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Out of descriptors the loop is not kept busy, and the peer that waits is served afterwards."""
    real, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept(sock: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    stage.expect()
    stage.links()
    assert not failures
    assert "cannot accept and pauses" in caplog.text


def test_a_name_of_no_listener_is_refused_and_any_other_name_not_dialled(stage: Stage) -> None:
    absent = ["@llm-datadist-0000000000000000", "/nowhere/llm-datadist-0.sock", f"/{'x' * 200}/llm-datadist-0.sock"]
    foreign = ["", "@", "llm-datadist-1", "@/run/dbus", "/run/docker.sock", "@llm-datadist-\0x"]
    for names, text in (
        (absent, "another host or in another network namespace"),
        (foreign, "is not the name of a same-host listener"),
    ):
        for name in names:
            with unchanged(), pytest.raises(LinkRefused, match=text):
                exchange_memory(name, TOKEN, stage.ours, Deadline(1000))
    stage.on_loop(stage.listener.close)
    stage.listener.close()
    assert "closed" in repr(stage.listener)
    with pytest.raises(LinkRefused, match="no same-host listener"):
        stage.dial()


@contextmanager
def liar(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """Run a listener that answers one hello as the test wants; yield its name."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server, ThreadPoolExecutor(1) as threads:
        server.bind("\0llm-datadist-liar-" + secrets.token_hex(4))
        server.listen(1)

        def serve() -> None:
            sock, _ = server.accept()
            with sock, Packet.receive(sock) as packet:
                assert isinstance(decode(packet.data), RendezvousHello)
                assert [os.get_inheritable(fd) for fd in packet.fds] == [False] * 4
                answer(sock)

        serving = threads.submit(serve)
        yield "@" + server.getsockname()[1:].decode()
        serving.result()


def test_lying_listeners(stage: Stage) -> None:
    lies: list[tuple[str, Callable[[socket.socket], object]]] = [
        ("before sending data", lambda sock: None),
        ("nonsense", lambda sock: socket.send_fds(sock, [b"\xc1"], [0, 1])),
        ("refused: not today", lambda sock: send(sock, Refusal("not\ntoday"), [0])),
        ("another token", lambda sock: send(sock, stage.hello(token=OTHER_TOKEN), stage.fds)),
        ("another cookie", lambda sock: send(sock, stage.hello(cookie=bytes(16)), stage.fds)),
        ("sent 0 descriptors", lambda sock: send(sock, stage.hello(), [])),
        ("acceptable", lambda sock: send(sock, stage.hello(), [0] * 4)),
        ("more than 34 descriptors", lambda sock: send(sock, stage.hello(), [0] * 100)),
    ]
    for reason, answer in lies:
        with unchanged(), liar(answer) as name, pytest.raises(LinkRefused, match=reason) as caught:
            exchange_memory(name, TOKEN, stage.ours, Deadline(10_000))
        assert "\n" not in str(caught.value)


def test_deadlines_of_a_dialer(stage: Stage) -> None:
    """Passed already; without an answer; in a full backlog."""
    gate = threading.Event()

    def late(name: str, budget_ms: int) -> None:
        with pytest.raises(DeadlineExceeded) as caught:
            exchange_memory(name, TOKEN, stage.ours, Deadline(budget_ms))
        assert caught.value.phase == "link"

    with unchanged():
        late(stage.listener.name, 0)
        with liar(lambda sock: gate.wait(10)) as name:
            late(name, 30)
            gate.set()
        with stage.held():
            late(stage.listener.name, 30)  # it has not admitted us
        stage.on_loop()
        kind = socket.AF_UNIX, socket.SOCK_SEQPACKET
        with socket.socket(*kind) as server, socket.socket(*kind) as first:
            server.bind("\0llm-datadist-full")
            server.listen(0)
            first.connect("\0llm-datadist-full")
            late("@llm-datadist-full", 30)


def test_close_with_a_silent_peer_on_the_loop_or_after_it(socket_folder: Path) -> None:
    with staged(str(socket_folder)) as stage, stage.raw() as silent:
        stage.pending(1)
        stage.on_loop(stage.listener.close)
        assert list(socket_folder.iterdir()) == []
        assert silent.recv(10) == b""
    with unchanged():
        exports = new_exports(writable=False)
        loop = asyncio.new_event_loop()
        listener = SameHostListener(exports, str(socket_folder))
        listener.start(loop)
        loop.close()
        listener.close()
        close_exports(exports)
    assert list(socket_folder.iterdir()) == []


def test_a_forked_child_that_closes_the_listener_does_not_disturb_its_parent(socket_folder: Path) -> None:
    with staged(str(socket_folder)) as stage:

        def close() -> None:
            stage.listener.close()
            stage.listener.close()
            assert stage.listener._socket.fileno() == -1

        in_a_forked_child(close)
        assert Path(stage.listener.name).exists()
        stage.expect()
        stage.links()


def verdicts(memory: PeerMemory | LinkError | None, *, here: bool, cma: str | None) -> dict[str, Verdict]:
    """Return how the transports judge a peer; ``cma``: why that cannot be used."""
    told = "no same-host rendezvous was made" if memory is None else str(memory)
    mapped = isinstance(memory, PeerMemory)
    return {
        "inproc": Verdict(here, f"the peer is in {'this' if here else 'another'} process"),
        "shm": Verdict(mapped, "the peer (pid 7) is on this host, 0 regions mapped" if mapped else told),
        "cma": Verdict(cma is None, cma or "the kernel lets us in", final=cma == TOLD_NOTHING),
        "nixl": Verdict(False, "neither side has NIXL", silent=True),
        "tcp": Verdict(True, "data lanes reach every peer"),
    }


def chosen_of(judged: dict[str, Verdict], forced: str | None) -> Choice:
    return choose(CANDIDATES, lambda each: judged[each.name], forced)


CANDIDATES = [object.__new__(kind) for kind in transports_for("nixl")]
TOLD_NOTHING = "the peer lets this side into none of its memory"


def test_choose() -> None:
    peer = object.__new__(PeerMemory)
    peer.pid, peer.regions, peer.pidfd = 7, {}, -1
    told, tried = LinkRefused("no such socket"), "nobody tried"
    mapped = "the peer (pid 7) is on this host, 0 regions mapped; not inproc: the peer is in another process; non-pool "
    chosen: list[tuple[bool, PeerMemory | LinkError | None, str | None, str | None, tuple[str, str | None], str]] = [
        (True, None, None, tried, ("inproc", "inproc"), "the peer is in this process"),
        (False, peer, None, tried, ("shm", "tcp"), mapped + "memory by tcp, not by cma: nobody tried"),
        (False, peer, None, None, ("shm", "cma"), mapped + "memory by cma"),
        (False, peer, None, TOLD_NOTHING, ("shm", None), f"{mapped}memory by nothing: {TOLD_NOTHING}"),
        (True, peer, "shm", tried, ("shm", None), "non-pool memory by nothing: llm.Transport is shm"),
        (False, None, None, tried, ("tcp", "tcp"), "not shm: no same-host rendezvous was made"),
        (False, told, None, tried, ("tcp", "tcp"), "not shm: no such socket"),
        (True, peer, "tcp", tried, ("tcp", "tcp"), "data lanes reach every peer"),
        (False, peer, "cma", None, ("cma", "cma"), "the kernel lets us in"),
    ]
    for here, memory, forced, cma, names, reason in chosen:
        choice = chosen_of(verdicts(memory, here=here, cma=cma), forced)
        assert (choice.name, choice.private) == names
        assert choice.reason.endswith(reason)
    for forced, cma, text in (
        ("inproc", None, "'inproc' cannot reach the peer: not inproc: the peer is in another process"),
        ("shm", None, "not shm: no such socket"),
        ("cma", "it runs as uid 5", "'cma' cannot reach the peer: not cma: it runs as uid 5"),
        ("nixl", None, "'nixl' cannot reach the peer: not nixl: neither side has NIXL"),
    ):
        with pytest.raises(LinkRefused, match=text):
            chosen_of(verdicts(told, here=False, cma=cma), forced)


@pytest.mark.parametrize(
    ("mine", "theirs", "used"),
    [("cma", "tcp", "tcp"), ("cma", "cma", "cma"), ("tcp", "cma", "tcp"), ("cma", "nixl", "cma"), (None, "tcp", None)],
)
def test_the_listener_yields_to_a_dialer_that_cannot_use_the_better_transport(
    mine: str | None, theirs: str | None, used: str | None
) -> None:
    choice = yield_to(Choice("shm", mine, "mapped"), CANDIDATES, theirs)
    assert choice.private == used
    shut_out = ", but the kernel does not let the peer into this process: by tcp"
    assert choice.reason == "mapped" + (shut_out if used != mine else "")


@contextmanager
def lingering() -> Iterator[tuple[int, socket.socket]]:
    """Yield a descriptor whose last close waits for a minute, or until the socket beside it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            sender.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    sender.send(bytes(1 << 16))
            sender.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 60))
            yield sender.detach(), receiver


KINDS = ("fifo", "pipe", "socket", "lingering", "memfd", "file", "less memory of a GPU", "memory of a GPU")


def announced(kind: str, folder: Path, opened: ExitStack) -> int:
    """Return a descriptor that a peer announces as 2 MiB of its GPU, for the caller to close."""
    if kind == "fifo":
        os.mkfifo(folder / kind)
        return os.open(folder / kind, os.O_RDONLY | os.O_NONBLOCK)
    if kind == "lingering":
        return opened.enter_context(lingering())[0]
    if kind == "memfd":
        return os.memfd_create(kind)
    if kind == "file":
        return os.open(__file__, os.O_RDONLY)
    if kind.endswith("GPU"):
        memory = DeviceMemory(0, (2 if kind == "memory of a GPU" else 1) << 20)
        opened.callback(memory.close)
        return memory.export_fd()
    ours, theirs = os.pipe() if kind == "pipe" else (each.detach() for each in socket.socketpair())
    opened.callback(os.close, theirs)
    return ours


@contextmanager
def offered(kind: str, folder: Path) -> Iterator[PeerMemory]:
    """Yield what a side with a GPU gets of a peer that announces a descriptor as region 9."""
    fakecuda.load()
    with staged() as stage, ExitStack() as opened, stage.raw() as sock:
        stage.listener.expect(TOKEN, stage.results.put, replace(stage.theirs, device=CudaDevice(0)))
        fd, nbytes = announced(kind, folder, opened), (4 if kind.startswith("less") else 2) << 20
        region = RegionDescriptor(9, nbytes, "gpu", False, bytes(16))
        stage.pending(1)
        with stage.held():
            send(sock, stage.hello(version=7, regions=[*stage.hello().regions, region]), [*stage.fds, fd])
            os.close(fd)
        stage.on_loop()
        stage.on_loop()
        peer = stage.results.get(timeout=10)
        assert isinstance(peer, PeerMemory)
        with peer:
            assert peer.regions.keys() == stage.ours.regions.keys()
            yield peer
    assert fakecuda.complaints_here() == []


@pytest.mark.gpu(True)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_memory_of_a_gpu_costs_that_region_only_and_nobody_waits(
    gpu: bool, kind: str, tmp_path: Path
) -> None:
    with offered(kind, tmp_path) as peer:
        regions = peer.on_device
        assert regions is not None
        regions.wait(Deadline(10_000))
        mapped = regions.get(9) is not None
        assert (mapped, 9 in regions.left_out) == (kind == KINDS[-1], kind != KINDS[-1])
        assert regions.remark().startswith("" if mapped else "; region 9 (GPU 00000000) is not mapped: ")


@pytest.mark.gpu(True)
def test_an_import_that_the_driver_does_not_end_keeps_nobody_waiting_and_is_undone_once_the_link_has_gone(
    gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, attach = threading.Event(), DeviceSegment.attach
    monkeypatch.setattr(DeviceSegment, "attach", lambda *args, **more: gate.wait(30) and attach(*args, **more))
    with offered(KINDS[-1], tmp_path) as peer:
        regions = peer.on_device
        assert regions is not None
        regions.wait(Deadline(50))
        assert (regions.get(9), 9 in regions.left_out) == (None, True)
        assert "the driver has not answered yet" in regions.remark()
        peer.close()
        gate.set()


@pytest.mark.parametrize("option", [rendezvous.SO_PASSRIGHTS, 9999], ids=["refused by the kernel", "older kernel"])
def test_a_descriptor_of_a_stranger_stops_no_listener(option: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its close may block: SO_LINGER. The listener goes on, and so does its close."""
    monkeypatch.setattr(rendezvous, "SO_PASSRIGHTS", option)
    with staged() as stage, lingering() as (fd, receiver):
        with stage.raw() as sock, monkeypatch.context() as strange:
            strange.setattr(listener, "peer_credentials", Mock(side_effect=LinkRefused("a stranger")))
            with stage.held():
                try:
                    socket.send_fds(sock, [b"x"], [fd])
                except PermissionError:
                    receiver.close()  # nobody has it: this close waits for nothing
                os.close(fd)
            stage.on_loop()
            stage.on_loop()
        stage.expect()
        stage.links()
        stage.on_loop(stage.listener.close)


@pytest.mark.parametrize("option", [rendezvous.SO_PASSRIGHTS, 9999], ids=["newer kernel", "older kernel"])
@pytest.mark.parametrize("at", ["in a packet", "behind 34 others", "in a second packet"])
def test_a_descriptor_of_a_peer_stops_neither_end(at: str, option: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: the kernel closes also what it has no room for, and what was never received."""
    monkeypatch.setattr(rendezvous, "SO_PASSRIGHTS", option)

    def send_all(sock: socket.socket, token: bytes) -> None:
        if at == "in a second packet":
            send(sock, stage.hello(token=token), stage.fds)
        socket.send_fds(sock, [b"x"], [0] * 34 * (at == "behind 34 others") + [fd])
        os.close(fd)

    with staged() as stage, lingering() as (fd, _), stage.raw() as sock:
        stage.pending(1)
        stage.expect()
        with stage.held():
            send_all(sock, TOKEN)
        for _ in range(3):
            stage.on_loop()
        if at == "in a second packet":
            stage.results.get(timeout=10).close()  # type: ignore[union-attr]
            stage.expect()
        stage.links()
        stage.on_loop(stage.listener.close)
    gate = threading.Event()

    class LateDeadline(Deadline):
        """Of a dialer that looks for the answer when all of it has come."""

        def ready(self, sock: socket.socket, event: int) -> bool:
            return gate.wait(10) and super().ready(sock, event)

    def answer(sock: socket.socket) -> None:
        send_all(sock, OTHER_TOKEN)
        gate.set()

    with staged() as stage, ThreadPoolExecutor(1) as threads, lingering() as (fd, _), liar(answer) as name:
        dialling = threads.submit(exchange_memory, name, TOKEN, stage.ours, LateDeadline(10_000))
        with pytest.raises(LinkRefused):
            dialling.result(10)


def test_a_peer_that_blocks_its_close_keeps_no_other_one_waiting(stage: Stage) -> None:
    with lingering() as (fd, _), stage.raw() as first, stage.raw() as second:
        stage.pending(2)
        with stage.held():
            stage.loop.call_soon_threadsafe(stage.listener.close)
            socket.send_fds(first, [b"x"], [fd])
            os.close(fd)
        assert second.recv(100) == b""


def test_no_packet_is_taken_while_too_many_descriptors_wait_for_their_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors, the kernel would close what it cannot give us in the thread that receives."""
    monkeypatch.setattr(rendezvous, "_MAX_CLOSING", 5)  # so many fit one packet
    with staged() as stage:
        with lingering() as (fd, _), stage.raw() as first, stage.raw() as second:
            stage.pending(2)
            with stage.held():
                socket.send_fds(first, [b"x"], [0, 0, 0, 0, fd])
                os.close(fd)
            stage.pending(1)
            stage.expect()
            send(second, stage.hello(), stage.fds)
            with pytest.raises(ConnectionResetError):  # closed, with the packet in it
                second.recv(100)
        stage.links()


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user, and become one")
FOLDERS: list[Any] = [
    *((mode, None, None, "sticky") for mode in (0o770, 0o777, 0o702)),
    *((mode | stat.S_ISVTX, None, None, "") for mode in (0o770, 0o777, 0o702)),
    pytest.param(0o1777, 1234, 0, "belongs to uid 1234", marks=ROOT),
    pytest.param(0o1777, 4321, 1234, "belongs to uid 4321", marks=ROOT),
    pytest.param(0o1777, 1234, 1234, "", marks=ROOT),
    pytest.param(0o1777, 0, 1234, "", marks=ROOT),
]


@pytest.mark.parametrize(("mode", "owner", "user", "why"), FOLDERS)
def test_a_folder_that_others_can_write_is_refused_unless_sticky_and_one_of_another_user_unless_it_is_roots(
    mode: int, owner: int | None, user: int | None, why: str, socket_folder: Path
) -> None:
    exports = new_exports(writable=False)
    refused = pytest.raises(ParamError, match=rf"llm\.ShmSocketDir.*{why}") if why else nullcontext()
    if owner is not None:
        os.chown(socket_folder, owner, owner)
    socket_folder.chmod(mode)
    if user is not None:
        os.seteuid(user)
    try:
        with refused, closing(SameHostListener(exports, str(socket_folder))) as listener:
            assert stat.S_IMODE(Path(listener.name).lstat().st_mode) == 0o600
    finally:
        if user is not None:
            os.seteuid(0)
    assert list(socket_folder.iterdir()) == []
    close_exports(exports)
