"""States of a request whose KV is fetched from a prefill engine, or offered to a decode engine. No I/O.

In a `kv_both` engine a request may do both, so it has a state of each. vLLM may abort and preempt at any moment, and
use an id again: an event that a state does not name changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class Fetch(Enum):
    """State of a fetch; a request that is not to be fetched has one, too."""

    NONE = "none"
    UNVERIFIED = "unverified"  # until its adapter is known
    REFUSED = "refused"  # its reference is wrong
    VERIFIED = "verified"  # it waits for blocks; its grants are claimed, in `kv_both` not yet
    FETCHING = "fetching"  # until workers report it


class Offer(Enum):
    """State of an offer."""

    NONE = "none"
    COMPUTING = "computing"  # its prompt
    GRANTED = "granted"  # it still runs
    OFFERED = "offered"  # it has ended, and the answer had the offer
    CLAIMED = "claimed"  # by a reader


class Event(Enum):
    """Event of a request, and the orders that workers get for it."""

    NAME_OFFER = "comes with an offer"
    VERIFY = "its reference is right"  # claim the grants, so that the prefill engine keeps the blocks; not in `kv_both`
    REFUSE = "its reference is wrong"
    ALLOCATE = "gets blocks for a fetch"  # fetch the KV into them; in `kv_both` claim the grants first
    SKIP = "has all its KV here, or ends without blocks"  # release the grants
    REPORT = "workers have fetched, or could not"
    NAME_READER = "is to be decoded elsewhere"
    GRANT = "has its last prompt token computed in this step"  # grant its blocks
    HAND_OUT = "ends with these blocks"  # keep them for readers
    PREEMPT = "is preempted"  # revoke the grant
    WITHDRAW = "is aborted, ends with other blocks, or cannot be granted"  # revoke the grant
    CLAIM = "a reader has claimed its grants"
    RELEASE = "its grants have ended on all ranks"


_F, _O, _E = Fetch, Offer, Event

FETCHES: Final[dict[Fetch, dict[Event, Fetch]]] = {
    _F.NONE: {_E.NAME_OFFER: _F.UNVERIFIED},
    _F.UNVERIFIED: {_E.VERIFY: _F.VERIFIED, _E.REFUSE: _F.REFUSED, _E.ALLOCATE: _F.FETCHING, _E.SKIP: _F.NONE},
    _F.REFUSED: {_E.ALLOCATE: _F.FETCHING, _E.SKIP: _F.NONE},
    _F.VERIFIED: {_E.ALLOCATE: _F.FETCHING, _E.SKIP: _F.NONE},
    _F.FETCHING: {_E.REPORT: _F.NONE},
}
OFFERS: Final[dict[Offer, dict[Event, Offer]]] = {
    _O.NONE: {_E.NAME_READER: _O.COMPUTING},
    _O.COMPUTING: {_E.GRANT: _O.GRANTED, _E.PREEMPT: _O.COMPUTING, _E.WITHDRAW: _O.NONE},
    _O.GRANTED: {_E.HAND_OUT: _O.OFFERED, _E.PREEMPT: _O.COMPUTING, _E.WITHDRAW: _O.NONE},
    _O.OFFERED: {_E.CLAIM: _O.CLAIMED, _E.RELEASE: _O.NONE},
    _O.CLAIMED: {_E.RELEASE: _O.NONE},
}
WAITING: Final = (Fetch.UNVERIFIED, Fetch.REFUSED, Fetch.VERIFIED)  # for blocks
UNCLAIMED: Final = (Offer.GRANTED, Offer.OFFERED)
HANDED_OUT: Final = (Offer.OFFERED, Offer.CLAIMED)


@dataclass(eq=False)
class RequestStates:
    """The two states of a request."""

    fetch: Fetch = Fetch.NONE
    offer: Offer = Offer.NONE

    def fire(self, event: Event) -> bool:
        """Take an event; return False if these states do not name it."""
        fetch, offer = FETCHES[self.fetch].get(event), OFFERS[self.offer].get(event)
        self.fetch, self.offer = fetch or self.fetch, offer or self.offer
        return fetch is not None or offer is not None
