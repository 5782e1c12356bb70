"""`fulmen.algorithm.v1.TrainingRunService`."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import cast
from weakref import WeakValueDictionary

import grpc.aio

from fulmen.algorithm.v1 import prompt_search_pb2 as prompts_pb
from fulmen.algorithm.v1 import training_run_service_pb2 as pb
from fulmen.algorithm.v1.training_run_pb2 import TrainingRun as TrainingRunMessage
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceServicer
from fulmen.errors import (
    ArgumentInvalid,
    CheckpointNotFound,
    DeadlineExceeded,
    Draining,
    FulmenError,
    RunLeaseHeld,
    RunStorageUnavailable,
    TrainingRunExists,
    Unavailable,
)
from fulmen.ids import MAX_TRAINING_RUN
from fulmen_algorithm.persistence.checkpoints import Checkpoint
from fulmen_algorithm.runs.algorithm import Registry
from fulmen_algorithm.runs.creation.descriptions import description_problems
from fulmen_algorithm.runs.creation.measured import measured_steps
from fulmen_algorithm.runs.creation.rules import CreationRules, RunDraft
from fulmen_algorithm.runs.creation.stages import MAX_STAGES, checked_runs, gpu_plans
from fulmen_algorithm.runs.entry import Clock, Entry
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.execution import Connections
from fulmen_algorithm.runs.ownership import RunOwnership
from fulmen_algorithm.runs.registry import RunRegistry
from fulmen_algorithm.runs.report import Report, report
from fulmen_algorithm.runs.run import RunState, TrainingRun
from fulmen_algorithm.runs.worker import RunWorker
from fulmen_algorithm.training.files import is_storage_trouble
from fulmen_algorithm.transport import encode
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.pages import page
from fulmen_algorithm.transport.prompt_candidates import prompt_candidates
from fulmen_algorithm.transport.run_access import project_in, require_run_access
from fulmen_service_kit.security.auth import require_project

READ_LIMIT_S = 3.0


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
        ownership: RunOwnership,
        forwarding: Forwarding,
    ) -> None:
        self._runs = runs
        self._worker = worker
        self._ownership = ownership
        self._forwarding = forwarding
        self._connections = connections
        self._clock = clock
        self._rules = rules
        self._descriptions = _Descriptions(rules.registry)
        self._creating: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._draining = asyncio.Event()

    def drain(self) -> None:
        """Closes the open watches; their callers reconnect."""
        self._draining.set()

    async def CreateTrainingRun(
        self, request: pb.CreateTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateTrainingRunResponse:
        """Creates a run, and the stages that follow it."""
        asked = request.training_run
        project = require_project(asked.project or project_in(asked.name))
        drafts = encode.drafts(request, project)
        # One of a project at a time, so that two equal requests do not both find nothing.
        async with self._creating.setdefault(project, asyncio.Lock()):
            run = self._runs.existing(drafts)
            if run is None:
                # The caller waits out an outage of the store; there is no run yet that could be notified.
                resources = self._connections.resources(project, lambda severity, message: None)
                runs = await checked_runs(
                    drafts,
                    rules=self._rules,
                    resources=resources,
                    now=self._clock(),
                    knows_run=self._runs.has,
                )
                run = runs[0] if request.validate_only else await self._create(runs, drafts)
        return pb.CreateTrainingRunResponse(training_run=encode.training_run(run))

    async def PlanTrainingRun(
        self, request: pb.PlanTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.PlanTrainingRunResponse:
        """Plans the GPUs of a run, and of the stages that follow it, and returns the measurements of similar runs."""
        asked = request.training_run
        project = require_project(asked.project or project_in(asked.name))
        messages = (asked, *islice(request.next_stages, MAX_STAGES - 1))
        drafts = [replace(encode.draft(each, ""), project=project) for each in messages]
        rules = self._rules
        plans = await gpu_plans(drafts, rules)
        measured = await measured_steps(drafts, algorithms=rules.registry, runs=self._runs, device=rules.device)
        return pb.PlanTrainingRunResponse(
            plans=[pb.GpuPlan(text=each.text, problems=each.problems) for each in plans],
            measured=[pb.MeasuredSteps(**asdict(each)) for each in measured],
        )

    async def _create(self, runs: Sequence[TrainingRun], drafts: Sequence[RunDraft]) -> TrainingRun:
        """Records runs at the store, then here; returns the first, or the run of an equal request to another
        service."""
        self._runs.require_room(drafts[0].project, len(runs))
        try:
            await self._ownership.create(*runs)
        except TrainingRunExists:
            existing = self._runs.existing(drafts)
            if existing is None:
                raise
            return existing
        with _storage_errors():
            for run in runs:
                self._runs.add(run)
        return runs[0]

    async def GetTrainingRun(
        self, request: pb.GetTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainingRunResponse:
        """Returns a run."""
        entry = await self._entry(request.name)
        if entry.elsewhere:
            # The owner may have died or stopped a moment ago: its last state is a valid answer.
            with suppress(Unavailable, DeadlineExceeded):
                forwarded = await self._forwarding.call(
                    entry.owner_address, "GetTrainingRun", request, context, limit_s=READ_LIMIT_S
                )
                return cast(pb.GetTrainingRunResponse, forwarded)
        return pb.GetTrainingRunResponse(training_run=self._message(entry))

    async def ListTrainingRuns(
        self, request: pb.ListTrainingRunsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListTrainingRunsResponse:
        """Lists runs, newest first."""
        project = require_project(request.project)
        listed, token = page(self._runs.newest_first(project), request.page_size, request.page_token)
        return pb.ListTrainingRunsResponse(
            training_runs=[self._message(self._runs.entry(run.name)) for run in listed], next_page_token=token
        )

    async def WatchTrainingRun(
        self, request: pb.WatchTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WatchTrainingRunResponse]:
        """Streams the events of a run."""
        entry = await self._entry(request.name)
        if entry.elsewhere:
            async for message in self._forwarding.watch(entry.owner_address, request, context):
                yield message
            return
        events = entry.events.follow(request.after_sequence)
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
        changed = await self._changed(request.name, self._runs.pause, "PauseTrainingRun", request, context)
        if isinstance(changed, Entry):
            return pb.PauseTrainingRunResponse(training_run=self._message(changed))
        return cast(pb.PauseTrainingRunResponse, changed)

    async def ResumeTrainingRun(
        self, request: pb.ResumeTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeTrainingRunResponse:
        """Resumes a paused run."""
        resume = partial(self._runs.resume, pause_at_step=request.pause_at_step)
        changed = await self._changed(request.name, resume, "ResumeTrainingRun", request, context)
        if isinstance(changed, Entry):
            return pb.ResumeTrainingRunResponse(training_run=self._message(changed))
        return cast(pb.ResumeTrainingRunResponse, changed)

    async def CancelTrainingRun(
        self, request: pb.CancelTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.CancelTrainingRunResponse:
        """Ends a run, or the stage of its training that runs or is next."""
        entry = await self._entry(request.name)
        # A stage may end, and the next one begin, while it is cancelled.
        for name in entry.run.stages_to_cancel:
            entry = await self._entry(name)
            if not entry.elsewhere and entry.run.state.final:
                continue
            try:
                if not entry.elsewhere:
                    with _storage_errors():
                        await self._worker.cancel(name)
                    if entry.run.state is RunState.SUCCEEDED:
                        continue
                    break
            except RunLeaseHeld as error:
                if not _is_elsewhere(error, name):
                    raise
            request.name = name
            forwarded = await self._forwarding.call(entry.owner_address, "CancelTrainingRun", request, context)
            return cast(pb.CancelTrainingRunResponse, forwarded)
        return pb.CancelTrainingRunResponse(training_run=self._message(entry))

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
        entry = await self._entry(request.parent)
        if entry.elsewhere:
            forwarded = await self._forwarding.call(entry.owner_address, "ListCheckpoints", request, context)
            return cast(pb.ListCheckpointsResponse, forwarded)
        run, store = entry.run, entry.files.checkpoint_store()
        found = [value for value in await asyncio.to_thread(store.listed) if own_past(run, value)]
        listed, token = page(found[::-1], request.page_size, request.page_token)
        return pb.ListCheckpointsResponse(
            checkpoints=[encode.checkpoint(run, value) for value in listed], next_page_token=token
        )

    async def RollbackTrainingRun(
        self, request: pb.RollbackTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.RollbackTrainingRunResponse:
        """Rolls a run back to a checkpoint."""
        parent, _, sequence = request.checkpoint.partition("/checkpoints/")
        entry = await self._entry(parent)
        found: Checkpoint | None = None
        if not entry.elsewhere:
            # Verified only when the run resumes, because that may take minutes.
            listed = await asyncio.to_thread(entry.files.checkpoint_store().listed)
            found = next((value for value in listed if str(value.sequence) == sequence), None)

        def roll_back(name: str) -> TrainingRun:
            if found is None or not own_past(entry.run, found):
                raise CheckpointNotFound(
                    "The run does not have this checkpoint.", checkpoint=request.checkpoint[: 2 * MAX_TRAINING_RUN]
                )
            return self._runs.rollback(name, sequence=found.sequence, step=int(found.progress["step"]))

        changed = await self._changed(parent, roll_back, "RollbackTrainingRun", request, context)
        if isinstance(changed, Entry):
            return pb.RollbackTrainingRunResponse(training_run=self._message(changed))
        return cast(pb.RollbackTrainingRunResponse, changed)

    async def GetTrainingRunReport(
        self, request: pb.GetTrainingRunReportRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainingRunReportResponse:
        """Returns the report of a run as it is now."""
        entry = await self._entry(request.name)
        if entry.elsewhere:
            forwarded = await self._forwarding.call(entry.owner_address, "GetTrainingRunReport", request, context)
            return cast(pb.GetTrainingRunReportResponse, forwarded)
        made = await asyncio.to_thread(_report, entry)
        return pb.GetTrainingRunReportResponse(markdown=made.markdown, curve_png=made.curve_png)

    async def UpdateTrainingRun(
        self, request: pb.UpdateTrainingRunRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateTrainingRunResponse:
        """Changes the display name and the tags of a run."""
        display_name = request.display_name if request.HasField("display_name") else None
        tags = sorted(set(request.tags.values)) if request.HasField("tags") else None
        if problems := description_problems(display_name or "", tags or ()):
            raise ArgumentInvalid("The request is malformed.", violations=problems)

        def describe(name: str) -> TrainingRun:
            return self._runs.describe(name, display_name=display_name, tags=tags)

        changed = await self._changed(request.name, describe, "UpdateTrainingRun", request, context)
        if isinstance(changed, Entry):
            return pb.UpdateTrainingRunResponse(training_run=self._message(changed))
        return cast(pb.UpdateTrainingRunResponse, changed)

    async def ListPromptCandidates(
        self, request: prompts_pb.ListPromptCandidatesRequest, context: grpc.aio.ServicerContext
    ) -> prompts_pb.ListPromptCandidatesResponse:
        """Lists the prompts that a run has searched through."""
        entry = await self._entry(request.parent)
        if entry.elsewhere:
            forwarded = await self._forwarding.call(entry.owner_address, "ListPromptCandidates", request, context)
            return cast(prompts_pb.ListPromptCandidatesResponse, forwarded)
        return await asyncio.to_thread(prompt_candidates, entry, request.page_size, request.page_token)

    async def _entry(self, name: str) -> Entry:
        """Returns a run that the caller may see, as of its newest files; any other is as if it did not exist."""
        require_run_access(name)
        if self._runs.find(name) is None:
            with suppress(FulmenError):
                await self._ownership.learn()  # another service may have created it a moment ago
        entry = self._runs.entry(name)
        if entry.stale and not entry.elsewhere:
            with _storage_errors():
                await self._ownership.fresh(entry)
        return entry

    async def _changed(
        self,
        name: str,
        change: Callable[[str], TrainingRun],
        rpc: str,
        request: object,
        context: grpc.aio.ServicerContext,
    ) -> object:
        """Changes a run of this service or of none, and returns its entry; otherwise the answer of its owner."""
        entry = await self._entry(name)
        name = entry.run.name
        try:
            if not entry.elsewhere:
                with _storage_errors():
                    await self._worker.changed(name, lambda: change(name))
                return entry
        except RunLeaseHeld as error:
            if not _is_elsewhere(error, name):
                raise
            return await self._forwarding.call(error.metadata["owner_address"], rpc, request, context)
        return await self._forwarding.call(entry.owner_address, rpc, request, context)

    def _message(self, entry: Entry) -> TrainingRunMessage:
        waiting = entry.waiting_reason
        if self._runs.waits_for_stage(entry):
            waiting = f"The run waits for the stage before it, {entry.run.stages_before[-1]}."
        message = encode.training_run(entry.run, owner_address=self._owner_address(entry), waiting=waiting)
        engines = self._connections.engines(entry.run)
        message.engine_count, message.ready_engine_count = engines.count, engines.ready
        return message

    def _owner_address(self, entry: Entry) -> str:
        if entry.epoch:
            return self._forwarding.own_address()
        return entry.owner_address if entry.elsewhere else ""


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Translates errors of the runs' storage into errors of the service."""
    try:
        yield
    except OSError as error:
        if not is_storage_trouble(error):
            raise
        raise RunStorageUnavailable("The storage of training runs is full or cannot be reached.") from error


def _is_elsewhere(error: RunLeaseHeld, name: str) -> bool:
    """Returns whether another service runs a run; if not, another run of its policy keeps it from being changed."""
    return error.metadata.get("training_run") == name and bool(error.metadata.get("owner_address"))


class _Descriptions:
    """Descriptions of the algorithms, created at the first request, in a thread; this takes a second in all."""

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
