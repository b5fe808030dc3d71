"""Names of remote caches and of their memory, and the target's answers, validated and mapped in the caller's thread.

An invalid answer raises, and gives its pin back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from llm_datadist._cache.geometry import CachePair, Geometry, decode_geometry
from llm_datadist._cache.registry import FIRST_PEER_CHOSEN_PIN
from llm_datadist._checks import clean
from llm_datadist._links.messages import U64, GrantedOnly, Guarded, Id, Release, Resolved
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._native import GuardSet, steps
from llm_datadist._native.public_call import raise_of_handler
from llm_datadist._transport.connection import guards_of
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, ProtocolError, TransferFailed

if TYPE_CHECKING:
    from llm_datadist._cache.registry import Key
    from llm_datadist._links.link import Link
    from llm_datadist._transport.connection import RemoteTensors
    from llm_datadist.types.grant import Grant

_MAX_MAPPED: Final = 1024  # tensors cached per link, each with at most so many bytes of offsets
_MAX_MAPPED_BYTES: Final = 4096
_MAX_GUARDS: Final = 8  # of a handle


class RemoteName(msgspec.Struct, frozen=True):
    """Name of a remote cache: a key, or an id and a row."""

    cluster_id: int
    key: Key | None = None
    cache_id: int = 0
    row: int = 0

    def __str__(self) -> str:
        if self.key is not None:
            return f"key {self.key} of cluster {self.cluster_id}"
        return f"cache {self.cache_id} row {self.row} of cluster {self.cluster_id}"


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=0):
    """Cache, pin (0: none) and guards of a ``Resolved``, with the guard of any grant."""

    cache_id: Id
    pin: Id
    guards: Annotated[list[Guarded], msgspec.Meta(min_length=1, max_length=_MAX_GUARDS)]


class KeyHandle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Handle by key, sent without asking the owner first: a predicted resolution.

    The owner looks ``key`` up. It refuses if the cache has another geometry; else it pins the cache as number ``pin``.
    Offsets of the request begin at the key's row. ``reported`` counts the reports that this side has sent before,
    because one that is still on its way may consume the key.
    """

    key: tuple[int, U64, U64]
    geometry: Geometry
    pin: Annotated[int, msgspec.Meta(ge=FIRST_PEER_CHOSEN_PIN, le=2**63 - 1)]
    budget_ms: Id
    reported: Id


encode_handle: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(Handle | KeyHandle)


def decode_handle(data: bytes) -> Handle | KeyHandle:
    """Decode a handle; ProtocolError."""
    try:
        handle: Handle | KeyHandle = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(f"move request: invalid handle: {clean(str(error))}") from error
    return handle


class Resolution(msgspec.Struct, eq=False):
    """The target's answer, mapped; valid while its guards show these generations."""

    cache_id: int
    geometry: Geometry
    row: int
    tensors: RemoteTensors
    guards: list[Guarded]
    guard_set: GuardSet | None  # None if the owner compares
    pin: int  # 0: none, so the answer may be cached
    predicted: int = 0  # the future pin's number if this is a prediction
    pair: CachePair | None = None  # comparison with the local cache used last
    granted_only: bool = False


def open_answer(link: Link, answer: Resolved, what: str, *, push: bool) -> Resolution:
    """Validate an answer and map its tensors.

    Raises ProtocolError if it contradicts itself, ``LLM_FEATURE_NOT_ENABLED`` if no transport reaches the memory.
    """
    try:
        return _open(link, answer, what, push)
    except BaseException as error:
        if answer.pin:
            link.report(Release(answer.pin, 0, 0))
        if isinstance(error, LinkError) and link.ended:
            raise link.lost_error(what, "resolve") from error
        if not isinstance(error, (ValueError, ProtocolError)):
            raise
        raise_of_handler(error, _open, link, answer, what, push)
        if isinstance(error, LLMException):
            raise
        raise ProtocolError(f"{link.peer} sent a broken answer: {error}") from error


def _open(link: Link, answer: Resolved, what: str, push: bool) -> Resolution:
    geometry = decode_geometry(bytes(answer.geometry))
    if answer.row >= geometry.rows:
        raise _misfit(link, answer, geometry)
    if not answer.guards:
        raise ProtocolError(f"{link.peer} sent no guard: nothing would tell that its cache has changed")
    known = answer.regions, answer.offsets, geometry.num_tensors, geometry.tensor_bytes, push
    if steps.watch is not None:
        steps.watch("answer", link)
    tensors = link.caches.mapped.get(known) or _map(link, answer, geometry, what, push=push)
    if steps.watch is not None:
        steps.watch("resolved", link)
    # Pool memory is reused often; what is served only because a GPU's is not mapped may be mapped soon.
    served = tensors.connection.capabilities.remote_guards
    if len(answer.offsets) <= _MAX_MAPPED_BYTES and not (served and answer.regions):
        keep(link.caches.mapped, known, tensors, _MAX_MAPPED)
    if (guard_set := _guard_set(tensors, answer.guards)) is None:
        tensors = replace(tensors, handle=encode_handle(Handle(answer.cache_id, answer.pin, answer.guards)))
    found = answer.cache_id, geometry, answer.row, tensors, answer.guards, guard_set, answer.pin
    return Resolution(*found, granted_only=isinstance(answer, GrantedOnly))


def with_grant(remote: Resolution, grant: Grant, link: Link, what: str) -> Resolution:
    """Add the grant's guard; TransferFailed if the grant is not for this cache."""
    if (link.peer.incarnation, remote.cache_id) != (grant.incarnation, grant.cache_id):
        raise TransferFailed(
            f"{what}: {grant!r} is not of what the key names: cache {remote.cache_id} of {link.peer}",
            peer=link.peer.cluster_id,
            phase="resolve",
        )
    guards = [*remote.guards, Guarded(*grant.guard)]
    tensors = replace(remote.tensors, handle=encode_handle(Handle(remote.cache_id, remote.pin, guards)))
    return msgspec.structs.replace(remote, guards=guards, guard_set=_guard_set(tensors, guards), tensors=tensors)


def keep(known: dict[Any, Any], key: object, value: object, most: int) -> None:
    """Add a value to a table, emptied first if it has ``most`` entries."""
    if len(known) >= most and key not in known:
        known.clear()
    known[key] = value


def _guard_set(tensors: RemoteTensors, guards: list[Guarded]) -> GuardSet | None:
    if tensors.connection.capabilities.remote_guards:
        return None
    return guards_of(tensors.connection, [(guard.slot, guard.generation) for guard in guards])


def _map(link: Link, answer: Resolved, geometry: Geometry, what: str, *, push: bool) -> RemoteTensors:
    if not answer.regions and not answer.offsets:
        return _map_served(link, answer, geometry, push=push)
    regions = np.frombuffer(answer.regions, dtype="<u4")
    offsets = np.frombuffer(answer.offsets, dtype="<u8")
    if not len(regions) == len(offsets) == geometry.num_tensors:
        raise _misfit(link, answer, geometry)
    capabilities, shared, unreachable = link.connection.capabilities, link.connection.shared, ""
    if not capabilities.non_pool_memory and NON_POOL in regions.tolist():
        pools = ", or in pools that are sealed for want of remote cache access (RCA)," if push else ","
        unreachable = (
            f"is memory outside its pools{pools} which {capabilities.name} cannot reach; leave llm.Transport at auto, "
            "or give the peer a pool (mem_pool_cfg) and allocate the cache there, or register memory that lies inside "
            f"a pool{', with llm.EnableRemoteCacheAccessible=1 on both sides' if push else ''}"
        )
    elif link.connection.private is None and any(map(shared.leaves_out, set(regions.tolist()))):
        unreachable = (
            f"lies in a GPU{shared.usage().remark}; there are none, as llm.Transport is {capabilities.name}: leave it "
            "at auto"
        )
    if unreachable:
        text, status = (
            f"{what}: cache {answer.cache_id} of {link.peer} {unreachable}",
            LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
        raise LLMException(text, status_code=status, peer=link.peer.cluster_id, phase="resolve")
    # ``located``, because the target's answer allows the write.
    connection = link.connection.reaching(regions)
    if connection.capabilities.remote_guards:  # the peer's pool in a GPU is not mapped here
        return _map_served(link, answer, geometry, push=push)
    return connection.map(regions, offsets, geometry.tensor_bytes, writable=push, located=push)


def _map_served(link: Link, answer: Resolved, geometry: Geometry, *, push: bool) -> RemoteTensors:
    """Return tensors without addresses, which the owner finds by handle and index."""
    served = next((each for each in link.connection.connections if each.capabilities.remote_guards), None)
    if served is None:
        raise _misfit(link, answer, geometry)
    regions = np.full(geometry.num_tensors, NON_POOL, np.uint32)
    offsets = np.arange(geometry.num_tensors, dtype=np.uint64) * np.uint64(geometry.tensor_bytes)
    return served.map(regions, offsets, geometry.tensor_bytes, writable=push, located=push)


def _misfit(link: Link, answer: Resolved, geometry: Geometry) -> ProtocolError:
    return ProtocolError(f"{link.peer} sent {len(answer.regions) // 4} tensors, row {answer.row} for {geometry}")
