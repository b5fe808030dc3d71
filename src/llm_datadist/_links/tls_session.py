"""TLS 1.3 sessions without I/O: bytes in, bytes out.

Both sides show a certificate (:mod:`.credentials`). No session is resumed; data follows the whole handshake.
"""

from __future__ import annotations

import ssl
import threading
from typing import Final

from llm_datadist.errors import AuthFailed

#: Bytes taken before authentication: enough for two certificates of elliptic curves.
MAX_HANDSHAKE_BYTES: Final = 4096

_READ_BYTES: Final = 1 << 16
#: OpenSSL's codes, and alert, for an issuer that is unknown or has another key.
_FOREIGN: Final = {7, 18, 19, 20, 21}
_FOREIGN_ALERT: Final = "TLSV1_ALERT_UNKNOWN_CA"
#: Waiting answers to requests for new keys; encrypted bytes take them along.
_MAX_ANSWERS_BYTES: Final = 1024


class Context(ssl.SSLContext):
    """A TLS context. ``differ`` is the error text if the sides have different issuers."""

    differ = ""


class TlsSession:
    """One side of a TLS session; ``context`` has the certificate to show and the trusted issuers.

    Threads: any; a lock makes each call one step. Results of :meth:`encrypt` must be sent in the order of the calls.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)
        self._differ = getattr(context, "differ", "")
        self._taken = 0  # bytes of the handshake that were received
        self._lock = threading.Lock()
        self.authenticated = False

    def shake(self, received: bytes = b"") -> bytes:
        """Continue the handshake; return the bytes to send, even once :attr:`authenticated` is set.

        Raises AuthFailed if the peer is rejected, speaks no TLS 1.3, or sent more than 4 KiB. Send :meth:`alert` then.
        """
        with self._lock:
            self._taken += len(received)
            if self._taken > MAX_HANDSHAKE_BYTES:
                raise AuthFailed(f"it has sent more than {MAX_HANDSHAKE_BYTES} bytes before it was authenticated")
            self.incoming.write(received)
            try:
                self._tls.do_handshake()
                self.authenticated = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                raise self._failed(error) from None
            return self.outgoing.read()

    def alert(self) -> bytes:
        """Return the bytes that report a failure; empty after success."""
        with self._lock:
            return self.outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes that carry ``data``. Raises AuthFailed once :meth:`decrypt` has failed, in any thread."""
        with self._lock:
            try:
                self._tls.write(data)
            except ssl.SSLError as error:
                raise self._failed(error) from None
            return self.outgoing.read()

    def decrypt(self, received: bytes) -> bytes:
        """Return the data that the received bytes carry, perhaps none yet.

        Raises AuthFailed if bytes were changed, repeated or left out; or the peer rejects this side, ends the session
        before the connection, or asks for new keys without end.
        """
        with self._lock:
            self.incoming.write(received)
            opened = bytearray()
            try:
                while data := self._tls.read(_READ_BYTES):
                    opened += data
            except ssl.SSLWantReadError:
                if self.outgoing.pending > _MAX_ANSWERS_BYTES:
                    raise AuthFailed("the peer asks for new keys without end") from None
                return bytes(opened)
            except ssl.SSLError as error:
                raise self._failed(error) from None
            # All that follows would be kept, and never decrypted.
            raise AuthFailed("the peer has ended the session")

    def names(self) -> tuple[str, ...]:
        """Return the URIs in the peer's certificate."""
        with self._lock:
            shown = self._tls.getpeercert() or {}
        alternatives: tuple[tuple[str, str], ...] = shown.get("subjectAltName", ())  # type: ignore[assignment]
        return tuple(name for kind, name in alternatives if kind == "URI")

    def _failed(self, error: ssl.SSLError) -> AuthFailed:
        """Return the error to raise: OpenSSL's reason without source lines, or ``differ``."""
        if self._differ and (getattr(error, "verify_code", 0) in _FOREIGN or error.reason == _FOREIGN_ALERT):
            return AuthFailed(self._differ)
        verify = getattr(error, "verify_message", None)
        return AuthFailed(str(verify or error.reason or error).lower().replace("_", " "))
