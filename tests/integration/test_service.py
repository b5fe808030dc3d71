"""The service of examples/service.py under clients that ask all the time, while its processes are drained, replaced,
upgraded, killed and stopped in turn. `make soak` does this for twenty minutes, and looks at the memory of those that
live all the time.

The table of errors is read from the guide, so that page, example and library cannot differ.
"""

import asyncio
import importlib.util
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from llm_datadist import errors
from tests.compat.builds import made
from tests.support.linking import free_port
from tests.support.moves import wait_until
from tests.support.source import PATHS, ROOT
from tests.support.wire import VERSIONS

SECONDS: Final = float(os.environ.get("LLM_DATADIST_SOAK", "60"))
#: One request at the router, which repeats it itself.
REQUEST: Final = 20.0
#: What has not happened by then, on a machine that does other things, does not happen.
PATIENCE: Final = 240.0
CLIENTS: Final = 3
#: Right answers after each fault, before the next one.
PROGRESS: Final = 10
PREFILLS: Final = ("prefill-0", "prefill-1", "prefill-2")
DECODERS: Final = ("decoder-0", "decoder-1")
#: Never ended, only stopped: their memory is looked at.
LONG_LIVING: Final = ("router", "prefill-0", "decoder-0")
#: Minutes until caches and pools are as large as they get, and what the allocator may still add, in MiB.
WARM, FLAT = 5, 5.0

_EXAMPLE: Final = ROOT / "examples" / "service.py"
_ROW: Final = re.compile(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]*) \| (yes|no) \| ([^|]*) \|", re.MULTILINE)


def _imported() -> Any:
    spec = importlib.util.spec_from_file_location("service_example", _EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


service: Final = _imported()


@dataclass(frozen=True)
class Row:
    """One error of the guide's table."""

    status: str
    again: bool
    pause: float  # seconds before it is tried again


def table() -> dict[str, Row]:
    text = (ROOT / "docs" / "howto-service.md").read_text()
    rows = {}
    for names, status, again, pause in _ROW.findall(text):
        for name in re.findall(r"\w+", names):
            assert name not in rows, f"{name} stands twice in the table"
            number = re.match(r"(\d+) ms", pause)
            rows[name] = Row(status.strip(), again == "yes", int(number[1]) / 1000 if number else 0.0)
    return rows


RETRY: Final = table()


def test_the_table_of_the_guide_is_that_of_the_library_and_of_the_example() -> None:
    assert {name: row.pause for name, row in RETRY.items() if row.again} == service.PAUSES
    raised = {name: kind for name, kind in vars(errors).items() if _raised(kind)}
    assert RETRY.keys() == raised.keys() | {"ConnectionError", "TimeoutError"}
    for name, kind in raised.items():
        # The same call does not help where a grant has ended; the same request does: it gets another one.
        assert RETRY[name].again == (kind.retryable or name == "GrantEnded"), name
        if name != "LLMException":
            assert f"`{kind.default_status.name}`" in RETRY[name].status, name


def _raised(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, errors.LLMException) and kind is not errors.CacheError


# --- clients ---
@dataclass
class Clients(AbstractContextManager["Clients"]):
    """Ask all the time, each in turn; judge every answer. Threads: one for all, and that of the test, which reads."""

    router: str
    right: int = 0
    met: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> "Clients":
        self.thread = threading.Thread(target=lambda: asyncio.run(self._all()))
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive(), "a client waits for ever"

    async def _all(self) -> None:
        await asyncio.gather(*(self._one(number) for number in range(CLIENTS)))

    async def _one(self, number: int) -> None:
        numbers = random.Random(number)
        while not self.over.is_set() and not self.wrong:
            await self._ask(numbers.randbytes(numbers.randrange(32)).hex())
            await asyncio.sleep(0.02)  # so that what starts has the processors too

    async def _ask(self, prompt: str) -> None:
        """Ask until the answer is right; note anything else that the table does not call retryable."""
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            request = {"kind": "request", "prompt": prompt, "seconds": REQUEST}
            try:
                answer = await service.call(self.router, request, PATIENCE)
            except (ConnectionError, TimeoutError) as error:
                self.wrong.append(f"{prompt}: no answer: {error}")  # the router lives all the time
                return
            if answer.get("token") == service.token_of(service.kv_of(prompt.encode())):
                self.right += 1
                return
            row = RETRY.get(answer.get("error", ""))
            if row is None or not row.again:
                self.wrong.append(f"{prompt}: {answer}")
                return
            self.met[answer["error"]] += 1
            await asyncio.sleep(row.pause)
        self.wrong.append(f"{prompt}: no right answer within {PATIENCE:g} s")


# --- processes ---
class Fleet(AbstractContextManager["Fleet"]):
    """The processes of a service, and what may happen to them; none is left at the end."""

    def __init__(self, folder: Path, older: Path) -> None:
        self.folder, self.older = folder, older
        self.numbers = itertools.count()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.logs: list[Path] = []
        self.builds: dict[str, Path] = {}
        self.router = f"127.0.0.1:{free_port()}"
        for name in ("router", *PREFILLS, *DECODERS):
            self.start(name)

    def start(self, name: str, build: Path = ROOT) -> None:
        paths = PATHS if build == ROOT else {"PYTHONPATH": str(build)}
        self.logs.append(self.folder / f"{name}-{next(self.numbers)}.log")
        command = [sys.executable, "-W", "error", str(_EXAMPLE), name.partition("-")[0], self.router, "--name", name]
        with self.logs[-1].open("wb") as log:
            self.running[name] = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | paths)
        self.builds[name] = build

    def status(self) -> Any:
        return asyncio.run(service.call(self.router, {"kind": "status"}, PATIENCE))

    def incarnation(self, name: str) -> str:
        return str(self.status()["workers"].get(name, {}).get("incarnation"))

    def pairs(self) -> set[tuple[str, str]]:
        return {(decoder, prefill) for decoder, prefill in self.status()["pairs"]}

    def whole(self) -> bool:
        return self.pairs() == set(itertools.product(DECODERS, PREFILLS))

    def settle(self) -> None:
        wait_until(self.whole, PATIENCE)

    def end(self, name: str, number: int) -> int:
        """Send a signal that ends it; return its status."""
        process = self.running.pop(name)
        process.send_signal(number)
        return process.wait(PATIENCE)

    def drain(self, name: str) -> None:
        """End it as an operator does."""
        assert self.end(name, signal.SIGTERM) == 0, self.said(name)
        assert self.said(name).endswith(f"{name}: drained, nothing is left\n"), self.said(name)

    def said(self, name: str) -> str:
        """Return what the last process of that name has printed."""
        return next(each for each in reversed(self.logs) if each.name.startswith(name)).read_text()

    def replaced_by(self, name: str, build: Path = ROOT) -> None:
        """Start another process of that name, and wait until it is the one that all know."""
        before = self.incarnation(name)
        self.start(name, build=build)
        wait_until(lambda: self.incarnation(name) != before, PATIENCE)
        self.settle()

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


Fault = Callable[[Fleet, Callable[[], None]], None]


def replaced_prefill(fleet: Fleet, go_on: Callable[[], None]) -> None:
    """At once, at another port, under the same cluster id: decoders learn both deaths and births."""
    assert fleet.end("prefill-1", signal.SIGKILL) == -signal.SIGKILL
    fleet.replaced_by("prefill-1")
    go_on()


def killed_prefill(fleet: Fleet, go_on: Callable[[], None]) -> None:
    assert fleet.end("prefill-2", signal.SIGKILL) == -signal.SIGKILL
    go_on()
    fleet.replaced_by("prefill-2", fleet.builds["prefill-2"])


def killed_decoder(fleet: Fleet, go_on: Callable[[], None]) -> None:
    assert fleet.end("decoder-1", signal.SIGKILL) == -signal.SIGKILL
    go_on()
    fleet.replaced_by("decoder-1")


def drained_prefill(fleet: Fleet, go_on: Callable[[], None]) -> None:
    """Its peers lose nothing."""
    before = len(fleet.said("decoder-0"))
    fleet.drain("prefill-1")
    go_on()
    lost = rf"link to cluster {service.cluster_of('prefill-1')} .* ended"
    assert not re.search(lost, fleet.said("decoder-0")[before:])
    fleet.replaced_by("prefill-1")


def drained_decoder(fleet: Fleet, go_on: Callable[[], None]) -> None:
    fleet.drain("decoder-1")
    go_on()
    fleet.replaced_by("decoder-1")


def upgraded_prefill(fleet: Fleet, go_on: Callable[[], None]) -> None:
    """From the older build to this one, and back the next time; the others speak with both."""
    upgrade = fleet.builds["prefill-2"] == fleet.older
    fleet.drain("prefill-2")
    fleet.replaced_by("prefill-2", ROOT if upgrade else fleet.older)
    workers = fleet.status()["workers"]
    links = {each: workers["decoder-0"]["links"][str(workers[each]["cluster"])] for each in PREFILLS}
    newest = VERSIONS[1]
    assert links == dict.fromkeys(PREFILLS, newest) | {"prefill-2": newest if upgrade else newest - 1}
    go_on()


def stopped_prefill(fleet: Fleet, go_on: Callable[[], None]) -> None:
    """It says nothing, and its links stay."""
    fleet.running["prefill-0"].send_signal(signal.SIGSTOP)
    wait_until(lambda: "prefill-0" not in {prefill for _, prefill in fleet.pairs()}, PATIENCE)
    go_on()
    fleet.running["prefill-0"].send_signal(signal.SIGCONT)
    fleet.settle()


def prefill_stopped_for_longer(fleet: Fleet, go_on: Callable[[], None]) -> None:
    """Until it counts as dead: the link is lost, and comes back to the same process."""
    before, cluster = fleet.incarnation("prefill-0"), str(fleet.status()["workers"]["prefill-0"]["cluster"])
    fleet.running["prefill-0"].send_signal(signal.SIGSTOP)
    wait_until(lambda: cluster not in fleet.status()["workers"]["decoder-0"]["links"], PATIENCE)
    go_on()
    fleet.running["prefill-0"].send_signal(signal.SIGCONT)
    fleet.settle()
    assert fleet.incarnation("prefill-0") == before


def stopped_decoder(fleet: Fleet, go_on: Callable[[], None]) -> None:
    fleet.running["decoder-0"].send_signal(signal.SIGSTOP)
    wait_until(lambda: "decoder-0" not in {decoder for decoder, _ in fleet.pairs()}, PATIENCE)
    go_on()
    fleet.running["decoder-0"].send_signal(signal.SIGCONT)
    fleet.settle()


FAULTS: Final[tuple[Fault, ...]] = (
    upgraded_prefill,  # first to the older build
    replaced_prefill,
    drained_prefill,
    stopped_prefill,
    killed_decoder,
    upgraded_prefill,
    killed_prefill,
    drained_decoder,
    stopped_decoder,
    prefill_stopped_for_longer,
)


# --- memory ---
def rss(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory in MiB."""
    (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return int(kib) / 1024


def grown(minutes: list[dict[str, float]]) -> dict[str, float]:
    """Return by how much MiB each process that is not flat has grown: its last quarter above minute 5."""
    warm, last = minutes[WARM], minutes[-max(len(minutes) // 4, 1) :]
    above = {name: max(each[name] for each in last) - warm[name] for name in warm}
    return {name: mib for name, mib in above.items() if mib > FLAT}


def shown(minutes: list[dict[str, float]]) -> str:
    names = list(minutes[0])
    lines = ["| minute | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| {at} | " + " | ".join(f"{each[n]:.1f}" for n in names) + " |" for at, each in enumerate(minutes)]
    return "\n".join(lines)


@pytest.mark.parametrize(("slope", "expected"), [(0.0, set()), (0.3, set()), (1.0, {"router"})])
def test_memory_that_grows_after_minute_five_is_seen(slope: float, expected: set[str]) -> None:
    minutes = [{"router": 40.0 + 5 * min(at, WARM) + slope * at, "decoder-0": 60.0} for at in range(21)]
    assert grown(minutes).keys() == expected
    assert "| 20 | " in shown(minutes)


def _processes(address: str) -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if address.encode() in words and str(_EXAMPLE).encode() in words:
                yield path.parent.name


@pytest.mark.timeout(SECONDS + 8 * PATIENCE)
def test_every_request_is_answered_rightly_whatever_happens_to_its_processes(tmp_path: Path) -> None:
    happened: Counter[str] = Counter()
    minutes: list[dict[str, float]] = []
    older = made("older", tmp_path)
    with Fleet(tmp_path, older) as fleet:
        wait_until(lambda: "at " in fleet.logs[0].read_text(), PATIENCE)
        fleet.settle()
        assert len(list(_processes(fleet.router))) == len(fleet.running)
        began = time.monotonic()
        with Clients(fleet.router) as clients:

            def go_on() -> None:
                before = clients.right
                wait_until(lambda: bool(clients.wrong) or clients.right >= before + PROGRESS, PATIENCE)
                assert clients.wrong == []

            for fault in itertools.cycle(FAULTS):
                if len(happened) == len(set(FAULTS)) and time.monotonic() > began + SECONDS:
                    break
                go_on()
                fault(fleet, go_on)
                happened[fault.__name__] += 1
                while len(minutes) <= (time.monotonic() - began) / 60:
                    minutes.append({name: rss(fleet.running[name]) for name in LONG_LIVING})
        retried = fleet.status()["met"]
        for name in DECODERS + PREFILLS:
            fleet.drain(name)
        assert fleet.end("router", signal.SIGTERM) == 0
    # Shown by -s.
    sys.stdout.write(f"\n{clients.right} right answers; tried again: {retried}, by clients {clients.met}\n")
    sys.stdout.write(f"{dict(happened)}\n{shown(minutes)}\n")
    assert clients.wrong == []
    assert happened.keys() == {each.__name__ for each in FAULTS}
    assert retried, "no request met a fault"
    assert {each for each in retried if not RETRY[each].again} == set()
    assert [(each.name, each.read_text()) for each in fleet.logs if "Traceback" in each.read_text()] == []
    assert list(_processes(fleet.router)) == []
    if len(minutes) > 2 * WARM:
        assert grown(minutes) == {}, shown(minutes)
