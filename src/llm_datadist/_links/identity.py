"""Proofs that a peer is the process met before, by a secret that only the two know.

The first handshake of two incarnations agrees on a secret, half from each side. In later ones each side proves it,
because others may learn an incarnation. An attacker that read or changed the first handshake is not excluded.
Credentials (TLS 1.3, :mod:`.credentials`) protect against that; no greeting field does.

Threads: any; single dict operations only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from llm_datadist._links.messages import Greeting

#: Secrets kept, 1 MiB: four times the links of the default ``llm.MaxLinks``. The oldest goes first, as if never met.
_MAX_SECRETS: Final = 4096
SHARE_BYTES: Final = 32
DIALER, LISTENER = b"initiator", b"target"  # roles in proofs, on the wire


class Transcript(bytes):
    """Incarnations, nonces, versions and features of both sides; its digest shows that both saw the same."""

    @classmethod
    def of(cls, hello: Greeting, welcome: Greeting) -> Transcript:
        languages = msgspec.msgpack.encode([hello.versions, hello.features, welcome.versions, welcome.features])
        return cls(hello.incarnation + welcome.incarnation + hello.nonce + welcome.nonce + languages)

    def digest(self) -> bytes:
        return hashlib.blake2b(self, digest_size=16).digest()

    def secret(self, shares: bytes) -> bytes:
        """Return the link's secret, HKDF-Extract of both sides' shares; empty without them."""
        return hmac.digest(self, shares, "sha256") if shares else b""


class PeerSecrets:
    """The secrets of one incarnation, by that of the peer."""

    def __init__(self) -> None:
        self._secrets: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._secrets)

    def prove(self, peer: bytes, role: bytes, transcript: Transcript) -> bytes:
        """Return the proof for a peer; empty without a secret. ``role`` is that of the side that proves."""
        if (secret := self._secrets.get(peer)) is None:
            return b""
        # Keyed BLAKE2b is a MAC; an HMAC by OpenSSL occasionally takes ten times as long.
        return hashlib.blake2b(role + transcript, key=secret, digest_size=32).digest()

    def is_proven(self, peer: bytes, role: bytes, transcript: Transcript, proof: bytes) -> bool:
        """Return True if only the peer, in its role, can have sent this proof."""
        expected = self.prove(peer, role, transcript)
        return expected != b"" and hmac.compare_digest(proof, expected)

    def agree(self, peer: bytes, dialer_share: bytes, listener_share: bytes, transcript: Transcript) -> None:
        self._secrets.pop(peer, None)
        self._secrets[peer] = hashlib.sha256(dialer_share + listener_share + transcript).digest()
        for each in list(self._secrets)[:-_MAX_SECRETS]:  # a copy: other handshakes add theirs
            self._secrets.pop(each, None)


def new_share() -> bytes:
    return secrets.token_bytes(SHARE_BYTES)
