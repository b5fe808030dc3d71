"""``llm-datadist top``: what it shows equals ``statistics()`` of two processes that have moved data."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from textual.widgets import DataTable, Static

from llm_datadist._statistics_page import PageError, StatisticsPage, instances, read_page
from llm_datadist.cli.top_screen import Top
from tests.support.moves import BLOCKS, Spec, Use, call, make, wait_until

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World


def _publish(world: World) -> Any:
    """Write the page now; return pid and statistics of that moment."""
    engine = world.dd._engine
    assert engine is not None
    assert engine._page is not None
    engine._control.call(engine._page.write)
    return os.getpid(), msgspec.to_builtins(world.dd.statistics())


def _moved(pair: Pair) -> None:
    pair.start()
    spec = Spec(tensors=2, rows=4, stride=1024, blocks=True)
    pair.prompt.do(make, "blocks", replace(spec, blocks_key=BLOCKS), 1)
    pair.decoder.do(make, "kv", spec, 2)
    for _ in range(3):
        pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 1], [1, 2])


def _once() -> dict[int, Any]:
    command = [sys.executable, "-m", "llm_datadist.cli", "top", "--once", "--json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return {each["pid"]: each for each in json.loads(output)["instances"]}


def test_once_as_json_equals_the_statistics_of_both_processes(shm_pair: Pair) -> None:
    _moved(shm_pair)
    for end in (shm_pair.prompt, shm_pair.decoder):
        pid, expected = end.do(_publish)
        shown = _once()[pid]["statistics"]
        for key in (*shown["keys"], *expected["keys"]):
            del key["age_seconds"]
        assert shown == json.loads(json.dumps(expected))


def test_the_screen_shows_links_and_operations_and_says_why(shm_pair: Pair) -> None:
    _moved(shm_pair)
    pid, expected = shm_pair.decoder.do(_publish)
    (link,) = expected["links"]

    async def look() -> None:
        app = Top()
        async with app.run_test(size=(160, 50)) as pilot:
            row = [f"{each['pid']}" for each in app.found for _ in each["statistics"]["links"]].index(str(pid))
            links = app.query_one("#links", DataTable)
            assert links.get_row_at(row)[1:6] == ["1", "ready", "shm", str(link["read_bytes"]), "0"]
            operations = app.query_one("#operations", DataTable)
            rows = [operations.get_row_at(at) for at in range(operations.row_count)]
            assert any(each[1:5] == ["pull_blocks", "shm", "3", str(3 * 2 * 2 * 1024)] for each in rows)
            links.move_cursor(row=row)
            await pilot.press("e")
            assert str(app.query_one("#reason", Static).content) == link["reason"]
            await pilot.press("q")

    asyncio.run(look())


def test_an_option_switches_it_off(shm_pair: Pair) -> None:
    shm_pair.start(extra={"llm.StatisticsPage": "0"})
    pids = {each["pid"] for each in instances()}
    assert pids.isdisjoint({shm_pair.prompt.do(_pid), shm_pair.decoder.do(_pid)})


def _pid(_: World) -> int:
    return os.getpid()


_PAGE = """
import sys
from llm_datadist import LLMDataDist, LLMRole
one = LLMDataDist(LLMRole.DECODER, 77)
one.init({"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"})
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_nothing_and_another_user_sees_nothing() -> None:
    with subprocess.Popen([sys.executable, "-c", _PAGE], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in {each["pid"] for each in instances()}
        if os.getuid() == 0:
            assert _opened_by_nobody(process.pid) == "refused"
        process.kill()
        process.wait()
        assert process.pid not in {each["pid"] for each in instances()}


def _opened_by_nobody(pid: int) -> str:
    look = f"""
import os
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    os.listdir("/proc/{pid}/fd"); print("listed")
except PermissionError:
    print("refused")
"""
    return subprocess.run([sys.executable, "-c", look], check=True, capture_output=True, text=True).stdout.strip()


def test_a_reader_never_sees_half_a_page(shm_pair: Pair) -> None:
    shm_pair.start()
    now = shm_pair.decoder.do(_statistics)
    page = StatisticsPage(5, lambda: next(contents))
    contents = iter((f"{at} " * (1 + at % 2 * 5000), now) for at in range(1 << 30))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            page.write()

    page.write()
    writer = threading.Thread(target=write)
    writer.start()
    try:
        roles: set[str] = set()
        while len(roles) < 50:
            try:
                found = read_page(page._fd)
            except PageError:
                continue
            names = found["role"].split()
            assert len(set(names)) == 1
            assert len(names) == 1 + int(names[0]) % 2 * 5000
            roles.add(names[0])
    finally:
        stop.set()
        writer.join()
        page.close()


def _statistics(world: World) -> Any:
    return world.dd.statistics()


def test_a_page_that_stays_half_written_is_refused_and_one_that_is_too_long_is_cut(shm_pair: Pair) -> None:
    shm_pair.start()
    now = shm_pair.decoder.do(_statistics)
    page = StatisticsPage(5, lambda: ("DECODER", replace(now, links=now.links * 10_000)))
    try:
        with pytest.raises(PageError, match="half written"):
            read_page(page._fd)
        page.write()
        found = read_page(page._fd)
        assert (found["truncated"], len(found["statistics"]["links"])) == (True, 100)
        page._sequence += 1
        page._write_header(10)
        with pytest.raises(PageError, match="half written"):
            read_page(page._fd)
    finally:
        page.close()


def test_the_page_follows_by_itself(shm_pair: Pair) -> None:
    _moved(shm_pair)
    pid = shm_pair.decoder.do(_pid)

    def pulls() -> list[int]:
        (mine,) = (each for each in instances() if each["pid"] == pid)
        return [each["count"] for each in mine["statistics"]["operations"] if each["name"] == "pull_blocks"]

    wait_until(lambda: pulls() == [3])
