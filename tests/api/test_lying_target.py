"""A target whose answers are wrong: typed errors, nothing written, its pin given back, the link as good as before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist._links.messages import Failed, Guarded, Release, Resolve, Resolved, UnlinkAck
from llm_datadist.errors import LLMException, ProtocolError, TransferFailed
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.messages import Message
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR", "errors.ProtocolError")

KEY = CacheKey(1, 10)


def geometry(**change: Any) -> msgspec.Raw:
    fields = {
        "kind": 0,
        "num_tensors": 4,
        "rows": 8,
        "stride": 48,
        "tensor_bytes": 8 * 48,
        "shape": [8, 48],
        "data_type": 4,
        "placement": 1,
    }
    return msgspec.Raw(msgspec.msgpack.encode(list((fields | change).values())))


def words(kind: str, *values: int) -> bytes:
    return np.array(values, dtype=kind).tobytes()


LIES: list[tuple[dict[str, Any], str]] = [
    ({"geometry": msgspec.Raw(b"\xc0")}, "no cache geometry"),
    ({"geometry": geometry(kind=5)}, "no cache geometry"),
    ({"geometry": geometry(rows=2**40)}, "impossible cache geometry"),
    ({"geometry": geometry(stride=0)}, "impossible cache geometry"),
    ({"geometry": geometry(num_tensors=5)}, "4 tensors"),
    ({"geometry": geometry(tensor_bytes=2**62, stride=2**50)}, "ends outside"),
    ({"row": 8}, "row 8"),
    ({"row": 2**63 - 1}, "row 9223372036854775807"),
    ({"regions": b""}, "0 tensors"),
    ({"regions": words("<u4", 1, 1, 1)}, "3 tensors"),
    ({"regions": b"\1\0\0"}, "broken answer"),
    ({"regions": words("<u4", 1, 1, 1, 7)}, "no region 7"),
    ({"offsets": words("<u8", 0, 0, 0)}, "tensors"),
    ({"offsets": b"\0" * 31}, "broken answer"),
    ({"offsets": words("<u8", 0, 0, 0, 32 << 20)}, "ends outside"),
    ({"offsets": words("<u8", 0, 0, 0, (32 << 20) - 8 * 48 + 1)}, "ends outside"),
    ({"offsets": words("<u8", 2**64 - 1, 0, 0, 0)}, "ends outside"),
    ({"guards": [Guarded(2**40, 0)]}, "guard"),
    ({"guards": [Guarded(2**63 - 1, 0)]}, "guard"),
]


class Liar:
    """Doctors the prompt's answers while ``lie`` is set, and notes the pins that come back."""

    def __init__(self, end: LocalEnd) -> None:
        engine: Any = end.world.dd._engine
        self.lie: Callable[[Resolved], Message] | None = None
        self.released: list[int] = []
        handlers: Any = engine.links._handlers
        honest, release = handlers[Resolve], handlers[Release]

        def resolve(link: Any, message: Resolve) -> None:
            if self.lie is None:
                honest(link, message)
                return
            link.send(self.lie(engine._target._resolved(link, message)))

        def note(link: Any, message: Release) -> None:
            self.released.append(message.pin)
            release(link, message)

        handlers[Resolve], handlers[Release] = resolve, note


def pull(world: World, row: int) -> None:
    call(world, "pull_cache", KEY, Use("kv"), row)


def pull_a_layer(world: World, row: int) -> None:
    call(world, "pull_cache", KEY, Use("kv"), row, src_layer_range=range(1), dst_layer_range=range(1))


@pytest.mark.parametrize(("change", "text"), LIES)
def test_rule_10_a_lie_is_a_protocol_error_and_moves_nothing(
    local_pair: Pair, change: dict[str, Any], text: str
) -> None:
    local_pair.start()
    src = local_pair.prompt.do(make, "kv", Spec(keys=(KEY,)), 1)
    dst = local_pair.decoder.do(make, "kv", Spec(), 2)
    liar = Liar(local_pair.prompt)  # type: ignore[arg-type]  # both ends are here
    liar.lie = lambda answer: msgspec.structs.replace(answer, **change)
    with pytest.raises(ProtocolError, match=text) as caught:
        local_pair.decoder.do(pull, 3)
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    assert "\n" not in str(caught.value)
    wait_until(lambda: liar.released == [1])
    assert [key.key for key in local_pair.prompt.do(picture).keys] == ["(0, 10, 0)"]
    same_bytes(local_pair.decoder.do(show, "kv"), dst)
    liar.lie = None
    local_pair.decoder.do(pull, 3)
    same_bytes(local_pair.decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))


@pytest.mark.parametrize(("change", "text"), LIES)
def test_rule_10_a_lie_about_places_that_were_mapped_before_is_no_better(
    local_pair: Pair, change: dict[str, Any], text: str
) -> None:
    local_pair.start()
    src = local_pair.prompt.do(make, "kv", Spec(keys=(KEY,)), 1)
    dst = local_pair.decoder.do(make, "kv", Spec(), 2)
    liar = Liar(local_pair.prompt)  # type: ignore[arg-type]  # both ends are here
    local_pair.decoder.do(pull_a_layer, 3)  # true, and not yet all that the key is for
    liar.lie = lambda answer: msgspec.structs.replace(answer, **change)
    with pytest.raises(ProtocolError, match=text):
        local_pair.decoder.do(pull, 5)
    wait_until(lambda: liar.released == [1, 2])
    expected = moved(dst[:2], src[:2], [(3, 0)]) + dst[2:]
    same_bytes(local_pair.decoder.do(show, "kv"), expected)
    liar.lie = None
    local_pair.decoder.do(pull, 5)
    same_bytes(local_pair.decoder.do(show, "kv"), moved(expected, src, [(5, 0)]))


@pytest.mark.parametrize(
    ("code", "kind", "status"),
    [
        (0, TransferFailed, LLMStatusCode.LLM_FAILED),  # interface R29: nothing that is raised carries success
        (1234, TransferFailed, LLMStatusCode.LLM_FAILED),
        (-1, TransferFailed, LLMStatusCode.LLM_UNKNOWN_ERROR),
        (507057, TransferFailed, LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR),
    ],
)
def test_r29_a_failure_with_any_code_is_a_failure(
    local_pair: Pair, code: int, kind: type[LLMException], status: LLMStatusCode
) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", Spec(keys=(KEY,)), 1)
    dst = local_pair.decoder.do(make, "kv", Spec(), 2)
    liar = Liar(local_pair.prompt)  # type: ignore[arg-type]  # both ends are here
    liar.lie = lambda answer: Failed(answer.id, code, "two\nlines\r\nof text")
    with pytest.raises(kind, match="two lines of text") as caught:
        local_pair.decoder.do(pull, 3)
    assert (caught.value.status_code, caught.value.peer, caught.value.phase) == (status, 1, "resolve")
    assert "\n" not in str(caught.value)
    same_bytes(local_pair.decoder.do(show, "kv"), dst)


def test_rule_10_an_answer_to_another_question_is_a_protocol_error(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", Spec(keys=(KEY,)), 1)
    dst = local_pair.decoder.do(make, "kv", Spec(), 2)
    liar = Liar(local_pair.prompt)  # type: ignore[arg-type]  # both ends are here
    liar.lie = lambda answer: UnlinkAck(answer.id)
    with pytest.raises(ProtocolError, match="answered a Resolve with UnlinkAck"):
        local_pair.decoder.do(pull, 3)
    same_bytes(local_pair.decoder.do(show, "kv"), dst)
