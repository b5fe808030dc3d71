"""Rules over series that real instances exported, each sample a minute: an ordinary day fires none, a fault its own.

Unlike a Prometheus beside them, promtool does not mind how busy the machine is.
"""

import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from llm_datadist.prometheus import StatisticsCollector
from tests.deploy.loads import (
    FAULTS,
    Instance,
    Pair,
    Rounds,
    drained,
    polls,
    replaced,
    restarted,
    unlinks,
    upgraded,
)
from tests.deploy.server import RULES, needs_prometheus, promtool
from tests.support.ends import ChildEnd
from tests.support.world import World

Series = dict[str, list[str]]
MINUTES: Final = 30
_ROUNDS_A_MINUTE: Final = 6
_SECONDS_A_MINUTE: Final = 0.6
_ALERTS: Final = re.findall(r"alert: (\w+)", RULES.read_text())


def _samples(world: World) -> dict[str, float]:
    """Return what the instances of a process export now, by name and labels."""
    collector = StatisticsCollector(*(each.dd for each in world.memory.values() if hasattr(each, "dd")))
    found = {}
    for sample in (sample for family in collector.collect() for sample in family.samples):
        labels = "".join(f',{name}="{value}"' for name, value in sample.labels.items())
        found[f'{sample.name}{{job="j",instance="i"{labels}}}'] = sample.value
    return found


def _recorded(load: Callable[[Pair], Rounds], folder: Path) -> Series:
    """Run a load; return a value of each series for each minute, ``_`` where it was not exported."""
    series: Series = {}
    with ExitStack() as stack:
        prompts, decoders = (ChildEnd(name) for name in ("prompts", "decoders"))
        for process in (prompts, decoders):
            stack.callback(process.kill)
        rounds = load(Pair(Instance(prompts, 1), Instance(decoders, 2), folder, stack))
        stack.callback(rounds.close)
        for minute in range(MINUTES):
            until = time.monotonic() + _SECONDS_A_MINUTE
            for _ in range(_ROUNDS_A_MINUTE if minute else 1):  # a fault is healthy at first
                next(rounds)
            time.sleep(max(0.0, until - time.monotonic()))
            for process in (prompts, decoders):
                for name, value in process.do(_samples).items():
                    series.setdefault(name, ["_"] * minute).append(repr(value))
            for values in series.values():
                values.extend(["_"] * (minute + 1 - len(values)))
    return series


def _fired(series: Series, folder: Path) -> set[str]:
    """Return the alerts that fire in any minute."""
    lines = ["rule_files: [alerts.yml]", "evaluation_interval: 1m", "tests:", "  - interval: 1m", "    input_series:"]
    for name, values in series.items():
        lines += [f"      - series: '{name}'", f"        values: '{' '.join(values)}'"]
    lines.append("    alert_rule_test:")
    for alert in _ALERTS:
        for minute in range(MINUTES):
            lines.append(f"      - {{eval_time: {minute}m, alertname: {alert}, exp_alerts: []}}")
    shutil.copy(RULES, folder)
    (path := folder / "recorded.yml").write_text("\n".join(lines) + "\n")
    done = promtool("test", "rules", path)
    fired = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    assert (done.returncode == 1) == bool(fired), done.stdout + done.stderr
    return fired


@needs_prometheus
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "load", [polls, unlinks, restarted, replaced, upgraded, drained], ids=lambda load: load.__name__
)
def test_an_ordinary_day_fires_no_alert(load: Callable[[Pair], Rounds], tmp_path: Path) -> None:
    series = _recorded(load, tmp_path)
    assert any(name.startswith("llm_datadist_link_up") for name in series)
    assert _fired(series, tmp_path) == set()


@needs_prometheus
@pytest.mark.timeout(300)
@pytest.mark.parametrize("alert", ["LlmDatadistLinkDown", "LlmDatadistRedialling", "LlmDatadistFailureRatio"])
def test_a_fault_fires_its_own_alert(alert: str, tmp_path: Path) -> None:
    fault, _ = FAULTS[alert]
    assert _fired(_recorded(fault, tmp_path), tmp_path) == {alert}
