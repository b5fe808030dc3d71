"""Registered memory that is a file's mapping, and the file is truncated: which path of the bytes ends the process.

Where the kernel moves the bytes it says EFAULT and the call fails; where this library touches them by itself the
process dies by SIGBUS, as at any other instruction that does. docs/extensions.md has the table.
"""

from __future__ import annotations

import mmap
import os
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from faults.gates import Gate, shut
from llm_datadist import BlocksCacheKey
from llm_datadist.errors import LLMException, PeerLost, TransferFailed
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links, start_both
from tests.support.moves import Spec, Use, call, make, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.world import World

SPEC = Spec(tensors=4, rows=8, stride=mmap.PAGESIZE, blocks=True)
KEY = BlocksCacheKey(1, 3)
ALL = list(range(SPEC.rows))


def register_file(world: World, path: Path) -> None:
    """Register the mapping of a file as cache "file"."""
    nbytes = SPEC.rows * SPEC.stride
    with path.open("w+b") as file:
        file.truncate(SPEC.tensors * nbytes)
        mapping = mmap.mmap(file.fileno(), 0)
    world.memory["mapping"] = mapping
    memory = np.frombuffer(mapping, np.uint8)
    memory[:] = 7
    addresses = [memory.ctypes.data + tensor * nbytes for tensor in range(SPEC.tensors)]
    del memory
    world.caches["file"] = world.cm.register_blocks_cache(SPEC.desc, addresses, KEY)


def drop_file(world: World) -> None:
    world.cm.unregister_cache(world.caches.pop("file").cache_id)
    world.memory.pop("mapping").close()


def pull_and_stop(world: World, folder: Path) -> None:
    """Pull, and stop between the last byte and the checksum."""
    with shut(world.dd, "after copy", folder, peer=1):
        call(world, "pull_blocks", KEY, Use("target"), ALL, ALL)


def _failure(end: ChildEnd, *args: Any) -> LLMException | None:
    """Return what a call raises; None if its process has died."""
    with suppress(EOFError, ConnectionResetError):
        with pytest.raises(LLMException) as caught:
            end.do(call, *args)
        return caught.value
    end._process.wait(10)
    assert end.code == -signal.SIGBUS, end.code
    return None


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """A prompt and a decoder of their own, linked; a test may kill them."""
    prompt, decoder = ChildEnd("prompt"), ChildEnd("decoder")
    transport, extra = request.param
    start_both(prompt, decoder, transport, extra=extra)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    yield prompt, decoder
    for end in (decoder, prompt):
        if end.code is None:
            end.stop()
            end.close()


@pytest.mark.parametrize("ends", [("auto", {}), ("tcp", {})], indirect=True, ids=["cma", "tcp"])
@pytest.mark.parametrize("truncated", ["source", "destination"])
@pytest.mark.parametrize("rows", [ALL, [5]], ids=["all blocks", "a block"])
def test_where_the_kernel_moves_the_bytes_a_truncated_file_fails_the_pull_and_nothing_else(
    ends: tuple[ChildEnd, ChildEnd], tmp_path: Path, truncated: str, rows: list[int]
) -> None:
    prompt, decoder = ends
    for end in ends:
        end.do(register_file, tmp_path / str(end.cluster_id))
    decoder.do(call, "pull_blocks", KEY, Use("file"), rows, rows)
    os.truncate(tmp_path / ("1" if truncated == "source" else "2"), 0)
    for _ in range(3):
        assert isinstance(_failure(decoder, "pull_blocks", KEY, Use("file"), rows, rows), TransferFailed)
    assert decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(prompt, decoder)
    for end in ends:
        end.do(drop_file)


@pytest.mark.parametrize("ends", [("auto", {})], indirect=True, ids=["shm"])
@pytest.mark.parametrize("verb", ["pull_blocks", "copy_blocks"])
def test_a_copy_of_this_library_into_a_truncated_file_ends_the_process_that_registered_it(
    ends: tuple[ChildEnd, ChildEnd], tmp_path: Path, verb: str
) -> None:
    prompt, decoder = ends
    prompt.do(make, "kv", SPEC, 1)
    prompt.do(make, "keyed", replace(SPEC, blocks_key=BlocksCacheKey(1, 4)), 1)
    decoder.do(register_file, tmp_path / "memory")
    os.truncate(tmp_path / "memory", 0)
    arguments = {"pull_blocks": (BlocksCacheKey(1, 4), Use("file"), ALL, ALL), "copy_blocks": (Use("file"), {0: [1]})}
    assert _failure(decoder, verb, *arguments[verb]) is None
    wait_until(lambda: prompt.do(links) == {})


@pytest.mark.parametrize("ends", [("tcp", {"llm.Checksum": "1"})], indirect=True, ids=["checksum"])
def test_a_checksum_of_a_truncated_file_ends_the_process_that_registered_it(
    ends: tuple[ChildEnd, ChildEnd], tmp_path: Path
) -> None:
    prompt, decoder = ends
    prompt.do(register_file, tmp_path / "memory")
    decoder.do(make, "target", SPEC, 2)
    (folder := tmp_path / "gate").mkdir()
    gate = Gate(folder)
    decoder.begin(pull_and_stop, folder)
    gate.wait()
    os.truncate(tmp_path / "memory", 0)
    gate.open()
    with pytest.raises(PeerLost):
        decoder.finish()
    wait_until(lambda: prompt.code == -signal.SIGBUS)
