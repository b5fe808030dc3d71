"""A prefill engine in this process, whose steps the tests choose: references are good at once, tokens die in time."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.config import KVTransferConfig
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from five_cases import prompts
from llm_datadist.errors import DeadlineExceeded, GrantEnded
from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file
from llm_datadist.integrations.vllm.offers import KvOffer
from servers import Connector
from tests.vllm.reader import Reader
from tests.vllm.seen import ENVIRONMENT, SeenConnector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from llm_datadist.types.grant import Grant

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM and torch warn

BLOCKS = 7  # one of them is vLLM's null block


class Prefill:
    """The engine; prompts of more than 256 tokens are computed in several steps."""

    def __init__(self, checkpoint: Path) -> None:
        connector = Connector("SeenConnector", "tests.vllm.seen", {"max_unclaimed_blocks": BLOCKS, "lease_s": 600})
        self.llm = LLM(
            str(checkpoint),
            dtype="float32",
            max_model_len=768,
            max_num_batched_tokens=256,
            enforce_eager=True,
            num_gpu_blocks_override=BLOCKS,
            kv_transfer_config=KVTransferConfig(**connector.config("prefill")),
        )
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler

    def offer(self, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt; the engine makes no step after the one that has the answer."""
        (output,) = self.llm.generate([{"prompt_token_ids": prompt}], _sampling(1), use_tqdm=False)
        params: dict[str, Any] | None = output.kv_transfer_params
        assert params is not None
        return params

    def add(self, name: str, prompt: list[int], new: int) -> None:
        self.engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(new))

    def until(self, done: Callable[[], object]) -> dict[str, dict[str, Any] | None]:
        """Make steps until ``done()``; return the params of the requests that ended."""
        ended: dict[str, dict[str, Any] | None] = {}
        for _ in range(10_000):
            if done():
                return ended
            ended |= {each.request_id: each.kv_transfer_params for each in self.engine.step() if each.finished}
        raise AssertionError("not after 10,000 steps")

    def is_free(self) -> bool:
        return bool(self.scheduler.get_kv_cache_usage() == 0)

    @staticmethod
    def bytes_of(offer: KvOffer) -> np.ndarray:
        """Return the blocks of an offer as they lie in vLLM's memory: (layers, bytes)."""
        nbytes = offer.layout.rows * offer.layout.row_bytes
        blocks = [block for _, numbers in offer.groups for block in numbers]
        addresses = sorted({each.data_ptr() for each in SeenConnector.layers})
        rows = [b"".join(ctypes.string_at(base + block * nbytes, nbytes) for block in blocks) for base in addresses]
        return np.array([np.frombuffer(row, np.uint8) for row in rows])


def _sampling(new: int) -> SamplingParams:
    asked = {"do_remote_decode": True}
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": asked})


def granted() -> dict[str, tuple[bytes, list[int]]]:
    """Return all grants so far, the last of each request."""
    return {name: given for orders in SeenConnector.orders for name, given in orders.grants.items()}


def revoked() -> set[str]:
    return {name for orders in SeenConnector.orders for name in orders.revokes}


def read(params: dict[str, Any]) -> tuple[KvOffer, bytes]:
    return KvOffer.read(params["datadist"], ReferenceKeys(runtime_secret_file()))


@pytest.fixture(scope="module")
def prefill(checkpoint: Path) -> Iterator[Prefill]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Prefill(checkpoint)
        yield made
        made.engine.engine_core.shutdown()


@pytest.fixture
def reader() -> Iterator[Reader]:
    made = Reader(8)
    yield made
    made.datadist.finalize()


def dead(reader: Reader, token: bytes) -> bool:
    try:
        reader.claim(SeenConnector.rank.endpoint, token).release()
    except (GrantEnded, DeadlineExceeded):
        return True
    return False


def consume(prefill: Prefill, reader: Reader, params: dict[str, Any] | None) -> None:
    """Pull what is offered, compare the bytes, release it."""
    assert params is not None
    offer, token = read(params)
    grant = reader.claim(offer.ranks[0], token)
    assert np.array_equal(reader.pull(offer, grant), prefill.bytes_of(offer))
    grant.release()


def test_another_process_pulls_equal_bytes_from_an_engine_that_makes_no_further_step(
    prefill: Prefill, tmp_path: Path
) -> None:
    asked = [prompts(1, length)[0] for length in (2, 128, 129, 130, 500, 500, 600)]  # the second of 500 is cached
    command = [sys.executable, "-m", "tests.vllm.reader", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for number, prompt in enumerate(asked):
            params = prefill.offer(prompt)
            steps = len(SeenConnector.orders)
            other.stdin.write(json.dumps(params) + "\n")
            other.stdin.flush()
            said = other.stdout.readline()
            sys.stdout.write(f"{len(prompt)} tokens: {said}")
            assert said.startswith("claimed")
            assert len(SeenConnector.orders) == steps
            there, here = prefill.bytes_of(read(params)[0]), np.load(tmp_path / f"{number}.npy")
            assert np.array_equal(there, here)
            assert not (here == 0xFF).all(1).any()
            here[:, : here.shape[1] // 2] = 0
            assert not np.array_equal(there, here), "bytes that are lost would not be noticed"
            prefill.until(prefill.is_free)
        other.stdin.close()


def test_the_token_of_an_aborted_request_is_dead(prefill: Prefill, reader: Reader) -> None:
    SeenConnector.orders.clear()
    prefill.add("aborted", prompts(1, 300)[0], 400)
    prefill.until(granted)
    ((name, (token, _)),) = granted().items()
    grant: Grant = reader.claim(SeenConnector.rank.endpoint, token)  # nobody could: the offer was not handed out
    prefill.engine.abort_request(["aborted"])
    prefill.until(revoked)
    assert revoked() == {name}
    assert dead(reader, token)
    assert dead(reader, grant.token)
    prefill.until(prefill.is_free)
    assert name not in SeenConnector.sent
    consume(prefill, reader, prefill.offer(prompts(2, 300)[1]))
    prefill.until(prefill.is_free)


def test_the_token_of_a_preempted_request_is_dead_and_it_is_granted_anew(prefill: Prefill, reader: Reader) -> None:
    SeenConnector.orders.clear()
    for number, prompt in enumerate(prompts(3, 250)):  # two blocks each; from token 257 on three
        prefill.add(f"request{number}", prompt, 40)
    ended = prefill.until(revoked)
    assert ended == {}
    first = granted()
    (name,) = revoked()
    token, blocks = first[name]
    assert dead(reader, token)
    ended = prefill.until(lambda: len(prefill.scheduler.running) == 0)
    assert len(ended) == 2
    for params in ended.values():
        consume(prefill, reader, params)
    ended = prefill.until(lambda: not prefill.engine.has_unfinished_requests())
    ((_, params),) = ended.items()
    again, now = granted()[name]
    sys.stdout.write(f"preempted {name}: blocks {blocks}, then {now}\n")
    assert params is not None
    assert read(params)[1] == again != token
    assert dead(reader, token)
    consume(prefill, reader, params)
    prefill.until(prefill.is_free)


def test_a_request_that_goes_on_after_its_prompt_is_offered_at_its_end(prefill: Prefill, reader: Reader) -> None:
    SeenConnector.orders.clear()
    prefill.add("long", prompts(1, 300)[0], 100)
    ended = prefill.until(lambda: not prefill.engine.has_unfinished_requests())
    assert len(granted()) == 1
    assert revoked() == set()
    consume(prefill, reader, ended["long"])
    prefill.until(prefill.is_free)
