"""TLS of a service's ports. Renewed certificates apply to new connections without a restart."""

import ssl
from pathlib import Path
from typing import Any

import grpc
import structlog

from fulmen.rpc.tls import TlsFiles, TlsMaterial, TlsWatch
from fulmen_service_kit.errors import StartupError

_log = structlog.get_logger()


def rpc_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Returns the credentials of a gRPC port; with `ca_file`, clients must present a certificate (mTLS).

    Raises:
        StartupError: If a file cannot be read, or certificate and key do not match.
    """
    _context(files)
    watch = TlsWatch(files)
    shown = watch.material()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        # Called at every handshake, in a thread of gRPC.
        nonlocal shown
        material = watch.material()
        if material is shown:
            return None
        shown = material
        _log.info("certificate_renewed", port="grpc")
        return _configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(shown), fetch, require_client_authentication=bool(files.ca_file)
    )


def http_context(files: TlsFiles) -> ssl.SSLContext:
    """Returns the context of an HTTP port, without client certificates: agents have only a key.

    Raises:
        StartupError: If a file cannot be read, or certificate and key do not match.
    """
    first = _context(files)
    watch = TlsWatch(files)
    shown, newest = watch.material(), first

    def renew(connection: ssl.SSLObject, _name: str | None, _context_of_port: ssl.SSLContext) -> None:
        nonlocal shown, newest
        material = watch.material()
        if material is not shown:
            shown = material
            try:
                newest = _context(files)
                _log.info("certificate_renewed", port="http")
            except StartupError as error:
                _log.error("certificate_refused", reason=str(error))
        connection.context = newest

    first.sni_callback = renew  # called at every handshake, with a name or without
    return first


def _configuration(material: TlsMaterial) -> Any:
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)


def _context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        for path in filter(None, (files.ca_file, files.certificate_file, files.key_file)):
            Path(path).read_bytes()
        context.load_cert_chain(files.certificate_file, files.key_file)
        if files.ca_file:
            context.load_verify_locations(files.ca_file)
    except ssl.SSLError as error:
        raise StartupError(
            f"{files.certificate_file} and {files.key_file} are not a matching certificate and key in PEM"
            f"{', or ' + files.ca_file + ' contains no CA' if files.ca_file else ''}: {error.reason}"
        ) from None
    except OSError as error:
        raise StartupError(f"TLS file {error.filename} cannot be read: {error.strerror}") from None
    return context
