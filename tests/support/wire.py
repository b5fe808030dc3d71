"""What a peer of this build says: messages, versions, preambles, limits. The one place of the tests that knows where
the source keeps them; a test that speaks as a peer takes them from here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.registry import MAX_PINS_PER_PEER, Namespace, key_of
from llm_datadist._links import handshake, messages, versions
from llm_datadist._links.credentials import CLUSTER_URI, new_secret, read_secrets
from llm_datadist._links.identity import PeerSecrets
from llm_datadist._links.versions import FEATURES, VERSIONS
from llm_datadist._native import MAX_REQUEST_RUNS, Plan, encode_request
from llm_datadist._transport.address import WIRE_MAJOR, other_build, preamble
from llm_datadist._transport.samehost import rendezvous
from llm_datadist._transport.tcp.lanes import LANE_PREAMBLE, MAX_LANES


def offer(spoken: tuple[int, int], features: Sequence[str]) -> None:
    """From now on this process offers this range of versions and these features."""
    for module in (handshake, versions):
        vars(module).update(VERSIONS=spoken, FEATURES=features)


@contextmanager
def offering(spoken: tuple[int, int]) -> Iterator[None]:
    """This process offers this range of versions for a while."""
    offer(spoken, FEATURES)
    try:
        yield
    finally:
        offer(VERSIONS, FEATURES)
