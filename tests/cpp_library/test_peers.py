"""C++ programs that link the library, beside Python's and each other: what moves, by every call."""

from contextlib import ExitStack

import numpy as np
import pytest

from llm_datadist.cpp_api import CacheIndex, KvCacheExtParam, LlmRole
from tests.support import cpp
from tests.support.cpp import OK, Shape
from tests.support.cpp_peer import EXIST_LINK, FAILED, INVALID, NOT_LINKED, born, cache, python, target, there
from tests.support.ends import Processes
from tests.support.linking import free_port
from tests.support.moves import Use

PAIRS = [("shm", "pool"), ("cma", "private"), ("tcp", "private"), ("tcp", "pool")]


@pytest.mark.parametrize(("transport", "memory"), PAIRS)
def test_a_decoder_in_cpp_pulls_from_and_pushes_to_a_prompt_in_python(
    peers: ExitStack, processes: Processes, transport: str, memory: str
) -> None:
    prompt, port = python(processes, LlmRole.kPrompt, 1, transport)
    theirs = np.stack(prompt.do(cpp.made, "kv", Shape(memory=memory), 7))
    at = prompt.do(cpp.index, "kv")
    decoder = born(peers, LlmRole.kDecoder, 2, transport)
    ours = cache(decoder, "kv", memory)
    assert decoder.ok(f"link 10000 0 1@127.0.0.1:{port}") == "0 "
    # In order: of two pieces to one block the last one stays.
    decoder.ok(f"pull_blocks kv {target(at)} 1,2,1,4 7,0,3,0 -")
    ours[:, [7, 3]], ours[:, 0] = theirs[:, [1, 1]], theirs[:, 4]
    assert np.array_equal(decoder.bytes("kv"), ours)
    decoder.ok(f"pull_cache kv {target(at, 6)} 5 -1 -")
    ours[:, 5] = theirs[:, 6]
    decoder.ok(f"pull_cache kv {target(at, 2)} 1 20 0 0 1 1 2")
    ours[2:4, 1, :20] = theirs[0:2, 2, :20]
    assert np.array_equal(decoder.bytes("kv"), ours)
    decoder.ok(f"push_blocks kv {target(at)} 7,2 1,5 1 2 2 3 1")
    theirs[2:4, [1, 5]] = ours[1:3][:, [7, 2]]
    decoder.ok(f"push_cache kv {target(at, 7)} 4 -1 -")
    theirs[:, 7] = ours[:, 4]
    assert np.array_equal(there(prompt, "kv"), theirs)
    assert np.array_equal(decoder.bytes("kv"), ours)
    assert decoder.ok(f"unlink 10000 0 1@127.0.0.1:{port}") == "0 "
    assert decoder.do(f"pull_blocks kv {target(at)} 1 1 -")[0] == NOT_LINKED


@pytest.mark.parametrize(("transport", "memory"), PAIRS)
def test_a_decoder_in_python_pulls_from_and_pushes_to_a_prompt_in_cpp(
    peers: ExitStack, processes: Processes, transport: str, memory: str
) -> None:
    port = free_port()
    prompt = born(peers, LlmRole.kPrompt, 1, transport, port)
    theirs = cache(prompt, "kv", memory)
    assert prompt.ok("id kv") == "1", "the first cache of a process"
    decoder, _ = python(processes, LlmRole.kDecoder, 2, transport)
    ours = np.stack(decoder.do(cpp.made, "kv", Shape(memory=memory), 7))
    cpp.link(decoder, 1, port)
    assert decoder.do(cpp.run, "PullKvBlocks", CacheIndex(1, 1), Use("kv"), [1, 2], [7, 0]) is OK
    ours[:, [7, 0]] = theirs[:, [1, 2]]
    layer = KvCacheExtParam((0, 0), (3, 3), 1)
    assert decoder.do(cpp.run, "PushKvBlocks", Use("kv"), CacheIndex(1, 1), [4], [6], layer) is OK
    theirs[3, 6] = ours[0, 4]
    assert np.array_equal(prompt.bytes("kv"), theirs)
    assert np.array_equal(there(decoder, "kv"), ours)


@pytest.mark.parametrize("memory", ["pool", "private"])
def test_two_cpp_programs_pull_copy_and_switch_their_roles(peers: ExitStack, memory: str) -> None:
    first, second = free_port(), free_port()
    prompt, decoder = (
        born(peers, LlmRole.kPrompt, 1, "auto", first),
        born(peers, LlmRole.kDecoder, 2, "auto"),
    )
    theirs, ours = cache(prompt, "kv", memory, 1000), cache(decoder, "kv", memory, 5000)
    assert decoder.ok(f"link 10000 0 1@127.0.0.1:{first}") == "0 "
    decoder.ok("pull_blocks kv 1 1 0 1,2 0,1 -")
    decoder.ok("copy_blocks kv kv 0,1 2,3 6,7")
    ours[:, [0, 1]] = ours[:, [2, 3]] = ours[:, [6, 7]] = theirs[:, [1, 2]]
    decoder.ok("copy_cache kv kv 0 4 8")
    ours[:, 4, 8:] = ours[:, 0, 8:]
    assert np.array_equal(decoder.bytes("kv"), ours)
    assert decoder.do(f"role 1 llm.ListenIpInfo=127.0.0.1:{second}")[0] == EXIST_LINK
    decoder.ok(f"unlink 10000 0 1@127.0.0.1:{first}")
    prompt.begin(f"unlink 10000 1 2@127.0.0.1:{first}")
    assert prompt.finish()[0] == 0
    decoder.ok(f"role 1 llm.ListenIpInfo=127.0.0.1:{second}")
    prompt.ok("role 2")
    assert prompt.ok(f"link 10000 0 2@127.0.0.1:{second}") == "0 "
    prompt.ok("pull_blocks kv 2 1 0 4 5 -")
    theirs[:, 5] = ours[:, 4]
    assert np.array_equal(prompt.bytes("kv"), theirs)
    for peer in (prompt, decoder):
        peer.ok("deallocate 1" if memory == "pool" else "unregister 1")
        peer.ok("finalize")
        assert peer.do("pull_blocks kv 2 1 0 4 5 -")[0] == FAILED


def test_host_memory_without_an_id_is_copied_from_and_to_a_cache(peers: ExitStack) -> None:
    peer = born(peers, LlmRole.kMix, 1, "auto")
    ours = cache(peer, "kv", "pool")
    peer.ok("own swap 9000 0 4 3 8,16 0")
    host = peer.bytes("swap").copy()
    peer.ok("copy_blocks kv swap 1,2 5,6")
    host[:, [5, 6]] = ours[:, [1, 2]]
    peer.ok("copy_blocks swap kv 0,5 3,4 6,7")
    ours[:, [3, 6]] = host[:, [0]]
    ours[:, [4, 7]] = host[:, [5]]
    assert np.array_equal(peer.bytes("swap"), host)
    assert np.array_equal(peer.bytes("kv"), ours)
    assert peer.do("copy_blocks swap swap 1 2")[0] == INVALID
    assert np.array_equal(peer.bytes("swap"), host)
