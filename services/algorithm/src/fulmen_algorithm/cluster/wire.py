"""Connections of started processes to the process that started them. Only the standard library is needed.

On one machine this is a Unix socket in a folder that only its user can open. Between machines it is TCP, with TLS where it
is configured: both ends prove that they know the group's secret, which is never sent, before anything else is read.
"""

import asyncio
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import ssl
import struct
from asyncio import StreamReader, StreamWriter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "FULMEN_GROUP"
"""Environment variable of a process's ticket."""
FILE_VARIABLE = "FULMEN_GROUP_FILE"
"""Environment variable of the file of a ticket."""
NODE_VARIABLE = "FULMEN_NODE"
"""Environment variable of the name of a process's node, where that is not the machine's."""
UNSEEN_VARIABLE = "FULMEN_GROUP_UNSEEN"
"""Environment variable of the folders that a process does not see as the service does, and may ask for: a JSON list."""
PLACE_VARIABLE = "FULMEN_GROUP_PLACE"
"""Environment variable of a folder for their files, which the processes of a machine share."""
VIEWS = "views"
"""Folder in it of what single processes use."""
HIDDEN_PREFIX = "FULMEN_"
"""Beginning of the variables of the service's settings and secrets."""
CONNECT_DEADLINE_S = 60.0
HANDSHAKE_DEADLINE_S = 10.0
LONGEST_NOTE_BYTES = 2**20
"""Maximum length of a message of a member."""
_ID_BYTES = 16
_NONCE_BYTES = 32
_LENGTH_BYTES = 8


class Refused(Exception):
    """The other end does not know the group's secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """How a process of a group reaches the process that started it.

    Attributes:
        service: `unix:PATH` or `tcp://HOST:PORT`.
        rendezvous: URL at which the processes meet each other; empty if that is the first of them.
        group: Id of the group, in hexadecimal digits; empty for a Unix socket.
        secret: Secret of the group, in hexadecimal digits. Secret.
        ca_file: PEM file of the service's authorities, on the process's machine; empty for no TLS.
        server_name: Name in the service's certificate; empty for that of its address.
        silence_s: Time without a sign of life after which the other end counts as dead, in seconds.
    """

    service: str
    rendezvous: str = ""
    group: str = ""
    secret: str = field(default="", repr=False)
    ca_file: str = ""
    server_name: str = ""
    silence_s: float = 20.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Ticket":
        """Reads the ticket of this process.

        Raises:
            KeyError: if there is none.
        """
        if VARIABLE in environment:
            return cls(**json.loads(environment[VARIABLE]))
        return cls(**json.loads(Path(environment[FILE_VARIABLE]).read_text()))

    def text(self) -> str:
        """Returns it as text."""
        return json.dumps(asdict(self))

    @property
    def is_local(self) -> bool:
        """Whether the service is on this machine."""
        return self.service.startswith("unix:")


async def connect(ticket: Ticket, purpose: bytes) -> tuple[StreamReader, StreamWriter]:
    """Connects to the process that started this one.

    Args:
        ticket: The group's.
        purpose: One byte with the purpose of the connection.

    Raises:
        OSError, TimeoutError: if it cannot be reached.
        Refused: if one end does not know the secret.
    """
    async with asyncio.timeout(CONNECT_DEADLINE_S):
        if ticket.is_local:
            return await asyncio.open_unix_connection(ticket.service.removeprefix("unix:"))
        host, _, port = ticket.service.removeprefix("tcp://").rpartition(":")
        context = ssl.create_default_context(cafile=ticket.ca_file) if ticket.ca_file else None
        name = (ticket.server_name or host.strip("[]")) if context is not None else None
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context, server_hostname=name)
        try:
            theirs, mine = await reader.readexactly(_NONCE_BYTES), secrets.token_bytes(_NONCE_BYTES)
            secret, group = bytes.fromhex(ticket.secret), bytes.fromhex(ticket.group)
            writer.write(group + purpose + mine + proof(secret, b"process" + group + purpose + theirs + mine))
            answer = await reader.readexactly(hashlib.sha256().digest_size)
            if not hmac.compare_digest(answer, proof(secret, b"service" + mine + theirs)):
                raise Refused("The service does not know the group's secret.")
        except asyncio.IncompleteReadError:
            writer.close()
            raise Refused("The service does not know the group, or it has ended.") from None
        except BaseException:
            writer.close()
            raise
    return reader, writer


async def admit(reader: StreamReader, writer: StreamWriter, known: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """Checks that a connection is of a known group, before anything else is read of it.

    Args:
        reader: The connection.
        writer: The connection.
        known: Secrets by the groups' ids.

    Returns:
        The group's id and the purpose.

    Raises:
        Refused: if it is not.
        EOFError, OSError, TimeoutError: if it does not say in time.
    """
    mine = secrets.token_bytes(_NONCE_BYTES)
    async with asyncio.timeout(HANDSHAKE_DEADLINE_S):
        writer.write(mine)
        size = _ID_BYTES + 1 + _NONCE_BYTES + hashlib.sha256().digest_size
        said = await reader.readexactly(size)
        group, purpose = said[:_ID_BYTES], said[_ID_BYTES : _ID_BYTES + 1]
        theirs = said[_ID_BYTES + 1 : _ID_BYTES + 1 + _NONCE_BYTES]
        # An unknown group takes the time of a wrong secret.
        secret = known.get(group, secrets.token_bytes(_NONCE_BYTES))
        wanted = proof(secret, b"process" + group + purpose + mine + theirs)
        if not hmac.compare_digest(said[-len(wanted) :], wanted):
            raise Refused("The peer does not know the group's secret.")
        writer.write(proof(secret, b"service" + theirs + mine))
        await writer.drain()
    return group, purpose


def without_settings() -> dict[str, str]:
    """Returns this process's environment without settings and secrets, for what it starts."""
    return {key: value for key, value in os.environ.items() if not key.startswith(HIDDEN_PREFIX)}


def proof(secret: bytes, said: bytes) -> bytes:
    """Returns the message authentication code of what was said."""
    return hmac.digest(secret, said, "sha256")


async def read_message(reader: StreamReader, longest_bytes: int = LONGEST_NOTE_BYTES) -> bytes:
    """Reads a message.

    Raises:
        EOFError, OSError: if the connection ends.
        ValueError: if it is longer than allowed.
    """
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if length > longest_bytes:
        raise ValueError(f"A message of {length} bytes exceeds the limit of this protocol.")
    return await reader.readexactly(length)


async def read_note(reader: StreamReader) -> dict[str, Any]:
    """Reads a message of a member or to it; see `read_message`."""
    note = json.loads(await read_message(reader))
    if not isinstance(note, dict):
        raise ValueError("A note must be an object.")
    return note


def write_note(writer: StreamWriter, note: Mapping[str, object]) -> None:
    """Sends a message of a member or to it."""
    message = json.dumps(note).encode()
    writer.write(len(message).to_bytes(_LENGTH_BYTES, "big") + message)


def folder_digest(folder: Path) -> str:
    """Returns a digest of the names and sizes of a folder's files; empty if it cannot be read."""
    found = hashlib.sha256()
    try:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                found.update(f"{file.relative_to(folder)}\0{file.stat().st_size}\n".encode())
        return found.hexdigest() if folder.is_dir() else ""
    except OSError:
        return ""


def unseen_folders(folders: Mapping[str, str]) -> list[str]:
    """Returns which folders, given with their digests, have other files here."""
    return [folder for folder, digest in folders.items() if folder_digest(Path(folder)) != digest]


def interface_of(address: str) -> str:
    """Returns the network interface that has an address; empty if none has, or the system does not report it."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        try:
            lines = Path("/proc/net/if_inet6").read_text().splitlines()
        except OSError:
            return ""
        return next((words[-1] for line in lines if (words := line.split())[0] == wanted.packed.hex()), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                found = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24]
            except OSError:
                continue
            if found == wanted.packed:
                return name
    return ""


_SIOCGIFADDR = 0x8915  # linux/sockios.h
