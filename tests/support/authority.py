"""Certificates and secrets for tests: a small CA, what it issues, and files of shared secrets."""

import base64
import datetime
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.wire import CLUSTER_URI

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    """A CA whose files lie in a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = folder / f"{name}.pem"
        builder = self._builder(self._name, self._key.public_key(), NOW + 30 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))

    def issue(
        self, name: str, clusters: Sequence[int | str], *, expires: datetime.datetime = NOW + DAY
    ) -> dict[str, str]:
        """Return the options of an end whose certificate names these clusters."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        names = [x509.UniformResourceIdentifier(f"{CLUSTER_URI}{each}") for each in clusters]
        builder = self._builder(subject, key.public_key(), expires)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem = serialization.Encoding.PEM
        certificate, private = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(pem))
        private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        private.chmod(0o600)
        return {"llm.TlsCert": str(certificate), "llm.TlsKey": str(private), "llm.TlsCa": str(self.path)}

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, expires: datetime.datetime
    ) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - 10 * DAY)
            .not_valid_after(expires)
        )


def secret_file(path: Path, **secrets: bytes) -> dict[str, str]:
    """Return the options of an end with a file of secrets, by their ids; the first one is the current one."""
    path.touch(mode=0o600)
    path.write_text("".join(f"{name} {base64.b64encode(value).decode()}\n" for name, value in secrets.items()))
    return {"llm.AuthSecretFile": str(path)}
