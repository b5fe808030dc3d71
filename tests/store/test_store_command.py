"""`llm-datadist store` as a user starts it: an engine's bytes through it, its metrics, its statistics at the end."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llm_datadist.store import STORE_ID
from llm_datadist.store.identity import shown
from tests.store import engines as e
from tests.store.engines import NS, family_of, keys_of
from tests.support.moves import make
from tests.support.source import PATHS, ROOT, run

pytest.importorskip("typer", reason="the command needs the extra [cli]")
pytest.importorskip("prometheus_client", reason="its metrics need the extra [metrics]")

pytestmark = pytest.mark.covers("store.*")
COMMAND = [sys.executable, "-W", "error", "-m", "llm_datadist", "store"]


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a store; yield it, and what it prints once it listens."""
    command = [*COMMAND, "--memory", "4MiB", "--listen", "127.0.0.1:0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | PATHS, cwd=ROOT)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_engines_and_metrics_until_it_is_interrupted(end: signal.Signals) -> None:
    with started("--metrics", "0", "--json") as (process, first), family_of() as family:
        assert (first["cluster_id"], first["memory"]) == (STORE_ID, 4 << 20)
        engine = family.child("engine")
        engine.start("MIX", 7)
        engine.do(make, "kv", e.SPEC, 7)
        engine.do(e.open_client, "client", int(first["address"].rpartition(":")[2]), NS, {"store_id": STORE_ID, "label": "m\x1b7"})
        keys = keys_of(0, 1, 2)
        assert engine.do(e.save, keys, [3, 4, 5]) == 3
        assert engine.do(e.hits, keys) == 3
        with urllib.request.urlopen(f"http://127.0.0.1:{first['metrics']}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
        assert NS.hex() not in metrics, "who knows a namespace may use it"
        labels = f'{{label="m?7",namespace="{shown(NS)}",rank="0/1",tenant=""}}'
        for name, value in {"stored_keys_total": 3, "found_keys_total": 3, "published_slots": 3, "slots": 61}.items():
            assert f"llm_datadist_store_{name}{labels} {value:.1f}\n" in metrics
        assert "llm_datadist_store_cleared_namespaces_total 0.0\n" in metrics
        assert f'llm_datadist_link_up{{cluster="{STORE_ID}",peer="7"' in metrics
        process.send_signal(end)
        printed, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        (space,) = json.loads(printed)["statistics"]["namespaces"]
        assert (space["namespace"], space["stored"], space["published"]) == (shown(NS), 3, 3)


@pytest.mark.parametrize("again", [False, True], ids=["released", "interrupted again"])
def test_an_interrupted_store_waits_for_the_hit_that_an_engine_holds(again: bool) -> None:
    with started("--json", "--drain", "50") as (process, first), family_of() as family:
        engine = family.child("engine")
        engine.start("MIX", 7)
        engine.do(make, "kv", e.SPEC, 7)
        engine.do(e.open_client, "client", int(first["address"].rpartition(":")[2]), NS, {"store_id": STORE_ID})
        keys = keys_of(0, 1)
        assert engine.do(e.save, keys, [3, 4]) == 2
        assert engine.do(e.look_up, keys) == 2
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        engine.do(e.load, [5, 6], "hit", "client", False)  # what it holds can still be loaded
        if again:
            process.send_signal(signal.SIGTERM)
        else:
            engine.do(e.release)
        process.wait(40)
        assert process.returncode == 0


def test_mistakes_are_one_line_each() -> None:
    for arguments, text in (
        ((), "Missing option '--memory'"),
        (("--memory", "5x"), "--memory '5x' is not a number of bytes"),
        (("--memory", "1KiB"), "memory: 1024 bytes, at least 262144 are needed"),
        (("--memory", "1MiB", "--option", "x"), "--option 'x' is not of the form KEY=VALUE"),
        (("--memory", "1MiB", "--listen", "nowhere"), "'nowhere' is not of the form ip:port"),
        (("--memory", "1MiB", "--namespaces", "0"), "namespaces"),
    ):
        done = run(*COMMAND, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert text in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr


def test_without_json_it_says_where_it_listens() -> None:
    command = [*COMMAND, "--memory", "1MiB", "--listen", "127.0.0.1:0", "--namespaces", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | PATHS, cwd=ROOT)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("store at 127.0.0.1:")
    assert line.endswith(": 2 namespaces of 0.5 MiB; interrupt to end\n")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


def test_clear_empties_all_namespaces_of_a_running_store() -> None:
    with started("--json") as (_, first), family_of() as family:
        engine = family.child("engine")
        engine.start("MIX", 7)
        engine.do(make, "kv", e.SPEC, 7)
        engine.do(e.open_client, "client", int(first["address"].rpartition(":")[2]), NS, {"store_id": STORE_ID})
        assert engine.do(e.save, keys_of(0, 1, 2), [3, 4, 5]) == 3
        done = run(*COMMAND, "clear", first["address"])
        assert (done.returncode, done.stdout) == (0, "namespaces emptied: 1\n"), done.stderr
        assert engine.do(e.look_up, keys_of(0)) == 0
        done = run(*COMMAND, "clear", first["address"], "--cluster-id", "9")
        assert (done.returncode, done.stdout) == (2, "")
        assert f"store clear: link to {first['address']}: refused: remote_cluster_id=9" in done.stderr
