"""A TLS end in front of a plain server, which asks every caller for a certificate: what a mesh or a load balancer does."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

__all__ = ["Certificates", "make_certificates", "tls_front"]

LIFETIME = datetime.timedelta(hours=1)
CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Paths of PEM files; `stranger_*` are of an authority of their own."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path
    stranger: Path
    stranger_key: Path


def make_certificates(folder: Path) -> Certificates:
    """Makes an authority, a server called `localhost`, a client, and a client that nobody vouches for."""
    authority = _issue(folder, "authority")
    own = (authority, x509.load_pem_x509_certificate((folder / "authority.pem").read_bytes()))
    for name in ("server", "client"):
        _issue(folder, name, issuer=own)
    _issue(folder, "stranger")
    files = {name: folder / f"{name}.pem" for name in ("authority", "server", "client", "stranger")}
    keys = {f"{name}_key": folder / f"{name}.key" for name in ("server", "client", "stranger")}
    return Certificates(**files, **keys)


def _issue(
    folder: Path, name: str, *, issuer: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None = None
) -> ec.EllipticCurvePrivateKey:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer[1].subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFETIME)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    )
    certificate = builder.sign(issuer[0] if issuer else key, hashes.SHA256())
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    pkcs8 = serialization.PrivateFormat.PKCS8
    pem = key.private_bytes(serialization.Encoding.PEM, pkcs8, serialization.NoEncryption())
    (folder / f"{name}.key").write_bytes(pem)
    return key


@asynccontextmanager
async def tls_front(port: int, certificates: Certificates) -> AsyncIterator[str]:
    """Yields where a TLS end listens that hands everything on to a port of this machine."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.authority))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates.server, certificates.server_key)
    context.set_alpn_protocols(["h2"])
    server = await asyncio.start_server(lambda *caller: _joined(*caller, port=port), "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"


async def _joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, port: int) -> None:
    behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(_handed_on(reader, behind_writer), name="towards the server")
            group.create_task(_handed_on(behind_reader, writer), name="towards the caller")
    finally:
        writer.close()
        behind_writer.close()


async def _handed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.close()
    except (ConnectionError, ssl.SSLError):
        writer.close()
