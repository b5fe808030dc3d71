"""``llm-datadist keys``: make and show secret files and small CAs."""

from __future__ import annotations

import datetime
import os
import secrets
from pathlib import Path  # noqa: TC003 (typer evaluates annotations)
from typing import TYPE_CHECKING, Annotated

import typer

from llm_datadist._checks import is_digits
from llm_datadist._links.credentials import certificate, new_secret, read_secrets
from llm_datadist.errors import LLMException
from llm_datadist.tools.cli.usage import examples, failing

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

keys = typer.Typer(help="Make and show secrets and certificates for links.", no_args_is_help=True)

_YEARS = 2
_DAY = datetime.timedelta(days=1)


@keys.command(
    epilog=examples(
        "llm-datadist keys new /etc/datadist/secrets",
        "llm-datadist keys new ca --ca --cluster 1 --cluster 2",
    )
)
def new(
    path: Annotated[Path, typer.Argument(help="File of secrets, or folder of a CA.", show_default=False)],
    name: Annotated[str, typer.Option("--id", help="Id of the new secret; by default today's date.")] = "",
    ca: Annotated[bool, typer.Option("--ca", help="Make a CA and certificates instead, for tests.")] = False,
    cluster: Annotated[
        list[str] | None, typer.Option(help="With --ca: cluster id of a certificate, or *. Repeatable.")
    ] = None,
) -> None:
    """Add a secret to a file, or make a small CA for a test. The new secret is the file's last.

    An instance shows the first secret of its file, and believes all of them.
    """
    if cluster and not ca:
        raise typer.BadParameter("--cluster is of certificates: give --ca, too")
    with failing("keys", OSError, LLMException, ModuleNotFoundError):
        if ca:
            _new_authority(path, cluster or ["*"])
        else:
            _new_secret(path, name or datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"))


@keys.command(epilog=examples("llm-datadist keys show /etc/datadist/secrets", "llm-datadist keys show ca/1.pem"))
def show(
    path: Annotated[Path, typer.Argument(help="File of secrets, or a certificate in PEM.", show_default=False)],
) -> None:
    """Show what a file of secrets or a certificate holds. Of secrets, show only ids and digests."""
    with failing("keys", OSError, ValueError, LLMException, ModuleNotFoundError):
        if path.read_bytes().startswith(b"-----BEGIN CERTIFICATE"):
            _show_certificate(path)
            return
        for place, secret in enumerate(read_secrets(path)):
            print(f"{secret.id:20} digest {secret.digest}  {'shown and believed' if place == 0 else 'believed'}")


def _new_secret(path: Path, name: str) -> None:
    present = read_secrets(path) if path.exists() else []
    word = name.isascii() and name.split() == [name] and not name.startswith("#")
    if not word or name in {each.id for each in present}:
        raise typer.BadParameter(
            f"{path} has a secret {name!r} already, or that is not one word in ASCII: choose another --id"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    new_secret(path, name)
    print(f"{path}: secret {name}, {'believed' if present else 'shown and believed'} by instances that use this file")


def _new_authority(folder: Path, clusters: list[str]) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    for cluster in clusters:
        if cluster != "*" and not (is_digits(cluster) and str(int(cluster)) == cluster and int(cluster) < 1 << 64):
            raise typer.BadParameter(f"--cluster {cluster!r} is neither a cluster id nor *")
        for there in (folder / f"{_file_of(cluster)}.{suffix}" for suffix in ("key", "pem")):
            if there.exists():
                raise typer.BadParameter(f"{there} exists already: choose another folder, or remove it")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    # Unique: for two authorities of one name OpenSSL reports only a wrong signature.
    authority = f"open-datadist test CA {secrets.token_hex(4)}"
    now = datetime.datetime.now(datetime.UTC)
    valid = now - _DAY, now + _YEARS * 365 * _DAY  # hosts' clocks differ
    _write_pair(folder / "ca", key, certificate(key, key, (authority, authority), valid))
    for cluster in dict.fromkeys(clusters):
        name = _file_of(cluster)
        own = ec.generate_private_key(ec.SECP256R1())
        _write_pair(folder / name, own, certificate(own, key, (f"cluster {name}", authority), valid, cluster))
        print(f"llm.TlsCert={folder / name}.pem llm.TlsKey={folder / name}.key llm.TlsCa={folder / 'ca.pem'}")


def _file_of(cluster: str) -> str:
    return "any" if cluster == "*" else cluster


def _write_pair(path: Path, key: EllipticCurvePrivateKey, issued: Certificate) -> None:
    """Write two new files, for this user only."""
    from cryptography.hazmat.primitives import serialization as form

    secret = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    for suffix, data in (("key", secret), ("pem", issued.public_bytes(form.Encoding.PEM))):
        file = path.with_name(f"{path.name}.{suffix}")
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new_file:
            new_file.write(data)


def _show_certificate(path: Path) -> None:
    from cryptography import x509

    shown = x509.load_pem_x509_certificate(path.read_bytes())
    until = f"by {shown.issuer.rfc4514_string()}, until {shown.not_valid_after_utc:%Y-%m-%d}"
    try:
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        print(f"{path}: names no cluster, {until}")
        return
    print(f"{path}: {', '.join(names.get_values_for_type(x509.UniformResourceIdentifier))}, {until}")
