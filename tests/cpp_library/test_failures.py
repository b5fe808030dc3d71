"""What fails in a C++ program: every status, other processes and threads that end, forks, interpreters."""

import re
import signal
import socket
import struct
import sys
import sysconfig
import venv
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from llm_datadist import CacheDesc, CacheKey, DataType
from llm_datadist._cache import registry
from llm_datadist.cpp_api import CacheIndex, LlmRole
from tests.support import cpp
from tests.support.cpp import Shape
from tests.support.cpp_peer import (
    ALREADY,
    BUSY,
    EXIST_LINK,
    FAILED,
    INVALID,
    LINK_FAILED,
    NO_CACHE,
    NO_MEMORY,
    NOT_ENABLED,
    NOT_LINKED,
    PEER_DIED,
    TIMEOUT,
    Peer,
    born,
    cache,
    init,
    python,
    target,
    there,
)
from tests.support.ends import Processes, freeze, frozen
from tests.support.linking import free_port
from tests.support.moves import Use, wait_until
from tests.support.source import ROOT
from tests.support.wire import MAX_PINS_PER_PEER
from tests.support.world import World

#: Statuses that the tests below provoke.
PROVOKED = {
    ALREADY,
    BUSY,
    EXIST_LINK,
    FAILED,
    INVALID,
    LINK_FAILED,
    NOT_ENABLED,
    NOT_LINKED,
    NO_CACHE,
    NO_MEMORY,
    PEER_DIED,
    TIMEOUT,
}

#: Commands after two caches of four blocks and rows, allocated as 1 and registered as 2; status; part of the reason.
REFUSED = [
    ("new 1 4", 0, ""),
    (init("auto"), INVALID, "kEnd"),
    ("new 1 77", 0, ""),
    (init("auto"), INVALID, "77"),
    ("new 1 3", 0, ""),
    ("role 1", FAILED, "Initialize"),
    ("link 1000 0 2@127.0.0.1:1", FAILED, "Initialize"),
    ("unlink 1000 0 2@127.0.0.1:1", FAILED, "Initialize"),
    ("own kv 1 1 4 3 4,16 1", FAILED, "Initialize"),
    ("allocate kv 1 1 4 3 4,16", FAILED, "Initialize"),
    ("deallocate 1", FAILED, "Initialize"),
    ("unregister 1", FAILED, "Initialize"),
    ("pull_cache kv 2 1 0 0 -1 -", FAILED, "Initialize"),
    ("pull_blocks kv 2 1 0 1 1 -", FAILED, "Initialize"),
    ("push_cache kv 2 1 0 0 -1 -", FAILED, "Initialize"),
    ("push_blocks kv 2 1 0 1 1 -", FAILED, "Initialize"),
    ("copy_cache kv kv 0 1 0", FAILED, "Initialize"),
    ("copy_blocks kv kv 0 1", FAILED, "Initialize"),
    ("init", INVALID, "llm.DeviceId"),
    ("init llm.DeviceId=x", INVALID, "llm.DeviceId"),
    ("init llm.DeviceId=0 llm.ListenIpInfo=nonsense", INVALID, "nonsense"),
    ("init llm.DeviceId=0 llm.ListenIpInfo=192.0.2.1:1", FAILED, "192.0.2.1"),
    ("init llm.DeviceId=BAD_UTF8", INVALID, "utf-8"),
    ('init llm.DeviceId=0 llm.MemPoolConfig={"memory_size":100000000000000}', NO_MEMORY, "memory"),
    (init("auto"), 0, ""),
    ("init nothing=read", 0, ""),
    ("allocate a 100 1 4 3 4,16", 0, ""),
    ("own b 200 1 4 3 4,16 1", 0, ""),
    ("role 4", INVALID, "kEnd"),
    ("role 0", INVALID, "0"),
    ("role 1 llm.ListenIpInfo=BAD_UTF8", INVALID, "utf-8"),
    ("role 1 llm.ListenIpInfo=192.0.2.1:1", FAILED, "192.0.2.1"),
    ("link 1000 0", INVALID, "clusters"),
    ("link 0 0 2@127.0.0.1:1", INVALID, "timeout"),
    ("link -1 0 2@127.0.0.1:1", INVALID, "timeout"),
    ("link 1000 0 2@-:1", INVALID, "0 remote ips"),
    ("link 1000 0 2@127.0.0.1:1", LINK_FAILED, "refused"),
    ("unlink 0 0 2@127.0.0.1:1", INVALID, "timeout"),
    ("unlink 1000 0 2@127.0.0.1:1", 0, ""),
    ("allocate c 0 1 0 3 4,16", INVALID, "num_tensors"),
    ("allocate c 0 1 4 28 4,16", INVALID, "data_type"),
    ("allocate c 0 1 4 99 4,16", INVALID, "99"),
    ("allocate c 0 7 4 3 4,16", INVALID, "7"),
    ("allocate c 0 1 4 3 -", INVALID, "shape"),
    ("allocate c 0 1 4 3 4,100000000", NO_MEMORY, "pool"),
    ("allocate c 0 1 1000000 3 4,16", NO_MEMORY, "pool"),
    ("allocate c 0 1 4000000000 3 4,16", INVALID, "num_tensors=4000000000: a cache has 1 to 1048576 tensors"),
    ("own c 0 1 0 3 4,16 1", INVALID, "num_tensors"),
    ("deallocate 99", 0, ""),
    ("unregister 99", 0, ""),
    ("pull_blocks a 1 1 0 1 1 -", INVALID, "our own"),
    ("pull_blocks a 2 1 0 1 1 -", NOT_LINKED, "2"),
    ("pull_blocks a 2 1 3 1 1 -", INVALID, "batch_index"),
    ("pull_blocks a 2 1 0 - - -", INVALID, "src_blocks"),
    ("pull_blocks a 2 1 0 1 1,2 -", INVALID, "equal lengths"),
    ("pull_blocks a 2 1 0 1 9 -", INVALID, "9"),
    ("pull_blocks a 2 1 0 18446744073709551615 1 -", INVALID, "18446744073709551615"),
    ("pull_blocks a 2 1 0 1 1 3 2 0 1 1", INVALID, "src_layer_range"),
    ("pull_blocks a 2 1 0 1 1 0 1 0 2 1", INVALID, "equal lengths"),
    ("pull_blocks a 2 1 0 1 1 -1 -1 -1 -1 0", INVALID, "tensor_num_per_layer"),
    ("pull_cache a 2 1 0 0 0 -", INVALID, "size"),
    ("pull_cache a 2 1 0 4 -1 -", INVALID, "4"),
    ("pull_cache a 2 1 0 0 -1 -", NOT_LINKED, "2"),
    ("push_cache a 2 1 0 0 64 -", INVALID, "size"),
    ("push_cache a 2 1 0 0 -1 -", NOT_LINKED, "2"),
    ("push_blocks a 2 1 0 1 1 -", NOT_LINKED, "2"),
    ("push_blocks a 2 1 1 1 1 -", INVALID, "batch_index"),
    ("copy_cache a b 0 0 65", INVALID, "65"),
    ("copy_cache a b 4 0 0", INVALID, "4"),
    ("copy_cache a b 0 0 0 0", INVALID, "size"),
    ("copy_blocks a b - 1", INVALID, "src_blocks"),
    ("copy_blocks a b 1", INVALID, "dst_blocks_list"),
    ("copy_blocks a b 1,2 1", INVALID, "dst_blocks_list[0]"),
    ("copy_blocks a b 4 1", INVALID, "4"),
    ("named a 77", 0, ""),
    *(
        (f"{call} a 2 1 0 {what} -", NO_CACHE, "77")
        for call, what in [
            ("pull_blocks", "1 1"),
            ("pull_cache", "0 -1"),
            ("push_blocks", "1 1"),
            ("push_cache", "0 -1"),
        ]
    ),
    ("copy_cache a b 0 0 0", NO_CACHE, "77"),
    ("copy_blocks a b 1 1", NO_CACHE, "77"),
    ("named a 1", 0, ""),
]


def test_every_call_has_a_status_and_a_reason_for_every_mistake_and_moves_nothing(peers: ExitStack) -> None:
    peer = Peer()
    peers.callback(peer.close)
    before = []
    for command, status, reason in REFUSED:
        if command == "role 4":
            before = [peer.bytes(name, rows=4) for name in "ab"]
        found, text, error = peer.do(command)
        assert (hex(found), reason in error) == (hex(status), True), (command, text, error)
    assert [peer.bytes(name, rows=4).tolist() for name in "ab"] == [each.tolist() for each in before]


def test_each_cluster_has_its_status_and_the_overall_one_is_the_last_failure(peers: ExitStack) -> None:
    ports = free_port(), free_port()
    for cluster_id, port in enumerate(ports, 1):
        born(peers, LlmRole.kPrompt, cluster_id, "auto", port)
    decoder = born(peers, LlmRole.kDecoder, 3, "auto")
    nobody = free_port()
    both = f"1@127.0.0.1:{ports[0]} 9@127.0.0.1:{nobody} 2@127.0.0.1:{ports[1]}"
    status, each, error = decoder.do(f"link 60000 0 {both}")
    assert (status, each) == (LINK_FAILED, f"0 {LINK_FAILED} 0 ")
    assert "clusters[1]" in error
    assert decoder.do(f"link 10000 0 1@127.0.0.1:{ports[0]}")[:2] == (ALREADY, f"{ALREADY} ")
    assert decoder.do(f"link 10000 0 7@127.0.0.1:{ports[1]}")[0] == LINK_FAILED
    assert decoder.do("link 10000 0")[:2] == (INVALID, ""), "no status is left of what was there"
    assert decoder.do("role 3")[0] == EXIST_LINK
    assert decoder.ok(f"unlink 60000 0 {both}") == "0 0 0 "


def test_what_an_option_forbids_is_not_enabled(peers: ExitStack) -> None:
    peer = born(peers, LlmRole.kMix, 1, "auto", free_port(), TransferBackend="hixl")
    assert peer.do(f"role 1 llm.ListenIpInfo=127.0.0.1:{free_port()}")[0] == NOT_ENABLED


def test_memory_that_the_transport_cannot_reach_is_not_enabled(peers: ExitStack, processes: Processes) -> None:
    prompt, port = python(processes, LlmRole.kPrompt, 1, "shm")
    prompt.do(cpp.made, "kv", Shape(memory="private"), 7)
    decoder = born(peers, LlmRole.kDecoder, 2, "shm")
    ours = cache(decoder, "kv", "private")
    decoder.ok(f"link 10000 0 1@127.0.0.1:{port}")
    status, _, error = decoder.do(f"pull_blocks kv {target(prompt.do(cpp.index, 'kv'))} 1 1 -")
    assert (status, "outside its pools" in error) == (NOT_ENABLED, True)
    assert np.array_equal(decoder.bytes("kv"), ours)


def test_a_peer_that_keeps_as_much_for_us_as_it_may_is_busy(peers: ExitStack, processes: Processes) -> None:
    prompt, port = python(processes, LlmRole.kPrompt, 1, "shm")
    decoder = born(peers, LlmRole.kDecoder, 2, "shm")
    ours = cache(decoder, "kv", "private")
    decoder.ok(f"link 10000 0 1@127.0.0.1:{port}")
    pull = f"pull_cache kv 1 {prompt.do(_rows)} 0 0 -1 -"
    prompt.do(_keep, 0)
    try:
        assert decoder.do(pull)[0] == BUSY
    finally:
        prompt.do(_keep, MAX_PINS_PER_PEER)
    assert np.array_equal(decoder.bytes("kv"), ours)
    decoder.ok(pull)


def test_a_peer_that_goes_in_the_handshake_costs_its_own_link_only(peers: ExitStack) -> None:
    """Regression: SIGPIPE ended the program."""
    port = free_port()
    prompt, decoder = born(peers, LlmRole.kPrompt, 1, "auto", port), born(peers, LlmRole.kDecoder, 2, "auto")
    with socket.create_server(("127.0.0.1", 0)) as there:
        dial, hello = f"link 10000 0 1@127.0.0.1:{there.getsockname()[1]}", b""
        for i in range(100):  # the reset has to come between two messages
            decoder.begin(dial)
            accepted, _ = there.accept()
            with accepted:
                if i == 0:
                    hello = accepted.recv(1 << 16)
                accepted.shutdown(socket.SHUT_WR)
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            assert decoder.finish()[0] == LINK_FAILED
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(hello)
    decoder.ok(f"link 10000 0 1@127.0.0.1:{port}")
    prompt.ok("unlink 10000 1 2@127.0.0.1:1")


def _rows(world: World) -> int:
    """Allocate a cache that a pull may consume, so that it is pinned meanwhile."""
    manager = cpp.dist(world).datadist.cache_manager
    return manager.allocate_cache(CacheDesc(4, [8, 16], DataType.DT_INT32), [CacheKey(1, 1, 1)]).cache_id


def _keep(_: World, pins: int) -> None:
    vars(registry)["MAX_PINS_PER_PEER"] = pins


def test_a_peer_that_does_not_answer_is_a_timeout_and_one_that_dies_is_told(
    peers: ExitStack, processes: Processes
) -> None:
    prompt, port = python(processes, LlmRole.kPrompt, 1, "tcp")
    theirs = np.stack(prompt.do(cpp.made, "kv", Shape(), 7))
    at = prompt.do(cpp.index, "kv")
    decoder = born(peers, LlmRole.kDecoder, 2, "tcp", SyncKvCacheWaitTime="300")
    ours = cache(decoder, "kv", "private")
    decoder.ok(f"link 10000 0 1@127.0.0.1:{port}")
    missing = decoder.do("pull_blocks kv 1 99 0 1 1 -")
    assert (missing[0], "99" in missing[2]) == (NO_CACHE, True)
    with frozen(prompt):
        assert decoder.do(f"pull_blocks kv {target(at)} 1,2 1,2 -")[0] == TIMEOUT
        assert decoder.do(f"unlink 300 0 1@127.0.0.1:{port}")[:2] == (TIMEOUT, f"{TIMEOUT} ")
        found = decoder.bytes("kv")
        assert np.array_equal(np.delete(found, [1, 2], 1), np.delete(ours, [1, 2], 1))
    decoder.ok(f"pull_blocks kv {target(at)} 1,2 1,2 -")
    ours[:, [1, 2]] = theirs[:, [1, 2]]
    assert np.array_equal(decoder.bytes("kv"), ours)
    decoder.ok("finalize")
    decoder.ok(init("tcp"))
    ours = cache(decoder, "kv", "private")
    decoder.ok(f"link 10000 0 1@127.0.0.1:{port}")
    freeze(prompt)
    before = _unread(port)
    decoder.begin(f"pull_blocks kv {target(at)} 1 1 -")
    wait_until(lambda: _unread(port) > before)
    processes.kill(prompt)
    assert decoder.finish()[0] == PEER_DIED
    wait_until(lambda: decoder.do(f"pull_blocks kv {target(at)} 1 1 -")[0] == NOT_LINKED)
    assert np.array_equal(np.delete(decoder.bytes("kv"), 1, 1), np.delete(ours, 1, 1))


def _unread(port: int) -> int:
    """Return the bytes that nobody has read yet from connections to a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4].partition(":")[2], 16) for row in rows if row[1].endswith(f":{port:04X}"))


def test_python_sees_a_cpp_program_killed_and_links_to_its_next_life(peers: ExitStack, processes: Processes) -> None:
    port = free_port()
    prompt = born(peers, LlmRole.kPrompt, 1, "auto", port)
    cache(prompt, "kv", "private")
    decoder, _ = python(processes, LlmRole.kDecoder, 2, "auto")
    ours = np.stack(decoder.do(cpp.made, "kv", Shape(), 7))
    cpp.link(decoder, 1, port)
    prompt.kill()
    wait_until(lambda: decoder.do(_pull)[0] == NOT_LINKED)
    assert np.array_equal(there(decoder, "kv"), ours)
    prompt = born(peers, LlmRole.kPrompt, 1, "auto", port)
    theirs = cache(prompt, "kv", "private", 4000)
    cpp.link(decoder, 1, port)
    assert decoder.do(_pull)[0] == 0
    ours[:, 3] = theirs[:, 2]
    assert np.array_equal(there(decoder, "kv"), ours)


def _pull(world: World) -> tuple[int, str]:
    return cpp.attempt(world, "PullKvBlocks", CacheIndex(1, 1), Use("kv"), [2], [3])


@pytest.mark.parametrize("object", ["static", "forgotten"])
def test_a_program_that_returns_from_main_with_all_it_has_tells_its_peers(
    peers: ExitStack, processes: Processes, object: str
) -> None:
    port = free_port()
    prompt = born(peers, LlmRole.kPrompt, 1, "auto", port)
    cache(prompt, "kv", "pool")
    decoder, _ = python(processes, LlmRole.kDecoder, 2, "auto")
    cpp.link(decoder, 1, port)
    if object == "forgotten":
        prompt.ok("forget")
    assert prompt.exit() == 0
    wait_until(lambda: decoder.do(_links)[0] == 0)
    born(peers, LlmRole.kPrompt, 1, "auto", port)
    cpp.link(decoder, 1, port)  # by now a loss would be counted
    assert decoder.do(_links) == (1, {}), "it was unlinked, not lost"


def _links(world: World) -> tuple[int, dict[str, int]]:
    statistics = world.dd.statistics()
    return len(statistics.links), statistics.links_lost


def test_sixteen_threads_pull_while_one_links_and_unlinks_and_each_has_its_own_reason(peers: ExitStack) -> None:
    ports = free_port(), free_port()
    prompt, other = (born(peers, LlmRole.kPrompt, i, "auto", port) for i, port in enumerate(ports, 1))
    theirs = cache(prompt, "kv", "pool")
    cache(other, "kv", "pool")
    decoder = born(peers, LlmRole.kDecoder, 3, "auto", SyncKvCacheWaitTime="60000")
    ours = cache(decoder, "kv", "pool", 9000)
    decoder.ok(f"link 10000 0 1@127.0.0.1:{ports[0]}")
    decoder.ok(f"storm 16 30 1 1 0 2@127.0.0.1:{ports[1]} ; kv")
    ours[:, :8] = theirs[:, :8]
    assert np.array_equal(decoder.bytes("kv"), ours)


def test_no_thread_of_the_program_is_the_interpreters_main_thread(peers: ExitStack) -> None:
    """Calls of that one would be errands of another thread: slower, and for the sake of signal handlers in Python."""
    peer = born(peers, LlmRole.kMix, 1, "auto", free_port())
    peer.ok("role 1")
    names = {each.read_text().strip() for each in Path(f"/proc/{peer.process.pid}/task").glob("*/comm")}
    assert names & {"lldd-python", "lldd-call"} == {"lldd-python"}


def test_a_forked_child_is_refused_and_ends_well_and_the_parent_goes_on(peers: ExitStack) -> None:
    peer = born(peers, LlmRole.kMix, 1, "auto", free_port())
    ours = cache(peer, "kv", "pool")
    for command in ("fork", f"fork_{init('auto')}"):
        text = peer.ok(command)
        assert text.startswith(f"{FAILED} "), text
        assert "fork" in text
        assert text.endswith(" ended with 0"), text
    peer.ok("copy_blocks kv kv 1 2")
    ours[:, 2] = ours[:, 1]
    assert np.array_equal(peer.bytes("kv"), ours)


def test_a_child_forked_before_the_first_initialize_has_an_interpreter_of_its_own(peers: ExitStack) -> None:
    peer = Peer()
    peers.callback(peer.close)
    peer.ok("new 1 3")
    text = peer.ok(f"fork_{init('auto')}")
    assert (text.split()[0], text.endswith(" ended with 0")) == ("0", True), text
    peer.ok(init("auto"))


def test_an_exit_in_a_signal_handler_waits_for_nothing(peers: ExitStack) -> None:
    peer = Peer()
    peers.callback(peer.close)
    peer.ok("new 2 2")
    peer.ok(init("auto"))
    peer.ok("exit_when_interrupted")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        peer.begin(f"link 600000 0 1@127.0.0.1:{silent.getsockname()[1]}")
        with silent.accept()[0]:
            peer.process.send_signal(signal.SIGINT)
            assert peer.process.wait(60) == 7


def test_the_interpreter_that_a_plugin_has_for_itself_is_used(peers: ExitStack) -> None:
    """Regression: it was begun a second time, by the program's thread, and the program died."""
    peer = Peer()
    peers.callback(peer.close)
    peer.ok("new 1 3")
    peer.ok(f"plugin {sysconfig.get_config_var('LIBDIR')}/{sysconfig.get_config_var('INSTSONAME')} {sys.executable}")
    peer.ok(init("auto"))


def test_no_module_of_the_working_folder_runs_and_site_may_print(peers: ExitStack, tmp_path: Path) -> None:
    """Regression: the question where the interpreter's library is ran a sysconfig.py that lay there."""
    for name in ("sysconfig", "os", "json", "numpy", "llm_datadist"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'has run')!r}, 'w')")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(_NOISE)
    peer = Peer(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    peers.callback(peer.close)
    peer.ok("new 1 3")
    peer.ok(init("auto"))
    assert not (tmp_path / "has run").exists()


_NOISE = """
import atexit, sys
if sys.orig_argv:  # not in the program
    print(9000 * "x")
    atexit.register(print, "bye")
"""


def _script(folder: Path, *lines: str) -> str:
    path = folder / "python"
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("interpreter", "reason"),
    [
        ("missing", "No such file or directory"),
        ("silent", "does not run"),
        ("static", "no shared libpython"),
        ("empty", "No module named 'llm_datadist'"),
    ],
)
def test_an_interpreter_that_cannot_serve_is_a_status_that_says_what_to_install(
    peers: ExitStack, tmp_path: Path, interpreter: str, reason: str
) -> None:
    named = str(tmp_path / "nothing")
    if interpreter == "silent":
        named = _script(tmp_path, "exit 1")
    elif interpreter == "static":
        named = _script(tmp_path, f"echo {tmp_path}/python; echo {tmp_path}/libpython3.a")
    elif interpreter == "empty":
        venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
        named = str(tmp_path / "venv" / "bin" / "python")
    peer = Peer(LLM_DATADIST_PYTHON=named)
    peers.callback(peer.close)
    peer.ok("new 1 1")
    for _ in range(2):  # it may be called again
        status, _, error = peer.do(init("auto"))
        assert status == FAILED
        assert reason in error
        assert "LLM_DATADIST_PYTHON" in error
    peer.ok("finalize")


def test_the_interpreter_of_a_virtual_environment_may_be_named(peers: ExitStack, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    here = next((tmp_path / "venv").glob("lib/python3*/site-packages"))
    paths = [
        str(ROOT / "src"),
        *(each for each in sys.path if "site-packages" in each),
    ]
    (here / "test.pth").write_text("\n".join(f"import site; site.addsitedir({each!r})" for each in paths) + "\n")
    peer = Peer(LLM_DATADIST_PYTHON=str(tmp_path / "venv" / "bin" / "python"))
    peers.callback(peer.close)
    peer.ok("new 1 1")
    peer.ok(init("auto"))
    maps = Path(f"/proc/{peer.process.pid}/maps").read_text()
    assert re.search(r"libpython3\.\d+\.so", maps)
