"""The TCP port of this service at which processes on other machines call back."""

import asyncio
import ipaddress
import secrets
import socket
import ssl
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from fulmen_algorithm.cluster.port import Welcome
from fulmen_algorithm.cluster.wire import HANDSHAKE_DEADLINE_S, Refused, Ticket, admit

MEMBER = b"m"
"""Purpose of the connection of a member's guardian."""
PROCESS = b"p"
"""Purpose of the connection of a process itself."""
MAX_STRANGERS = 256
"""Maximum number of connections that have not proven yet that they are of a group."""
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """Where a service listens to processes on other machines.

    Attributes:
        host: Address to bind to.
        port: Port; 0 selects a free one.
        advertise_host: Host at which other machines reach it; empty for `host`, or for the machine's name where that is a wildcard.
        tls: Context of the port; None for no TLS.
        ca_file: PEM file of the authorities of the port's certificate, at the same path on every machine.
        server_name: Name in the certificate; empty for the address's host.
        silence_s: Time without a sign of life after which a machine counts as dead, in seconds.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = ""
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    ca_file: str = ""
    server_name: str = ""
    silence_s: float = 20.0


@dataclass(frozen=True, slots=True)
class _Group:
    secret: bytes = field(repr=False)
    welcome: Mapping[bytes, Welcome]


class Gate:
    """Listens from the first group on."""

    def __init__(self, options: GateOptions) -> None:
        """Opens nothing yet."""
        self._options = options
        self._groups: dict[bytes, _Group] = {}
        self._server: asyncio.Server | None = None
        self._strangers = 0
        self._opening = asyncio.Lock()

    async def open(self, welcome: Mapping[bytes, Welcome]) -> Ticket:
        """Admits the processes of a new group, whose connections go to `welcome` by purpose.

        Raises:
            OSError: if the port cannot be bound.
        """
        async with self._opening:
            if self._server is None:
                tls = self._options.tls
                self._server = await asyncio.start_server(
                    self._admit,
                    self._options.host,
                    self._options.port,
                    ssl=tls,
                    ssl_handshake_timeout=None if tls is None else HANDSHAKE_DEADLINE_S,
                )
        group, secret = secrets.token_bytes(16), secrets.token_bytes(32)
        self._groups[group] = _Group(secret, welcome)
        return Ticket(
            service=f"tcp://{self._host()}:{self._server.sockets[0].getsockname()[1]}",
            group=group.hex(),
            secret=secret.hex(),
            ca_file=self._options.ca_file,
            server_name=self._options.server_name,
            silence_s=self._options.silence_s,
        )

    def forget(self, ticket: Ticket) -> None:
        """Admits no more processes of a group."""
        self._groups.pop(bytes.fromhex(ticket.group), None)

    def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()

    def _host(self) -> str:
        host = self._options.advertise_host or self._options.host
        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            if address.is_unspecified:
                host = socket.gethostname()
            elif address.version == 6:
                host = f"[{host}]"
        return host

    async def _admit(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self._strangers >= MAX_STRANGERS:
            writer.close()
            return
        self._strangers += 1
        try:
            group, purpose = await admit(reader, writer, {key: each.secret for key, each in self._groups.items()})
        except (Refused, OSError, EOFError, TimeoutError) as error:
            _log.warning("stranger_refused", address=writer.get_extra_info("peername"), reason=str(error))
            writer.close()
            return
        finally:
            self._strangers -= 1
        known = self._groups.get(group)
        welcome = None if known is None else known.welcome.get(purpose)
        if welcome is None:
            writer.close()
            return
        await welcome(reader, writer)
