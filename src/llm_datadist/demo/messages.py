"""Messages between the processes of the demo: one JSON object a line, over the pipes of the child."""

from __future__ import annotations

import msgspec


class Said(msgspec.Struct, frozen=True, tag=True):
    """A line for the user."""

    text: str


class DemoProgress(msgspec.Struct, frozen=True, tag=True):
    """``done`` of ``total`` units of ``what`` are done."""

    what: str
    done: int
    total: int


class Reference(msgspec.Struct, frozen=True, tag=True):
    """Result of the single-process run.

    Attributes:
        first_token: The token that follows the prompt.
        tokens: Those that follow it.
        digest: SHA-256 of the prompt's keys and values.
        seconds: Seconds the forward passes took.
    """

    first_token: int
    tokens: list[int]
    digest: str
    seconds: float


class DemoOffer(msgspec.Struct, frozen=True, tag=True):
    """What the prompt side has published: what a router hands from prefill to decode.

    Attributes:
        port: Port that the prompt side listens on.
        blocks: Its block numbers of the prompt, in the order of the sequence.
        length: Tokens in them.
        first_token: The token that follows the prompt.
        digest: SHA-256 of the prompt's keys and values.
    """

    port: int
    blocks: list[int]
    length: int
    first_token: int
    digest: str


class DemoOutcome(msgspec.Struct, frozen=True, tag=True):
    """Result of the decoder.

    Attributes:
        tokens: The tokens after the first one.
        digest: SHA-256 of the keys and values as pulled.
        transport: Name of the transport the link used.
        reason: Why that one.
        blocks: Blocks pulled.
        nbytes: Bytes pulled, over all tensors.
        seconds: Seconds of the ``pull_blocks`` call.
        sealed: Both ends were authenticated.
    """

    tokens: list[int]
    digest: str
    transport: str
    reason: str
    blocks: int
    nbytes: int
    seconds: float
    sealed: bool


class DemoFailed(msgspec.Struct, frozen=True, tag=True):
    """The role gave up; ``error`` is one line."""

    error: str


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Order to a prompt process: the cache is not needed any more."""


Event = Said | DemoProgress | Reference | DemoOffer | DemoOutcome | DemoFailed
Order = DemoOffer | Finish
