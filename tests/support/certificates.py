"""Certificates of an authority of the tests' own."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Authority", "Pair"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Files of a certificate and of its key."""

    certificate: Path
    key: Path

    def settings(self) -> dict[str, str]:
        """Returns the settings of a service that shows it."""
        return {"tls_certificate_file": str(self.certificate), "tls_key_file": str(self.key)}


class Authority:
    """Issues certificates for this machine."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        """Makes the authority, and the file by which others know it."""
        self._folder = folder
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(name, issuer=name, key=self._key, authority=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(self._certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, dns: tuple[str, ...] = ("localhost",), to: Pair | None = None) -> Pair:
        """Makes a certificate; into the files of another, in place of it, if they are given."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [x509.IPAddress(IPv4Address("127.0.0.1")), *(x509.DNSName(each) for each in dns)]
        certificate = (
            _builder(name, issuer=self._name, key=key, authority=False)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pair = to or Pair(certificate=self._folder / f"{name}.pem", key=self._folder / f"{name}.key")
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return pair


def _builder(name: str, *, issuer: str, key: ec.EllipticCurvePrivateKey, authority: bool) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_named(name))
        .issuer_name(_named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
