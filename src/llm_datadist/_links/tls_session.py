"""One TLS 1.3 session over any connection: bytes in, bytes out, no I/O.

Both ends show a certificate (:mod:`.credentials`). Neither resumes an earlier session, and nothing is sent before the
handshake is over. What a stranger may send until then is bounded.

Threads: any; a lock makes each call one step of the session. The caller sends what :meth:`TlsSession.encrypt` returns
in the order of the calls.
"""

from __future__ import annotations

import ssl
import threading
from typing import Final

from llm_datadist.errors import AuthFailed

#: What the other end may send before it is authenticated: a certificate of an elliptic curve and its issuer's fit well.
MAX_HANDSHAKE_BYTES: Final = 4096

_READ_BYTES: Final = 1 << 16
#: What OpenSSL calls a certificate whose authority this end does not believe, or has another key of; and as an alert.
_FOREIGN: Final = {7, 18, 19, 20, 21}
_FOREIGN_ALERT: Final = "TLSV1_ALERT_UNKNOWN_CA"
#: New keys that the other end asks for are answered with the next bytes that are sealed; nobody needs so many at once.
_MAX_ANSWERS_BYTES: Final = 1024


class Context(ssl.SSLContext):
    """What an end shows and believes; ``differ`` says which that is, for an end that is not believed."""

    differ = ""


class TlsSession:
    """The session of one connection, at one end.

    Args:
        context: What this end shows, and whom it believes.
        server_side: True at the end that listens.
    """

    def __init__(self, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)
        self._differ = getattr(context, "differ", "")
        self._taken = 0  # bytes of the handshake that were received
        self._lock = threading.Lock()
        self.authenticated = False

    def shake(self, received: bytes = b"") -> bytes:
        """Go on with the handshake; return what has to be sent, even when :attr:`authenticated` is set by now.

        Raises:
            AuthFailed: The other end is not believed, or speaks no TLS 1.3. What is left to be sent is in
                :meth:`alert`.
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
        """Return what tells the other end that it has failed; nothing after a handshake that went well."""
        with self._lock:
            return self.outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        """Return the bytes that carry ``data``.

        Raises:
            AuthFailed: The session has ended: :meth:`decrypt`, perhaps of another thread, has failed.
        """
        with self._lock:
            try:
                self._tls.write(data)
            except ssl.SSLError as error:
                raise self._failed(error) from None
            return self.outgoing.read()

    def decrypt(self, received: bytes) -> bytes:
        """Return what the received bytes carry, which may be nothing yet.

        Raises:
            AuthFailed: They were changed, repeated or left out on their way, or the other end refuses this one, ends
                the session before the connection, or asks for new keys without end.
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
            # All that follows would be kept, and never opened.
            raise AuthFailed("the peer has ended the session")

    def names(self) -> tuple[str, ...]:
        """Return the URIs in the certificate of the other end."""
        with self._lock:
            shown = self._tls.getpeercert() or {}
        alternatives: tuple[tuple[str, str], ...] = shown.get("subjectAltName", ())  # type: ignore[assignment]
        return tuple(name for kind, name in alternatives if kind == "URI")

    def _failed(self, error: ssl.SSLError) -> AuthFailed:
        """Return what to raise: OpenSSL's words without its source lines, or which credentials differ."""
        if self._differ and (getattr(error, "verify_code", 0) in _FOREIGN or error.reason == _FOREIGN_ALERT):
            return AuthFailed(self._differ)
        verify = getattr(error, "verify_message", None)
        return AuthFailed(str(verify or error.reason or error).lower().replace("_", " "))
