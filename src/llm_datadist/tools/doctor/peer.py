"""The way to a peer: a link; with ``doctor --serve`` there, also pulls and the raw machine's speed."""

from __future__ import annotations

import os
import socket
import statistics
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist import LLMException, LLMRole
from llm_datadist._deadline import Deadline
from llm_datadist.config import LISTEN
from llm_datadist.datadist import life_of
from llm_datadist.errors import AuthFailed, DeadlineExceeded, ProtocolError
from llm_datadist.tools.doctor.answers import lacks_credentials, other_program
from llm_datadist.tools.doctor.finding import Finding, Severity, judge
from llm_datadist.tools.doctor.serve import (
    BLOCK_BYTES,
    BLOCKS,
    CLOCK,
    CLUSTER,
    KEY,
    PULL_S,
    STREAM_BYTES,
    describe,
    make_end,
)
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist import LLMDataDist
    from llm_datadist.metrics import LinkStatistics

#: For all questions to a peer: enough at 2.5 MB/s.
_TOTAL_MS: Final = 120_000
_LINK_MS: Final = 5000
_SECONDS: Final = 5.0
_CLOCK_MS: Final = 1000.0
_TRIPS: Final = 50
_PULLS: Final = 200
_PASSES: Final = 5
_SLOW: Final = 0.25
_NO_LINK: Final = "the peer was reached, but there is no link to it"


def examine(
    host: str, port: int, given: dict[str, str], progress: Callable[[str], None], cluster_id: int = CLUSTER
) -> Iterator[Finding]:
    """Yield findings about a peer; if it cannot be linked, the last one says why."""
    deadline = Deadline(_TOTAL_MS)
    progress("reaching the peer")
    try:
        with socket.create_connection((host, port), timeout=_SECONDS) as sock:
            ends = sock.getsockname()[0], sock.getpeername()[0]
    except OSError as error:
        yield _unreachable(f"{host}:{port}", port, error)
        return
    yield Finding("peer_reachable", Severity.OK, f"{host}:{port} accepts connections", "links can be made to it")
    if cluster_id == CLUSTER:  # other peers serve no clock and no cache
        progress("asking its clock")
        yield clock(host, port, deadline)
        if deadline.expired():  # the finding says so
            return
    progress("linking")
    with ExitStack() as stack:
        try:
            # Different from the peer's id and those of other doctors there.
            end = stack.enter_context(make_end(LLMRole.DECODER, int.from_bytes(os.urandom(6), "big"), given))
        except LLMException as error:
            mend = "correct the option that the text names, or the finding about memory above"
            yield Finding("peer_link", Severity.PROBLEM, str(error), "no instance can be made here", mend)
            return
        yield from _linked(end, cluster_id, ends, port, progress, deadline)


def _unreachable(peer: str, port: int, error: OSError) -> Finding:
    meaning = "no link can be made to the peer"
    value = f"{peer}: {error.strerror or error}"
    if isinstance(error, ConnectionRefusedError):
        mend = f"start it there: llm-datadist doctor --serve --host ADDRESS --port {port}"
    elif isinstance(error, socket.gaierror):
        mend = f"correct the name, or add it: getent hosts {peer.rpartition(':')[0]}"
    else:
        mend = (
            f"open the port in the firewalls between the hosts: nft add rule inet filter input tcp dport {port} accept"
        )
    return Finding("peer_reachable", Severity.PROBLEM, value, meaning, mend)


def clock(host: str, port: int, deadline: Deadline) -> Finding:
    """Compare the clocks by the fastest round trip; the value has the median trip, too."""
    meaning = "certificates, and logs of both sides together, need clocks that agree"
    try:
        trips = sorted(_round_trips(host, port + 1, deadline))
    except OSError as error:
        mend = f"run llm-datadist doctor --serve there, and let port {port + 1} through"
        return Finding("peer_clock", Severity.UNKNOWN, f"port {port + 1}: {error.strerror or error}", meaning, mend)
    trip, ahead = trips[0][0], trips[0][1] / 1e6
    middle = statistics.median(each[0] for each in trips)
    value = f"{ahead:+.1f} ms, round trip {middle / 1000:.0f} us (fastest {trip / 1000:.0f} us)"
    return judge("peer_clock", abs(ahead) < _CLOCK_MS, value, meaning, "chronyc makestep (on the side that is wrong)")


def _round_trips(host: str, port: int, deadline: Deadline) -> Iterator[tuple[int, int]]:
    """Yield a round trip, and the peer clock's lead, in nanoseconds."""
    with socket.create_connection((host, port), timeout=_SECONDS) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_TRIPS):
            before, start = time.time_ns(), time.perf_counter_ns()
            sock.sendall(b"t")
            data, got = memoryview(bytearray(CLOCK.size)), 0
            while got < CLOCK.size:
                got += _receive(sock, data[got:], deadline)
            trip = time.perf_counter_ns() - start
            yield trip, CLOCK.unpack(data)[0] - before - trip // 2


def _receive(sock: socket.socket, buffer: bytearray | memoryview, deadline: Deadline) -> int:
    """Receive a part of a raw answer; return its bytes. Raises OSError if nothing comes."""
    sock.settimeout(min(_SECONDS, _left(deadline)))
    try:
        got = sock.recv_into(buffer)
    except TimeoutError:
        _left(deadline)
        raise
    if not got:
        raise ConnectionResetError("it does not answer like doctor --serve")
    return got


def _left(deadline: Deadline, needed: float = 0.0) -> float:
    """Return the seconds left. Raises DeadlineExceeded unless they exceed ``needed``."""
    left = deadline.remaining()
    if left <= needed:
        raise DeadlineExceeded(f"not all is answered within the {deadline.budget_ms / 1e3:g} s of doctor --peer")
    return left


def _linked(
    end: LLMDataDist, wanted: int, ends: tuple[str, str], port: int, progress: Callable[[str], None], deadline: Deadline
) -> Iterator[Finding]:
    (here, there), links = ends, life_of(end).require_engine("doctor").links
    try:
        links.link(None, (there, port), Deadline(min(_LINK_MS, deadline.remaining_ms())))  # the peer tells its id
    except LLMException as error:
        yield _not_linked(error, (there, port), deadline)
        return
    (link,) = end.statistics().links
    answered = link.remote_cluster_id
    if answered == wanted:
        where = f"linked to pid {link.peer_pid} of {link.peer_host}"
        yield Finding("peer_link", Severity.OK, where, "both sides can use it")
        yield _authentication(link)
        yield _transport(link, same_host=here == there)
        yield _private_transport(link)
    else:
        value = f"{show_address((there, port))} is cluster {answered}, not {wanted}"
        mend = (
            f"name the cluster that answers there: --cluster-id {answered}; or start llm-datadist doctor --serve there"
        )
        yield Finding("peer_link", Severity.PROBLEM, value, _NO_LINK, mend)
    try:
        if answered == wanted == CLUSTER:
            progress("measuring pulls")
            yield from _measured(end, link, there, port, deadline)
    except LLMException as error:
        mend = "run llm-datadist doctor --serve there; without it nothing can be pulled"
        if isinstance(error, DeadlineExceeded):
            mend = f"look for loss, a slow network and load on both sides: ss -ti dst {there}; top"
        yield Finding("peer_pull", Severity.PROBLEM, str(error), "pulls from this peer fail", mend)
    with suppress(LLMException):
        links.unlink(answered, Deadline(min(_LINK_MS, deadline.remaining_ms())), force=False)


def _not_linked(error: LLMException, address: tuple[str, int], deadline: Deadline) -> Finding:
    text, deaf = str(error), isinstance(error, DeadlineExceeded)
    strange = deaf or error.phase == "handshake" or isinstance(error.__cause__, ProtocolError)
    # The questions, also those about credentials, take at most as long.
    if strange and deadline.remaining() > 2 * _SECONDS and (program := other_program(address)):
        text = f"{show_address(address)} {program}, not this library: is it the port of {LISTEN}?"
        mend = "name that port of the peer: llm-datadist doctor --peer HOST:PORT"
    elif isinstance(error, AuthFailed):
        return Finding("peer_authentication", Severity.PROBLEM, text, _NO_LINK, _credentials(text, address))
    elif deaf:
        mend = "look whether the peer is stopped or overloaded: ps -o stat,pcpu -p PID"
    elif strange or any(each in text for each in ("no common protocol version", "wire major")):  # or it left
        mend = "install the same version on both sides: pip install --upgrade open-datadist; let the port be doctor's"
    else:
        mend = "give both sides the same options: llm-datadist doctor --option KEY=VALUE"
    return Finding("peer_link", Severity.PROBLEM, text, _NO_LINK, mend)


def _credentials(text: str, address: tuple[str, int]) -> str:
    """Return how to mend a failed proof: which side has no secret, or that both have different ones."""
    if "asks for authentication" in text:
        return "this side has no secret or certificate, the peer has: --secrets FILE, or --option llm.TlsCert=FILE ..."
    if "secrets of the two sides differ" in text:
        return "the secrets differ, or the peer has certificates: compare llm-datadist keys show FILE on both sides"
    if "it rejected this instance's credentials" in text and lacks_credentials(address):
        return "the peer has no secret or certificate, this side has: give it the same, in programs llm.AuthSecretFile"
    return (
        "give both sides the same secret: llm-datadist keys new FILE; llm-datadist doctor --secrets FILE; or "
        "certificates of one authority: --option llm.TlsCert=FILE, llm.TlsKey, llm.TlsCa"
    )


def _authentication(link: LinkStatistics) -> Finding:
    meaning = "without it, every process that reaches the port may read and write what is published"
    proved = link.authenticated_at is not None
    value = "both sides proved a secret or certificate" if proved else "not authenticated"
    mend = "llm-datadist keys new FILE; give it to both sides: --secrets FILE, in programs llm.AuthSecretFile"
    return judge("peer_authentication", proved, value, meaning, mend)


def _transport(link: LinkStatistics, *, same_host: bool) -> Finding:
    meaning = "moves the peer's pools; shm is the fastest between processes of one host, tcp reaches all"
    value = f"{link.transport}: {link.reason}"
    mend = "same user and network namespace on both sides, no llm.Transport; or --option llm.SameHostUsers=UID"
    if on_lanes := ": by data lanes" in link.reason:
        meaning, mend = "a pool in a GPU is not mapped", "see gpu_export at both sides, and: nvidia-smi topo -p2p r"
    return judge("peer_transport", not on_lanes and (link.transport != "tcp" or not same_host), value, meaning, mend)


def _private_transport(link: LinkStatistics) -> Finding:
    meaning = "moves memory that the peer registered outside its pools"
    value = link.private_transport or "no transport reaches it"
    good = link.transport != "shm" or link.private_transport == "cma" or "memory of a GPU" in link.reason
    mend = "sysctl -w kernel.yama.ptrace_scope=0, or docker run --cap-add SYS_PTRACE; or allocate caches from the pool"
    return judge("peer_private_transport", good, value if good else f"{value}: {link.reason}", meaning, mend)


def _measured(end: LLMDataDist, link: LinkStatistics, host: str, port: int, deadline: Deadline) -> Iterator[Finding]:
    """Pull one block many times, then all, and compare with the raw machine."""
    manager = end.cache_manager
    cache = manager.allocate_blocks_cache(describe())
    everything = list(range(BLOCKS))

    def pull(blocks: list[int]) -> None:
        _left(deadline, PULL_S)
        manager.pull_blocks(KEY, cache, blocks, blocks)

    one = [_seconds(lambda: pull([0])) for _ in range(_PULLS)]
    value = f"one block of {BLOCK_BYTES >> 10} KiB: median {statistics.median(one) * 1e6:.0f} us"
    yield Finding("peer_latency", Severity.OK, value, "over shm and cma a repeated pull of a cache sends no message")
    passes = [_seconds(lambda: pull(everything)) for _ in range(_PASSES)]
    manager.deallocate_blocks_cache(cache)
    yield bandwidth(link, BLOCKS * BLOCK_BYTES / statistics.median(passes) / 1e9, host, port, deadline)


def bandwidth(link: LinkStatistics, pulls: float, host: str, port: int, deadline: Deadline) -> Finding:
    """Compare pulls of ``pulls`` GB/s with the machine's limit."""
    meaning = "pulls beside what the machine does without this library"
    try:
        limit, of = (
            (_memcpy(), "memcpy")
            if link.transport in ("shm", "cma")
            else (_stream(host, port + 1, deadline), "one socket stream")
        )
    except OSError as error:
        mend = f"run llm-datadist doctor --serve there, and let port {port + 1} through"
        return Finding("peer_bandwidth", Severity.UNKNOWN, f"pulls {pulls:.2f} GB/s; limit: {error}", meaning, mend)
    value = f"pulls {pulls:.2f} GB/s, {of} {limit:.2f} GB/s"
    mend = "look for load and few CPUs on both sides (top); then more threads: --option llm.CopyThreads=4"
    return judge("peer_bandwidth", pulls >= _SLOW * limit, value, meaning, mend)


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _memcpy() -> float:
    """Return GB/s of copies in this thread."""
    source, target = (np.ones(BLOCKS * BLOCK_BYTES, np.uint8) for _ in range(2))
    passes = [_seconds(lambda: np.copyto(target, source)) for _ in range(_PASSES)]
    return target.nbytes / statistics.median(passes) / 1e9


def _stream(host: str, port: int, deadline: Deadline) -> float:
    """Return GB/s of one plain connection."""
    buffer, left = bytearray(1 << 20), STREAM_BYTES
    with socket.create_connection((host, port), timeout=_SECONDS) as sock:
        start = time.perf_counter()
        sock.sendall(b"s")
        while left:
            left -= _receive(sock, buffer, deadline)
        return STREAM_BYTES / (time.perf_counter() - start) / 1e9
