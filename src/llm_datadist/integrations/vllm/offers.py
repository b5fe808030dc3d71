"""What a prefill engine offers in ``kv_transfer_params``, and what schedulers tell their workers. No I/O.

The params are JSON with the fields of NIXL's connector, so that routers written for that pass them on, and one field
of ours, ``datadist``. The blocks of an offer are under a grant of each rank. Its token is a digest of a random nonce
and of all that the offer says, the tokens of the prompt included: a decode engine computes the token again from what
it was given and from its own prompt. So an offer for another prompt, or one in which anything was changed, names no
grant.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

from llm_datadist.errors import ParamError
from llm_datadist.integrations.vllm.layout import Layout  # noqa: TC001 (msgspec evaluates annotations)
from llm_datadist.types.grant import TOKEN_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["Claim", "Endpoint", "EndpointMetadata", "Offer", "OfferedBlocks", "Orders", "Targets", "prompt_digest"]

VERSION: Final = 1

Hex16 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rank of the prefill engine listens, and what its memory is. The cluster id is hexadecimal."""

    cluster_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    layout: Layout


@dataclass
class EndpointMetadata(KVConnectorHandshakeMetadata):
    """An :class:`Endpoint` on its way from a worker to the scheduler."""

    endpoint: bytes


class OfferedBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of one group of layers: ``numbers`` in order, the first of which is block ``first`` of the request."""

    first: Count
    numbers: Annotated[list[Count], msgspec.Meta(max_length=1 << 20)]


class Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field ``datadist``: what a decode engine needs to fetch the KV of one request."""

    version: int
    nonce: Hex16
    prompt: Hex16  # digest of the prompt that the blocks are of
    tokens: Count  # of the prompt that the blocks hold
    groups: Annotated[list[OfferedBlocks], msgspec.Meta(min_length=1, max_length=64)]
    ranks: Annotated[list[Endpoint], msgspec.Meta(min_length=1, max_length=1024)]  # by tensor-parallel rank
    lease_s: Annotated[float, msgspec.Meta(gt=0)]  # left for a first claim when the offer was made

    def token(self, prompt: str) -> bytes:
        """Return the token of the grants, for a prompt with this digest."""
        said = msgspec.msgpack.encode(msgspec.structs.replace(self, prompt=prompt))
        return hashlib.blake2b(said, digest_size=TOKEN_BYTES, key=bytes.fromhex(self.nonce)).digest()

    @classmethod
    def parse(cls, params: dict[str, Any]) -> Offer:
        """Return the offer in a request's params. Raises ParamError."""
        try:
            offer = msgspec.convert(params.get("datadist"), cls)
        except msgspec.ValidationError as error:
            raise ParamError(f"kv_transfer_params hold no offer of an LLMDataDistConnector: {error}") from None
        if offer.version != VERSION:
            raise ParamError(f"kv_transfer_params are of version {offer.version}, this connector reads {VERSION}")
        return offer


def prompt_digest(request: Request) -> str | None:
    """Return a digest of all that the KV of a prompt depends on; None for a prompt that is not of tokens alone."""
    if request.prompt_token_ids is None:
        return None
    said = [
        request.prompt_token_ids,
        [request.lora_request.lora_name] if request.lora_request is not None else [],
        [each.identifier for each in request.mm_features],
        [request.cache_salt] if request.cache_salt is not None else [],
    ]
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).hexdigest()


@dataclass
class Claim:
    """An order to a worker: claim the grants of what a request was offered.

    Attributes:
        params: The request's ``kv_transfer_params``, as they came.
        prompt: Digest of this engine's own prompt.
    """

    params: dict[str, Any]
    prompt: str | None


#: For each group of layers the place of the first block in the request, and the blocks of this engine from there on.
Targets = list[tuple[int, list[int]]]


@dataclass
class Orders(KVConnectorMetadata):
    """What the scheduler tells its workers in one step.

    Attributes:
        claims: Requests that have come with an offer: claim their grants, so that the prefill engine keeps the blocks.
        fetches: Requests of earlier claims for which there are blocks now.
        drops: Requests that need nothing of their offer any more.
        grants: Requests that are offered: token, and the blocks of each group.
    """

    claims: dict[str, Claim] = field(default_factory=dict)
    fetches: dict[str, Targets] = field(default_factory=dict)
    drops: list[str] = field(default_factory=list)
    grants: dict[str, tuple[bytes, list[list[int]]]] = field(default_factory=dict)
