"""One process of the demo: ``python -m llm_datadist.demo reference|prompt|decoder|both TRANSPORT MEMORY``.

Writes events to standard output, reads orders from standard input, and exits when the input ends.
"""

from __future__ import annotations

import argparse
import io
import os
import queue
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from llm_datadist.demo.messages import DemoFailed, DemoOffer, Event, Finish, Order, Said
from llm_datadist.demo.model import Llama
from llm_datadist.demo.roles import DecoderSide, Emit, PromptSide, run_reference
from llm_datadist.demo.workload import DemoMemory, DemoTransport, DemoWorkload, Setup

_ORPHANED: Final = 3
# Bounds every wait; the runner's bound is shorter.
_ORDER_TIMEOUT_S: Final = 600.0
_decode: Final = msgspec.json.Decoder(Order).decode

_Order = TypeVar("_Order", DemoOffer, Finish)


class _Orders:
    """Orders from standard input; thread ``demo-orders`` ends the process with it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Order] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="demo-orders", daemon=True).start()

    def wait(self, kind: type[_Order]) -> _Order:
        """Return the next order, which must be a ``kind``."""
        order = self._queue.get(timeout=_ORDER_TIMEOUT_S)
        if not isinstance(order, kind):
            raise TypeError(f"order: got {order}, expected a {kind.__name__}")
        return order

    def _read(self) -> None:
        # Unbuffered: a daemon thread that holds the lock of sys.stdin makes the interpreter's exit fail.
        with io.FileIO(0, closefd=False) as stdin:
            while line := stdin.readline():
                self._queue.put(_decode(line))
        os._exit(_ORPHANED)


def _prompt(workload: DemoWorkload, setup: Setup, emit: Emit, orders: _Orders) -> None:
    with closing(PromptSide(workload, setup)) as prompt:
        emit(Said(f"listens on port {prompt.datadist.listen_port}"))
        emit(prompt.publish(Llama(workload.model), emit))
        orders.wait(Finish)


def _decoder(workload: DemoWorkload, setup: Setup, emit: Emit, orders: _Orders) -> None:
    with closing(DecoderSide(workload, setup)) as decoder:
        model = Llama(workload.model)
        emit(Said("ready"))
        emit(decoder.run(orders.wait(DemoOffer), model, emit))


def _both(workload: DemoWorkload, setup: Setup, emit: Emit) -> None:
    model = Llama(workload.model)
    with closing(PromptSide(workload, setup)) as prompt, closing(DecoderSide(workload, setup)) as decoder:
        offer = prompt.publish(model, emit)
        emit(offer)
        emit(decoder.run(offer, model, emit))


def _run(role: str, setup: Setup, emit: Emit) -> None:
    workload, orders = DemoWorkload(), _Orders()
    match role:
        case "reference":
            emit(run_reference(workload, emit))
        case "prompt":
            _prompt(workload, setup, emit, orders)
        case "decoder":
            _decoder(workload, setup, emit, orders)
        case _:
            _both(workload, setup, emit)


def main() -> int:
    """Run the role named on the command line; return 0 if it succeeded, else 1."""
    parser = argparse.ArgumentParser(prog="python -m llm_datadist.demo", description="One process of the demo.")
    parser.add_argument("role", choices=["reference", "prompt", "decoder", "both"])
    parser.add_argument("transport", choices=list(DemoTransport), type=DemoTransport)
    parser.add_argument("memory", choices=list(DemoMemory), type=DemoMemory)
    parser.add_argument("--secrets", type=Path)
    arguments = parser.parse_args()
    events = sys.stdout
    # Other code must not print between the events.
    sys.stdout = sys.stderr

    def emit(event: Event) -> None:
        events.write(msgspec.json.encode(event).decode() + "\n")
        events.flush()

    try:
        _run(arguments.role, Setup(arguments.transport, arguments.memory, arguments.secrets), emit)
    except Exception as error:  # noqa: BLE001  the runner shows it
        emit(DemoFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
