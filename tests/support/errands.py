"""Traces and interrupts of calls that the main thread has done by another thread."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llm_datadist._native.public_call import elsewhere
from tests.support.moves import wait_until

Trace = Callable[..., Any]


@contextmanager
def traced(trace: Trace) -> Iterator[None]:
    """Trace this thread, and the one that does its errands."""
    elsewhere(sys.settrace)(trace)
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
        elsewhere(sys.settrace)(None)


def interrupt_main(number: int, seen: Callable[[], bool]) -> None:
    """In an errand: send the main thread a signal, and wait until ``seen`` tells that its handler has run."""
    signal.pthread_kill(threading.main_thread().ident or 0, number)
    wait_until(seen)
