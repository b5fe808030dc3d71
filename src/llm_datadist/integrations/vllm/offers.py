"""What a prefill engine offers in ``kv_transfer_params``, and what schedulers tell their workers. No I/O.

The params are JSON with the fields of NIXL's connector, so that routers written for that pass them on, and one field
of ours, ``datadist``: an :class:`KvOffer` as a signed reference (``integrations/references.py``). The blocks of an offer
are under a grant of each rank, whose token is that of the reference. So an offer in which anything was changed is
refused, and one that is used twice or too late names no grant.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from llm_datadist.errors import ParamError
from llm_datadist.integrations.vllm.layout import Layout  # noqa: TC001 (msgspec evaluates annotations)

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from llm_datadist.integrations.references import ReferenceKeys

__all__ = [
    "ClaimedRequests",
    "EndpointMetadata",
    "KvOffer",
    "Orders",
    "RankEndpoint",
    "Targets",
    "asked_of",
    "prompt_digest",
]

FIELD: Final = "datadist"

Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
#: For each group of layers the place of its first block in the request, and the blocks of an engine from there on.
Targets = list[tuple[Count, Annotated[list[Count], msgspec.Meta(max_length=1 << 20)]]]


class RankEndpoint(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a rank of the prefill engine listens, and which process that is."""

    cluster_id: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    incarnation: str
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


@dataclass
class EndpointMetadata(KVConnectorHandshakeMetadata):
    """An :class:`RankEndpoint` and the :class:`Layout` there, on their way from a worker to the scheduler."""

    endpoint: RankEndpoint
    layout: Layout


class KvOffer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The field ``datadist``: what a decode engine needs to fetch the KV of one request."""

    prompt: bytes  # digest of the prompt that the blocks are of
    groups: Annotated[Targets, msgspec.Meta(min_length=1, max_length=64)]
    ranks: Annotated[list[RankEndpoint], msgspec.Meta(min_length=1, max_length=1024)]  # by tensor-parallel rank
    layout: Layout  # of each rank
    nonce: bytes = msgspec.field(default_factory=lambda: secrets.token_bytes(16))

    def sign(self, keys: ReferenceKeys) -> tuple[str, bytes]:
        """Return the reference, and the token of its grants."""
        return keys.sign(msgspec.msgpack.encode(self))

    @staticmethod
    def read(reference: object, keys: ReferenceKeys) -> tuple[KvOffer, bytes]:
        """Return the offer of a reference, and the token of its grants. Raises ParamError."""
        payload, token = keys.read(reference)
        try:
            return _decode(payload), token
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ParamError(f"reference: signed, but no offer of this version: {error}") from None


_decode: Final = msgspec.msgpack.Decoder(KvOffer).decode


def asked_of(request: Request) -> dict[str, Any]:
    """Return the ``kv_transfer_params`` of a request; empty for what an HTTP client gave instead of an object."""
    params = request.kv_transfer_params
    return params if isinstance(params, dict) else {}


def prompt_digest(request: Request) -> bytes | None:
    """Return a digest of all that the KV of a prompt depends on; None unless the prompt is of tokens and texts."""
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return None
    lora = request.lora_request.lora_name if request.lora_request is not None else None
    said = [request.prompt_token_ids, lora, [each.identifier for each in request.mm_features], request.cache_salt]
    try:
        return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()
    except (UnicodeEncodeError, TypeError, OverflowError):
        return None


@dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler tells its workers in one step.

    Attributes:
        claims: Requests that have come with an offer, which the scheduler has verified, and the token of its grants:
            claim them, so that the prefill engine keeps the blocks.
        fetches: Requests of earlier claims for which there are blocks now.
        drops: Requests that need nothing of their offer any more.
        refused: Requests whose reference was refused: nothing is fetched for them.
        grants: Requests that are offered: token and blocks.
    """

    claims: dict[str, tuple[KvOffer, bytes]] = field(default_factory=dict, repr=False)  # vLLM logs a step that fails
    fetches: dict[str, Targets] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    grants: dict[str, tuple[bytes, list[int]]] = field(default_factory=dict, repr=False)


class ClaimedRequests(KVConnectorWorkerMetadata):
    """What a worker tells the scheduler: requests whose grants a reader has claimed."""

    def __init__(self, requests: set[str]) -> None:
        self.requests = requests

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ClaimedRequests:
        """Add those of another worker."""
        return ClaimedRequests(self.requests | other.requests)
