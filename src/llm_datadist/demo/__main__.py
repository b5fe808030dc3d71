"""One process of the demo: ``python -m llm_datadist.demo reference|prompt|decoder|both SETUP``, the setup in JSON.

Writes events to standard output. The decoder reads its order from standard input; the prompt side serves until that
input ends. If the runner dies, input and output end, and with them the process.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import Final

import msgspec

from llm_datadist.demo.messages import DemoFailed, DemoOffer, Event, Said
from llm_datadist.demo.model import Llama
from llm_datadist.demo.roles import DecoderSide, Emit, PromptSide, run_reference
from llm_datadist.demo.workload import DemoWorkload, Setup

_decode_setup: Final = msgspec.json.Decoder(Setup).decode
_decode_order: Final = msgspec.json.Decoder(DemoOffer).decode


def _prompt(workload: DemoWorkload, setup: Setup, emit: Emit) -> None:
    with closing(PromptSide(workload, setup)) as prompt:
        emit(Said(f"listens on port {prompt.datadist.listen_port}"))
        emit(prompt.publish(Llama(workload.model), emit))
        sys.stdin.read()


def _decoder(workload: DemoWorkload, setup: Setup, emit: Emit) -> None:
    with closing(DecoderSide(workload, setup)) as decoder:
        model = Llama(workload.model)
        emit(Said("ready"))
        emit(decoder.run(_decode_order(sys.stdin.readline()), model, emit))


def _both(workload: DemoWorkload, setup: Setup, emit: Emit) -> None:
    model = Llama(workload.model)
    with closing(PromptSide(workload, setup)) as prompt, closing(DecoderSide(workload, setup)) as decoder:
        offer = prompt.publish(model, emit)
        emit(offer)
        emit(decoder.run(offer, model, emit))


def _reference(workload: DemoWorkload, _: Setup, emit: Emit) -> None:
    emit(run_reference(workload, emit))


_ROLES: Final = {"reference": _reference, "prompt": _prompt, "decoder": _decoder, "both": _both}


def main() -> int:
    """Run the role named on the command line; return 0 if it succeeded, else 1."""
    role, setup = sys.argv[1:]
    events = sys.stdout
    # Other code must not print between the events.
    sys.stdout = sys.stderr

    def emit(event: Event) -> None:
        events.write(msgspec.json.encode(event).decode() + "\n")
        events.flush()

    try:
        _ROLES[role](DemoWorkload(), _decode_setup(setup), emit)
    except Exception as error:  # noqa: BLE001  the runner shows it
        emit(DemoFailed(f"{type(error).__name__}: {error}"))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
