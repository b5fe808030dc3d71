"""Each call of vLLM in each state of a request: the orders that workers get, and the state afterwards."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from vllm.v1.request import RequestStatus

from llm_datadist.integrations.request_states import Fetch, Offer
from llm_datadist.integrations.vllm import identity
from llm_datadist.integrations.vllm.layout import Layout
from llm_datadist.integrations.vllm.offers import ClaimedRequests, EndpointMetadata, RankEndpoint
from llm_datadist.integrations.vllm.scheduler import Scheduler
from tests.vllm.test_requests import PROMPT, TOKENS, adapted, adapter, asked, configured

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.request import Request

BLOCKS: Any = ([1, 2, 3],)
GIVEN: Any = SimpleNamespace(get_block_ids=lambda: BLOCKS)
CALLS = ("blocks", "no fetch", "computed", "preempted", "ended", "aborted", "received", "claimed", "sent")

#: Orders and next state; in every other pair there is neither.
EXPECTED: dict[tuple[Fetch | Offer, str], tuple[str, Fetch | Offer]] = {
    (Fetch.UNVERIFIED, "blocks"): ("refused", Fetch.FETCHING),
    (Fetch.REFUSED, "blocks"): ("refused", Fetch.FETCHING),
    (Fetch.VERIFIED, "blocks"): ("fetches", Fetch.FETCHING),
    **{(Fetch.UNVERIFIED, call): ("", Fetch.NONE) for call in ("no fetch", "ended", "aborted")},
    **{(Fetch.REFUSED, call): ("", Fetch.NONE) for call in ("no fetch", "ended", "aborted")},
    **{(Fetch.VERIFIED, call): ("drops", Fetch.NONE) for call in ("no fetch", "ended", "aborted")},
    (Fetch.FETCHING, "received"): ("", Fetch.NONE),
    (Offer.COMPUTING, "computed"): ("grants", Offer.GRANTED),
    **{(Offer.COMPUTING, call): ("", Offer.NONE) for call in ("ended", "aborted")},
    (Offer.GRANTED, "preempted"): ("revokes", Offer.COMPUTING),
    (Offer.GRANTED, "ended"): ("offered", Offer.OFFERED),
    (Offer.GRANTED, "aborted"): ("revokes", Offer.NONE),
    (Offer.OFFERED, "claimed"): ("", Offer.CLAIMED),
    (Offer.OFFERED, "sent"): ("", Offer.NONE),
    (Offer.CLAIMED, "sent"): ("", Offer.NONE),
}


class Half:
    """The scheduler's half in an engine, and its request."""

    def __init__(self, role: str, request: Request) -> None:
        self.scheduler, self.request = Scheduler(*configured(role)), request
        layout = Layout({}, TOKENS, 1, 1, TOKENS, [["layer"]], 1, 1, [])
        if role == "prefill":
            self.scheduler.take_endpoints({(0, 0): EndpointMetadata(RankEndpoint(1, "", "h", 1), layout)})
        self.scheduler.on_new_request(request)
        self.params: Any = None

    def call(self, call: str) -> str:
        """Make a call as vLLM does; return the names of the orders that it leaves, and of no others."""
        scheduler, request = self.scheduler, self.request
        step: Any = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
        output: Any = SimpleNamespace(
            kv_connector_worker_meta=ClaimedRequests({"one"} if call == "claimed" else set()),
            finished_sending={"one"} if call == "sent" else None,
            finished_recving={"one"} if call == "received" else None,
        )
        if call in ("blocks", "no fetch"):
            scheduler.allocated(request, GIVEN, len(PROMPT) - 1 if call == "blocks" else 0)
        elif call == "computed":
            step.num_scheduled_tokens = {"one": len(PROMPT)}
            step.kv_connector_block_state = SimpleNamespace(resolve_block_ids=lambda _: BLOCKS)
        elif call == "preempted":
            step.preempted_req_ids = {"one"}
        elif call in ("ended", "aborted"):
            status = {"ended": RequestStatus.FINISHED_LENGTH_CAPPED, "aborted": RequestStatus.FINISHED_ABORTED}
            request.status = status[call]
            keeps, self.params = scheduler.finished(request, BLOCKS)
            assert keeps is bool(self.params)
        scheduler.take_output(output)
        return " ".join(name for name, orders in vars(scheduler.take_orders(step)).items() if orders)

    def state(self, of: type[Fetch | Offer]) -> Fetch | Offer:
        if (tracked := self.scheduler.requests.get("one")) is None:
            return of.NONE
        return tracked.fetch if of is Fetch else tracked.offer


def in_state(state: Fetch | Offer, folder: Path) -> Half:
    if isinstance(state, Offer):
        half = Half("prefill", asked("one", {"do_remote_decode": state is not Offer.NONE}, PROMPT))
        for call, reached in (("computed", Offer.GRANTED), ("ended", Offer.OFFERED), ("claimed", Offer.CLAIMED)):
            if half.state(Offer) is not state:
                half.call(call)
                assert half.state(Offer) is reached
        return half
    params = in_state(Offer.GRANTED, folder)
    params.call("ended")
    given = {Fetch.NONE: {}, Fetch.REFUSED: {"datadist": "forged"}}.get(state, params.params)
    waits = adapted("one", given, folder) if state is Fetch.UNVERIFIED else asked("one", given, PROMPT)
    half = Half("decode", waits)
    half.scheduler.take_orders(
        SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, kv_connector_block_state=None)
    )
    if state is Fetch.FETCHING:
        half.call("blocks")
    return half


@pytest.mark.parametrize("state", [*Fetch, *Offer], ids=str)
def test_every_call_in_every_state(state: Fetch | Offer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, folder = threading.Event(), adapter(tmp_path / "adapter", 1.0)
    monkeypatch.setattr(identity, "digest_of", lambda _: str(known.wait(60)))
    halves = {call: in_state(state, folder) for call in CALLS}
    for call, half in halves.items():
        assert half.state(type(state)) is state
        assert (half.call(call), half.state(type(state))) == EXPECTED.get((state, call), ("", state)), call
        for later in ("received", "aborted", "sent"):
            half.call(later)
        assert half.scheduler.requests == {}
        assert half.call("aborted") == "", "vLLM may say so twice"
    known.set()
    for half in halves.values():
        half.scheduler.stop()
