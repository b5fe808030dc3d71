"""Signed references: one engine names its KV to another, over HTTP clients that neither trusts.

A reference is a text ``version.key.payload.signature``. The signature is HMAC-SHA256 of the rest, by the secret whose
digest is ``key``. A token computed from secret and reference names the grant: a client without the secret cannot claim
it.
"""

from __future__ import annotations

import base64
import hmac
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_text, temporary_folder
from llm_datadist._links.credentials import Kept, Secret, new_secret, read_secrets
from llm_datadist.config import AUTH_SECRET, CACHE_MANAGER, DEVICE_ID, INSECURE, CredentialFiles, Options
from llm_datadist.errors import ParamError
from llm_datadist.types.enums import LLMRole
from llm_datadist.types.grant import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

SECRET_FILE: Final = "reference_secret_file"

_VERSION: Final = "3"
#: Hostile text is scanned once (``*+``); the payload is read only after its signature is verified.
_FORM: Final = re.compile(r"(([0-9]{1,4})\.([0-9a-f]{16})\.([^.]*+))\.([0-9a-f]{64})")
#: Above any offer whose grant fits a message (``MAX_GRANT``).
_MAX_LENGTH: Final = 1 << 21


class ReferenceKeys:
    """Signs references, and verifies those of instances with the same secrets. Threads: one.

    ``path`` has the secrets, one a line. The first signs, all verify; changes are read again. Raises ParamError, which
    names ``option``, if the file cannot be used.
    """

    def __init__(self, path: Path, option: str = SECRET_FILE) -> None:
        self._path, self._option = path, option
        self._current = Kept(CredentialFiles(secrets=path), self._read, "secrets of references").current

    def sign(self, payload: bytes) -> tuple[str, bytes]:
        """Return the reference with this payload, and its token."""
        name, secret = next(iter(self._current().items()))
        head = f"{_VERSION}.{name}.{base64.urlsafe_b64encode(payload).decode()}"
        return f"{head}.{_digest(secret, 'references', head).hex()}", _digest(secret, "tokens", head)[:TOKEN_BYTES]

    def read(self, reference: object) -> tuple[bytes, bytes]:
        """Return payload and token of a reference.

        Raises:
            ParamError: No secret of the file has signed it; its payload was not read.
        """
        if not isinstance(reference, str) or len(reference) > _MAX_LENGTH:
            raise ParamError(f"reference: {type(reference).__name__}: not a text of at most {_MAX_LENGTH} characters")
        parts = _FORM.fullmatch(reference) if reference.isascii() else None
        if parts is None or len(parts[4]) % 4:
            raise ParamError("reference: not of the form version.key.payload.signature")
        head, version, name, payload, signature = parts.groups()
        if version != _VERSION:
            raise ParamError(f"reference: version {version}: this connector reads version {_VERSION}")
        known = self._current()
        secret = known.get(name)
        if secret is None or not hmac.compare_digest(_digest(secret, "references", head).hex(), signature):
            what = "its key is not known here" if secret is None else "its signature is wrong"
            raise ParamError(
                f"reference: key {name}: {what}; believed keys: {', '.join(known)} ({self._option}: {self._path})"
            )
        return base64.urlsafe_b64decode(payload), _digest(secret, "tokens", head)[:TOKEN_BYTES]

    def _read(self) -> dict[str, Secret]:
        return {each.digest: each for each in read_secrets(self._path, self._option)}


def _digest(secret: Secret, use: str, head: str) -> bytes:
    key = hmac.digest(secret.value, f"open-datadist: {use}".encode(), "sha256")
    return hmac.digest(key, head.encode(), "sha256")


def secret_file(own: str | None, options: Mapping[str, str]) -> tuple[Path, str]:
    """Return the file of secrets for references, and its option.

    It is ``llm.AuthSecretFile``, ``own`` (``reference_secret_file``), or this user's file on this host. Raises
    ParamError, and the engine does not start: both files are given; or none, but certificates or ``llm.Insecure``.
    """
    parsed = Options.parse({DEVICE_ID: "0", CACHE_MANAGER: "1", **options}, LLMRole.DECODER)
    if (credentials := parsed.credentials) is not None and credentials.secrets is not None:
        if own is not None:
            raise ParamError(f"{SECRET_FILE}={own}: {AUTH_SECRET} signs references already; give one of them")
        return credentials.secrets, AUTH_SECRET
    if own is None and (credentials is not None or parsed.insecure):
        raise ParamError(
            f"{SECRET_FILE}: not given: with certificates or {INSECURE} references need a secret that all engines "
            "share; make one with `llm-datadist keys new FILE`"
        )
    return runtime_secret_file() if own is None else Path(check_text(SECRET_FILE, own)), SECRET_FILE


def runtime_secret_file() -> Path:
    """Return this user's file of secrets on this host; make it if missing.

    Raises:
        ParamError: Its folder is not this user's alone, or cannot be used.
    """
    uid = os.geteuid()
    home = os.environ.get("XDG_RUNTIME_DIR", "")
    folder: Path | str = "its folder"
    try:
        named = os.path.isdir(home)
        folder = Path(home, "open-datadist") if named else Path(temporary_folder(), f"open-datadist-{uid}")
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()  # follows no symbolic link
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != uid or about.st_mode & 0o077:
            raise ParamError(
                f"{SECRET_FILE}: {folder}: not a folder of user {uid} alone (mode 0700); remove it, or give a file"
            )
        path = folder / "references"
        if not path.exists():
            made = new_secret(folder / f".{secrets.token_hex(8)}", "host")
            try:
                with suppress(FileExistsError):  # another engine was faster
                    os.link(made, path)
            finally:
                made.unlink()
    except OSError as error:
        raise ParamError(f"{SECRET_FILE}: {folder}: {error.strerror}; give a file or XDG_RUNTIME_DIR") from None
    return path
