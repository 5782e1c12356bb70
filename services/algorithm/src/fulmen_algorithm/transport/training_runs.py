"""`fulmen.algorithm.v1.TrainingRunService`."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

import grpc.aio

from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceServicer
from fulmen.errors import (
    ArgumentInvalid,
    CheckpointNotFound,
    Draining,
    PageTokenInvalid,
    TrainingRunNotFound,
    Violation,
)
from fulmen_algorithm.runs.algorithm import Registry
from fulmen_algorithm.runs.creation import CreationRules, checked_run
from fulmen_algorithm.runs.entry import Clock, Entry
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.execution import Connections
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.report import Report, report
from fulmen_algorithm.runs.run import TrainingRun
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.training.checkpoints import Checkpoint, CheckpointStore
from fulmen_algorithm.transport import encode
from fulmen_service_kit.security.auth import current_caller, require_project

DEFAULT_PAGE = 50
MAX_PAGE = 1000
Item = TypeVar("Item")


class TrainingRunServicer(TrainingRunServiceServicer):
    """Decodes, calls once, encodes."""

    def __init__(
        self,
        *,
        runs: RunRegistry,
        worker: RunWorker,
        connections: Connections,
        clock: Clock,
        rules: CreationRules,
    ) -> None:
        self._runs = runs
        self._worker = worker
        self._connections = connections
        self._clock = clock
        self._rules = rules
        self._descriptions = _Descriptions(rules.registry)
        self._creating = asyncio.Lock()
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Closes the open watches; their callers reconnect."""
        self._draining.set()

    async def CreateTrainingRun(
        self, request: pb.CreateTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateTrainingRunResponse:
        """Creates a run."""
        request.training_run.project = require_project(request.training_run.project)
        draft = encode.draft(request.training_run, request.request_id)
        # One at a time, so that two equal requests do not both find nothing.
        async with self._creating:
            run = self._runs.existing(draft)
            if run is None:
                # The caller waits out an outage of the store; there is no run yet that could be notified.
                resources = self._connections.resources(draft.project, lambda severity, message: None)
                run = await checked_run(
                    draft,
                    rules=self._rules,
                    resources=resources,
                    now=self._clock(),
                    knows_run=self._runs.has,
                )
                if not request.validate_only:
                    self._runs.add(run)
        return pb.CreateTrainingRunResponse(training_run=encode.training_run(run))

    async def GetTrainingRun(
        self, request: pb.GetTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainingRunResponse:
        """Returns a run."""
        return pb.GetTrainingRunResponse(training_run=encode.training_run(self._entry(request.name).run))

    async def ListTrainingRuns(
        self, request: pb.ListTrainingRunsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListTrainingRunsResponse:
        """Lists runs, newest first."""
        project = require_project(request.project)
        page, token = _page(self._runs.newest_first(project), request.page_size, request.page_token)
        return pb.ListTrainingRunsResponse(
            training_runs=[encode.training_run(run) for run in page], next_page_token=token
        )

    async def WatchTrainingRun(
        self, request: pb.WatchTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchTrainingRunResponse]:
        """Streams the events of a run."""
        events = self._entry(request.name).events.follow(request.after_sequence)
        draining = asyncio.create_task(self._draining.wait())
        following: asyncio.Future[Event | None] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(events, None))
                await asyncio.wait({following, draining}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    raise Draining("The service is shutting down.")
                event = following.result()
                if event is None:
                    return
                yield pb.WatchTrainingRunResponse(event=encode.event(event))
        finally:
            # A caller who leaves is mostly waiting, maybe for an event that never comes.
            for waiting in (draining, following):
                if waiting is not None:
                    waiting.cancel()

    async def PauseTrainingRun(
        self, request: pb.PauseTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseTrainingRunResponse:
        """Stops a run at a checkpoint."""
        run = self._runs.pause(self._entry(request.name).run.name)
        return pb.PauseTrainingRunResponse(training_run=encode.training_run(run))

    async def ResumeTrainingRun(
        self, request: pb.ResumeTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeTrainingRunResponse:
        """Resumes a paused run."""
        run = self._runs.resume(self._entry(request.name).run.name)
        return pb.ResumeTrainingRunResponse(training_run=encode.training_run(run))

    async def CancelTrainingRun(
        self, request: pb.CancelTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelTrainingRunResponse:
        """Ends a run."""
        run = await self._worker.cancel(self._entry(request.name).run.name)
        return pb.CancelTrainingRunResponse(training_run=encode.training_run(run))

    async def ListAlgorithms(
        self, request: pb.ListAlgorithmsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAlgorithmsResponse:
        """Lists the algorithms."""
        descriptions = self._descriptions
        return await (descriptions.whole(request.algorithm) if request.algorithm else descriptions.listed())

    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListCheckpointsResponse:
        """Lists the checkpoints of a run, newest first."""
        entry = self._entry(request.parent)
        run, store = entry.run, CheckpointStore(directory=entry.files.checkpoints)
        found = [value for value in await asyncio.to_thread(store.listed) if own_past(run, value)]
        page, token = _page(found[::-1], request.page_size, request.page_token)
        return pb.ListCheckpointsResponse(
            checkpoints=[encode.checkpoint(run, value) for value in page], next_page_token=token
        )

    async def RollbackTrainingRun(
        self, request: pb.RollbackTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.RollbackTrainingRunResponse:
        """Rolls a run back to a checkpoint."""
        parent, _, sequence = request.checkpoint.partition("/checkpoints/")
        entry = self._entry(parent)
        store = CheckpointStore(directory=entry.files.checkpoints)
        # Verified only when the run resumes, because that may take minutes.
        listed = {str(value.sequence): value for value in await asyncio.to_thread(store.listed)}
        found = listed.get(sequence)
        run = entry.run  # as it is after the wait
        if found is None or not own_past(run, found):
            raise CheckpointNotFound("The run has no such checkpoint.", checkpoint=request.checkpoint[:128])
        run = self._runs.rollback(run.name, sequence=found.sequence, step=int(found.progress["step"]))
        return pb.RollbackTrainingRunResponse(training_run=encode.training_run(run))

    async def GetTrainingRunReport(
        self, request: pb.GetTrainingRunReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainingRunReportResponse:
        """Returns the report of a run as it is now."""
        entry = self._entry(request.name)
        made = await asyncio.to_thread(_report, entry)
        return pb.GetTrainingRunReportResponse(markdown=made.markdown, curve_png=made.curve_png)

    def _entry(self, name: str) -> Entry:
        """Returns a run that the caller may see; any other is as if it did not exist."""
        entry = self._runs.entry(name)
        if not current_caller().may_access(entry.run.project):
            raise TrainingRunNotFound("There is no such training run.", training_run=name[:128])
        return entry


class _Descriptions:
    """Descriptions of the algorithms, made when first asked for, in a thread; they take a second in all."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._listed: pb.ListAlgorithmsResponse | None = None
        self._schemas: dict[str, str] = {}
        self._making = asyncio.Lock()

    async def listed(self) -> pb.ListAlgorithmsResponse:
        """Returns all descriptions, without schemas."""
        async with self._making:
            if self._listed is None:
                self._listed = await asyncio.to_thread(self._describe)
            return self._listed

    async def whole(self, name: str) -> pb.ListAlgorithmsResponse:
        """Returns the description of one algorithm with its schema; none if there is no such algorithm."""
        found = pb.ListAlgorithmsResponse(algorithms=[a for a in (await self.listed()).algorithms if a.name == name])
        for algorithm in found.algorithms:
            async with self._making:
                if name not in self._schemas:
                    self._schemas[name] = await asyncio.to_thread(encode.settings_schema, self._registry[name])
            algorithm.settings_schema_json = self._schemas[name]
        return found

    def _describe(self) -> pb.ListAlgorithmsResponse:
        return pb.ListAlgorithmsResponse(algorithms=[encode.algorithm(e) for _, e in sorted(self._registry.items())])


def _report(entry: Entry) -> Report:
    """Reads the data of a report and renders it, which may take a while; the run may continue meanwhile."""
    events, files = entry.events, entry.files
    return report(entry.run, events.steps(), events.notices(), files.notes(), files.versions(repair=False))


def own_past(run: TrainingRun, checkpoint: Checkpoint) -> bool:
    """Returns whether a run may be rolled back to a checkpoint, which an earlier rollback may have abandoned."""
    branch = int(checkpoint.progress.get("branch", 0))
    return run.descends_from(branch=branch, sequence=checkpoint.sequence)


def _page(items: Sequence[Item], page_size: int, page_token: str) -> tuple[Sequence[Item], str]:
    """Cuts a page out of a list; the token is the number of items before it."""
    if page_size < 0:
        violation = Violation(field="page_size", description="must not be negative")
        raise ArgumentInvalid("The request is malformed.", violations=[violation])
    if page_token and not page_token.isdecimal():
        raise PageTokenInvalid("The page token is not one of this list.")
    start = int(page_token or 0)
    end = start + min(page_size or DEFAULT_PAGE, MAX_PAGE)
    return items[start:end], str(end) if end < len(items) else ""
