"""Only processes of a group get in, and they only talk to the service that started them."""

from __future__ import annotations

import asyncio
import signal
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.rpc.tls import TlsFiles
from fulmen_algorithm.cluster import wire
from fulmen_algorithm.cluster.gate import PROCESS, Gate, GateOptions
from fulmen_algorithm.cluster.port import ClusterFailed
from fulmen_algorithm.cluster.wire import Refused, Ticket, connect, interface_of, read_note, write_note
from fulmen_service_kit.security.tls import http_context
from tests.support.algorithm.clusters import DEADLINE_S, Calls, Hosts, order_of, remote
from tests.support.certificates import Authority
from tests.support.processes import all_ended


class Guests:
    """What came in."""

    def __init__(self) -> None:
        self.notes: asyncio.Queue[object] = asyncio.Queue()
        self.count = 0

    async def welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.count += 1
        try:
            await self.notes.put(await read_note(reader))
        except (EOFError, ValueError) as error:
            await self.notes.put(error)
        writer.close()


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    made = Gate(GateOptions())
    yield made
    made.close()


@pytest.fixture
def guests() -> Guests:
    return Guests()


async def said(ticket: Ticket, guests: Guests) -> object:
    """Connects, says something, and returns what arrives."""
    _, writer = await connect(ticket, PROCESS)
    write_note(writer, {"hello": 1})
    try:
        return await guests.notes.get()
    finally:
        writer.close()


async def test_a_process_with_the_ticket_gets_in(gate, guests):
    assert await said(await gate.open({PROCESS: guests.welcome}), guests) == {"hello": 1}


async def test_a_ticket_is_read_from_the_environment_or_a_file_and_shows_no_secret(gate, guests, tmp_path):
    ticket = await gate.open({PROCESS: guests.welcome})
    (tmp_path / "ticket").write_text(ticket.text())
    assert Ticket.from_environment({wire.VARIABLE: ticket.text()}) == ticket
    assert Ticket.from_environment({wire.FILE_VARIABLE: str(tmp_path / "ticket")}) == ticket
    assert ticket.secret not in repr(ticket)


@pytest.mark.parametrize("what", ["secret", "group", "purpose", "forgotten"])
async def test_a_stranger_gets_no_answer_and_reaches_nobody(gate, guests, what):
    ticket = await gate.open({PROCESS: guests.welcome})
    if what == "forgotten":
        gate.forget(ticket)
    if what == "purpose":
        _, writer = await connect(ticket, b"?")
        writer.close()
    else:
        stranger = replace(ticket, **({what: "00" * (16 if what == "group" else 32)} if what != "forgotten" else {}))
        with pytest.raises(Refused):
            await connect(stranger, PROCESS)
    assert guests.count == 0


async def test_who_says_nothing_is_sent_away(gate, guests, monkeypatch):
    monkeypatch.setattr(wire, "HANDSHAKE_DEADLINE_S", 0.1)
    ticket = await gate.open({PROCESS: guests.welcome})
    reader, writer = await asyncio.open_connection("127.0.0.1", int(ticket.service.rpartition(":")[2]))
    assert len(await reader.read()) == 32
    writer.close()
    assert guests.count == 0


async def test_a_process_does_not_talk_to_a_service_without_the_secret(gate, guests):
    async def impostor(reader: StreamReader, writer: StreamWriter) -> None:
        writer.write(bytes(32))
        await reader.readexactly(16 + 1 + 32 + 32)
        writer.write(bytes(32))
        await reader.read()
        writer.close()

    ticket = await gate.open({PROCESS: guests.welcome})
    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        fooled = replace(ticket, service=f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(Refused, match="does not know the group's secret"):
            await connect(fooled, PROCESS)


async def test_a_note_that_is_too_long_is_not_read(gate, guests):
    ticket = await gate.open({PROCESS: guests.welcome})
    _, writer = await connect(ticket, PROCESS)
    writer.write((wire.LONGEST_NOTE_BYTES + 1).to_bytes(8, "big"))
    assert isinstance(await guests.notes.get(), ValueError)
    writer.close()


async def test_with_a_certificate_the_port_is_tls_and_is_verified(guests, tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    pair = authority.issue("service", dns=("service.test",))
    files = TlsFiles(certificate_file=str(pair.certificate), key_file=str(pair.key))
    options = GateOptions(tls=http_context(files), ca_file=str(authority.file), server_name="service.test")
    gate, hasty = Gate(options), Gate(options)
    try:
        ticket = await gate.open({PROCESS: guests.welcome})
        assert await said(ticket, guests) == {"hello": 1}
        (tmp_path / "another").mkdir()
        another = Authority(tmp_path / "another")
        for wrong in ({"ca_file": str(another.file)}, {"server_name": "another.test"}):
            with pytest.raises(OSError, match="certificate verify failed"):
                await connect(replace(ticket, **wrong), PROCESS)
        # Each end waits for the other to speak.
        monkeypatch.setattr("fulmen_algorithm.cluster.gate.HANDSHAKE_DEADLINE_S", 0.1)
        ticket = await hasty.open({PROCESS: guests.welcome})
        with pytest.raises((Refused, OSError, TimeoutError)):
            await connect(replace(ticket, ca_file=""), PROCESS)
        assert guests.count == 1
    finally:
        gate.close()
        hasty.close()


def test_the_loopback_address_is_that_of_the_loopback_interface():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") == ""


async def test_a_machine_that_accepts_and_never_answers_counts_as_dead():
    gate = Gate(GateOptions(silence_s=2.0))
    hosts, calls = Hosts([[]]), Calls(2)
    group = await remote(hosts, gate).start(order_of(2), calls.welcome)
    notes = await calls.all()
    hosts.started[1].send_signal(signal.SIGSTOP)
    async with asyncio.timeout(DEADLINE_S):
        assert "sent nothing for 2 s" in await group.ended()
    calls.close()
    await group.end()
    gate.close()
    await all_ended(note["pid"] for note in notes)


async def test_a_group_whose_guardians_do_not_come_is_given_up(gate, tmp_path):
    hosts = Hosts([["sh", "-c", "exit 3", "sh"]])
    with pytest.raises(ClusterFailed, match="a guardian ended with status 3"):
        await remote(hosts, gate).start(order_of(1), Calls(1).welcome)


async def test_a_process_that_reaches_no_service_ends_at_once(tmp_path: Path):
    ticket = Ticket(service="tcp://127.0.0.1:1", group="00" * 16, secret="00" * 32)
    hosts = Hosts([[]])
    launch = await hosts.launch(order_of(1), ticket)
    assert await launch.failed() == "a guardian ended with status 3"
    await launch.cancel()
