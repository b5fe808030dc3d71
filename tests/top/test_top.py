"""``llm-datadist top``: what it shows equals ``statistics()`` of two processes that have moved data."""

import asyncio
import errno
import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from textual.widgets import DataTable, Static

import llm_datadist
from llm_datadist._statistics_page import PAGE_VERSION, PageError, StatisticsPage, instances, read_page
from llm_datadist.metrics import quantile
from llm_datadist.tools.cli.top_rows import NOTHING
from llm_datadist.tools.cli.top_screen import Top
from llm_datadist.tools.cli.top_source import Remote, SourceError, encode
from tests.doctor.hosts import needs
from tests.support.ends import ChildEnd
from tests.support.linking import statistics
from tests.support.moves import BLOCKS, Spec, Use, call, make, wait_until
from tests.support.pairs import Pair
from tests.support.source import run, run_here
from tests.support.tables import left_out, printed, tables
from tests.support.world import World


def _publish(world: World) -> Any:
    """Write the page now; return pid and statistics of that moment."""
    page = world.probe.engine.page
    assert page is not None
    world.probe.on_control(page.write)
    return os.getpid(), msgspec.to_builtins(world.dd.statistics())


def _pull(pair: Pair) -> None:
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 1], [1, 2])


@pytest.fixture
def published(shm_pair: Pair) -> dict[int, Any]:
    """Two processes that have moved data, and what each has published then: the prompt first."""
    shm_pair.start()
    spec = Spec(tensors=2, rows=4, stride=1024, blocks=True)
    shm_pair.prompt.do(make, "blocks", replace(spec, blocks_key=BLOCKS), 1)
    shm_pair.decoder.do(make, "kv", spec, 2)
    for _ in range(3):
        _pull(shm_pair)
    wait_until(lambda: shm_pair.prompt.do(statistics).links[0].served_bytes == 3 * 2 * 2 * 1024)
    return dict(end.do(_publish) for end in (shm_pair.prompt, shm_pair.decoder))


@contextmanager
def _child(code: str, *arguments: str, inside: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run Python meanwhile; yield its process, and the line that it has printed."""
    python = sys.executable if not inside else "/usr/bin/python3"
    command = [*inside, python, "-c", code, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


def _top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here("top", *arguments)


def _json(*arguments: str) -> dict[int, Any]:
    done = _top("--once", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return {each["pid"]: each for each in json.loads(done.stdout)["instances"]}


def _pids(*arguments: str) -> set[int]:
    """Return the pids of the table of instances."""
    return {int(each["pid"]) for each in tables(_top("--once", *arguments).stdout, None)["instances"]}


_SSH = """#!/bin/sh
# Stands in for ssh: runs the command on this host, as the shell of the other one would.
while [ "$1" != -- ]; do shift; done
echo "$2" >> "$(dirname "$0")/hosts"
exec sh -c "$3"
"""


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program that stands in for ssh first in the path; it connects to nothing."""
    program = tmp_path / "ssh"
    program.write_text(_SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return program


def test_once_as_json_equals_the_statistics_of_both_processes_here_and_over_ssh_and_follows_them(
    shm_pair: Pair, published: dict[int, Any], ssh: Path
) -> None:
    there = ("--connect", "far", "--command", f"{sys.executable} -m llm_datadist")
    for end, options in ((shm_pair.prompt, ()), (shm_pair.decoder, there)):
        pid, expected = end.do(_publish)
        shown = _json(*options)[pid]["statistics"]
        for key in (*shown["keys"], *expected["keys"]):
            del key["age_seconds"]
        assert shown == json.loads(json.dumps(expected))
    assert published.keys() <= _pids(*there)
    assert ssh.with_name("hosts").read_text() == "far\nfar\n"
    with closing(Remote("far", there[-1])) as remote:
        first = remote.read(30)
        wait_until(lambda: remote.read() != first)
        ended = remote.ssh
    assert ended is not None
    assert ended.poll() is not None
    _pull(shm_pair)

    def pulls() -> list[int]:
        (mine,) = (each for each in instances() if each["pid"] == pid)
        return [each["count"] for each in mine["statistics"]["operations"] if each["name"] == "pull_blocks"]

    wait_until(lambda: pulls() == [4])


@pytest.mark.parametrize("width", [200, None])  # a narrow one leaves columns out: below
def test_once_as_tables_has_the_figures_of_the_json(published: dict[int, Any], width: int | None) -> None:
    pids = {str(pid) for pid in published}
    asked = [sys.executable, "-m", "llm_datadist", "top", "--once"]
    wait_until(lambda: all(_json()[pid]["statistics"]["links"] for pid in published))
    shown, now_published = tables(printed(asked, width), width), _json()
    for name in ("instances", "links", "operations"):
        shown[name] = [each for each in shown[name] if each["pid"] in pids]  # other tests have instances, too
    for each in shown["instances"]:
        now = now_published[int(each["pid"])]["statistics"]
        for pool in now["pools"]:
            used, capacity = each[f"{pool['name']} pool"].split("/")
            used += "" if " " in used else capacity[-4:]
            assert (_bytes(used), _bytes(capacity)) == pytest.approx((pool["used_bytes"], pool["capacity_bytes"]))
        assert each["grants"] == str(now["grants"]["active"])
    found = [now_published[int(each["pid"])] for each in shown["instances"]]
    assert len(found) == 2
    links = [(each, link) for each in found for link in each["statistics"]["links"]]
    for cells, (each, link) in zip(shown["links"], links, strict=True):
        assert (cells["of"], cells["peer"]) == (f"{each['cluster_id']}", f"{link['remote_cluster_id']}")
        assert (cells["state"], cells["over"]) == (link["state"], link["transport"])
        assert (cells["release"], cells["role"]) == (link["peer_release"], link["peer_role"])
        names = ("read", "written", "served", "received")
        assert [_bytes(cells[name]) for name in names] == pytest.approx([link[f"{name}_bytes"] for name in names])
    assert sorted(cells["served"] for cells in shown["links"]) == ["0 B", "12.0 KiB"], "the owner's row has its bytes"
    done = [(each, one, by) for each in found for one in each["statistics"]["operations"] for by in one["transports"]]
    for cells, (each, one, by) in zip(shown["operations"], done, strict=True):
        told = f"{each['cluster_id']}", one["name"], f"{by['count']}"
        assert (cells["of"], cells["operation"], cells["calls"]) == told
        assert cells.get("over", "") == by["transport"]
        assert _bytes(cells["moved"]) == pytest.approx(by["nbytes"])
        for share, cell in ((0.5, cells["p50 µs"]), (0.99, cells["p99 µs"])):
            assert cell == f"<= {math.ceil(quantile(by['buckets'], share) * 1e6)}"
    assert done


def _bytes(cell: str) -> float:
    number, unit = cell.split()
    return float(number) * {"GiB": 1 << 30, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def test_in_a_pipe_the_screen_says_what_to_ask_for() -> None:
    done = _top()
    assert (done.returncode, done.stdout) == (2, "")
    assert "no terminal: --once prints once" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def _shown(app: Top, name: str) -> list[dict[str, str]]:
    """Return the rows of a table on the screen."""
    table = app.query_one(name, DataTable)
    names = [str(column.label) for column in table.columns.values()]
    return [dict(zip(names, table.get_row_at(at), strict=True)) for at in range(table.row_count)]


def test_the_screen_shows_links_and_operations_and_says_why_and_idle_instances_can_be_hidden(
    published: dict[int, Any],
) -> None:
    pid = list(published)[1]
    (link,) = published[pid]["links"]

    async def look(ours: set[int], idle: int) -> None:
        app = Top(lambda _: [each for each in instances() if each["pid"] in ours])
        async with app.run_test(size=(160, 50)) as pilot:
            row = [f"{each['pid']}" for each in app.found for _ in each["statistics"]["links"]].index(str(pid))
            links = app.query_one("#links", DataTable)
            wanted = {"peer": "1", "state": "ready", "over": "shm", "read": "12.0 KiB", "written": "0 B"}
            wanted |= {"release": llm_datadist.__version__, "role": "PROMPT"}
            assert wanted.items() <= _shown(app, "#links")[row].items()
            wanted = {"operation": "pull_blocks", "over": "shm", "calls": "3", "moved": "12.0 KiB"}
            assert any(wanted.items() <= each.items() for each in _shown(app, "#operations"))
            links.move_cursor(row=row)
            await pilot.press("e")
            assert str(app.query_one("#reason", Static).content) == link["reason"]
            for each in app.found:
                await pilot.press("i")
                chosen = [row["pid"] for row in _shown(app, "#instances") if row["shown"]]
                assert chosen == [str(each["pid"])]
                peers = [(*chosen, str(link["remote_cluster_id"])) for link in each["statistics"]["links"]]
                assert [(row["pid"], row["peer"]) for row in _shown(app, "#links")] == peers
            await pilot.press("i")
            assert links.row_count == sum(len(each["statistics"]["links"]) for each in app.found)
            assert {each["pid"] for each in _shown(app, "#instances")} == {str(each) for each in ours}
            await pilot.press("h")
            assert {each["pid"] for each in _shown(app, "#instances")} == {str(each) for each in ours - {idle}}
            await pilot.press("q")

    with _child(_INSTANCE) as (idle, _):
        ours = {*published, idle.pid}  # other tests have instances at the same time
        for options, expected in ((), ours), (("--hide-idle",), set(published)):
            assert _json(*options).keys() & ours == _pids(*options) & ours == expected
        asyncio.run(look(ours, idle.pid))


_INSTANCE = """
import sys
from llm_datadist import LLMDataDist, LLMRole
one = LLMDataDist(LLMRole.DECODER, 77)
one.init({"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"})
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_nothing_and_another_user_sees_nothing() -> None:
    with _child(_INSTANCE) as (process, _):
        assert process.pid in {each["pid"] for each in instances()}
        if os.getuid() == 0:
            nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
            assert "Permission denied" in run(*nobody, "ls", f"/proc/{process.pid}/fd").stderr
        process.kill()
        process.wait()
        assert process.pid not in {each["pid"] for each in instances()}


def test_the_screen_shows_rates_and_what_its_source_complains_of() -> None:
    answer: Any = None

    def read(_: float) -> Any:
        if isinstance(answer, SourceError):
            raise answer
        return answer

    async def look() -> None:
        nonlocal answer
        app = Top(read)
        async with app.run_test(size=(80, 30)) as pilot:
            text, links = app.query_one("#remark", Static), app.query_one("#links", DataTable)
            assert str(text.content) == "connecting"
            answer = [_reading(1.0, 10)]
            app.refresh_tables()
            assert not {"GB/s read", "GB/s written"} & _shown(app, "#links")[0].keys(), "no rate before the second page"
            answer = [_reading(3.0, 50)]
            app.refresh_tables()
            rates = {"GB/s read": "20.000", "GB/s written": "40.000", "GB/s served": "60.000", "GB/s received": "0.000"}
            assert rates.items() <= _shown(app, "#links")[0].items()
            assert _shown(app, "#operations")[0]["calls/s"] == "20.0"
            await pilot.pause()
            for name, first in (("instances", 6), ("links", 8), ("operations", 7)):
                table = app.query_one(f"#{name}", DataTable)
                assert sum(each.get_render_width(table) for each in table.ordered_columns[:first]) <= 80, name
            shown = {name: _shown(app, f"#{name}")[0] for name in ("instances", "links", "operations")}
            assert [shown["links"][name] for name in ("of", "peer")] == ["..20001", "..10001"], "four digits are equal"
            assert (shown["instances"]["cluster"], shown["instances"]["release"]) == ("..20001", "0.2.0")
            operation = ["of", "operation", "failed", "p50 µs", "p99 µs", "GB/s", "calls/s"]
            assert list(shown["operations"])[:7] == operation
            assert (shown["operations"]["failed"], shown["operations"]["failures"]) == ("3", "PeerLost: 2, X: 1")
            keys: Any = app.query("FooterKey")
            assert {"q", "i", "h", "e"} <= {each.key for each in keys if each.region.right <= 80}
            await pilot.resize_terminal(50, 30)
            links.scroll_to(x=20, animate=False)
            await pilot.pause()
            answer = [_reading(4.0, 60)]
            app.refresh_tables()
            await pilot.pause()
            assert (links.scroll_x, _shown(app, "#links")[0]["GB/s read"]) == (20, "10.000")
            assert _shown(app, "#links")[0]["served"] == "167.6 GiB"
            answer = [_reading(5.0, 60, known=False)]
            app.refresh_tables()
            row = _shown(app, "#links")[0]
            assert [row[name] for name in ("GB/s served", "served", "received")] == ["-", "-", "0 B"]
            answer = SourceError("cut")
            app.refresh_tables()
            assert str(text.content) == "cut; what is shown is old"
            assert links.row_count == 1
            answer = []
            app.refresh_tables()
            assert (str(text.content), links.row_count) == (NOTHING, 0)

    asyncio.run(look())


def _reading(when: float, calls: int, known: bool = True) -> Any:
    """Return an instance that has read a GB, written two and served three with each call; the last may not be known."""
    link = {"remote_cluster_id": 18 * 10**17 + 10_001, "state": "ready", "transport": "tcp", "reason": "so"}
    link |= {"peer_release": "0.2.0", "peer_role": "PROMPT"}
    by = {"transport": "tcp", "count": calls, "nbytes": calls << 20, "buckets": [0] * 10 + [calls, 1] + [0] * 14}
    moved: dict[str, int | None] = {"read_bytes": calls * 10**9, "written_bytes": 2 * calls * 10**9}
    moved |= {"served_bytes": 3 * calls * 10**9 if known else None, "received_bytes": 0}
    now = {
        "links": [link | moved],
        "operations": [{"name": "pull_blocks", "failures": {"PeerLost": 2, "X": 1}, "transports": [by]}],
        "pools": [{"name": each, "used_bytes": 300 << 20, "capacity_bytes": 8 << 30} for each in ("device", "host")],
        "grants": {"active": 0},
        "quarantined_bytes": 0,
        "release": "0.2.0",
    }
    about = {"pid": 12345, "cluster_id": 18 * 10**17 + 20_001, "role": "DECODER", "published_at": when}
    return about | {"age_seconds": 0.1, "truncated": False, "statistics": now}


def test_once_on_a_narrow_terminal_has_the_columns_that_the_screen_has_first_and_names_the_others(
    ssh: Path, tmp_path: Path
) -> None:
    assert ssh.exists()
    (tmp_path / "said").write_text(encode([_reading(1.0, 10)]) + "\n")
    asked = [sys.executable, "-m", "llm_datadist", "top", "--once", "--connect", "far", "--command"]
    asked.append(f"cat {tmp_path}/said; sleep 60 #")
    piped = tables(printed(asked, None), None)
    said = printed(asked, 80)
    shown, missing = tables(said, 80), left_out(said)
    assert shown.keys() == piped.keys() == {"instances", "links", "operations"}
    cut = iter(missing)
    for name, (row,) in piped.items():
        (first,) = shown[name]
        names = list(first)
        assert len(names) >= 5, said
        assert names == list(row)[: len(names)]
        assert names == list(row) or next(cut) == list(row)[len(names) :]
        for column, cell in first.items():
            short = column in ("cluster", "of", "peer")
            assert cell == (f"..{row[column][-5:]}" if short else row[column])
    assert list(cut) == []
    assert missing, "nothing was too wide"


_WRITER = """
import sys
from llm_datadist import LLMDataDist, LLMRole
from llm_datadist._statistics_page import StatisticsPage
one = LLMDataDist(LLMRole.DECODER, 77)
one.init({"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0", "llm.StatisticsPage": "0"})
now = one.statistics()
contents = ((f"{at} " * (1 + at % 2 * 5000), now) for at in range(1 << 62))
page = StatisticsPage(5, lambda: next(contents))
print(page.fd, flush=True)
while True:
    page.write()
"""


def test_a_reader_never_sees_half_a_page_of_another_process() -> None:
    with _child(_WRITER) as (process, fd), open(f"/proc/{process.pid}/fd/{int(fd)}", "rb") as page:
        seen: set[str] = set()
        while len(seen) < 200:
            try:
                names = read_page(page.fileno())["role"].split()
            except PageError:
                continue
            assert len(set(names)) == 1
            assert len(names) == 1 + int(names[0]) % 2 * 5000
            seen.add(names[0])


@pytest.mark.parametrize(
    ("there", "says"),
    [
        ("echo no such program >&2; exit 127 #", "ssh to far ended with status 127: no such program"),
        ("echo hello; sleep 60 #", "far printed something else than `llm-datadist top --json` does: 'hello\\n'"),
        ("""echo '{"page_version": 999, "instances": []}'; sleep 60 #""", "far has another version of open-datadist"),
        ("sleep 60 #", "the other host has said nothing for 10 s"),
    ],
)
def test_another_host_that_cannot_be_read_is_one_line(ssh: Path, there: str, says: str) -> None:
    assert ssh.exists()
    done = _top("--connect", "far", "--command", there, "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"llm-datadist top: {says}")
    assert done.stderr.count("\n") == 1


def test_without_ssh_and_with_an_option_for_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _top("--connect", "-oProxyCommand=true", "--once").returncode == 2
    monkeypatch.setenv("PATH", str(tmp_path))
    done = _top("--connect", "far", "--once")
    assert (done.returncode, done.stderr) == (1, "llm-datadist top: ssh cannot be run: No such file or directory\n")


def test_json_is_printed_each_second_until_the_pipe_is_closed() -> None:
    command = [sys.executable, "-m", "llm_datadist", "top", "--json"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for _ in range(2):
            assert "instances" in json.loads(process.stdout.readline())
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 1


def test_a_host_that_says_nothing_more_is_no_reading(ssh: Path) -> None:
    assert ssh.exists()
    line = f"""echo '{{"page_version": {PAGE_VERSION}, "instances": []}}'; sleep 60 #"""
    with closing(Remote("far", line)) as remote:
        assert remote.read(30) == []
        assert remote.read(0.1) is None
        assert remote.read() == [], "what a screen goes on to show"


def test_a_lost_connection_is_tried_again(ssh: Path) -> None:
    assert ssh.exists()
    with closing(Remote("far", f"{sys.executable} -m llm_datadist")) as remote:
        assert remote.read(30) is not None
        assert remote.ssh is not None
        os.killpg(remote.ssh.pid, signal.SIGKILL)
        with pytest.raises(SourceError, match="ended with status -9"):
            wait_until(lambda: remote.read() is None)
        with pytest.raises(SourceError, match="ended with status -9"):  # for three seconds
            remote.read()

        def again() -> bool:
            with suppress(SourceError):
                return remote.read(30) is not None
            return False

        wait_until(again, 60)


def test_an_option_switches_it_off_and_a_page_that_is_too_long_is_cut(
    shm_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in shm_pair.start(extra={"llm.StatisticsPage": "0"}):
        assert isinstance(end, ChildEnd)
        assert end.pid not in {each["pid"] for each in instances()}
    now = shm_pair.decoder.do(statistics)
    with closing(StatisticsPage(5, lambda: ("DECODER", replace(now, links=now.links * 10_000)))) as page:
        page.write()
        found = read_page(page.fd)
        assert (found["truncated"], len(found["statistics"]["links"])) == (True, 100)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "no memory is left")))
            with pytest.raises(OSError, match="no memory is left"):
                page.write()
        page.write()
        assert read_page(page.fd)["truncated"], "it can be read again"


def _header(pid: int, sequence: int, length: int) -> bytes:
    return struct.pack("<8sIIQdQQ", b"lldd-sta", PAGE_VERSION, pid, sequence, 0.0, 5, length)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "half written"),
        (b"x", "version"),
        (b"x" * 100, "version"),
        (_header(os.getpid(), 2, 1 << 62), "no statistics"),
        (_header(os.getpid(), 3, 19) + b'{"role": "DECODER"}', "half written"),
    ],
    ids=["empty", "short", "other", "no JSON", "being written"],
)
def test_a_page_with_something_else_is_refused_and_left_out(content: bytes, says: str) -> None:
    with open(os.memfd_create("llm-datadist-statistics"), "r+b", buffering=0) as page:
        page.write(content)
        page.truncate(1 << 20)
        with pytest.raises(PageError, match=says):
            read_page(page.fileno())
        assert 5 not in [each["cluster_id"] for each in instances() if each["pid"] == os.getpid()]


_FORGER = """
import os, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
page = os.memfd_create("llm-datadist-statistics")
os.write(page, bytes.fromhex(sys.argv[1]))
print("made", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can open the pages of other users")
def test_root_is_not_shown_what_another_user_publishes() -> None:
    body = b'{"role": "DECODER"}'
    with _child(_FORGER, (_header(4_000_000_000, 2, len(body)) + body).hex()) as (process, said):
        assert said == "made\n"
        shown = [each["pid"] for each in instances()]
        page = next(each for each in Path(f"/proc/{process.pid}/fd").iterdir() if "memfd" in os.readlink(each))
        with page.open("rb") as opened:
            assert read_page(opened.fileno())["pid"] == 4_000_000_000
    assert 4_000_000_000 not in shown


_FIFO = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None):
    sys.exit("no file system can be mounted")
fifo = "/mnt/memfd:llm-datadist-statistics x"
os.mkfifo(fifo)
kept = os.open(fifo, os.O_PATH)
libc.umount2(b"/mnt", 2)  # MNT_DETACH: the name in /proc begins at the root of what was mounted
print(os.readlink(f"/proc/self/fd/{kept}"), flush=True)
sys.stdin.read()
"""


def test_a_fifo_that_is_named_like_a_page_is_not_opened() -> None:
    """It belongs to another user if the test runs as root: nobody writes into it, so who opens it waits."""
    other = needs("setpriv", "--reuid=1234", "--regid=1234", "--clear-groups") if os.geteuid() == 0 else ()
    with _child(_FIFO, inside=needs(*other, "unshare", "-Urm")) as (process, said):
        assert said == "/memfd:llm-datadist-statistics x\n"
        assert process.pid not in _json()


def test_a_page_of_which_nothing_is_told_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in a FUSE file system of another user, named like a page: even root may not ask about it."""

    def refuse(_: int) -> os.stat_result:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with open(os.memfd_create("llm-datadist-statistics"), "rb"), monkeypatch.context() as fuse:
        fuse.setattr("os.fstat", refuse)
        assert instances() == []
