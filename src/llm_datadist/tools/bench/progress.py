"""Progress of long work: a bar on a terminal, else plain lines. Needs rich."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final, TextIO, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

_T = TypeVar("_T")
#: Between two refreshes of the bar.
_SECONDS: Final = 0.1


class BenchProgress:
    """Lines, and on a terminal a bar below them. A context manager.

    Only calls draw the bar: a thread for it would take time from the measured work.

    Attributes:
        live: True if there is a bar.
    """

    def __init__(self, stream: TextIO, unit: str) -> None:
        self.live: Final = stream.isatty()
        self._drawn = 0.0
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            console=Console(file=stream, highlight=False, soft_wrap=True),
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),
            disable=not self.live,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def begin(self, total: float) -> None:
        """Set the amount of work."""
        self._bar.update(self._task, total=total)

    def say(self, text: str) -> None:
        """Show a line."""
        self._bar.console.print(text, markup=False, emoji=False)

    def show(self, done: float, what: str) -> None:
        """Move the bar to ``done`` and name the current work, if there is a bar."""
        self._bar.update(self._task, completed=done, description=what)
        if time.monotonic() - self._drawn >= _SECONDS or self._bar.finished:
            self._bar.refresh()
            self._drawn = time.monotonic()


def steps(items: Iterable[_T], name: Callable[[_T], object] = str, unit: str = "steps") -> Iterator[_T]:
    """Yield the items; show their number and name on standard error: a bar, or a line for each."""
    known = list(items)
    with BenchProgress(sys.stderr, unit) as progress:
        progress.begin(len(known))
        for number, item in enumerate(known):
            what = str(name(item))
            if not progress.live:
                progress.say(f"{number + 1} of {len(known)}: {what}")
            progress.show(number, what)
            yield item
            progress.show(number + 1, what)
