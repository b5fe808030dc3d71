"""Which loads and faults the alerts of deploy/ are for: a real Prometheus, for whose rules a minute is a second."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from tests.deploy import traffic
from tests.deploy.loads import FAULTS, LOADS, Instance, Pair, stop_instances
from tests.deploy.server import RULES, in_seconds, needs_prometheus, prometheus
from tests.support.ends import ChildEnd
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROUND_SECONDS: Final = 0.1
FAULTS_SECONDS: Final = 120.0


@contextmanager
def _process(name: str) -> Iterator[ChildEnd]:
    """A process of many instances, which ends as it should unless the test has failed."""
    end = ChildEnd(name)
    try:
        yield end
        end.do(traffic.end_serving)
        end.do(stop_instances)
        end.close()
    finally:
        if end.code is None:
            end.kill()


@needs_prometheus
@pytest.mark.timeout(400)
def test_healthy_loads_fire_no_alert_and_each_fault_exactly_its_own(tmp_path: Path) -> None:
    text = in_seconds(RULES.read_text())
    (rules := tmp_path / RULES.name).write_text(text)
    window, wait = (max(map(int, re.findall(pattern, text))) for pattern in (r"\[(\d+)s\]", r"for: (\d+)s"))
    assert (window, wait, re.findall(r"\dm\b", text)) == (30, 10, [])
    assert list(FAULTS) == re.findall(r"- alert: (\w+)", text)
    with ExitStack() as stack:
        prompts, decoders = (stack.enter_context(_process(name)) for name in ("prompts", "decoders"))

        def pair(number: int) -> Pair:
            (folder := tmp_path / str(number)).mkdir()
            return Pair(Instance(prompts, 2 * number), Instance(decoders, 2 * number + 1), folder, stack)

        loads = [load(pair(number)) for number, load in enumerate(LOADS, 1)]
        faults = {name: fault(pair(number)) for number, (name, (fault, _)) in enumerate(FAULTS.items(), 11)}
        ends = {"prompt": (0,), "decoder": (1,), "both": (0, 1)}
        expected = {
            name: {(name, 2 * number + end) for end in ends[sees]}
            for number, (name, (_, sees)) in enumerate(FAULTS.items(), 11)
        }
        for each in [*loads, *faults.values()]:
            stack.callback(each.close)
            next(each)
        server = stack.enter_context(
            prometheus(tmp_path, [end.do(traffic.serve) for end in (prompts, decoders)], rules)
        )

        until = time.monotonic() + window + wait + 5
        while time.monotonic() < until:
            time.sleep(ROUND_SECONDS)
            for load in loads:
                next(load)
            assert server.alerts("10m") == set()
        busy = server.numbers(f"sum by (cluster) (increase(llm_datadist_operation_bytes_total[{window}s])) > 0")
        assert len(busy) == len(loads), "the decoder of each load pulls"

        def fired() -> bool:
            for each in [*loads, *faults.values()]:
                next(each)
            seen = server.alerts("10m")
            assert seen <= set().union(*expected.values())
            for name in [name for name in faults if expected[name] <= seen]:
                faults.pop(name).close()
            return not faults

        try:
            wait_until(fired, FAULTS_SECONDS)
        except AssertionError as error:
            pytest.fail(f"{error}: not fired: {list(faults)}, fired: {server.alerts('10m')}")
