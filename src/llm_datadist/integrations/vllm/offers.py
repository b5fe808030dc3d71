"""Offers of a prefill engine in ``kv_transfer_params``, and the scheduler's orders to workers. No I/O.

The params are JSON with the fields of vLLM's NixlConnector, so its routers pass them on. The field ``datadist`` is a
:class:`KvOffer` as a signed reference, whose token names each rank's grant. So a changed offer is refused, and one used
twice or too late names no grant.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from llm_datadist.errors import ParamError
from llm_datadist.integrations.vllm.layout import Layout  # noqa: TC001 (msgspec evaluates annotations)

if TYPE_CHECKING:
    from llm_datadist.integrations.references import ReferenceKeys

FIELD: Final = "datadist"

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
#: For each group of layers: index of its first block in the request, and an engine's blocks from there.
Targets = list[tuple[Count, Annotated[list[Count], msgspec.Meta(max_length=1 << 20)]]]


class RankEndpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Address and identity of a prefill engine's rank."""

    cluster_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    incarnation: str
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


@dataclass
class EndpointMetadata(KVConnectorHandshakeMetadata):
    """Endpoint and layout of a rank, from its worker to the scheduler."""

    endpoint: RankEndpoint
    layout: Layout


class KvOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The field ``datadist``: everything a decode engine needs to fetch one request's KV."""

    prompt: bytes  # digest of the prompt
    groups: Annotated[Targets, msgspec.Meta(min_length=1, max_length=64)]
    ranks: Annotated[list[RankEndpoint], msgspec.Meta(min_length=1, max_length=1024)]  # by tensor-parallel rank
    layout: Layout  # of each rank
    nonce: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(16))

    def sign(self, keys: ReferenceKeys) -> tuple[str, bytes]:
        return keys.sign(msgspec.msgpack.encode(self))

    @staticmethod
    def read(reference: object, keys: ReferenceKeys) -> tuple[KvOffer, bytes]:
        """Return a reference's offer, and the token of its grants. Raises ParamError."""
        payload, token = keys.read(reference)
        try:
            return _decode(payload), token
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ParamError(f"reference: signed, but no offer of this version: {error}") from None


_decode: Final = msgspec.msgpack.Decoder(KvOffer).decode


@dataclass
class Orders(KVConnectorMetadata):
    """The scheduler's orders to its workers for one step, by request. vLLM logs failed steps: tokens are not shown."""

    claims: dict[str, tuple[KvOffer, bytes]] = field(default_factory=dict, repr=False)  # verified; their grants' tokens
    fetches: dict[str, Targets] = field(default_factory=dict)  # claimed requests that now have blocks
    drops: list[str] = field(default_factory=list)  # claimed requests that need nothing of their offer
    refused: list[str] = field(default_factory=list)  # with a refused reference, to report as failed
    revokes: list[str] = field(default_factory=list)  # granted requests whose blocks may be used again
    grants: dict[str, tuple[bytes, list[int]]] = field(default_factory=dict, repr=False)  # token and blocks
    offered: list[str] = field(default_factory=list)  # granted requests that ended, and whose offer was handed out
    # If KV is staged, blocks above are slots.
    saves: list[tuple[int, int]] = field(default_factory=list)  # blocks, each with its slot
    loads: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)  # of fetches: slots, and their blocks


@dataclass
class ClaimedRequests(KVConnectorWorkerMetadata):
    """Offered requests whose grants a reader has claimed, from a worker to the scheduler.

    ``ended`` counts ranks on which the slots of an offered request may be used again. The first one has the rank's
    endpoint, too, by (pipeline rank, tensor-parallel rank), for MultiConnector.
    """

    requests: set[str] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)
    endpoints: dict[tuple[int, int], EndpointMetadata] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ClaimedRequests:
        requests, ended = self.requests | other.requests, self.ended + other.ended
        return ClaimedRequests(requests, ended, self.endpoints | other.endpoints)
