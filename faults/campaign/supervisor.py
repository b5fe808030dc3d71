"""The long campaign of faults (docs/notes/faults.md): epochs, each followed by healing, proof and a last look.

The supervisor sees the workers as processes that are killed, stopped, and born again at the same address.
"""

import argparse
import heapq
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random, SystemRandom
from typing import Any, Final

from faults.campaign import worker as work
from faults.campaign.liars import Liars, Rubbish, Victim
from faults.campaign.memory import Directory
from faults.campaign.report import Report
from faults.campaign.schedule import TRANSPORTS, WORKERS, Epoch, Event, plan_epoch, schedule
from faults.harness import holds_within
from faults.relay import Relay
from llm_datadist._links.credentials import new_secret
from llm_datadist.tools.bench.progress import BenchProgress
from tests.support.ends import ChildEnd
from tests.support.world import GPU_VARIABLE, SECRETS_VARIABLE

_ANSWER_SECONDS: Final = 90.0
_LEAVE_SECONDS: Final = 30.0
_STEP_SECONDS: Final = 0.02
_ROAM_SECONDS: Final = 0.4
_LOST_SECONDS: Final = 0.5  # a worker goes on without its GPU
_PROGRESS_SECONDS: Final = 30.0
_LINK_SECONDS: Final = 20.0
#: Below those that the kernel gives to connections, so that a dead worker's stays free, and below those that members
#: of communicators try, here and in other runs on this host: what they dial must be theirs.
_PORTS: Final = range(21000, 27000)
_TOLD: dict[str, Callable[..., None]] = {"stall": work.stop_for, "fork": work.fork, "limit": work.limit}
_TOLD |= {"storm": work.storm, "exhaust": work.exhaust}


class Lost(Exception):
    """A worker that should be there is not, or does not answer."""


class Hand:
    """One worker, through all its lives. The supervisor's thread only.

    Attributes:
        state: "up", "stopped", "dead", "rising" while it has not answered yet, or "leaving".
        busy: Its main thread makes calls, and hears nothing.
    """

    def __init__(self, number: int, port: int, folder: Path, directory: Directory) -> None:
        self.number, self.port = number, port
        self.state = "dead"
        self.busy = False
        self._until = 0.0
        self._folder, self._directory = folder, directory
        self._child: ChildEnd | None = None

    @property
    def child(self) -> ChildEnd:
        assert self._child is not None
        return self._child

    def bear(self) -> None:
        self._child, self.state = ChildEnd(f"campaign {self.number}"), "up"
        self.do(work.prepare, str(self._folder), self.number)

    def rise(self, epoch: Epoch, ports: dict[int, int]) -> None:
        """Be born again in the middle of an epoch. Returns at once, see :meth:`risen`."""
        self._child, self.state = ChildEnd(f"campaign {self.number}"), "rising"
        self.send(_rise, str(self._folder), self.number, epoch, self.port, ports)

    def risen(self) -> bool:
        if self.state == "rising" and self.child.answered():
            self.collect()
            self.state = "up"
        elif self.busy and self.state == "up" and self.child.answered():
            self.rest()
        return self.state == "up"

    def roam(self, seconds: float) -> None:
        """Let its main thread make calls of its own for a while. Returns at once; it is busy meanwhile."""
        self.send(work.roam, seconds)
        self.busy = True

    def rest(self) -> None:
        if self.busy:
            self.busy = False
            self.collect()

    def kill(self) -> None:
        self.child.kill()
        self.state, self.busy = "dead", False
        self._directory.reborn(self.number)

    def depart(self, finalize: bool) -> None:
        """Have it end in good order, in the middle of its calls. Returns at once, see :meth:`departed`."""
        self._directory.reborn(self.number)
        self.send(work.depart, finalize)
        self.state = "leaving"
        self._until = time.monotonic() + _LEAVE_SECONDS

    def departed(self) -> bool:
        if self.child.code is None and time.monotonic() < self._until:
            return False
        code, self.state = self.child.code, "dead"
        if code:
            raise Lost(f"worker {self.number} was to leave in good order, and ended with {code}")
        if code is None:
            raise Lost(f"worker {self.number} was to leave in good order, and has not answered")
        self.child.kill()
        self._directory.reborn(self.number)
        return True

    def stop(self) -> None:
        self.child.signal(signal.SIGSTOP)
        self.state = "stopped"

    def go_on(self) -> None:
        if self.state == "stopped":
            self.child.signal(signal.SIGCONT)
            self.state = "up"

    def gone(self) -> int | None:
        return None if self.state in {"dead", "leaving"} else self.child.code

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.send(function, *args)
        return self.collect()

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        try:
            self.child.begin(function, *args)
        except OSError as error:
            raise Lost(f"worker {self.number} is gone (exit {self._exit()}) before {function.__name__}") from error

    def collect(self) -> Any:
        try:
            return self.child.finish(_ANSWER_SECONDS)
        except (EOFError, ConnectionError) as error:
            raise Lost(f"worker {self.number} is gone, exit {self._exit()}") from error
        except TimeoutError as error:
            raise Lost(f"worker {self.number} has not answered for {_ANSWER_SECONDS:g} s") from error

    def close(self) -> None:
        if self._child is not None:
            self.go_on()
            self._child.kill()
            self.state, self.busy = "dead", False

    def _exit(self) -> int | None:
        holds_within(lambda: self.child.code is not None, 5.0)
        return self.child.code


def _rise(world: Any, folder: str, number: int, epoch: Epoch, port: int, ports: dict[int, int]) -> None:
    work.prepare(world, folder, number)
    work.begin(world, epoch, port, dialled=True)
    work.go(world, ports)


class Supervisor:
    """Owns the workers, the relays and the schedule. One thread."""

    def __init__(self, seed: int, transports: tuple[str, ...], folder: Path, progress: BenchProgress) -> None:
        self._seed, self._transports, self._folder, self._progress = seed, transports, folder, progress
        (folder / "sockets").mkdir()
        self._directory = Directory(folder / "directory", create=True)
        ports = _free_ports(SystemRandom())
        self._hands = [Hand(number, ports[number], folder, self._directory) for number in range(WORKERS)]
        self._rubbish, self._liars = Rubbish(), Liars()
        self._relays: dict[tuple[int, int], Relay] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked: Counter[int] = Counter()  # what each worker has not heard yet
        self.report = Report(folder)
        self._began = self._told = time.monotonic()

    def run(self, seconds: float, epoch_seconds: float) -> None:
        end = time.monotonic() + seconds
        self._progress.begin(round(seconds))
        try:
            for number in itertools.count():
                left = end - time.monotonic()
                if left <= epoch_seconds / 4:
                    break
                epoch = plan_epoch(self._seed, number, self._transports)
                self._progress.say(str(epoch))
                self.report.begin(epoch)
                finished = False
                try:
                    self._epoch(epoch, min(epoch_seconds, left))
                    finished = True
                except Lost as error:
                    self.report.violation("hangs" if "answered" in str(error) else "crashes", str(error))
                    self._start_over()
                self.report.collect(finished=finished)
        finally:
            for hand in self._hands:
                hand.close()
            self._rubbish.tidy(all_of_it=True)
            self._liars.join()
            self._directory.close()

    def _epoch(self, epoch: Epoch, seconds: float) -> None:
        self._directory.clear()
        for hand in self._hands:
            if hand.state == "dead":
                hand.bear()
        self._all(work.begin, lambda hand: (epoch, hand.port))
        with ExitStack() as undo:
            targets = {pair: ("127.0.0.1", self._hands[pair[1]].port) for pair in sorted(epoch.relayed)}
            self._relays = {pair: undo.enter_context(Relay(target)) for pair, target in targets.items()}
            self._all(work.go, lambda hand: (self._ports(epoch, hand.number),))
            self._harm(epoch, schedule(epoch, seconds), time.monotonic() + seconds)
            self.report.phase("calm")
            self._calm(epoch)
        self._relays.clear()
        self.report.phase("heal")
        self._heal(epoch)
        self.report.phase("finish")
        self._all(work.finish, lambda hand: (epoch.number % 2 == 0,))
        self.report.phase("end")
        left = sorted(path.name for path in (self._folder / "sockets").iterdir())
        if left:
            self.report.violation("leaks", f"socket files left: {left}")

    # --- the faults ------------------------------------------------------------------------------------------------

    def _harm(self, epoch: Epoch, events: list[Event], end: float) -> None:
        start = time.monotonic()
        self._agenda.clear()
        self._asked.clear()
        for event in events:
            self._at(start + event.at, lambda event=event: self._happen(epoch, event))  # type: ignore[misc]
        while time.monotonic() < end:
            while self._agenda and self._agenda[0][0] <= time.monotonic():
                heapq.heappop(self._agenda)[2]()
            for hand in self._hands:
                if hand.risen() and not hand.busy and not self._asked[hand.number]:
                    hand.roam(_ROAM_SECONDS)
                if (code := hand.gone()) is not None:
                    raise Lost(f"worker {hand.number} ended by itself with {code}")
            self._rubbish.tidy()
            self._tell_progress()
            time.sleep(_STEP_SECONDS)

    def _at(self, moment: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (moment, next(self._order), action))

    def _happen(self, epoch: Epoch, event: Event) -> None:
        hand, done = self._hands[event.worker], True
        match event.what:
            case "kill" if event.details.get("lost") and GPU_VARIABLE in os.environ and hand.state == "up":
                self._tell(hand, work.lose_device)
                after = Event(event.at, "kill", event.worker, details={**event.details, "lost": False})
                self._at(time.monotonic() + _LOST_SECONDS, lambda: self._happen(epoch, after))
            case "kill" if hand.state in {"up", "stopped"}:
                hand.kill()
                back = time.monotonic() + event.details["back_after"]
                self._at(back, lambda: self._bring_back(hand, epoch))
            case "stop" if hand.state == "up":
                hand.stop()
                self._at(time.monotonic() + event.details["seconds"], hand.go_on)
            case "relay" | "plan" | "resume" | "cut":
                self._through(event)
            case "garbage" if hand.state in {"up", "stopped"}:
                self._rubbish.throw(**event.details, port=hand.port, pid=hand.child.pid, folder=self._folder)
            case "liar" if hand.state in {"up", "stopped"}:
                victim = Victim(hand.number, hand.port, epoch, self._directory, self._folder)
                self._liars.send(event.details["seed"], victim, event.details["seconds"])
            case "stall" | "fork" | "limit" | "storm" | "exhaust" if hand.state == "up":
                self._tell(hand, _TOLD[event.what], *event.details.values())
            case "gate" if hand.state == "up":
                self._tell(hand, work.stop_at, event.details["step"], *list(event.details.values())[1:])
                # The other end meanwhile uses its memory again.
                if (peer := self._hands[event.details["peer"]]).state == "up":
                    self._tell(peer, work.storm)
            case "lull":
                self._directory.rest(**event.details)
            case "exit" if hand.state == "up":
                self._depart(hand, epoch, event.details["finalize"])
            case "roll":
                self._roll(list(self._hands), epoch, event.details["finalize"])
            case _:
                done = False
        if done:
            self.report.happened(event)

    def _tell(self, hand: Hand, function: Callable[..., Any], *args: Any) -> None:
        """Have a worker do this as soon as its main thread hears it; not at all where it is lost before."""
        life = self._directory.life(hand.number)
        self._asked[hand.number] += 1

        def attempt() -> None:
            if hand.state in {"dead", "leaving"} or self._directory.life(hand.number) != life:
                self._asked[hand.number] -= 1
            elif hand.state != "up" or hand.busy:
                self._at(time.monotonic() + _STEP_SECONDS, attempt)
            else:
                self._asked[hand.number] -= 1
                hand.do(function, *args)

        attempt()

    def _depart(self, hand: Hand, epoch: Epoch, finalize: bool) -> None:
        if hand.state != "up":
            return
        if hand.busy:
            self._at(time.monotonic() + _STEP_SECONDS, lambda: self._depart(hand, epoch, finalize))
            return
        hand.depart(finalize)

        def look() -> None:
            if hand.state == "leaving" and not hand.departed():
                self._at(time.monotonic() + _STEP_SECONDS, look)
            self._bring_back(hand, epoch)

        look()

    def _roll(self, left: list[Hand], epoch: Epoch, finalize: bool) -> None:
        """Restart one after the other; the next one leaves when the last one is there again."""
        if left[0].state == "up" and not left[0].busy:
            self._depart(left.pop(0), epoch, finalize)
        if left:
            self._at(time.monotonic() + _STEP_SECONDS, lambda: self._roll(left, epoch, finalize))

    def _bring_back(self, hand: Hand, epoch: Epoch) -> None:
        if hand.state == "dead":
            hand.rise(epoch, self._ports(epoch, hand.number))

    def _through(self, event: Event) -> None:
        assert event.pair is not None
        relay, details = self._relays[event.pair], event.details
        match event.what:
            case "relay":
                relay.now(details["kind"], details["direction"], details["fault"])
            case "plan":
                relay.plan(details["kind"], details["direction"], details["fault"])
            case "resume":
                relay.resume()
                relay.forget_plans()
            case _:
                relay.cut(details["kind"], reset=details["reset"])

    def _ports(self, epoch: Epoch, number: int) -> dict[int, int]:
        return {
            peer: self._relays[number, peer].port if (number, peer) in self._relays else self._hands[peer].port
            for peer in epoch.peers(number)
        }

    # --- after them ------------------------------------------------------------------------------------------------

    def _calm(self, epoch: Epoch) -> None:
        """Everybody is there and runs; every thread ends what it does."""
        self._agenda.clear()
        self._rubbish.tidy(all_of_it=True)
        for hand in self._hands:
            hand.go_on()
            while hand.state == "leaving" and not hand.departed():
                time.sleep(_STEP_SECONDS)
        self._liars.join()
        self.report.counts["liars that were linked"] = self._liars.linked
        for hand in self._hands:
            self._bring_back(hand, epoch)
        for hand in self._hands:
            if hand.state == "rising":
                hand.collect()
                hand.state = "up"
            hand.rest()
        self._all(work.halt, lambda hand: ())

    def _heal(self, epoch: Epoch) -> None:
        """The relays are gone. Whoever was lost is linked again with no unlink, and every byte moves both ways."""
        direct = {hand.number: hand.port for hand in self._hands}
        # Prompts dial, or decoders.
        first = epoch.number // 2 % 2 * 2
        for hand in self._hands[first : first + 2]:
            hand.do(work.link_to, {peer: direct[peer] for peer in epoch.peers(hand.number)}, _LINK_SECONDS)
        self._all(work.publish_proof, lambda hand: ())
        self._all(work.prove, lambda hand: ())

    def _all(self, function: Callable[..., Any], arguments: Callable[[Hand], tuple[Any, ...]]) -> list[Any]:
        for hand in self._hands:
            hand.send(function, *arguments(hand))
        answers = [hand.collect() for hand in self._hands]
        self._tell_progress()
        return answers

    def _start_over(self) -> None:
        """Something is broken beyond this epoch: the next one begins with new processes."""
        for hand in self._hands:
            with suppress(Lost):
                hand.close()
        for hand in self._hands:
            self._directory.reborn(hand.number)

    def _tell_progress(self) -> None:
        self._progress.show(round(time.monotonic() - self._began), "faults")
        if time.monotonic() - self._told > _PROGRESS_SECONDS:
            self._told = time.monotonic()
            self._progress.say(self.report.line())


def _free_ports(rng: Random) -> list[int]:
    ports: list[int] = []
    while len(ports) < WORKERS:
        port = rng.choice(_PORTS)
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    seed = secrets.randbelow(1 << 32) if options.seed is None else options.seed
    yield f"seed {seed}", True
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        if options.secure:
            os.environ[SECRETS_VARIABLE] = str(new_secret(Path(folder) / "secrets", "campaign"))
        if options.gpu:
            os.environ[GPU_VARIABLE] = "1"
        with BenchProgress(sys.stdout, "seconds") as progress:
            reached = [each for each in options.transport if not (options.gpu and each == "cma")]
            supervisor = Supervisor(seed, tuple(reached), Path(folder), progress)
            supervisor.run(options.seconds, options.epoch)
    report = supervisor.report
    if options.json:
        Path(options.json).write_text(json.dumps(report.as_dict() | {"seed": seed}, indent=1) + "\n")
    yield f"\n{report.table()}\n\nseed {seed}: {'FAILED' if report.failed else 'passed'}", not report.failed


OPTIONS: Final = {
    "seconds": (600.0, "how long, about"),
    "epoch": (20.0, "seconds of faults between two looks at what is left"),
    "seed": (None, "what it is made from; any, if left out"),
    "transport": (TRANSPORTS, "taken in turn"),
    "secure": (False, "with links that are authenticated and sealed"),
    "gpu": (False, "with caches in a GPU, of the fake driver"),
    "json": ("", "a file for the numbers"),
}
