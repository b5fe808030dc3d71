"""Messages between the demo's processes: one JSON object a line, over the child's pipes."""

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
        tokens: The tokens after ``first_token``.
        digest: SHA-256 of the prompt's keys and values.
        seconds: Seconds of prefill and generation.
    """

    first_token: int
    tokens: list[int]
    digest: str
    seconds: float


class DemoOffer(msgspec.Struct, frozen=True, tag=True):
    """The published cache, as a router hands it from prefill to decode.

    Attributes:
        port: The prompt side's listen port.
        blocks: The prompt's blocks, in sequence order.
        length: Tokens in them.
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
        tokens: The tokens after the first.
        digest: SHA-256 of the pulled keys and values.
        transport: The transport that moved the blocks.
        bytes: Pulled bytes, over all tensors.
        seconds: Seconds of the ``pull_blocks`` call.
        sealed: Both sides were authenticated.
    """

    tokens: list[int]
    digest: str
    transport: str
    reason: str
    blocks: int
    bytes: int
    seconds: float
    sealed: bool


class DemoFailed(msgspec.Struct, frozen=True, tag=True):
    """The role gave up; ``error`` is one line."""

    error: str


Event = Said | DemoProgress | Reference | DemoOffer | DemoOutcome | DemoFailed
