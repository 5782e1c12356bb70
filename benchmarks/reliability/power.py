"""Cuts the power of a host under load: what was acknowledged is there when it comes back.

The files lie in ext4 on a disk whose cache is lost (volatile_disk.py). A cut stops the disk in the middle of its work, ends every
process as it is, and mounts what the disk had written at the same place; then PostgreSQL, the store or the whole stack starts on
it. First the store alone under clients that note every acknowledgement, then a stack in the middle of a training run.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.reliability.plan import Victim
from benchmarks.reliability.results import Results
from benchmarks.reliability.stand import Stand, StandFailed, free_port, short_folder
from benchmarks.reliability.watch import Watch
from benchmarks.reliability.workload import Workload
from fulmen_cli.local.postgres import EmbeddedPostgres, EmbeddedPostgresError, find_binaries
from fulmen_cli.local.stack import DATABASE_SETTINGS
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.store.load import FeedReader, Ledger, LoadRunner, Producer, StoreGroup, stored_spans
from tests.support.store.oracle import Shown, store_problems
from tests.support.store.process import StoreProcess
from tests.support.store.running import SIGNING_KEY

__all__ = ["PowerDisk", "cut_power", "cut_stacks"]

DISK_MIB: Final = 2048
STACK_CUTS_IN: Final = 4
"""Of so many cuts, one is of a whole stack."""
LOAD_S: Final = (1.0, 4.0)
"""Between two cuts of the store, chosen anew each time."""
RUNNERS, PRODUCERS = 4, 3
DRAIN_LIMIT_S: Final = 180.0
DISK_LIMIT_S: Final = 60.0
RUN_LIMIT_S: Final = 300.0
MAX_SHOWN: Final = 10


class PowerDisk:
    """A disk of which the power can be cut, mounted at `folder / "disk"`."""

    def __init__(self, folder: Path) -> None:
        """Makes its first image, with an empty ext4."""
        self._folder, self._number = folder, 0
        self.place = folder / "disk"
        self._fuse = folder / "fuse"
        for each in (self.place, self._fuse):
            each.mkdir()
        with self._image.open("wb") as file:
            file.truncate(DISK_MIB * 2**20)
        _do("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(self._image))
        self._disk: subprocess.Popen[str] | None = None

    @property
    def _image(self) -> Path:
        return self._folder / f"{self._number}.img"

    def attach(self) -> None:
        """Mounts the present image; the journal of its file system is replayed."""
        command = [sys.executable, "-m", "benchmarks.reliability.volatile_disk", str(self._image), str(self._fuse)]
        self._disk = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._disk.stdout is not None
        assert self._disk.stdout.readline() == "ready\n"
        device = _do("losetup", "--find", "--show", str(self._fuse / "disk"))
        _do("mount", device, str(self.place))
        self.place.chmod(0o755)
        _do("losetup", "--detach", device)  # It goes when the mount does.

    @property
    def pid(self) -> int:
        """The process that serves it."""
        assert self._disk is not None
        return self._disk.pid

    def cut(self, seed: int) -> tuple[int, int]:
        """Cuts the power; returns how many blocks were in the cache, and how many of them were written all the same."""
        assert self._disk is not None
        assert self._disk.stdin is not None
        assert self._disk.stdout is not None
        target = self._folder / f"{self._number + 1}.img"
        self._disk.stdin.write(f"cut {target} {seed}\n")
        self._disk.stdin.flush()
        dirty, kept = self._disk.stdout.readline().split()
        return int(dirty), int(kept)

    def replace(self) -> None:
        """Takes the cut disk away, once no process is left that uses it, and mounts what it had written."""
        self.detach()
        self._number += 1
        self.attach()

    def detach(self) -> None:
        """Takes the disk away."""
        assert self._disk is not None
        self._disk.kill()
        self._disk.wait(DISK_LIMIT_S)
        for place in (self.place, self._fuse):
            subprocess.run(["umount", "--lazy", str(place)], check=False, capture_output=True)
        self._image.unlink(missing_ok=True)
        self._image.with_suffix(".now").unlink(missing_ok=True)


async def cut_power(count: int, results: Results, *, seed: int) -> None:
    """Cuts the power so many times, and adds what it showed to the results."""
    chance = random.Random(seed)
    stacks = max(1, count // STACK_CUTS_IN)
    began = time.monotonic()
    store = await _store_cuts(count - stacks, chance)
    stack = await cut_stacks(stacks, chance)
    figures = {
        "cuts": count,
        "seed": seed,
        "disk": f"ext4 on a loop device over a write cache, {DISK_MIB} MiB",
        "seconds": round(time.monotonic() - began),
        **store,
        "stack": stack,
        "corrupt_starts": store["corrupt_starts"] + sum(not each["came_up"] for each in stack),
    }
    results.add_power_cuts(figures)
    sys.stdout.write(
        f"{count} cuts: {figures['acknowledged_rollouts']} acknowledged rollouts, {figures['acknowledged_spans']} spans; lost "
        f"{figures['lost_rollouts']} and {figures['lost_spans']}; {figures['corrupt_starts']} corrupt starts; "
        f"{figures['problems'] or 'no problem'}\n"
    )


async def _store_cuts(count: int, chance: random.Random) -> dict[str, Any]:
    folder = short_folder("fulmen-power-")
    disk = PowerDisk(folder)
    disk.attach()
    postgres = EmbeddedPostgres(disk.place / "postgres", settings=dict(DATABASE_SETTINGS))
    host = _Host(disk, postgres, folder)
    ledger, stop = Ledger(), asyncio.Event()
    cuts: list[dict[str, Any]] = []
    try:
        await host.start()
        async with StoreGroup.open([host.target], host.token, chance) as group:
            tasks = [asyncio.create_task(Producer(group, ledger, stop).run()) for _ in range(PRODUCERS)]
            runners = [asyncio.create_task(LoadRunner(group, ledger).run()) for _ in range(RUNNERS)]
            reader = FeedReader(group, ledger)
            runners.append(asyncio.create_task(reader.run()))
            for number in range(1, count + 1):
                await asyncio.sleep(chance.uniform(*LOAD_S))  # The moment of the cut.
                cuts.append(await host.cut(0 if number % 2 else chance.randrange(1, 2**31)))
                sys.stdout.write(f"cut {number} of {count}: {cuts[-1]}, {len(ledger.created)} groups acknowledged\n")
                sys.stdout.flush()
            stop.set()
            async with asyncio.timeout(DRAIN_LIMIT_S):
                await asyncio.gather(*tasks)
            shown = await _shown(group, ledger, reader, runners)
        problems = store_problems(ledger, shown)
        damaged = await host.damaged_pages()
    finally:
        await host.end()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "store_cuts": cuts,
        "acknowledged_rollouts": sum(map(len, ledger.created.values())),
        "acknowledged_ends": len(ledger.ended),
        "acknowledged_spans": sum(map(len, ledger.spans.values())),
        "lost_rollouts": sum("acknowledged and is lost" in each and "span" not in each for each in problems)
        + sum("acknowledged end" in each for each in problems),
        "lost_spans": sum("a span of" in each and "is lost" in each for each in problems),
        "corrupt_starts": sum(not each["came_up"] for each in cuts),
        "damaged_pages": damaged,
        "problems": problems[:MAX_SHOWN],
    }


class _Host:
    """PostgreSQL, as `fulmen up` starts it, and a store, on a disk of which the power can be cut."""

    def __init__(self, disk: PowerDisk, postgres: EmbeddedPostgres, folder: Path) -> None:
        self._disk, self._postgres, self._folder = disk, postgres, folder
        self._store: StoreProcess | None = None
        self._port = free_port()
        self.target = f"127.0.0.1:{self._port}"
        self.token = TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="power", ttl_s=7200)

    async def start(self) -> None:
        """Starts both."""
        await asyncio.to_thread(self._postgres.start)
        self._store = StoreProcess(self._postgres.dsn, self._folder, FULMEN_STORE_PORT=str(self._port))
        await self._store.port()

    async def cut(self, seed: int) -> dict[str, Any]:
        """Cuts the power, and starts everything on what is left."""
        dirty, kept = await asyncio.to_thread(self._disk.cut, seed)
        assert self._store is not None
        self._store.process.kill()
        _kill_all_but(self._disk.pid)
        await asyncio.to_thread(self._disk.replace)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._store.end, signal.SIGKILL)
        began = time.monotonic()
        came_up = True
        try:
            await self.start()
        except (EmbeddedPostgresError, AssertionError, TimeoutError) as error:
            came_up = False
            sys.stdout.write(f"{error}\n")
        found = {"blocks_in_cache": dirty, "of_them_written": kept, "came_up": came_up}
        if not came_up:
            raise StandFailed(f"after a power cut nothing starts: {found}")
        return {**found, "start_s": round(time.monotonic() - began, 1)}

    async def damaged_pages(self) -> int:
        """Counts the pages of the database that are not as their checksums say."""
        await asyncio.to_thread(self._postgres.stop)
        command = [str(find_binaries() / "pg_checksums"), "--check", "-D", str(self._disk.place / "postgres")]
        # As whoever owns the files: PostgreSQL's programs refuse root.
        owner = (self._disk.place / "postgres").stat()
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, check=False, user=owner.st_uid, group=owner.st_gid,
            cwd="/",
        )  # fmt: skip
        bad = [line for line in done.stdout.splitlines() if line.startswith("Bad checksums:")]
        return int(bad[0].rpartition(":")[2]) if bad else -1

    async def end(self) -> None:
        """Ends everything."""
        if self._store is not None:
            self._store.process.kill()
        _kill_all_but(self._disk.pid)
        await asyncio.to_thread(self._disk.detach)


async def _shown(group: StoreGroup, ledger: Ledger, reader: FeedReader, tasks: Sequence[asyncio.Task[None]]) -> Shown:
    """Reads everything from the store, once the feed has named all that was acknowledged or comes no further."""
    whole = FeedReader(group, ledger)
    last = asyncio.create_task(whole.run())
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_LIMIT_S):
            while min(len(reader.read), len(whole.read)) < len(ledger.created):
                await asyncio.sleep(0.1)
    for task in (last, *tasks):
        task.cancel()
    await asyncio.gather(last, *tasks, return_exceptions=True)
    return Shown(
        feeds=[[one.group_id for one in each.read] for each in (reader, whole)],
        rollouts={rollout.name: rollout for one in whole.read for rollout in one.rollouts},
        spans=await stored_spans(group, list(ledger.spans)),
    )


async def cut_stacks(count: int, chance: random.Random) -> list[dict[str, Any]]:
    """Cuts the power of a whole stack in the middle of a run, once per run; returns what each showed."""
    cuts = []
    for number in range(1, count + 1):
        async with _stack_on_disk() as (stand, disk):
            cuts.append(await _cut_stack(stand, disk, number, chance))
            sys.stdout.write(f"cut {number} of {count} of a stack: {cuts[-1]}\n")
            sys.stdout.flush()
    return cuts


@asynccontextmanager
async def _stack_on_disk() -> AsyncIterator[tuple[Stand, PowerDisk]]:
    folder = short_folder("fulmen-power-")
    disk = PowerDisk(folder)
    disk.attach()
    stand = Stand(disk.place)
    try:
        yield stand, disk
    finally:
        await stand.abandon()
        _kill_all_but(disk.pid)
        await asyncio.to_thread(disk.detach)
        shutil.rmtree(folder, ignore_errors=True)


async def _cut_stack(stand: Stand, disk: PowerDisk, number: int, chance: random.Random) -> dict[str, Any]:
    await stand.up()
    workload = Workload(stand)
    run = await workload.start(f"power-{number}", (Victim.STORE,))
    step = chance.randrange(2, 12)
    async with Watch(stand, workload, run, victims=()) as watch:
        deadline = time.monotonic() + RUN_LIMIT_S
        while watch.progress.step < step and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
    await asyncio.sleep(chance.uniform(0.0, 1.0))  # The moment of the cut.
    dirty, kept = await asyncio.to_thread(disk.cut, 0 if number % 2 else chance.randrange(1, 2**31))
    await stand.abandon()
    _kill_all_but(disk.pid)
    await asyncio.to_thread(disk.replace)
    found: dict[str, Any] = {"step": step, "blocks_in_cache": dirty, "of_them_written": kept, "came_up": True}
    try:
        found["ready_s"] = round(await stand.up(), 1)
    except StandFailed as error:
        return {**found, "came_up": False, "problems": [str(error)]}
    workload.hurry()
    async with Watch(stand, workload, run, victims=()) as watch:
        deadline = time.monotonic() + RUN_LIMIT_S
        while not watch.progress.ended and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        ended, failure = watch.progress.succeeded, watch.progress.failure
    verdict = await workload.judge(run, ended=ended)
    return {**found, "run_ended": ended, "failure": failure, **verdict.as_dict()}


def _kill_all_but(disk: int) -> None:
    """Ends every process of this program's namespace apart from this one, those above it, and the disk.

    Raises:
        RuntimeError: if the namespace is not its own.
    """
    if b"benchmarks.reliability" not in Path("/proc/1/cmdline").read_bytes():
        raise RuntimeError("Power cuts end all processes: they need a process namespace of their own.")
    me = psutil.Process()
    kept = {me.pid, disk, *(each.pid for each in me.parents())}
    for process in psutil.process_iter():
        if process.pid not in kept:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _do(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=DISK_LIMIT_S).stdout.strip()
