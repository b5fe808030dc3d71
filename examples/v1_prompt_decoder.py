"""The older interface (v1): a prompt serves its caches, a decoder pulls them, then copies and swaps blocks of its own.

One command runs both roles, as two processes on loopback, and checks every byte:

    python examples/v1_prompt_decoder.py

or run the roles by hand, the prompt first:

    python examples/v1_prompt_decoder.py --role prompt --listen 127.0.0.1:26000
    python examples/v1_prompt_decoder.py --role decoder --remote 127.0.0.1:26000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

PROMPT, DECODER = 1, 2
TENSORS, BLOCKS = 4, 10
PAGED = CacheDesc(TENSORS, [BLOCKS, 128], DataType.DT_FLOAT)
ROWS = CacheDesc(TENSORS, [2, 256], DataType.DT_FLOAT16)
#: The prompt's row 0 has no key: the placeholder.
KEYS = [CacheKey(PROMPT, req_id=2**64 - 1), CacheKey(PROMPT, req_id=7)]
PATIENCE_SECONDS = 60


def paged_value(tensor: int, block: int) -> float:
    return 100.0 * tensor + block + 1


def row_value(tensor: int, row: int) -> float:
    return 10.0 * tensor + row + 1


def start(role: LLMRole, cluster_id: int, listen: str = "") -> LLMDataDist:
    config = LLMConfig()
    config.device_id = 0
    config.sync_kv_timeout = 10_000
    config.ge_options = {"ge.flowGraphMemMaxSize": str(64 << 20)}
    if listen:
        config.listen_ip_info = listen
    datadist = LLMDataDist(role, cluster_id)
    datadist.init(config.generate_options())
    return datadist


def prompt(listen: str) -> None:
    """Publish a blocks cache and a row, and wait until a decoder has come and gone."""
    datadist = start(LLMRole.PROMPT, PROMPT, listen)
    manager = datadist.kv_cache_manager
    paged = manager.allocate_blocks_cache(PAGED, BlocksCacheKey(PROMPT, 0))
    rows = manager.allocate_cache(ROWS, KEYS)
    for tensor in range(TENSORS):
        for block in range(BLOCKS):
            manager.get_cache_tensors(paged, tensor)[0].numpy()[block] = paged_value(tensor, block)
        for row in range(2):
            manager.get_cache_tensors(rows, tensor)[0].numpy()[row] = row_value(tensor, row)
    manager.deallocate_cache(rows)  # freed once its key has been pulled
    print(f"prompt: listening on {datadist.listen_port}", flush=True)
    wait_for(lambda: bool(datadist.statistics().links), "a decoder to link")
    wait_for(lambda: not datadist.statistics().links, "the decoder to unlink")
    assert datadist.statistics().caches.deferred == 0, "the row was pulled, so nothing keeps its memory"
    manager.deallocate_cache(paged)
    datadist.finalize()
    print("prompt: done", flush=True)


def decoder(remote: str) -> None:
    """Link, pull blocks and a row, copy and swap, and check every byte."""
    datadist = start(LLMRole.DECODER, DECODER)
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PROMPT
    cluster.append_local_ip_info("127.0.0.1", 0)
    ip, _, port = remote.rpartition(":")
    cluster.append_remote_ip_info(ip, int(port))
    status, _ = datadist.link_clusters([cluster], 10_000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    datadist.check_link_status(PROMPT)
    blocks_and_swap(datadist.kv_cache_manager)
    rows_and_copy(datadist.kv_cache_manager)
    status, _ = datadist.unlink_clusters([cluster], 10_000)
    assert status == LLMStatusCode.LLM_SUCCESS, status
    datadist.finalize()
    print("decoder: every byte is right", flush=True)


def blocks_and_swap(manager: KvCacheManager) -> None:
    paged = manager.allocate_blocks_cache(PAGED)
    expected = np.zeros((TENSORS, BLOCKS), np.float32)  # one value per block
    manager.pull_blocks(BlocksCacheKey(PROMPT, 0), paged, [0, 1], [2, 3])
    for tensor in range(TENSORS):
        expected[tensor, 2:4] = paged_value(tensor, 0), paged_value(tensor, 1)
    check("pull_blocks", manager, paged, expected)
    manager.copy_blocks(paged, {2: [0, 1]})
    expected[:, 0] = expected[:, 1] = expected[:, 2]
    check("copy_blocks", manager, paged, expected)
    # Two blocks go out to host memory, and come back into others.
    memory = np.zeros((TENSORS, 2, 128), np.float32)
    host_desc = CacheDesc(TENSORS, [2, 128], DataType.DT_FLOAT, Placement.HOST)
    host = KvCache.create_cpu_cache(host_desc, [tensor.ctypes.data for tensor in memory])
    manager.swap_blocks(paged, host, {2: 0, 3: 1})
    assert (memory == expected[:, 2:4, None]).all(), "swap out"
    manager.swap_blocks(host, paged, {0: 8, 1: 9})
    expected[:, 8:10] = expected[:, 2:4]
    check("swap_blocks", manager, paged, expected)
    manager.deallocate_cache(paged)


def rows_and_copy(manager: KvCacheManager) -> None:
    pulled, batch = manager.allocate_cache(ROWS), manager.allocate_cache(ROWS)
    manager.pull_cache(KEYS[1], pulled, batch_index=0)
    manager.copy_cache(batch, pulled, dst_batch_index=1, src_batch_index=0, req_id=7)
    expected = np.zeros((TENSORS, 2), np.float16)
    expected[:, 1] = [row_value(tensor, 1) for tensor in range(TENSORS)]
    check("pull_cache, copy_cache", manager, batch, expected)
    for cache in (pulled, batch):
        manager.deallocate_cache(cache)


def check(what: str, manager: KvCacheManager, cache: KvCache, expected: np.ndarray) -> None:
    """Compare every byte of the cache with one expected value per row or block."""
    for tensor in range(TENSORS):
        (found,) = manager.get_cache_tensors(cache, tensor)
        assert (found.numpy() == expected[tensor][:, None]).all(), f"{what}: tensor {tensor} is wrong"
    print(f"decoder: {what}: ok", flush=True)


def wait_for(condition, what: str) -> None:  # noqa: ANN001 (an example stays short)
    limit = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < limit, f"waited {PATIENCE_SECONDS} s for {what}"
        time.sleep(0.002)


def both() -> int:
    """Run the two roles as two processes; the exit status."""
    command = [sys.executable, __file__, "--role"]
    with subprocess.Popen([*command, "prompt", "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            first = server.stdout.readline()
            print(first, end="", flush=True)
            port = first.rsplit(maxsplit=1)[-1]
            failed = subprocess.run([*command, "decoder", "--remote", f"127.0.0.1:{port}"], check=False).returncode
            if failed:
                server.terminate()  # nobody will come any more
            print(server.stdout.read(), end="", flush=True)
            return failed or server.wait(PATIENCE_SECONDS)
        finally:
            server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--role", choices=["prompt", "decoder"], help="left out: both, as two processes")
    parser.add_argument("--listen", default="127.0.0.1:26000", help="where the prompt listens; port 0 picks one")
    parser.add_argument("--remote", default="127.0.0.1:26000", help="where the decoder finds the prompt")
    arguments = parser.parse_args()
    if arguments.role == "prompt":
        prompt(arguments.listen)
    elif arguments.role == "decoder":
        decoder(arguments.remote)
    else:
        return both()
    return 0


if __name__ == "__main__":
    sys.exit(main())
