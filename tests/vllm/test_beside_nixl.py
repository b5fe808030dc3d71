"""A prefill engine in this process whose MultiConnector has NixlConnector and ours: readers of either find its KV."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from five_cases import prompts
from llm_datadist.integrations.references import ReferenceKeys, runtime_secret_file
from llm_datadist.integrations.vllm import LLMDataDistConnector
from llm_datadist.integrations.vllm.layout import pages_of, rows_of
from llm_datadist.integrations.vllm.offers import KvOffer
from llm_datadist.views import tensor_views
from servers import CONNECTORS, free_port
from tests.support.moves import wait_until
from tests.vllm.reader import Reader
from tests.vllm.seen import ENVIRONMENT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]  # vLLM and torch warn

NIXL_LEASE_S = 2
#: Fields of NixlConnector that its readers need.
OF_NIXL = {"do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "tp_size"}


@pytest.fixture(scope="module", params=["ours first", "NixlConnector first"])
def prefill(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    parts = [CONNECTORS[name].config("prefill") for name in ("datadist", "nixl")]
    parts[1]["kv_connector_extra_config"] = {"kv_lease_duration": NIXL_LEASE_S}
    if request.param == "NixlConnector first":
        parts.reverse()
    variables = ENVIRONMENT | {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        made = LLM(
            str(checkpoint),
            dtype="float32",
            max_model_len=768,
            enforce_eager=True,
            num_gpu_blocks_override=16,
            kv_transfer_config=KVTransferConfig(
                kv_connector="MultiConnector",
                kv_role="kv_producer",
                kv_buffer_device="cpu",
                kv_connector_extra_config={"connectors": parts},
            ),
        )
        yield made
        made.llm_engine.engine_core.shutdown()


def ours() -> LLMDataDistConnector:
    (found,) = (each for each in get_kv_transfer_group().sub_connectors if isinstance(each, LLMDataDistConnector))
    return found


def steps_until(prefill: LLM, condition: Callable[[], bool]) -> None:
    def step() -> bool:
        prefill.llm_engine.step()
        return condition()

    wait_until(step, 60)


def pulled(offer: KvOffer, token: bytes) -> tuple[list[bytes], list[bytes]]:
    """Claim and pull what is offered; return its bytes as read, and as they are in the engine's memory."""
    reader, blocks = Reader(9), [block for _, numbers in offer.groups for block in numbers]
    rows = rows_of(offer.layout, pages_of(offer.layout, blocks), 0, offer.layout.heads)
    try:
        grant = reader.claim(offer.ranks[0], token)
        read = [each.tobytes() for each in reader.pull(offer, grant)]
        memory = [view[rows].tobytes() for view in tensor_views(ours()._half._cache)]  # noqa: SLF001
        grant.release()
    finally:
        reader.datadist.finalize()
    return read, memory


def test_a_request_is_offered_to_readers_of_both(prefill: LLM) -> None:
    engine = prefill.llm_engine
    scheduler: Any = engine.engine_core.engine_core.scheduler
    (half,) = (each for each in scheduler.connector.sub_connectors if isinstance(each, LLMDataDistConnector))
    steps_until(prefill, lambda: not half.has_pending_push_work())
    asked = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    for prompt in prompts(2, 300):
        (output,) = prefill.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
        params: Any = output.kv_transfer_params
        assert params.keys() >= OF_NIXL | {"datadist"}
        offer, token = KvOffer.read(params["datadist"], ReferenceKeys(runtime_secret_file()))
        assert [numbers for _, numbers in offer.groups] == [list(each) for each in params["remote_block_ids"]]
        read, memory = pulled(offer, token)
        assert read == memory
        assert any(any(each) for each in read)
        engine.step()
        assert scheduler.get_kv_cache_usage() > 0, "NixlConnector keeps the blocks for its own readers"
        steps_until(prefill, lambda: scheduler.get_kv_cache_usage() == 0)


def test_a_request_that_nobody_decodes_elsewhere_is_not_kept(prefill: LLM) -> None:
    (output,) = prefill.generate([{"prompt_token_ids": [5] * 40}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.kv_transfer_params is None
