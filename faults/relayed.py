"""Two ends with a relay between them, and a neighbour beside it that must not notice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from faults.streams import Fault
from llm_datadist import CacheKey
from tests.support.linking import bytes_move_both_ways, info, link
from tests.support.moves import Spec

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.relay import Relay
    from llm_datadist import LLMStatusCode
    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair

KEY: Final = CacheKey(1, 10)
BIG: Final = Spec(tensors=4, rows=2, stride=1 << 20, keys=(KEY,))
DEADLINE_MS: Final = 1_500
HARM: Final[dict[str, Callable[[int], Fault]]] = {
    "truncate": lambda at: Fault("truncate", at=at),
    "reset": lambda at: Fault("reset", at=at),
    "half_close": lambda at: Fault("half_close", at=at),
    "corrupt": lambda at: Fault("corrupt", at=at, count=4),
    "duplicate": lambda at: Fault("duplicate", at=at, count=9),
    "drop": lambda at: Fault("drop", at=at),
    "stall": lambda at: Fault("stall", at=at),
}


class Relayed:
    """A prompt, a decoder, a relay in front of the prompt, and a neighbour that is linked to the prompt directly."""

    def __init__(self, pair: Pair, relay: Relay, neighbour: LocalEnd) -> None:
        self.prompt, self.decoder, self.neighbour = pair.prompt, pair.decoder, neighbour
        self.pair = pair
        self.relay = relay

    def link(self, timeout: int = 10_000) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link the decoder to the prompt through the relay."""
        return self.decoder.do(link, [info(1, self.relay.port)], timeout)

    def others_are_served(self) -> None:
        """The prompt's other link moves data."""
        bytes_move_both_ways(self.prompt, self.neighbour)
