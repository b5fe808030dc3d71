"""Ends for the interface tests: the same test runs over inproc (two in this process), shm and tcp (two processes)."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from llm_datadist.config import INSECURE_VARIABLE
from tests.support.ends import NURSERY, ChildEnd, End, LocalEnd
from tests.support.family import Processes
from tests.support.linking import SUCCESS, info, link
from tests.support.world import baseline, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator

TRANSPORTS = ("inproc", "shm", "tcp")

# No test is about time: by default an example that takes 200 ms fails.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell starts a background job ("make test &") with these signals ignored, and nohup adds SIGHUP. Programs inherit
# that, so a child would not end by the signal that a test sends. Handlers of ours become the default in each program
# that is started from here on, also in the workers of pytest-xdist.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


#: Folders whose tests take long, or wait, one after the other: they come first, so that no worker is left with them.
FIRST = ("hosts", "faults", "integration", "native", "bench", "clients")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders named above first; else nothing changes."""

    def rank(item: pytest.Item) -> int:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=rank)


def pytest_collection_finish() -> None:
    """Take all that collecting made out of the collector's sight: every test collects garbage to see what it left."""
    NURSERY.open()
    gc.collect()
    gc.freeze()


#: Files whose tests share what a fixture made.
_sharing: set[Path] = set()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect after a file what was frozen while it lived: a scene that its tests shared.

    A look at everything takes as long as some files do. So it is left to the end where a file shares nothing.
    """
    fixtures: Any = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 (it is not public)
    if any(each.scope in ("class", "module", "package") for known in fixtures for each in known):
        _sharing.add(item.path)
    if item.path in _sharing and (nextitem is None or nextitem.path != item.path):
        gc.unfreeze()
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    """Show the collector everything again: pytest collects at its end, and fails the run for what complains then."""
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran between hosts: a run that skipped them looks green otherwise.

    Here and not beside them: where several processes run the tests, the one that reports reads only this file.
    """
    counts = {
        outcome: sum("/hosts/" in report.nodeid for report in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "error", "xfailed", "skipped")
    }
    terminalreporter.write_line("tests between hosts: " + ", ".join(f"{n} {name}" for name, n in counts.items()))


# Tests use all kinds of addresses; those of the rule itself say "0". Set here, so that child processes inherit it.
os.environ.setdefault(INSECURE_VARIABLE, "1")


@dataclass
class Pair:
    """A prompt (cluster 1, listening) and a decoder (cluster 2), not started yet."""

    prompt: End
    decoder: End
    transport: str

    def start(self, *, linked: bool = True, rca: bool = False, **settings: Any) -> None:
        """Start both, and link the decoder to the prompt unless told otherwise."""
        extra = {"llm.Transport": self.transport} | settings.pop("extra", {})
        if rca:
            settings["enable_remote_cache_accessible"] = True
        self.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **settings)
        self.decoder.start("DECODER", 2, extra=extra, **settings)
        if linked:
            self.link()

    def link(self) -> None:
        codes = self.decoder.do(link, [info(1, self.prompt.port)])
        assert codes == SUCCESS, codes


@pytest.fixture(scope="session")
def children() -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """Two child processes for the whole run; every test starts and stops its LLMDataDist in them."""
    ends = ChildEnd("prompt", fresh=True), ChildEnd("decoder", fresh=True)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def four() -> Iterator[list[ChildEnd]]:
    """Four processes; afterwards nothing may be left in those that were not killed."""
    processes = Processes()
    yield [processes.child(name) for name in ("first", "second", "third", "fourth")]
    processes.part()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """An empty folder for sockets, whose path is short: with a socket's name behind it, it has 108 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="sockets-") as folder:
        yield Path(folder)


@pytest.fixture
def end() -> Iterator[LocalEnd]:
    """One end in this process, for what needs no peer; afterwards nothing may be left."""
    end = LocalEnd("alone")
    before = end.do(baseline)
    yield end
    end.stop()
    assert end.do(settled_of, before) == before


def _pair(request: pytest.FixtureRequest, transport: str) -> Iterator[Pair]:
    if transport == "inproc":
        ends: tuple[End, End] = (LocalEnd("prompt"), LocalEnd("decoder"))
    else:
        ends = request.getfixturevalue("children")
    before = [end.do(baseline) for end in ends]
    yield Pair(*ends, transport)
    # The decoder first: it is the one that linked.
    for end in reversed(ends):
        end.stop()
    assert [end.do(settled_of, was) for end, was in zip(ends, before, strict=True)] == before


def _pairs(*transports: str) -> Any:
    """Two ends over each of these: two processes but for inproc; afterwards nothing may be left in either process."""

    @pytest.fixture(params=transports if len(transports) > 1 else None)
    def ends(request: pytest.FixtureRequest) -> Iterator[Pair]:
        yield from _pair(request, getattr(request, "param", transports[0]))

    return ends


pair = _pairs(*TRANSPORTS)
mapped_pair = _pairs("inproc", "shm")  # whose initiator reads the peer's guards by itself
tcp_pair, shm_pair, local_pair = _pairs("tcp"), _pairs("shm"), _pairs("inproc")
