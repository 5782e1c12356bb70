"""Groups as jobs of Slurm: one `sbatch` script each, whose one `srun` starts the guardians.

All processes of a group ask for the same, so one component of a job is enough: it is not a heterogeneous job.
"""

import asyncio
import re
import shlex
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fulmen_algorithm.cluster.port import Affinity, ClusterFailed, GroupOrder, Node, Resources
from fulmen_algorithm.cluster.remote import MODULE
from fulmen_algorithm.cluster.settings import SlurmSettings
from fulmen_algorithm.cluster.wire import FILE_VARIABLE, Ticket, without_settings

COMMAND_DEADLINE_S = 60.0
ALIVE = frozenset({"PD", "CF", "R", "CG", "S", "RQ", "RS", "RD", "RH", "SI", "SO", "ST"})
"""States of a job that has not ended, in squeue's short form."""
_GPUS = re.compile(r"gpu(?::[^:(),]+)?:(\d+)")
_MIB = 2**20


class SlurmLauncher:
    """See `remote.Launcher`. Commands of Slurm are called without a shell."""

    def __init__(self, settings: SlurmSettings) -> None:
        """Starts nothing yet."""
        self._settings = settings

    async def nodes(self) -> Sequence[Node]:
        """See `remote.Launcher`."""
        partition = ["--partition", self._settings.partition] if self._settings.partition else []
        told = await _command("sinfo", "--noheader", "--Node", "--format=%N|%c|%m|%G", *partition)
        nodes: dict[str, Node] = {}
        for line in filter(None, told.splitlines()):
            name, cpus, memory_mib, resources = line.split("|")
            gpus = sum(int(count) for count in _GPUS.findall(resources))
            has = Resources(cpus=int(cpus), gpus=gpus, memory_bytes=int(memory_mib.rstrip("+")) * _MIB)
            nodes[name] = Node(name=name, has=has)
        return list(nodes.values())

    def together(self, order: GroupOrder) -> int:
        """See `remote.Launcher`."""
        return 1

    async def launch(self, order: GroupOrder, ticket: Ticket) -> "SlurmJob":
        """See `remote.Launcher`."""
        place = self._settings.folder / f"fulmen-{ticket.group[:12]}"
        try:
            await asyncio.to_thread(_write, place, ticket, batch_script(order, self._settings, place))
        except OSError as error:
            raise ClusterFailed(f"the folder of Slurm's jobs cannot be written: {error}") from error
        try:
            told = await _command("sbatch", "--parsable", str(place / "job.sh"))
        except BaseException:
            await asyncio.to_thread(_forget, place)
            raise
        return SlurmJob(told.strip().partition(";")[0], place, poll_s=self._settings.poll_s)


class SlurmJob:
    """See `remote.Launch`."""

    def __init__(self, job: str, place: Path, *, poll_s: float) -> None:
        self._job = job
        self._place = place
        self._poll_s = poll_s

    async def failed(self) -> str:
        """See `remote.Launch`."""
        while True:
            # While Slurm's controller is away, nothing is known.
            with suppress(ClusterFailed):
                if not await self._is_alive():
                    return f"job {self._job} of Slurm is {await self._end_state()}; its log is {self._place / 'log'}"
            await asyncio.sleep(self._poll_s)

    async def cancel(self) -> None:
        """See `remote.Launch`."""
        try:
            await _command("scancel", self._job)
        finally:
            await asyncio.to_thread(_forget, self._place)

    async def _is_alive(self) -> bool:
        queued = await _command("squeue", "--noheader", "--states=all", "--jobs", self._job, "--format=%t", unknown="")
        return queued.strip() in ALIVE

    async def _end_state(self) -> str:
        """Returns how the job ended, where accounting is kept: jobs leave the queue some minutes after their end."""
        told = await _command("sacct", "-X", "--noheader", "--parsable2", "-j", self._job, "-o", "State", unknown="")
        return told.split()[0] if told.strip() else "no longer in the queue"


def batch_script(order: GroupOrder, settings: SlurmSettings, place: Path) -> str:
    """Returns the script of a group; its files are in the folder `place`."""
    each, cpus = order.wishes.each, order.wishes.each.cpus or 1
    options = [
        f"--job-name={place.name}",
        f"--output={place / 'log'}",
        "--no-requeue",
        # When a process or a node is lost, those that are left hand their state over; the service then cancels the job.
        "--no-kill",
        f"--ntasks={order.count}",
        f"--cpus-per-task={cpus}",
    ]
    if each.memory_bytes:
        options.append(f"--mem-per-cpu={-(-each.memory_bytes // (cpus * _MIB))}M")
    if each.gpus:
        options.append(f"--gpus-per-task={each.gpus}")
    match order.wishes.affinity:
        case Affinity.ONE_NODE:
            options.append("--nodes=1")
        case Affinity.OWN_NODES:
            options += [f"--nodes={order.count}", "--ntasks-per-node=1"]
        case Affinity.SPREAD:
            options.append("--spread-job")
        case Affinity.PACK:
            options.append("--distribution=block,Pack")
    if order.wishes.without:
        options.append(f"--exclude={','.join(sorted(order.wishes.without))}")
    if settings.partition:
        options.append(f"--partition={settings.partition}")
    if settings.account:
        options.append(f"--account={settings.account}")
    # `srun` does not take the CPUs from the script. Each rank picks its GPU among those of its node.
    step = f"--kill-on-bad-exit=0 --no-kill --cpus-per-task={cpus}" + (" --gpu-bind=none" if each.gpus else "")
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in [*options, *settings.options]),
        f"export {FILE_VARIABLE}={shlex.quote(str(place / 'ticket'))}",
        f"exec srun {step} {settings.python} -m {MODULE}",
    ]
    return "\n".join(lines) + "\n"


def _write(place: Path, ticket: Ticket, script: str) -> None:
    # The ticket's secret is for this user alone.
    place.mkdir(mode=0o700)
    (place / "ticket").write_text(ticket.text())
    (place / "ticket").chmod(0o600)
    (place / "job.sh").write_text(script)


def _forget(place: Path) -> None:
    """Deletes the ticket and the script; the log stays."""
    for name in ("ticket", "job.sh"):
        (place / name).unlink(missing_ok=True)
    with suppress(OSError):
        place.rmdir()


async def _command(*words: str, unknown: str | None = None) -> str:
    """Runs a command of Slurm and returns what it prints; `unknown` if it fails, where that is given.

    Raises:
        ClusterFailed: if it fails or does not end in time.
    """

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_DEADLINE_S,
            env=without_settings(),  # sbatch gives its environment to the job
        )

    try:
        done = await asyncio.to_thread(run)
    except subprocess.TimeoutExpired:
        raise ClusterFailed(f"{words[0]} did not end within {COMMAND_DEADLINE_S:g} s") from None
    except OSError as error:
        raise ClusterFailed(f"{words[0]} cannot be run: {error.strerror}") from error
    if done.returncode:
        if unknown is not None and "Invalid job id" in done.stderr:
            return unknown
        raise ClusterFailed(f"{words[0]}: {' '.join(done.stderr.split()) or f'status {done.returncode}'}")
    return done.stdout
