"""The whole demo: starts the roles, passes messages between them, compares, prints."""

from __future__ import annotations

import json
import queue
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from llm_datadist._deadline import Deadline
from llm_datadist._links.credentials import new_secret
from llm_datadist.demo.children import DemoChild, Inbox
from llm_datadist.demo.messages import DemoFailed, DemoOffer, DemoOutcome, DemoProgress, Reference, Said
from llm_datadist.demo.report import DemoReporter, make_reporter
from llm_datadist.demo.workload import DemoTransport, DemoWorkload, Setup

# The demo takes a few seconds; ten times as long passes.
_BUDGET_MS: Final = 180_000
_INTERRUPTED: Final = 130
_PARTS: Final = {
    "reference": "the single-process run to compare with",
    "prompt": "LLMDataDist in role PROMPT, cluster 0",
    "decoder": "LLMDataDist in role DECODER, cluster 1",
    "both": "PROMPT and DECODER as two LLMDataDist in this one process",
}

_Message = TypeVar("_Message", Reference, DemoOffer, DemoOutcome, int)


class DemoError(RuntimeError):
    """The demo ended early; the text is one line."""


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result, as ``--json`` prints it.

    Attributes:
        ok: Tokens and bytes are equal: the exit status is 0.
        transport: Transport that moved the bytes.
        tokens_equal: The tokens are those of the single-process run.
        bytes: Bytes moved, over all tensors.
        seconds: Seconds of the one ``pull_blocks`` call.
        gb_per_s: ``bytes / seconds / 1e9``.
        kv_equal: Keys and values arrived as published.
        processes: 2, or 1 if both roles ran in one process.
        sealed: Both sides proved a shared secret; messages were encrypted, over tcp also KV bytes.
    """

    ok: bool
    transport: str | None = None
    reason: str | None = None
    tokens_equal: bool | None = None
    blocks: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    gb_per_s: float | None = None
    kv_equal: bool | None = None
    tokens: list[int] | None = None
    processes: int | None = None
    sealed: bool | None = None
    error: str | None = None


def run_demo(setup: Setup, *, as_json: bool, secure: bool = False) -> int:
    """Run the demo and print it; return 0 only if tokens and bytes are equal.

    With ``secure`` both sides prove a new secret. With ``as_json`` the last line of standard output is the result.
    """
    reporter = make_reporter(sys.stderr if as_json else sys.stdout)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if secure:
                setup = replace(setup, secrets=str(new_secret(Path(folder) / "secrets", "demo")))
            with _Demo(setup, reporter) as demo:
                result = demo.run()
    except DemoError as error:
        result = DemoResult(ok=False, error=str(error))
    except KeyboardInterrupt:
        result = DemoResult(ok=False, error="interrupted")
    finally:
        reporter.close()
    if result.error is not None:
        print(f"demo failed: {result.error}", file=sys.stderr, flush=True)
    if as_json:
        print(json.dumps(asdict(result)), flush=True)
    if result.error == "interrupted":
        return _INTERRUPTED
    return 0 if result.ok else 1


class _Demo(ExitStack):
    """One run. Leaving the context ends its processes."""

    def __init__(self, setup: Setup, reporter: DemoReporter) -> None:
        super().__init__()
        self._setup = setup
        self._reporter = reporter
        self._deadline = Deadline(_BUDGET_MS)
        self._inbox: Inbox = queue.SimpleQueue()

    def run(self) -> DemoResult:
        reference = self._run_reference()
        together = self._setup.transport is DemoTransport.INPROC
        children = [self._start(role) for role in (("both",) if together else ("prompt", "decoder"))]
        prompt, decoder = children[0], children[-1]
        offer = self._expect(prompt, DemoOffer)
        decoder.send(offer)
        outcome = self._expect(decoder, DemoOutcome)
        # The prompt side serves until it is told to end.
        for child in reversed(children):
            self._finish(child)
        if self._setup.transport not in (DemoTransport.AUTO, outcome.transport):
            raise DemoError(f"transport: asked for {self._setup.transport}, but the link used {outcome.transport}")
        if outcome.sealed != (self._setup.secrets is not None):
            raise DemoError(f"secure: asked for {self._setup.secrets is not None}, the link says {outcome.sealed}")
        tokens_equal = (offer.first_token, outcome.tokens) == (reference.first_token, reference.tokens)
        # Keys carry their positions, so tokens ignore swapped blocks; the digest does not.
        kv_equal = outcome.digest == offer.digest
        moved = msgspec.structs.asdict(outcome)
        del moved["digest"]
        result = DemoResult(
            ok=tokens_equal and kv_equal,
            tokens_equal=tokens_equal,
            gb_per_s=outcome.bytes / outcome.seconds / 1e9,
            kv_equal=kv_equal,
            processes=len(children),
            **moved,
        )
        self._show(result, reference, offer, outcome)
        return result

    def _run_reference(self) -> Reference:
        child = self._start("reference")
        reference = self._expect(child, Reference)
        self._finish(child)
        self._reporter.say("reference", f"done: {reference.seconds:.1f} s of forward passes, without the library")
        return reference

    def _start(self, role: str) -> DemoChild:
        try:
            child = DemoChild(role, self._setup, self._inbox)
        except OSError as error:
            raise DemoError(f"{role}: cannot start its process: {error}") from error
        self.callback(child.stop)
        self._reporter.say(role, f"process {child.pid} started: {_PARTS[role]}")
        return child

    def _finish(self, child: DemoChild) -> None:
        """End the input of ``child``; show the children's events until it has ended well."""
        child.end_input()
        if status := self._expect(child, int, "still running after its work"):
            raise DemoError(f"{child.role}: the process ended with status {status}")

    def _expect(self, child: DemoChild, kind: type[_Message], late: str = "") -> _Message:
        """Show the children's events until ``child`` sends a ``kind``; an int is its exit status."""
        while True:
            try:
                role, event = self._inbox.get(timeout=self._deadline.remaining())
            except queue.Empty:
                what = late or f"no {_word(kind)}"
                raise DemoError(f"{child.role}: {what} within {self._deadline.budget_ms / 1e3:.0f} s") from None
            if isinstance(event, kind) and role == child.role:
                return event
            match event:
                case Said(text):
                    self._reporter.say(role, text)
                case DemoProgress(what, done, total):
                    self._reporter.progress(role, what, done, total)
                case DemoFailed(error):
                    raise DemoError(f"{role}: {error}")
                case int(status):
                    before = f" before its {_word(kind)}" if role == child.role else ""
                    if status or before:
                        raise DemoError(f"{role}: the process ended with status {status}{before}")
                case _:
                    raise DemoError(f"{role}: unexpected message {_word(type(event))}")

    def _show(self, result: DemoResult, reference: Reference, offer: DemoOffer, outcome: DemoOutcome) -> None:
        work = DemoWorkload()
        together = "both roles as two LLMDataDist in one process"
        apart = "prompt and decoder, each with its own LLMDataDist"
        moved = (
            f"{outcome.blocks} blocks of {work.block_tokens} tokens in {work.num_tensors} tensors, "
            f"{outcome.bytes / 1e6:.2f} MB, all to other block numbers"
        )
        rows = [
            ("tokens", _describe_tokens(result, reference, outcome)),
            ("KV bytes", _describe_bytes(result, reference, offer)),
            ("moved", moved),
            ("transport", f"{outcome.transport}: {outcome.reason}"),
            ("pull_blocks", f"{outcome.seconds * 1e3:.2f} ms, {result.gb_per_s:.2f} GB/s (the one and first call)"),
            ("processes", f"{result.processes}: {together if result.processes == 1 else apart}"),
            ("security", _describe_security(outcome)),
        ]
        self._reporter.show("Tokens equal." if result.ok else "NOT equal.", rows)


def _word(kind: type) -> str:
    return kind.__name__.removeprefix("Demo").lower()


def _describe_security(outcome: DemoOutcome) -> str:
    if not outcome.sealed:
        return "none: any process of this host could have linked (--secure)"
    encrypted = {
        "tcp": "messages and KV bytes were encrypted (TLS 1.3, AES-256-GCM)",
        "nixl": "messages were encrypted (TLS 1.3), KV bytes were not",
    }.get(outcome.transport, "messages were encrypted (TLS 1.3), KV bytes did not leave this host")
    return f"both sides proved a shared secret; {encrypted}"


def _describe_tokens(result: DemoResult, reference: Reference, outcome: DemoOutcome) -> str:
    tokens = outcome.tokens
    if result.tokens_equal:
        return f"all {len(tokens)} equal to the single-process run: {' '.join(map(str, tokens[:8]))} ..."
    pairs = zip(tokens, reference.tokens, strict=True)
    position = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), None)
    where = "in the token that the prompt side computed" if position is None else f"first at position {position}"
    return f"different from the single-process run, {where}"


def _describe_bytes(result: DemoResult, reference: Reference, offer: DemoOffer) -> str:
    if not result.kv_equal:
        return "what arrived differs from what the prompt side published"
    if offer.digest != reference.digest:
        return "arrived as published; but the prompt side computed other values than the single-process run"
    return f"equal on both sides and in the single-process run (sha256 {offer.digest[:16]}...)"
