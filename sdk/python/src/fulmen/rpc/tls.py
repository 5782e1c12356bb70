"""TLS settings of connections: trusted CAs, and the client certificate.

The files are read again when they change, so certificates are renewed without a restart.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from fulmen.watched_file import WatchedFile

CA_VARIABLE: Final = "FULMEN_TLS_CA_FILE"
CERTIFICATE_VARIABLE: Final = "FULMEN_TLS_CERTIFICATE_FILE"
KEY_VARIABLE: Final = "FULMEN_TLS_KEY_FILE"
SERVER_NAME_VARIABLE: Final = "FULMEN_TLS_SERVER_NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files, and the expected server name.

    Attributes:
        ca_file: CAs of the peer's certificates; empty for a server that requests no client certificates.
        certificate_file: Own certificate chain; empty for a client without a certificate.
        key_file: Key of that certificate.
        server_name: Name required in a server's certificate; empty for the name in its address.
    """

    ca_file: str = ""
    certificate_file: str = ""
    key_file: str = ""
    server_name: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "TlsFiles | None":
        """Reads FULMEN_TLS_CA_FILE and related variables; None without CAs."""
        ca_file = environment.get(CA_VARIABLE, "")
        if not ca_file:
            return None
        return cls(
            ca_file=ca_file,
            certificate_file=environment.get(CERTIFICATE_VARIABLE, ""),
            key_file=environment.get(KEY_VARIABLE, ""),
            server_name=environment.get(SERVER_NAME_VARIABLE, ""),
        )

    def options(self) -> tuple[tuple[str, str], ...]:
        """Returns the channel options for servers with that name."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


class TlsMaterial(NamedTuple):
    """Contents of the files; None for missing ones."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


class TlsWatch:
    """Watches the files for changes."""

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            OSError: if a file cannot be read.
        """
        self._files = [
            WatchedFile(path) if path else None for path in (files.ca_file, files.certificate_file, files.key_file)
        ]
        self._versions = self._seen()
        self._material = self._read()

    def material(self) -> TlsMaterial:
        """Returns the contents of the files; a new object after a change."""
        material = self._read()
        if self._seen() != self._versions:
            self._material, self._versions = material, self._seen()
        return self._material

    def _read(self) -> TlsMaterial:
        return TlsMaterial(*(None if file is None else file.content() for file in self._files))

    def _seen(self) -> list[int]:
        return [0 if file is None else file.version for file in self._files]
