"""Renewed authentication of a living link (``llm.MaxLinkAge``), over its messages, while transfers go on.

Either side runs a new TLS 1.3 handshake by the present credentials. Inside it each side proves the link's secret, so
neither can pass off another process's handshake as its own.
"""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING

from llm_datadist._links.identity import DIALER, LISTENER
from llm_datadist._links.messages import Authenticate, Authenticated
from llm_datadist.errors import AuthFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.tls_session import TlsSession


class Renewal:
    """Authentications of an encrypted link, whose two sides alone know the ``secret``. Threads: control.

    ``session`` returns a new session by the present credentials; ``server_side`` at the asked side. ``check`` raises
    AuthFailed unless the peer of a session may be the cluster of this link.
    """

    def __init__(
        self, session: Callable[..., TlsSession], check: Callable[[TlsSession], None], secret: bytes, *, dialled: bool
    ) -> None:
        self._session = session
        self._check = check
        self._secret = secret
        self._names = (DIALER, LISTENER) if dialled else (LISTENER, DIALER)
        self.at = time.time()  # for people; for the heartbeat:
        self.last = time.monotonic()
        self.asked: float | None = None  # start of this side's handshake, until it ends
        self._asking: TlsSession | None = None
        self._asked: TlsSession | None = None

    def ask(self, now: float) -> Authenticate:
        """Begin a handshake; return its first message."""
        self.asked, self._asking = now, self._session(server_side=False)
        return Authenticate(self._asking.shake())

    def answer(self, message: Authenticate) -> Authenticated:
        """Continue the peer's handshake. Raises AuthFailed."""
        if self._asked is None:
            self._asked = self._session(server_side=True)
        tls = self._asked
        reply = tls.shake(message.data)
        if not tls.authenticated:
            return Authenticated(reply)
        self._believe(tls, tls.decrypt(b""), asked_here=False)
        self._asked = None
        return Authenticated(reply + tls.encrypt(self._proof(self._names[0], b"answer")))

    def take(self, message: Authenticated) -> Authenticate | None:
        """Continue this side's handshake; None at its end. Raises AuthFailed."""
        if (tls := self._asking) is None:
            raise AuthFailed("it answers what was not asked")
        if tls.authenticated:
            self._believe(tls, tls.decrypt(message.data), asked_here=True)
            self.asked = self._asking = None
            return None
        reply = tls.shake(message.data)
        if not tls.authenticated:
            return Authenticate(reply)
        self._check(tls)
        return Authenticate(reply + tls.encrypt(self._proof(self._names[0], b"question")))

    def _believe(self, tls: TlsSession, proof: bytes, *, asked_here: bool) -> None:
        """Count the peer as authenticated now. Raises AuthFailed unless it belongs to this link."""
        self._check(tls)
        if not hmac.compare_digest(proof, self._proof(self._names[1], b"answer" if asked_here else b"question")):
            raise AuthFailed("the renewal proof belongs to another link or side")
        self.at, self.last = time.time(), time.monotonic()

    def _proof(self, side: bytes, part: bytes) -> bytes:
        # Side and part prevent reflection of a proof.
        return hmac.digest(self._secret, b"renewal " + side + b" " + part, "sha256")
