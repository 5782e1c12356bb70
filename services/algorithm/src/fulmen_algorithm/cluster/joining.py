"""Adds joining machines to the runs of this service."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from fulmen.errors import ArgumentInvalid, TrainingRunStateInvalid, Unavailable, Violation
from fulmen_algorithm.cluster.joined import JoinedMachine, JoinedMachines
from fulmen_algorithm.cluster.remote import with_news
from fulmen_algorithm.cluster.wire import folder_digest
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import PolicyOrigin, TrainingRun

MAX_NOTICES = 200
"""Different notices about the machines of one run."""


class RunRanks:
    """The machines of the runs of this service."""

    def __init__(
        self, runs: RunRegistry, machines: JoinedMachines, *, is_joined: Callable[[str], bool], silence_s: float
    ) -> None:
        """`is_joined` returns whether the machines of a cluster join it; `silence_s` is the time after which one counts as
        dead, in seconds."""
        self._runs = runs
        self._machines = machines
        self._is_joined = is_joined
        self.silence_s = silence_s
        self._noticed: dict[str, set[str]] = {}

    def owner_of(self, training_run: str) -> str:
        """Returns the address of the service that runs a run; empty if this one does, or none.

        Raises:
            TrainingRunNotFound: if there is no such run.
        """
        return self._runs.owner_of(training_run)

    async def use(self, training_run: str, machine: JoinedMachine, *, differences: Sequence[Violation]) -> None:
        """Places ranks of a run on a machine, until it leaves or the run has ended.

        Args:
            training_run: The run.
            machine: The machine.
            differences: Its differences from this service.

        Raises:
            TrainingRunNotFound: if there is no such run.
            TrainingRunStateInvalid: if the run has ended, or its ranks are on no cluster that machines join.
            ArgumentInvalid: with everything in which the machine differs from this service.
            Unavailable: if another machine of the run has its name, or another service runs it now.
            QuotaExceeded: if the run has too many machines.
        """
        entry, name = self._runs.entry(training_run), machine.node.name
        self._require_use(entry.run)
        if differences:
            error = ArgumentInvalid(f"{name} cannot run ranks of {training_run}.", violations=differences)
            reasons = "; ".join(f"{each.field} {each.description}" for each in differences)
            self._notify(entry, "warning", f"The machine {name} cannot run ranks: {reasons}.")
            raise error
        unseen = await self._unseen(entry, machine)
        self._machines.add(training_run, machine)
        try:
            text = f"The machine {name} has joined: it runs up to {machine.node.most} ranks"
            carried = (
                f". Files are transferred to it and from it, because it does not see {', '.join(unseen)}"
                if unseen
                else ""
            )
            self._notify(entry, "info", f"{text}{carried}.")
            await self._until_over(entry, machine)
        finally:
            self._machines.remove(training_run, machine)

    async def _until_over(self, entry: Entry, machine: JoinedMachine) -> None:
        ending = asyncio.create_task(self._until_ended(entry), name="run-ends")
        leaving = asyncio.create_task(machine.left(), name="machine-leaves")
        try:
            await asyncio.wait({ending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                ending.result()
        finally:
            ending.cancel()
            leaving.cancel()

    async def _until_ended(self, entry: Entry) -> None:
        async for _ in entry.events.follow(entry.events.last_sequence):
            pass
        self._noticed.pop(entry.run.name, None)
        self._require_use(entry.run)

    def _require_use(self, run: TrainingRun) -> None:
        if run.state.final:
            raise TrainingRunStateInvalid(f"{run.name} has ended.", training_run=run.name, state=run.state)
        cluster = (json.loads(run.settings_json or "{}").get("parallel") or {}).get("cluster", "")
        if not self._is_joined(cluster):
            text = f"The ranks of {run.name} are not on a cluster of kind joined: machines cannot join it."
            raise TrainingRunStateInvalid(text, training_run=run.name, state=run.state)

    async def _unseen(self, entry: Entry, machine: JoinedMachine) -> list[str]:
        """Has a machine look at the run's folders; returns those that it does not see as this service does."""
        run, folder = entry.run, entry.files.folder.absolute()
        with ExitStack() as stack:
            try:
                shown = {await asyncio.to_thread(with_news, stack, folder): folder}
            except OSError as error:
                raise Unavailable(f"The folder of {run.name} cannot be written: {error.strerror}.") from error
            if run.policy.origin is PolicyOrigin.PATH:
                source = Path(run.policy.source)
                shown[source] = source
            digests = {str(seen): await asyncio.to_thread(folder_digest, seen) for seen in shown}
            unseen = await machine.look(digests, silence_s=self.silence_s)
        return [str(shown[Path(seen)]) for seen in unseen if Path(seen) in shown]

    def _notify(self, entry: Entry, severity: str, text: str) -> None:
        """Reports it once: machines leave and join, and a refused one tries again."""
        noticed = self._noticed.setdefault(entry.run.name, set())
        if text not in noticed and len(noticed) < MAX_NOTICES:
            noticed.add(text)
            entry.events.notify(severity, text)
