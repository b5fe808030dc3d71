"""This process's TLS credentials and trusted issuers: TLS contexts, rebuilt when their files change.

With ``llm.TlsCert``, ``llm.TlsKey`` and ``llm.TlsCa`` this side shows that certificate. It accepts certificates of that
CA, for the clusters that they name. With ``llm.AuthSecretFile`` a CA is derived from each secret. This side shows a new
certificate of the first CA, and accepts those of any, for every cluster. So TLS proves the secret, which is never sent.

Threads: any; a lock guards the contexts.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import hashlib
import logging
import os
import secrets
import ssl
import stat
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from llm_datadist._checks import check_rule, clean
from llm_datadist._links.tls_session import Context, TlsSession
from llm_datadist._log import SeldomLog
from llm_datadist._log import links_logger as logger
from llm_datadist._memory.segment import EXHAUSTED, new_memfd
from llm_datadist._threads import finish_before_exit
from llm_datadist.config import AUTH_SECRET, TLS_CA, TLS_CERT, TLS_KEY
from llm_datadist.errors import AuthFailed, LLMException, LLMStatusCode, OutOfMemory, ParamError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509 import Certificate

    from llm_datadist.config import CredentialFiles

    Key = Ed25519PrivateKey | EllipticCurvePrivateKey

T = TypeVar("T")

CLUSTER_URI: Final = "datadist://cluster/"
"""URI in a certificate, before a cluster id or ``*``."""

#: A peer of a handshake can guess shorter secrets offline.
MIN_SECRET_BYTES: Final = 32
_MAX_FILE_BYTES: Final = 1 << 20
# Always valid: clocks differ, and these certificates end with their process.
_BEGIN: Final = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END: Final = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True, slots=True)
class Secret:
    """A shared secret. Its id is for people; neither is ever sent."""

    id: str
    value: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        """Public name of the secret."""
        return hashlib.sha256(b"digest of a secret" + self.value).hexdigest()[:16]


def read_secrets(path: Path, option: str = AUTH_SECRET) -> list[Secret]:
    """Return the secrets of the file that ``option`` names, the current one first.

    A line is ``id base64``, empty, or begins with ``#``. Only the first MiB is read. Raises ParamError if the file
    cannot be read, has no secret or one id twice, its owner is neither this user nor root, or others have access; if a
    line is malformed or its secret shorter than 32 bytes.
    """
    try:
        # The path may name a pipe.
        with open(path, "rb", opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            _check_private(f"{option}: {path}", about)
            text = file.read(_MAX_FILE_BYTES).decode("ascii")
    except OSError as error:
        raise ParamError(f"{option}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ParamError(f"{option}: {path} holds bytes that are no ASCII text") from None
    found = [
        _parse(line, f"{option}: line {number} of {path}")
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.startswith("#")
    ]
    check_rule(found, f"{option}: {path} holds no secret; `llm-datadist keys new` makes one")
    check_rule(len({each.id for each in found}) == len(found), f"{option}: {path} has two secrets of one id")
    return found


def new_secret(path: Path, name: str) -> Path:
    """Append a random secret to a file, made if needed for this user only; return its path."""
    value = base64.b64encode(secrets.token_bytes(MIN_SECRET_BYTES)).decode()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "w") as file:
        file.write(f"{name} {value}\n")
    return path


def _check_private(what: str, about: os.stat_result) -> None:
    owner, mode = about.st_uid, stat.S_IMODE(about.st_mode)
    check_rule(stat.S_ISREG(about.st_mode), f"{what} is no regular file")
    check_rule(owner in (os.geteuid(), 0), f"{what} belongs to user {owner}: it must be this user's, or root's")
    check_rule(not mode & 0o077, f"{what} has mode {mode:04o}: group and others must have no access")


def _parse(line: str, what: str) -> Secret:
    parts = line.split()
    check_rule(len(parts) == 2, f"{what} is not of the form: id base64")
    try:
        value = base64.b64decode(parts[1], validate=True)
    except (binascii.Error, ValueError):
        raise ParamError(f"{what}: the secret is no base64") from None
    text = f"{what}: the secret has {len(value)} bytes, {MIN_SECRET_BYTES} at least are needed"
    check_rule(len(value) >= MIN_SECRET_BYTES, text)
    return Secret(parts[0], value)


class Kept(Generic[T]):
    """A value that ``read`` makes of files, first here, and again once they change. If it fails, the last one stays."""

    def __init__(self, files: CredentialFiles, read: Callable[[], T], what: str) -> None:
        self._files, self._read, self._what = files, read, what
        self._seldom = SeldomLog(logger)
        self._lock = threading.Lock()  # guards these
        self._stamp: tuple[object, ...] = ()
        with suppress(OSError):  # ``read`` reports it
            self._stamp = files.stamp()
        self._value = read()

    def current(self) -> T:
        """Return the newest readable value; log failures at most once a second."""
        changed, failure = False, ""
        with self._lock:
            try:
                if (stamp := self._files.stamp()) != self._stamp:
                    self._value, self._stamp, changed = self._read(), stamp, True
            except (OSError, LLMException) as error:
                failure = f"the {self._what} cannot be loaded; keeping the previous ones: {error}"
            value = self._value
        # After the lock: a logger may be user code.
        if changed:
            logger.info("the %s have changed: the new ones are used from now on", self._what)
        elif failure:
            self._seldom.log(logging.WARNING, "", failure)
        return value


class Credentials:
    """The credentials of one process, read now and before each handshake if the files have changed.

    Raises ParamError if a file cannot be read or used, OutOfMemory at a limit of descriptors or memory, LLMException if
    secrets lack the package ``cryptography`` (``LLM_FEATURE_NOT_ENABLED``), memfd_create or /proc (``LLM_FAILED``).
    """

    def __init__(self, files: CredentialFiles) -> None:
        self._files = files
        self.current = Kept(files, partial(_contexts, files), "credentials").current

    def session(self, *, server_side: bool) -> TlsSession:
        return TlsSession(self.current()[server_side], server_side=server_side)

    def check(self, tls: TlsSession, cluster_id: int) -> None:
        """Raise AuthFailed unless the peer's certificate allows that cluster."""
        if self._files.secrets is not None:
            return
        names = tls.names()
        if not {f"{CLUSTER_URI}{cluster_id}", f"{CLUSTER_URI}*"}.intersection(names):
            shown = clean(", ".join(names)) or "none"
            raise AuthFailed(f"it says it is cluster {cluster_id}, its certificate names {shown}")


def _contexts(files: CredentialFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return contexts for dialer and listener."""
    if files.secrets is None:
        load: Callable[[ssl.SSLContext], None] = partial(_load_files, files)
        differ = f"the CAs of the two sides differ: here {TLS_CERT}={files.certificate}, {TLS_CA}={files.authority}"
    else:
        known = read_secrets(files.secrets)
        load = _derived(known)
        differ = (
            f"the secrets of the two sides differ: this one shows {known[0].id}, digest {known[0].digest}, of "
            f"{AUTH_SECRET}={files.secrets}; compare it with `llm-datadist keys show` there"
        )
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
        context = Context(protocol)
        context.differ = differ
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # Credentials.check compares cluster ids
        context.verify_mode = ssl.CERT_REQUIRED
        load(context)
        contexts.append(context)
    contexts[1].num_tickets = 0
    return contexts[0], contexts[1]


def _load_files(files: CredentialFiles, context: ssl.SSLContext) -> None:
    """Load PEM files. Raises ParamError if one is malformed or they do not fit together."""
    certificate, key, authority = files.certificate, files.key, files.authority
    assert certificate is not None
    assert key is not None
    try:
        _check_private(f"{TLS_KEY}: {key}", key.stat())
        # Without this function OpenSSL asks the terminal.
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError) as error:
        said = f"{certificate} and {key} cannot be used: {error.strerror or error}"
        raise ParamError(f"{TLS_CERT}, {TLS_KEY}: {said}") from None
    try:
        context.load_verify_locations(authority)
    except (ssl.SSLError, OSError) as error:
        raise ParamError(f"{TLS_CA}: {authority} cannot be used: {error.strerror or error}") from None


def _no_password() -> str:
    raise ParamError(f"{TLS_KEY}: the key has a password: give one without, readable by this user only")


def _derived(known: Sequence[Secret]) -> Callable[[ssl.SSLContext], None]:
    """Return a loader: of a new certificate that only owners of the secret can issue, and of the CAs of all secrets."""
    chain, authorities = finish_before_exit(partial(_issue, known))

    def load(context: ssl.SSLContext) -> None:
        context.load_verify_locations(cadata=authorities)
        # Python's ssl takes keys from files only; this is on no disk.
        try:
            with os.fdopen(new_memfd("llm-datadist-key"), "wb", buffering=0) as file:
                file.write(chain)
                context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
        except OSError as error:
            text = f"{AUTH_SECRET}: a certificate needs memfd_create and /proc: {error}"
            if error.errno in EXHAUSTED:
                raise OutOfMemory(text) from None
            raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from None

    return load


def _issue(known: Sequence[Secret]) -> tuple[bytes, str]:
    """Return a new key with its certificate, and the CAs of all secrets, as PEM. Runs Rust code."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError:
        text = f"{AUTH_SECRET} needs the package cryptography: pip install 'open-datadist[auth]'"
        raise LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED) from None
    seeds = (HKDF(SHA256(), 32, None, b"open-datadist: CA of a shared secret").derive(each.value) for each in known)
    issuers = [Ed25519PrivateKey.from_private_bytes(each) for each in seeds]
    key, pem = Ed25519PrivateKey.generate(), serialization.Encoding.PEM

    def issued(of: Ed25519PrivateKey, issuer: Ed25519PrivateKey) -> bytes:
        digests = (hashlib.blake2b(each.public_key().public_bytes_raw(), digest_size=16) for each in (of, issuer))
        subject, authority = (each.hexdigest() for each in digests)
        return certificate(of, issuer, (subject, authority), (_BEGIN, _END)).public_bytes(pem)

    chain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return chain + issued(key, issuers[0]), b"".join(issued(each, each) for each in issuers).decode()


def certificate(
    key: Key,
    issuer: Key,
    names: tuple[str, str],
    valid: tuple[datetime.datetime, datetime.datetime],
    cluster: str | None = None,
) -> Certificate:
    """Return a certificate of a key, for a ``cluster`` if given; a CA if the key is its own issuer.

    ``names`` are those of key and issuer, ``valid`` the first and the last moment.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256

    subject, authority = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in names)
    constraints = x509.BasicConstraints(ca=key is issuer, path_length=0 if key is issuer else None)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid[0])
        .not_valid_after(valid[1])
        .add_extension(constraints, critical=True)
    )
    if cluster is not None:
        uri = x509.UniformResourceIdentifier(f"{CLUSTER_URI}{cluster}")
        builder = builder.add_extension(x509.SubjectAlternativeName([uri]), critical=False)
    return builder.sign(issuer, None if isinstance(issuer, Ed25519PrivateKey) else SHA256())
