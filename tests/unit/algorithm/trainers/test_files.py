"""Files of a run between the service and a rank that does not see its folders: nothing else is given, and lines may break."""

from __future__ import annotations

import asyncio
import os
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fulmen.rpc.tls import TlsFiles
from fulmen_algorithm.cluster.gate import PROCESS, Gate, GateOptions
from fulmen_algorithm.cluster.wire import Ticket, read_message
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.calls import Hello
from fulmen_algorithm.trainers.files.access import OwnAccess
from fulmen_algorithm.trainers.files.carried import WINDOW, CarriedFolders
from fulmen_algorithm.trainers.files.folders import CallFolders
from fulmen_algorithm.trainers.files.messages import CHUNK_BYTES, is_path_in_folder
from fulmen_algorithm.trainers.files.server import FileServer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from fulmen_algorithm.training.files import StorageFailed
from fulmen_exchange.links.settings import ServerAccess
from tests.support.algorithm.trainers import setup_of

LIMIT_S = 60.0
MODEL = os.urandom(20 * CHUNK_BYTES + 7)


class Line:
    """A line between the rank and the service that breaks after some bytes, and counts them."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.target = target
        self.breaks: list[int] = []
        self.bytes = 0
        self.opened = 0

    async def carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        self.opened += 1
        there_reader, there_writer = await asyncio.open_connection(*self.target)
        left = [self.breaks.pop(0) if self.breaks else 2**62]

        async def copy(source: StreamReader, to: StreamWriter) -> None:
            while data := await source.read(2**16):
                self.bytes += len(data)
                left[0] -= len(data)
                if left[0] < 0:
                    break
                to.write(data)
                await to.drain()
            for each in (writer, there_writer):
                each.transport.abort()

        await asyncio.gather(copy(reader, there_writer), copy(there_reader, writer), return_exceptions=True)


@pytest.fixture
async def service() -> AsyncIterator[SimpleNamespace]:
    """A group's files, behind a line."""
    gate, files = Gate(GateOptions()), FileServer(ranks=2)

    async def welcome(reader: StreamReader, writer: StreamWriter) -> None:
        assert msgspec.msgpack.decode(await read_message(reader), type=Hello).asks_files
        await files.serve(reader, writer)

    ticket = await gate.open({PROCESS: welcome})
    host, _, port = ticket.service.removeprefix("tcp://").rpartition(":")
    line = Line((host, int(port)))
    carrier = await asyncio.start_server(line.carry, "127.0.0.1", 0)
    through = replace(ticket, service=f"tcp://127.0.0.1:{carrier.sockets[0].getsockname()[1]}")
    yield SimpleNamespace(files=files, line=line, ticket=through, gate=gate)
    files.close()
    carrier.close()
    gate.close()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("model/parts/a.safetensors", "model/config.json", "secret/token"):
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(MODEL if name.endswith(".safetensors") else b"{}")
    return tmp_path / "run"


def rank(ticket: Ticket, tmp_path: Path, number: int = 0) -> CarriedFolders:
    return CarriedFolders(ticket, number, [tmp_path / "run"], tmp_path / "machine")


def read(carried: CarriedFolders, folder: Path) -> dict[str, bytes]:
    """Returns what a call that reads a folder finds."""
    with carried.there("read_state", {"folder": folder}) as given:
        assert not given["folder"].is_relative_to(folder)
        return content(given["folder"])


def content(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() for each in folder.rglob("*") if each.is_file()}


def write(carried: CarriedFolders, folder: Path, files: dict[str, bytes]) -> None:
    """Carries out a call that writes a folder."""
    with carried.there("write_state", {"folder": folder}) as given:
        for name, data in files.items():
            (given["folder"] / name).parent.mkdir(parents=True, exist_ok=True)
            (given["folder"] / name).write_bytes(data)


async def on_rank(function, *arguments):
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.to_thread(function, *arguments)


async def test_what_a_call_reads_arrives_once_for_all_ranks_of_a_machine(service, run_dir, tmp_path):
    service.files.offer(CallFolders(read=frozenset({run_dir / "model"})))
    ranks = [rank(service.ticket, tmp_path, number) for number in range(2)]
    found = await asyncio.gather(*(on_rank(read, each, run_dir / "model") for each in ranks))
    assert found == [content(run_dir / "model")] * 2
    assert service.line.bytes < 1.1 * len(MODEL)
    assert not list((tmp_path / "machine/views").iterdir())


async def test_a_line_that_breaks_costs_no_more_than_what_was_under_way(service, run_dir, tmp_path):
    service.files.offer(CallFolders(read=frozenset({run_dir / "model"}), written=frozenset({run_dir / "new"})))
    service.line.breaks = [10**9, len(MODEL) // 3, len(MODEL) // 3]
    carried = rank(service.ticket, tmp_path)
    assert await on_rank(read, carried, run_dir / "model") == content(run_dir / "model")
    assert service.line.bytes < len(MODEL) + 4 * WINDOW * CHUNK_BYTES
    service.line.breaks, service.line.bytes = [len(MODEL) // 3] * 4, 0
    await on_rank(write, carried, run_dir / "new", {"state.pt": MODEL})
    assert content(run_dir / "new") == {"state.pt": MODEL}
    assert service.line.bytes < len(MODEL) + 8 * WINDOW * CHUNK_BYTES


async def test_a_machine_that_starts_again_goes_on_where_it_was(service, run_dir, tmp_path):
    service.files.offer(CallFolders(read=frozenset({run_dir / "model"})))
    await on_rank(read, rank(service.ticket, tmp_path), run_dir / "model")
    held = max((tmp_path / "machine/files").iterdir(), key=lambda file: file.stat().st_size)
    with held.open("r+b") as file:
        file.truncate(len(MODEL) - CHUNK_BYTES)
    held.rename(held.with_name(f"{held.name}.arriving"))
    service.line.bytes = 0
    assert await on_rank(read, rank(service.ticket, tmp_path), run_dir / "model") == content(run_dir / "model")
    assert service.line.bytes < 2 * CHUNK_BYTES


async def test_what_no_rank_uses_is_removed_from_the_machine(service, run_dir, tmp_path):
    service.files.offer(CallFolders(read=frozenset({run_dir / "model", run_dir / "secret"})))
    carried = rank(service.ticket, tmp_path)
    await on_rank(read, carried, run_dir / "model")
    await on_rank(read, carried, run_dir / "secret")
    assert [file.stat().st_size for file in (tmp_path / "machine/files").iterdir()] == [2]


async def test_only_the_folders_of_the_present_call_are_given_or_taken(service, run_dir, tmp_path):
    service.files.offer(CallFolders(read=frozenset({run_dir / "model"}), written=frozenset({run_dir / "new"})))
    carried = rank(service.ticket, tmp_path)
    with pytest.raises(OSError, match="secret is not a file of the current call"):
        await on_rank(read, carried, run_dir / "secret")
    with pytest.raises(OSError, match="is not a file of the current call"):
        await on_rank(write, carried, run_dir / "model", {"config.json": b"other"})
    service.files.offer()
    with pytest.raises(OSError, match="is not a file of the current call"):
        await on_rank(write, carried, run_dir / "new", {"late.pt": b"late"})
    assert sorted(content(run_dir)) == ["model/config.json", "model/parts/a.safetensors", "secret/token"]


@pytest.mark.parametrize(
    "path", ["", "../up", "/etc/passwd", "a/../b", "a//b", "./a", ".hidden", "a/.b", "a\0b", "a" * 600]
)
def test_a_path_that_leads_out_of_its_folder_is_none(path):
    assert not is_path_in_folder(path)
    assert is_path_in_folder("moments-00000/exp_avg/shard-00001-model-00001-of-00001.safetensors")


async def test_two_ranks_that_write_different_things_under_one_name_are_told(service, run_dir, tmp_path):
    service.files.offer(CallFolders(written=frozenset({run_dir / "new"})))
    await on_rank(write, rank(service.ticket, tmp_path), run_dir / "new", {"same.pt": b"mine"})
    await on_rank(write, rank(service.ticket, tmp_path, 1), run_dir / "new", {"same.pt": b"mine"})
    with pytest.raises(OSError, match=r"same.pt was written by two ranks"):
        await on_rank(write, rank(service.ticket, tmp_path, 1), run_dir / "new", {"same.pt": b"yours"})


async def test_a_service_whose_storage_is_full_says_so(service, run_dir, tmp_path):
    service.files.offer(CallFolders(written=frozenset({run_dir / "new"})))
    (run_dir / "new").mkdir()
    # Whatever is written to this device, the disk is full.
    (run_dir / "new/big.pt.arriving").symlink_to("/dev/full")
    with pytest.raises(StorageFailed):
        await on_rank(write, rank(service.ticket, tmp_path), run_dir / "new", {"big.pt": b"data"})


async def test_a_group_that_has_ended_gives_nothing(service, run_dir, tmp_path):
    service.files.offer(CallFolders(read=frozenset({run_dir / "model"})))
    service.gate.forget(service.ticket)
    with pytest.raises(OSError, match=r"has ended this group"):
        await on_rank(read, rank(service.ticket, tmp_path), run_dir / "model")


async def test_the_token_for_servers_of_shards_is_kept_fresh_in_a_file_of_its_user_alone(
    service, run_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr("fulmen_algorithm.trainers.files.access.REFRESH_S", 0.05)
    token, there = tmp_path / "service.token", tmp_path / "unseen.token"
    token.write_text("first")
    access = ServerAccess(training_run="run", token_file=str(there))
    setup = replace(setup_of(run_dir / "model", ComputeSettings(parallel=Ddp(ranks=1))), server_access=access)
    service.files.offer(CallFolders(read=frozenset({run_dir / "model"})))
    carried = rank(service.ticket, tmp_path)
    with pytest.raises(FileNotFoundError):
        await on_rank(opened, carried, setup)
    service.files.token_file = token
    found = await on_rank(opened, carried, setup)
    own = Path(found.token_file)
    assert (own.read_text(), own.stat().st_mode & 0o777) == ("first", 0o600)
    token.write_text("second")
    async with asyncio.timeout(LIMIT_S):
        while own.read_text() != "second":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def opened(carried: CarriedFolders, setup: TrainerSetup) -> ServerAccess:
    with carried.there("open", {"setup": setup}) as given:
        return given["setup"].server_access


def test_authorities_that_a_machine_does_not_have_are_its_own(tmp_path):
    (tmp_path / "there.pem").touch()
    tls = {"a:1": TlsFiles(ca_file="/nowhere"), "b:1": TlsFiles(ca_file=str(tmp_path / "there.pem")), "c:1": None}
    own = OwnAccess(tmp_path, lambda: b"", ca_file="/own.pem").of(ServerAccess(training_run="run", tls=tls))
    assert own.tls == {**tls, "a:1": TlsFiles(ca_file="/own.pem")}
