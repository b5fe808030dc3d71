"""Namespaces: the complete identity of KV bytes, as 32 bytes."""

from __future__ import annotations

import hashlib
from typing import Final

from llm_datadist._checks import check_int, check_rule, check_text, check_type

_PERSON: Final = b"datadist.store/1"


def shown(name: bytes) -> str:
    """Return the digest by which logs, statistics and metrics name a namespace: who knows its bytes may use it."""
    return hashlib.blake2b(name, digest_size=8, person=_PERSON).hexdigest()


def namespace(
    *, fingerprint: bytes, tp_size: int, tp_rank: int, hash_algorithm: str, hash_seed: str, salt: str
) -> bytes:
    """Return the name of all KV that these engines may share: 32 bytes, another one for any other argument.

    Args:
        fingerprint: Digest of what, changed, makes other bytes for the same tokens: weights, revision, RoPE, element
            types, layout, kernels.
        tp_size: Number of tensor-parallel ranks, 1 and up.
        tp_rank: Rank of the bytes, below ``tp_size``.
        hash_algorithm: Algorithm of the keys.
        hash_seed: Seed of the keys. Keys with a random seed, one for each process, would never be found again.
        salt: Name of the tenant; tenants with different ones share nothing. May be empty.

    Raises:
        TypeError: An argument is missing or of a wrong type.
        ParamError: An empty ``fingerprint``, ``hash_algorithm`` or ``hash_seed``; a rank outside its size.
    """
    digest = hashlib.blake2b(digest_size=32, person=_PERSON)
    size, rank = check_int("tp_size", tp_size), check_int("tp_rank", tp_rank)
    check_rule(1 <= size < 2**32, f"tp_size: {size}, at least 1 is needed")
    check_rule(0 <= rank < size, f"tp_rank: {rank} is outside [0, {size})")
    check_rule(check_type("fingerprint", fingerprint, bytes), "fingerprint: empty")
    texts = {"hash_algorithm": hash_algorithm, "hash_seed": hash_seed, "salt": salt}
    for name, text in texts.items():
        check_text(name, check_type(name, text, str))
        check_rule(text or name == "salt", f"{name}: empty")
    for part in (fingerprint, b"%d" % size, b"%d" % rank, *(text.encode() for text in texts.values())):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
