"""`fulmen.algorithm.v1.TrainerService`."""

import asyncio
import json
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final

import grpc.aio

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.algorithm.v1.trainer_service_pb2_grpc import TrainerServiceServicer
from fulmen.errors import CheckpointNotFound, Draining, QuotaExceeded, SettingsInvalid, Violation
from fulmen_algorithm.loops.calls import Draw, Pass, Render, Rendered, Sampled, Step, Stepped
from fulmen_algorithm.loops.processes import LoopProcess
from fulmen_algorithm.loops.record import AdamSettings, Progress, TrainerDraft
from fulmen_algorithm.loops.rules import (
    CHECKPOINT,
    ID,
    MAX_REQUEST_ID,
    MAX_SEED,
    RowLimits,
    draw_problems,
    invalid,
    loss_of,
    messages_problems,
    problem,
    rows_of,
)
from fulmen_algorithm.loops.trainer import LoopTrainer, unknown_trainer
from fulmen_algorithm.loops.trainers import Trainers
from fulmen_algorithm.runs.creation.policies import form_problems, name_problems, place_problems, version_problems
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.run import PolicyOrigin
from fulmen_algorithm.training.primitives_settings import PassResult
from fulmen_algorithm.transport.encode import policy_spec
from fulmen_algorithm.transport.pages import page
from fulmen_algorithm.transport.trainer_messages import (
    given_adam,
    given_draw,
    given_lora,
    given_rows,
    pass_message,
    rendered_message,
    sample_message,
    trainer_message,
)
from fulmen_service_kit.security.auth import current_caller, require_project

MAX_AUTOSAVE: Final = 1_000_000
_PROJECT = re.compile(r"projects/[a-z0-9-]{1,63}")
_TRAINER = re.compile(r"(projects/[a-z0-9-]{1,63})/trainers/[a-z0-9-]{1,63}")
_SEED_BITS: Final = 62


class TrainerServicer(TrainerServiceServicer):
    """Decodes, calls once, encodes."""

    def __init__(self, trainers: Trainers, limits: RowLimits) -> None:
        self._trainers = trainers
        self._limits = limits
        self._drains = False

    def drain(self) -> None:
        """Refuses further calls that need weights."""
        self._drains = True

    async def CreateTrainer(
        self, request: pb.CreateTrainerRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateTrainerResponse:
        """Creates a trainer."""
        self._refuse_if_draining()
        draft = await self._draft(request)
        return pb.CreateTrainerResponse(trainer=await _message(await self._trainers.create(draft)))

    async def GetTrainer(
        self, request: pb.GetTrainerRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainerResponse:
        """Returns a trainer."""
        return pb.GetTrainerResponse(trainer=await _message(self._own(request.name)))

    async def ListTrainers(
        self, request: pb.ListTrainersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListTrainersResponse:
        """Lists the trainers of a project."""
        found = self._trainers.newest_first(_project(request.project))
        listed, token = page(found, request.page_size, request.page_token)
        return pb.ListTrainersResponse(trainers=[await _message(each) for each in listed], next_page_token=token)

    async def DeleteTrainer(
        self, request: pb.DeleteTrainerRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteTrainerResponse:
        """Deletes a trainer."""
        _check_access(request.name)
        await self._trainers.delete(request.name)
        return pb.DeleteTrainerResponse()

    async def ForwardBackward(
        self, request: pb.ForwardBackwardRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForwardBackwardResponse:
        """Adds the gradient of rows."""
        trainer = self._training(request.name)
        loss, found = loss_of(request.loss, request.loss_settings_json)
        if not 0 <= request.temperature <= 100:
            found += problem("temperature", "must be greater than 0, and at most 100")
        if not request.forward_only and request.sequence < 1:
            found += problem("sequence", "must be 1 or more")
        if found:
            raise invalid(found)

        async def passed(process: LoopProcess) -> PassResult:
            record = trainer.record
            rows, weights = await asyncio.to_thread(
                lambda: rows_of(
                    given_rows(request.rows),
                    loss=request.loss,
                    limits=self._limits,
                    longest=record.max_tokens,
                    vocabulary=record.vocabulary,
                )
            )
            call = Pass(
                trainer=trainer.name,
                rows=rows,
                weights=weights,
                loss=loss,
                temperature=request.temperature or 1.0,
                forward_only=request.forward_only,
                fresh=request.fresh,
            )
            with _refusals("rows"):
                return await process.ask(call, PassResult)

        async def change(process: LoopProcess, at: Progress) -> tuple[Progress, bytes]:
            result = await passed(process)
            answer = pass_message(result).SerializeToString()
            earlier = 0.0 if request.fresh else at.weight_sum
            return replace(at, weight_sum=earlier + result.weight_sum), answer

        if request.forward_only:
            return pass_message(await trainer.read(request.sequence, passed))
        content = request.SerializeToString(deterministic=True)
        return pb.ForwardBackwardResponse.FromString(await trainer.change(request.sequence, content, change))

    async def OptimStep(self, request: pb.OptimStepRequest, context: grpc.aio.ServicerContext) -> pb.OptimStepResponse:
        """Takes a step."""
        trainer = self._training(request.name)
        adam, found = given_adam(request.adam, trainer.record.adam)
        if adam.learning_rate is None and not found:
            found += problem("adam.learning_rate", "is required here, because CreateTrainer did not set it")
        if request.reduction not in pb.GradientReduction.values():
            found += problem("reduction", f"{request.reduction} is unknown to this service")
        if request.sequence < 1:
            found += problem("sequence", "must be 1 or more")
        if found:
            raise invalid(found)

        async def change(process: LoopProcess, at: Progress) -> tuple[Progress, bytes]:
            if not at.weight_sum:
                raise invalid(problem("name", "no token has a weight since the last step: call ForwardBackward first"))
            divisor = 1.0 if request.reduction == pb.GRADIENT_REDUCTION_SUM else at.weight_sum
            stepped = await process.ask(Step(trainer=trainer.name, step=adam.step(divisor=divisor)), Stepped)
            step = at.step + (not stepped.skipped)
            answer = pb.OptimStepResponse(
                step=step, grad_norm=stepped.grad_norm, skipped=stepped.skipped, weight_sum=at.weight_sum
            )
            return replace(at, step=step, weight_sum=0.0), answer.SerializeToString()

        content = request.SerializeToString(deterministic=True)
        return pb.OptimStepResponse.FromString(await trainer.change(request.sequence, content, change))

    async def Sample(self, request: pb.SampleRequest, context: grpc.aio.ServicerContext) -> pb.SampleResponse:
        """Samples completions."""
        trainer, draw = self._training(request.name), given_draw(request)

        async def drawn(process: LoopProcess) -> pb.SampleResponse:
            record = trainer.record
            found = draw_problems(draw, limits=self._limits, longest=record.max_tokens, vocabulary=record.vocabulary)
            if found:
                raise invalid(found)
            call = Draw(
                trainer=trainer.name,
                prompt_ids=list(draw.prompt_ids),
                messages=draw.messages_json.encode(),
                count=draw.count,
                max_tokens=draw.max_tokens,
                temperature=draw.temperature,
                top_p=draw.top_p,
                seed=request.seed if request.HasField("seed") else secrets.randbits(_SEED_BITS),
                stop_ids=list(draw.stop_ids),
                stop_texts=list(draw.stop_texts),
            )
            with _refusals("messages_json"):
                return sample_message(await process.ask(call, Sampled), step=trainer.progress.step)

        return await trainer.read(_after(request), drawn)

    async def RenderMessages(
        self, request: pb.RenderMessagesRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenderMessagesResponse:
        """Renders messages."""
        trainer = self._training(request.name)
        if found := messages_problems("messages_json", request.messages_json, tools=request.tools_json):
            raise invalid(found)
        tools = json.dumps(json.loads(request.tools_json)).encode() if request.tools_json else b""
        call = Render(trainer=trainer.name, messages=request.messages_json.encode(), tools=tools)

        async def rendered(process: LoopProcess) -> Rendered:
            with _refusals("messages_json"):
                return await process.ask(call, Rendered)

        return rendered_message(await trainer.read(None, rendered))

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: grpc.aio.ServicerContext
    ) -> pb.SaveCheckpointResponse:
        """Saves the state."""
        trainer = self._training(request.name)
        if request.checkpoint and not ID.fullmatch(request.checkpoint):
            raise invalid(problem("checkpoint", "must be 1 to 63 of [a-z0-9._-]"))
        if request.checkpoint:
            self._check_checkpoints(trainer, request.checkpoint)
            await self._trainers.check_room(trainer.record.project)
        await trainer.save(_after(request), checkpoint=request.checkpoint, unload=request.unload)
        return pb.SaveCheckpointResponse(trainer=await _message(trainer))

    async def PublishVersion(
        self, request: pb.PublishVersionRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishVersionResponse:
        """Publishes a version."""
        trainer = self._training(request.name)
        if request.alias and (not ID.fullmatch(request.alias) or request.alias == "latest"):
            raise invalid(
                problem("alias", "must be 1 to 63 of [a-z0-9._-], and not `latest`, which moves automatically")
            )
        publish = partial(self._trainers.publisher.publish, trainer, alias=request.alias)
        version = await trainer.read(_after(request), publish, saved=True)
        return pb.PublishVersionResponse(policy_version=version)

    async def _draft(self, request: pb.CreateTrainerRequest) -> TrainerDraft:
        """Checks a request to create.

        Raises:
            SettingsInvalid: with every problem.
        """
        project, policy = _project(request.project), policy_spec(request.policy)
        lora, found = given_lora(request.lora) if request.HasField("lora") else (None, [])
        adam, more = given_adam(request.adam, AdamSettings())
        found += more
        if not 0 <= request.seed <= MAX_SEED:
            found += problem("seed", f"must be 0 to {MAX_SEED}")
        if not 0 <= request.autosave_steps <= MAX_AUTOSAVE:
            found += problem("autosave_steps", f"must be 0 to {MAX_AUTOSAVE}")
        if len(request.request_id) > MAX_REQUEST_ID:
            found += problem("request_id", f"is longer than {MAX_REQUEST_ID} characters")
        if not request.checkpoint or policy.name:
            found += name_problems(policy)
        if request.checkpoint:
            found += self._checkpoint_problems(request)
        else:
            # A trainer may begin with a version of any policy.
            found += form_problems(replace(policy, name=_policy_in(policy.source)))
            found += await self._source_problems(request, project)
        if found:
            raise SettingsInvalid("The trainer is not valid.", violations=found)
        return TrainerDraft(
            project=project,
            policy=policy,
            lora=lora,
            adam=adam,
            seed=request.seed,
            autosave_steps=request.autosave_steps if request.HasField("autosave_steps") else None,
            checkpoint=request.checkpoint,
            request_id=request.request_id,
        )

    def _checkpoint_problems(self, request: pb.CreateTrainerRequest) -> list[Violation]:
        found = []
        if request.policy.WhichOneof("initial"):
            found += problem("policy", "names initial weights, but `checkpoint` already has them")
        if request.HasField("lora"):
            found += problem("lora", "is given, but `checkpoint` has its own")
        match = CHECKPOINT.fullmatch(request.checkpoint)
        if match is None:
            return [*found, *problem("checkpoint", "must be projects/<p>/trainers/<t>/checkpoints/<name>")]
        if not match[1].startswith(f"{_project(request.project)}/"):
            return [*found, *problem("checkpoint", "must be of a trainer of the project")]
        if match[2] not in {each.id for each in self._own(match[1]).files.named()}:
            raise CheckpointNotFound("The checkpoint does not exist.", checkpoint=match[2])
        return found

    async def _source_problems(self, request: pb.CreateTrainerRequest, project: str) -> list[Violation]:
        policy, sources = policy_spec(request.policy), self._trainers.sources(project)
        if policy.origin is PolicyOrigin.BUILD:
            text = "is not available for trainers: build the weights with a training run and start from its version, or upload a model"
            return problem("policy.build", text)
        found = await place_problems(policy, project=project, roots=sources.roots, models=sources.models)
        return found + await version_problems(policy, sources.resources)

    def _check_checkpoints(self, trainer: LoopTrainer, checkpoint: str) -> None:
        ids = [each.id for each in trainer.files.named()]
        most = self._trainers.limits.max_checkpoints
        if checkpoint not in ids and len(ids) >= most:
            raise QuotaExceeded(
                f"The trainer has {len(ids)} checkpoints, which is the maximum (max_trainer_checkpoints). Save under one of "
                "their names, which replaces it.",
                quota="trainer_checkpoints",
            )

    def _own(self, name: str) -> LoopTrainer:
        """Returns a trainer of a project of the caller; another one is as if it did not exist."""
        _check_access(name)
        return self._trainers.find(name)

    def _training(self, name: str) -> LoopTrainer:
        trainer = self._own(name)
        self._refuse_if_draining()
        return trainer

    def _refuse_if_draining(self) -> None:
        if self._drains:
            raise Draining("The service is shutting down.")


async def _message(trainer: LoopTrainer) -> pb.Trainer:
    # Reads the checkpoints.
    return await asyncio.to_thread(trainer_message, trainer)


def _policy_in(version: str) -> str:
    return version.removeprefix("resources/policy.").partition("/")[0]


def _check_access(name: str) -> None:
    match = _TRAINER.fullmatch(name)
    if match is None or not current_caller().may_access(match[1]):
        raise unknown_trainer(name)


def _project(name: str) -> str:
    project = require_project(name)
    if not _PROJECT.fullmatch(project):
        raise invalid(problem("project", "must be projects/ and 1 to 63 of [a-z0-9-]"))
    return project


def _after(request: pb.SampleRequest | pb.SaveCheckpointRequest | pb.PublishVersionRequest) -> int | None:
    return request.after_sequence if request.HasField("after_sequence") else None


@contextmanager
def _refusals(field: str) -> Iterator[None]:
    """Turns what the process of a trainer refuses into errors of the request."""
    try:
        yield
    except RunFailed as error:
        raise invalid(problem(field, f"{error.message} Send less in one call.")) from error
    except ValueError as error:
        named, found, text = str(error).partition(": ")
        raise invalid(problem(named if found else field, text or str(error))) from error
