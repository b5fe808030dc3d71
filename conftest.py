"""What the tests of the library and those of the fault tool share: fixtures, and rules of a run."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from llm_datadist.config import INSECURE_VARIABLE
from tests.support import fakecuda
from tests.support.ends import NURSERY, ChildEnd, LocalEnd, Processes
from tests.support.pairs import TRANSPORTS, pairs
from tests.support.source import ROOT
from tests.support.world import NIXL_VARIABLE, baseline, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# No test is about time: by default an example that takes 200 ms fails.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# A shell starts a background job ("make test &") with these signals ignored, and nohup adds SIGHUP. Programs inherit
# that, so a child would not end by the signal that a test sends. Handlers of ours become the default in each program
# that is started from here on, also in the workers of pytest-xdist.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda number, frame: None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what ``pytest.mark.gpu`` marks twice: with caches in the memory of the host, and in that of a GPU."""
    marker = metafunc.definition.get_closest_marker("gpu")
    if marker is not None and marker.args != (False,) and "gpu" in metafunc.fixturenames:
        values = marker.args or (False, True)
        metafunc.parametrize("gpu", values, indirect=True, ids=["gpu" if each else "host" for each in values])


def _reached(item: pytest.Item) -> bool:
    """Return False for memory of a GPU over what does not reach it: cma, and nixl where that stands in."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    scene = params.get("scene")  # (transport, remote access, memory of a GPU)
    on_gpu = params.get("gpu") is True or (isinstance(scene, tuple) and len(scene) == 3 and scene[2] is True)
    transports = (params.get("pair"), params.get("linked"), params.get("pushed"), *params.get("route", ()))
    return not on_gpu or not ("cma" in transports or NIXL_VARIABLE in os.environ)


#: Folders whose tests take long, or wait, one after the other: they come first, so that no worker is left with them.
FIRST = ("hosts", "faults", "integration", "native", "bench", "clients")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the folders named above first, and no memory of a GPU over transports that do not reach it."""
    items[:] = [each for each in items if _reached(each)]

    def rank(item: pytest.Item) -> int:
        folder = next((each for each in item.path.relative_to(ROOT).parts if each in FIRST), None)
        return len(FIRST) if folder is None else FIRST.index(folder)

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


#: Where each process that has used the fake GPU says at its exit what it did wrong; the process that reports has it.
_reports = None if "FAKECUDA_REPORT" in os.environ else tempfile.TemporaryDirectory(prefix="gpu-")
if _reports is not None:
    os.environ["FAKECUDA_REPORT"] = str(Path(_reports.name) / "report")
_complaints: list[str] = []


@pytest.hookimpl(trylast=True)  # once pytest-xdist has ended its processes
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run if a process did wrong with the fake GPU, or left something there.

    Show the collector everything again: pytest collects at its end, and fails the run for what complains then.
    """
    gc.unfreeze()
    path = Path(os.environ["FAKECUDA_REPORT"])
    fakecuda.report(path)  # pytest-xdist ends its processes at once
    if _reports is not None:
        with _reports:
            _complaints.extend(each for state in fakecuda.reports(path) for each in fakecuda.complaints(state))
        if _complaints and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests ran between hosts: a run that skipped them looks green otherwise.

    Here and not beside them: where several processes run the tests, the one that reports reads only this file.
    """
    counts = {
        outcome: sum("/hosts/" in report.nodeid for report in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "error", "xfailed", "skipped")
    }
    terminalreporter.write_line("tests between hosts: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    for each in _complaints:
        terminalreporter.write_line(f"fake GPU: {each}", red=True)


# Tests use all kinds of addresses; those of the rule itself say "0". Set here, so that child processes inherit it.
os.environ.setdefault(INSECURE_VARIABLE, "1")
# NumPy starts a thread per core in every interpreter; they would spin beside the other processes of the tests.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def children() -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """Two child processes for the whole run; every test starts and stops its LLMDataDist in them."""
    ends = ChildEnd("prompt", fresh=True), ChildEnd("decoder", fresh=True)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def four(gpu: bool) -> Iterator[list[ChildEnd]]:
    """Four processes; afterwards nothing may be left in those that were not killed."""
    processes = Processes()
    ends = [processes.child(name) for name in ("first", "second", "third", "fourth")]
    for end in ends:
        end.gpu = gpu
    yield ends
    processes.part()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """An empty folder for sockets, whose path is short: with a socket's name behind it, it has 108 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="sockets-") as folder:
        yield Path(folder)


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> bool:
    """True if caches with Placement.DEVICE lie in a GPU, of the fake driver."""
    wanted: bool = getattr(request, "param", False)
    if wanted:
        try:
            fakecuda.library()
        except fakecuda.Unsupported as error:
            pytest.skip(str(error))
    return wanted


@pytest.fixture
def end(gpu: bool) -> Iterator[LocalEnd]:
    """One end in this process, for what needs no peer; afterwards nothing may be left."""
    end = LocalEnd("alone")
    end.gpu = gpu
    before = end.do(baseline)
    yield end
    end.stop()
    assert end.do(settled_of, before) == before


pair = pairs(*TRANSPORTS)
mapped_pair = pairs("inproc", "shm")  # whose initiator reads the peer's guards by itself
tcp_pair, shm_pair, local_pair = pairs("tcp"), pairs("shm"), pairs("inproc")
