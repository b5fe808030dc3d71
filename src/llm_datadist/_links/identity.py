"""Proof that a peer is the process which this end has met before: a secret that only the two of them know.

The first handshake of two incarnations agrees on a secret, of which each end sends one half. In every later handshake
of these two, each end proves by the secret that it is the same process as before, and not a stranger who has learnt the
incarnation. This does not protect against an attacker that has read or changed the first handshake. That takes
authentication, for which greetings have a field.

Threads: any; single dict operations only. Nothing fails: without a secret there is no proof.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final, NamedTuple

#: Secrets kept; the oldest goes first. A peer whose secret is gone is a peer that was never met.
_MAX_SECRETS: Final = 4096


class Transcript(NamedTuple):
    """What both ends of one handshake have said by the time of the proofs: their incarnations and fresh nonces."""

    dialer: bytes
    listener: bytes
    dialer_nonce: bytes
    listener_nonce: bytes


class PeerSecrets:
    """The secrets of one process incarnation, by the incarnation of the peer."""

    def __init__(self) -> None:
        self._secrets: dict[bytes, bytes] = {}

    def prove(self, peer: bytes, role: bytes, transcript: Transcript) -> bytes:
        """Return this end's proof in its role for a peer; empty where the two have no secret."""
        secret = self._secrets.get(peer)
        return b"" if secret is None else _proof(secret, role, transcript)

    def is_proven(self, peer: bytes, role: bytes, transcript: Transcript, proof: bytes) -> bool:
        """Return True if only the peer, in its role, can have sent this proof."""
        secret = self._secrets.get(peer)
        return secret is not None and hmac.compare_digest(proof, _proof(secret, role, transcript))

    def agree(self, peer: bytes, dialer_share: bytes, listener_share: bytes, transcript: Transcript) -> None:
        self._secrets.pop(peer, None)
        self._secrets[peer] = hashlib.sha256(b"".join((dialer_share, listener_share, *transcript))).digest()
        while len(self._secrets) > _MAX_SECRETS:
            self._secrets.pop(next(iter(self._secrets)), None)


def new_share() -> bytes:
    return secrets.token_bytes(32)


def _proof(secret: bytes, role: bytes, transcript: Transcript) -> bytes:
    # Keyed BLAKE2b is a MAC by itself; an HMAC by OpenSSL takes ten times as long once in a while.
    return hashlib.blake2b(b"".join((role, *transcript)), key=secret, digest_size=32).digest()
