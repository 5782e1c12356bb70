"""The calls of programs: what each endpoint of the `tinker` package does, on parsed requests."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import ArgumentInvalid, FulmenError, NotFound, Violation
from fulmen_console.tinker import requests as given
from fulmen_console.tinker.futures import Answered, Future, Futures
from fulmen_console.tinker.losses import plan_of
from fulmen_console.tinker.models import Model, lora_of, sampler_request
from fulmen_console.tinker.names import SAMPLER, WEIGHTS, BaseNames, path_of, read_path
from fulmen_console.tinker.samplers import Sampler
from fulmen_console.tinker.sessions import Session, Sessions, remove_strays
from fulmen_console.tinker.trainer_calls import TrainerCalls
from fulmen_console.tinker.wire import PROTOBUF_TYPE, Pass, encoded_pass
from fulmen_service_kit.http.wire import JSON_TYPE

__all__ = ["Caller", "Programs"]

Json = Mapping[str, Any]
_SEED_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: its project, and its calls of `TrainerService`."""

    project: str
    calls: TrainerCalls


class Programs:
    """The programs that train. Thread: the event loop."""

    def __init__(self, names: BaseNames) -> None:
        self.names = names
        self.sessions = Sessions()
        self.futures = Futures()

    async def create_session(self, caller: Caller) -> Json:
        """Begins a session."""
        await remove_strays(caller.calls)
        return {"type": "create_session", "session_id": self.sessions.begin(caller.project, caller.calls).id}

    def heartbeat(self, caller: Caller, request: given.OfSession) -> Json:
        """Notes that a program lives."""
        self.sessions.find(request.session_id, caller.project, caller.calls)
        return {"type": "session_heartbeat"}

    async def finish(self, caller: Caller, session_id: str) -> None:
        """Ends a session."""
        await self.sessions.finish(self.sessions.find(session_id, caller.project, caller.calls))

    def create_model(self, caller: Caller, request: given.CreateModel, size_bytes: int) -> Future:
        """Begins to make a model with new adapters."""
        session = self.sessions.find(request.session_id, caller.project, caller.calls)
        model_id = f"{session.id}:train:{request.model_seq_id}"

        async def work() -> Answered:
            create = pb.CreateTrainerRequest(policy=self.names.policy(request.base_model), request_id=model_id)
            create.lora.CopyFrom(lora_of(request.lora_config))
            seed = request.lora_config.seed
            create.seed = secrets.randbits(_SEED_BITS) if seed is None else seed
            trainer = await caller.calls.create(create)
            model = Model(model_id, caller.project, session.id, trainer, base=request.base_model)
            await self._add(caller, session, model)
            return _json({"type": "create_model", "model_id": model_id})

        return self._begin(f"{model_id}:create", caller, work, size_bytes)

    def load_weights(self, caller: Caller, request: given.LoadWeights, size_bytes: int) -> Future:
        """Begins to make a model of a checkpoint, or to replace the weights of one."""
        _check_load(request)
        trainer, kind, checkpoint = read_path(request.path, caller.project)
        if kind != WEIGHTS:
            raise _invalid("path", "is a sampler's path; only tinker://<run>/weights/<name> can be trained further")
        if request.model_id is not None:
            model = self.sessions.model(request.model_id, caller.project, caller.calls)
            number = request.seq_id or 0

            async def replaced() -> Answered:
                await model.load(caller.calls, checkpoint, f"{model.id}:load:{number}")
                return _json({"type": "load_weights", "path": request.path, "model_id": model.id})

            return self._in_turn(model, number, caller, replaced, size_bytes)
        session = self.sessions.find(request.session_id or "", caller.project, caller.calls)
        model_id = f"{session.id}:train:{request.model_seq_id}"

        async def made() -> Answered:
            base = self.names.name_of((await caller.calls.get(trainer)).policy)
            create = pb.CreateTrainerRequest(checkpoint=checkpoint, request_id=model_id)
            created = await caller.calls.create(create)
            await self._add(caller, session, Model(model_id, caller.project, session.id, created, base=base))
            return _json({"type": "load_weights", "path": request.path, "model_id": model_id})

        return self._begin(f"{model_id}:create", caller, made, size_bytes)

    def get_info(self, caller: Caller, request: given.OfModel) -> Json:
        """Returns what a model is."""
        return self.sessions.model(request.model_id, caller.project, caller.calls).info()

    def unload_model(self, caller: Caller, request: given.OfModel, size_bytes: int) -> Future:
        """Saves a model, and removes it from memory until it is called again."""
        model = self.sessions.model(request.model_id, caller.project, caller.calls)

        async def work() -> Answered:
            await caller.calls.save(pb.SaveCheckpointRequest(name=model.trainer, unload=True))
            return _json({"type": "unload_model", "model_id": model.id})

        return self._begin(f"{model.id}:unload:{secrets.token_hex(8)}", caller, work, size_bytes)

    def forward_backward(self, caller: Caller, request: Pass, size_bytes: int) -> Future:
        """Begins a pass."""
        model = self.sessions.model(request.model_id, caller.project, caller.calls)

        async def work() -> Answered:
            # In a thread: many tokens take long.
            plan = await asyncio.to_thread(plan_of, request)
            logprobs, metrics = await model.forward_backward(caller.calls, plan, forward_only=request.forward_only)
            return Answered(encoded_pass(logprobs, metrics), PROTOBUF_TYPE)

        return self._in_turn(model, request.seq_id, caller, work, size_bytes)

    def optim_step(self, caller: Caller, body: bytes) -> Future:
        """Begins a step."""

        async def step(model: Model, request: given.OptimStep) -> Answered:
            return _json({"metrics": await model.optim_step(caller.calls, request.adam_params)})

        return self._numbered(caller, given.OptimStep, body, step)

    def save_weights(self, caller: Caller, body: bytes) -> Future:
        """Begins to save the state under a name."""

        async def save(model: Model, request: given.SaveWeights) -> Answered:
            await model.save(caller.calls, WEIGHTS, request.path, overwrite=request.overwrite)
            return _json({"type": "save_weights", "path": path_of(model.trainer, WEIGHTS, request.path)})

        return self._numbered(caller, given.SaveWeights, body, save)

    def save_weights_for_sampler(self, caller: Caller, body: bytes) -> Future:
        """Begins to keep the present weights for sampling: under a name, or for one sampler."""

        async def save(model: Model, request: given.SaveWeightsForSampler) -> Answered:
            if request.path is not None:
                await model.save(caller.calls, SAMPLER, request.path, overwrite=True)
                path = path_of(model.trainer, SAMPLER, request.path)
                return _json({"type": "save_weights_for_sampler", "path": path})
            sampler_id = f"{model.session_id}:sample:{request.sampling_session_seq_id or 0}"
            trainer = await model.sampler(caller.calls, f"{sampler_id}:weights")

            async def gone(_: TrainerCalls) -> str:
                raise NotFound(
                    "The sampler's weights were removed, because newer samplers are used. Make a sampler from the "
                    "current weights, or keep weights under a name with save_weights_for_sampler."
                )

            sampler = Sampler(sampler_id, caller.project, model.session_id, base=model.base, path="", make=gone)
            sampler.trainer = trainer
            session = self.sessions.find(model.session_id, caller.project, caller.calls)
            self.sessions.add(session, sampler)
            await self.sessions.use(sampler, caller.calls)
            return _json({"type": "save_weights_for_sampler", "sampling_session_id": sampler_id})

        return self._numbered(caller, given.SaveWeightsForSampler, body, save)

    async def create_sampling_session(self, caller: Caller, request: given.CreateSamplingSession) -> Json:
        """Makes a sampler of a path or a base model; its weights are loaded by its first call."""
        session = self.sessions.find(request.session_id, caller.project, caller.calls)
        sampler_id = f"{session.id}:sample:{request.sampling_session_seq_id}"
        if request.model_path:
            trainer, _, checkpoint = read_path(request.model_path, caller.project)
            base = self.names.name_of((await caller.calls.get(trainer)).policy)
            create = sampler_request(checkpoint, "")
        elif request.base_model:
            base = request.base_model
            # New adapters add nothing to the base model.
            create = pb.CreateTrainerRequest(policy=self.names.policy(base), lora=pb.TrainerLora(rank=1))
            create.policy.name, create.autosave_steps = sampler_request("", "").policy.name, 0
        else:
            raise _invalid("model_path", "or base_model is required")

        async def make(calls: TrainerCalls) -> str:
            return (await calls.create(create)).name

        if sampler_id not in session.samplers:
            path = request.model_path or ""
            self.sessions.add(session, Sampler(sampler_id, caller.project, session.id, base=base, path=path, make=make))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def get_sampler(self, caller: Caller, sampler_id: str) -> Json:
        """Returns what a sampler is."""
        sampler = self.sessions.sampler(sampler_id, caller.project, caller.calls)
        return {"sampler_id": sampler.id, "base_model": sampler.base, "model_path": sampler.path or None}

    def sample(self, caller: Caller, request: given.Sample, size_bytes: int) -> tuple[Future, list[str]]:
        """Begins to sample; returns also the id of each sequence."""
        sampler = self.sessions.sampler(request.sampling_session_id, caller.project, caller.calls)
        future_id = f"{sampler.id}:{request.seq_id}"

        async def work() -> Answered:
            await self.sessions.use(sampler, caller.calls)
            return Answered(await sampler.sample(caller.calls, request), PROTOBUF_TYPE)

        future = self._begin(future_id, caller, work, size_bytes)
        return future, [f"{future_id}:{number}" for number in range(request.num_samples)]

    async def _add(self, caller: Caller, session: Session, model: Model) -> None:
        """Adds a model to its session, or removes its trainer, which nobody would find."""
        try:
            self.sessions.add(session, model)
        except FulmenError:
            await caller.calls.delete(model.trainer)
            raise

    def _numbered(
        self, caller: Caller, kind: type[Any], body: bytes, work: Callable[[Model, Any], Awaitable[Answered]]
    ) -> Future:
        """Begins a call of a model; one that is malformed takes its turn, too, and fails."""
        numbered = given.read(given.OfNumber, body)
        model = self.sessions.model(numbered.model_id, caller.project, caller.calls)

        async def read_and_work() -> Answered:
            return await work(model, given.read(kind, body))

        return self._in_turn(model, numbered.seq_id, caller, read_and_work, len(body))

    def _in_turn(
        self, model: Model, number: int, caller: Caller, work: Callable[[], Awaitable[Answered]], size_bytes: int
    ) -> Future:
        return self._begin(f"{model.id}:{number}", caller, partial(model.in_turn, number, work), size_bytes)

    def _begin(
        self, future_id: str, caller: Caller, work: Callable[[], Awaitable[Answered]], size_bytes: int
    ) -> Future:
        return self.futures.begin(future_id, caller.project, work, size_bytes=size_bytes)


def _check_load(request: given.LoadWeights) -> None:
    found = []
    if not request.optimizer:
        text = (
            "must be true: loading weights without their optimizer is not supported. Use "
            "create_training_client_from_state_with_optimizer"
        )
        found.append(Violation(field="optimizer", description=text))
    new, existing = (request.session_id, request.model_seq_id), (request.model_id, request.seq_id)
    if (None in new) == (None in existing):
        found.append(Violation(field="session_id", description="needs either model_seq_id, or model_id and seq_id"))
    if found:
        raise ArgumentInvalid("The request is malformed.", violations=found)


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=description)])


def _json(body: Json) -> Answered:
    return Answered(json.dumps(body).encode(), JSON_TYPE)
