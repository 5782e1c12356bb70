"""Which runs this service owns, and background role: renews their leases and learns of those of other services.

Invariants: only the owner of a run writes its files, submits and cancels its rollouts and publishes its versions. Each
owner has an epoch of its own; files hold it in their names, and the store refuses requests with an older one. So a
service that does not know yet that it lost a run harms nothing: it writes where nothing is read.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import structlog

from fulmen.errors import FulmenError, RunLeaseHeld, RunLeaseLost, TrainingRunExists, TrainingRunNotFound
from fulmen_algorithm.persistence.run_files import decoded_run, encoded_run
from fulmen_algorithm.persistence.run_storage import RunStorage
from fulmen_algorithm.runs.entry import Entry
from fulmen_algorithm.runs.failure import AWAY
from fulmen_algorithm.runs.ports import LeaseRenewal, RunLease, RunLeases, RunRecord
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.run import TrainingRun

_log = structlog.get_logger()

REFUSED_OR_AWAY: tuple[type[Exception], ...] = (FulmenError, *AWAY)
LOST_OR_AWAY: tuple[type[Exception], ...] = (RunLeaseLost, *AWAY)
RENEWALS_PER_LEASE = 4
RETRY_S = 1.0


class RunOwnership:
    """Acquires, renews and releases the leases of runs."""

    def __init__(
        self, runs: RunRegistry, leases: RunLeases, storage: RunStorage, *, lease_s: float, outage_limit_s: float
    ) -> None:
        """Initializes it without a lease.

        Args:
            runs: The runs that the service knows.
            leases: Leases at the store.
            storage: Files of the runs.
            lease_s: Time after which a lease that is not renewed ends, in seconds.
            outage_limit_s: Maximum wait of a run for the store, in seconds.
        """
        self._runs = runs
        self._leases = leases
        self._storage = storage
        self._interval_s = lease_s / RENEWALS_PER_LEASE
        self._lease_s = lease_s
        self._outage_limit_s = outage_limit_s
        self._sent: dict[str, TrainingRun] = {}
        self._learned = asyncio.Event()
        self.lost: Callable[[str], None] = lambda name: None
        """Called with each run that another service has taken over from this one."""
        self.ran_elsewhere: Callable[[Entry], None] = lambda entry: None
        """Called with each run that another service has acquired."""

    async def run(self) -> None:
        """Renews and learns until cancelled."""
        while True:
            try:
                await self.renew()
                await self.learn()
            except REFUSED_OR_AWAY as error:
                _log.warning("run_leases_not_renewed", reason=type(error).__name__)
            await self._push_journals()
            self._runs.wake()
            await asyncio.sleep(self._interval_s)

    async def create(self, *stages: TrainingRun) -> None:
        """Records new runs at the store, all or none: one, or the stages of a training in order.

        Raises:
            TrainingRunExists: if a name or the request id is taken by a run that is known from now on.
            Unavailable: if the store does not answer.
        """
        try:
            await self._create(stages)
        except TrainingRunExists:
            await self.learn()
            raise

    async def acquire(self, entry: Entry, *, for_change: bool = False) -> bool:
        """Acquires a run that no other service holds, and opens its files under the new epoch.

        For a change alone, another run of its policy may run meanwhile.

        Returns:
            False if another service holds it, or the store or the storage does not answer; it is tried again later.
        """
        try:
            if self._runs.misses_stage(entry.run):
                await self.learn()  # it was recorded with the stage before it, which is seen from now on, or gone
            await self._acquire(entry, for_change=for_change)
        except RunLeaseHeld as error:
            self._held_elsewhere(entry, error)
            if await self._released_ended(error.metadata.get("training_run", "")):
                self._try_again(entry)
            return False
        except REFUSED_OR_AWAY as error:
            _log.warning("run_not_acquired", run=entry.run.name, reason=type(error).__name__)
            self._try_again(entry)
            return False
        return True

    async def release(self, entry: Entry) -> None:
        """Ends the lease of a run; if the store does not answer, it ends by itself."""
        if not entry.epoch:
            return
        try:
            await entry.files.push_journal()
            await self._leases.release(entry.fence, state=entry.lease_state, record=encoded_run(entry.run))
        except LOST_OR_AWAY as error:
            _log.warning("run_lease_not_released", run=entry.run.name, reason=type(error).__name__)
        entry.epoch, entry.held_until = 0, 0.0
        self._sent.pop(entry.run.name, None)

    @asynccontextmanager
    async def holding(self, entry: Entry) -> AsyncIterator[None]:
        """Owns a run that is not active for the time of a change.

        Raises:
            RunLeaseHeld: if another service holds it; `metadata.owner_address`.
            Unavailable: if the store or the storage does not answer.
        """
        try:
            await self._acquire(entry, for_change=True)
        except RunLeaseHeld as error:
            self._held_elsewhere(entry, error)
            raise
        try:
            yield
        finally:
            await self.release(entry)

    async def check(self, entry: Entry) -> None:
        """Checks that this service still owns a run, at the store if the lease may have ended.

        Raises:
            RunLeaseLost: if another service has acquired it.
            Unavailable: if the store does not answer for longer than the outage limit.
        """
        asked = time.monotonic()
        while entry.epoch and time.monotonic() >= entry.held_until:
            try:
                await self._renew([entry])
            except AWAY:
                if time.monotonic() - asked > self._outage_limit_s:
                    raise
                await asyncio.sleep(RETRY_S)
        if not entry.epoch:
            raise RunLeaseLost("Another algorithm service runs the training run.", training_run=entry.run.name)

    async def fresh(self, entry: Entry) -> None:
        """Opens the newest files of a run that another service has run.

        Raises:
            OSError: if the storage cannot be reached.
        """
        async with entry.changing:
            if entry.stale and not entry.elsewhere:
                entry.open(await self._storage.newest_files(entry.run))

    async def renew(self) -> None:
        """Renews the leases of all owned runs.

        Raises:
            Unavailable: if the store does not answer.
        """
        await self._renew([entry for entry in self._runs.entries() if entry.epoch])

    async def learn(self) -> None:
        """Reads which runs other services have created, acquired and released.

        Raises:
            Unavailable: if the store does not answer.
        """
        for lease in await self._leases.changed():
            self._learn(lease)
        self._learned.set()

    async def serves(self, policy: str, *, timeout_s: float) -> bool:
        """Returns whether no other service has run the policy since this one; True if the store does not answer in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._learned.wait()
        except TimeoutError:
            return True
        runs = [e for e in self._runs.entries() if e.run.policy.name == policy and e.run.start_time is not None]
        newest = max(runs, key=lambda entry: (entry.run.start_time, entry.newest_epoch), default=None)
        return newest is None or newest.owner in ("", self._storage.owner)

    async def _acquire(self, entry: Entry, *, for_change: bool) -> None:
        run, after = entry.run, max(entry.files.epoch, entry.newest_epoch)
        asked = time.monotonic()
        try:
            epoch = await self._leases.acquire(run.name, after_epoch=after, for_change=for_change)
        except TrainingRunNotFound:
            await self._create([run])  # its files are older than the store's database
            epoch = await self._leases.acquire(run.name, after_epoch=after, for_change=for_change)
        try:
            files = await entry.files.taken_over(epoch, owner=self._storage.owner, record=run)
        except OSError:
            entry.epoch = epoch
            await self.release(entry)
            raise
        entry.open(files)
        entry.epoch = entry.newest_epoch = epoch
        entry.owner, entry.owner_address = self._storage.owner, ""
        entry.held_until = asked + self._lease_s

    async def _create(self, runs: Sequence[TrainingRun]) -> None:
        # One of many runs may have the client's request id: that of a run whose row was lost is free.
        records = [RunRecord(training_run=run.name, policy=run.policy.name, record=encoded_run(run)) for run in runs]
        await self._leases.create(records, request_id=runs[0].request_id)

    async def _renew(self, entries: list[Entry]) -> None:
        asked = time.monotonic()
        epochs = {entry.run.name: entry.epoch for entry in entries}
        runs = {entry.run.name: entry.run for entry in entries}
        if not entries:
            return
        lost = await self._leases.renew(
            [
                LeaseRenewal(
                    fence=entry.fence,
                    record=b"" if self._sent.get(entry.run.name) == entry.run else encoded_run(entry.run),
                )
                for entry in entries
            ]
        )
        for entry in entries:
            name = entry.run.name
            if entry.epoch != epochs[name]:
                continue  # released or acquired again meanwhile
            if name in lost:
                self._lose(entry)
            else:
                entry.held_until = asked + self._lease_s
                self._sent[name] = runs[name]

    def _lose(self, entry: Entry) -> None:
        _log.warning("run_lease_lost", run=entry.run.name, epoch=entry.epoch)
        entry.newest_epoch = max(entry.newest_epoch, entry.epoch + 1)
        entry.epoch, entry.held_until = 0, time.monotonic() + self._interval_s
        self._sent.pop(entry.run.name, None)
        entry.events.move()
        self.lost(entry.run.name)
        self.ran_elsewhere(entry)

    def _learn(self, lease: RunLease) -> None:
        entry = self._runs.find(lease.training_run)
        if entry is not None and (entry.epoch or lease.epoch < entry.newest_epoch):
            return  # this service knows better
        try:
            run = decoded_run(lease.record)
            files = self._storage.run_files(run) if entry is None else entry.files
        except ValueError:
            _log.warning("run_record_unreadable", run=lease.training_run)
            return
        if entry is None and run.name == lease.training_run:
            entry = self._runs.restore_readable(run, files)
        if entry is None:
            return
        if lease.epoch > entry.files.epoch:
            entry.run = run
        if lease.epoch > entry.newest_epoch and lease.owner != self._storage.owner:
            entry.events.move()
            self.ran_elsewhere(entry)
        entry.newest_epoch = lease.epoch
        entry.is_out_of_reach = lease.storage != self._storage.storage_id
        entry.owner, entry.owner_address = lease.owner, lease.owner_address
        # Its own from before a restart is free for this service.
        own = lease.owner == self._storage.owner
        entry.held_until = 0.0 if own else time.monotonic() + lease.held_s

    async def _released_ended(self, name: str) -> bool:
        """Releases a run that ended just before its service was killed: its lease keeps others of its policy waiting."""
        entry = self._runs.find(name)
        if entry is None or entry.run.runnable or entry.epoch or entry.changing.locked():
            return False
        try:
            async with entry.changing, self.holding(entry):
                return True
        except REFUSED_OR_AWAY:
            return False

    def _try_again(self, entry: Entry) -> None:
        entry.blocked_until = time.monotonic() + RETRY_S
        self._runs.wake_later(RETRY_S)

    def _held_elsewhere(self, entry: Entry, error: RunLeaseHeld) -> None:
        if error.metadata.get("training_run") == entry.run.name:
            entry.owner_address = error.metadata.get("owner_address", "")
            entry.held_until = time.monotonic() + self._interval_s
        entry.blocked_until = time.monotonic() + self._interval_s
        self._runs.wake_later(self._interval_s)

    async def _push_journals(self) -> None:
        for entry in self._runs.entries():
            if entry.epoch:
                try:
                    await entry.files.push_journal()
                except OSError as error:
                    _log.warning("run_journal_not_uploaded", run=entry.run.name, reason=str(error))
