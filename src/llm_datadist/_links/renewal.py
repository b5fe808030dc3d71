"""Authenticate the ends of a living link again: ``llm.MaxLinkAge``.

Either end may ask. It runs a new TLS 1.3 handshake with the other end, by the credentials of now, in messages of the
link: nothing is dialled, and transfers go on meanwhile. At the end of the handshake each end sends, inside the new
session, a proof made of a secret that only the two ends of this link know. So an end that is not believed any more
cannot pass another process's handshake off as its own, nor ours.

One :class:`Renewal` for each sealed link, owned by it. Threads: control.
"""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING

from llm_datadist._links.messages import Authenticate, Authenticated
from llm_datadist.errors import AuthFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._links.tls_session import TlsSession

_DIALER, _LISTENER = b"initiator", b"target"  # of the link, whichever end asks


class Renewal:
    """When the peer was authenticated, and the handshakes that do it again.

    Args:
        session: Returns a new session by the credentials of now; ``server_side`` at the end that was asked.
        check: Raises AuthFailed unless the other end of a session may be the cluster of this link.
        secret: What only the two ends of this link know.
        dialled: True at the end that dialled the link.
    """

    def __init__(
        self, session: Callable[..., TlsSession], check: Callable[[TlsSession], None], secret: bytes, *, dialled: bool
    ) -> None:
        self._session = session
        self._check = check
        self._secret = secret
        self._names = (_DIALER, _LISTENER) if dialled else (_LISTENER, _DIALER)
        self.at = time.time()  # for people, and for the heartbeat:
        self.last = time.monotonic()
        #: When this end asked, while it waits for the end of that handshake.
        self.asked: float | None = None
        self._asking: TlsSession | None = None
        self._asked: TlsSession | None = None

    def ask(self, now: float) -> Authenticate:
        """Begin a handshake; return the message that does."""
        self.asked, self._asking = now, self._session(server_side=False)
        return Authenticate(self._asking.shake())

    def answer(self, message: Authenticate) -> Authenticated:
        """Go on with a handshake that the peer has asked for. Raises AuthFailed."""
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
        """Go on with the handshake that this end has asked for; None at its end. Raises AuthFailed."""
        tls = self._asking
        if tls is None:
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
        """Count the peer as authenticated now if it belongs to this link. Raises AuthFailed."""
        self._check(tls)
        if not hmac.compare_digest(proof, self._proof(self._names[1], b"answer" if asked_here else b"question")):
            raise AuthFailed("the renewal proof belongs to another link or side")
        self.at, self.last = time.time(), time.monotonic()

    def _proof(self, end: bytes, part: bytes) -> bytes:
        # The end and the part: else an end could be shown what it has sent itself.
        return hmac.digest(self._secret, b"renewal " + end + b" " + part, "sha256")
