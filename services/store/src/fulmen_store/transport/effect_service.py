"""`EffectService` over gRPC: side effects that agents declare."""

from __future__ import annotations

import json
import re
from typing import Final

import grpc.aio

from fulmen.errors import AttemptOver, Violation
from fulmen.ids import AttemptName, attempt_name, parse_attempt_name
from fulmen.store.v1 import effect_service_pb2 as pb
from fulmen.store.v1 import effect_service_pb2_grpc
from fulmen_service_kit.security.auth import require_project
from fulmen_store.effects.table import EffectKey, EffectTable, EffectView
from fulmen_store.malformed import malformed, malformed_request
from fulmen_store.projects.names import ProjectNames

__all__ = ["EffectService"]

MAX_EFFECTS: Final = 1000
MAX_KEY: Final = 256
MAX_RESULT_BYTES: Final = 64 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9-]{16,64}")

_Request = pb.BeginEffectRequest | pb.EndEffectRequest


class EffectService(effect_service_pb2_grpc.EffectServiceServicer):
    """Serves effects."""

    def __init__(self, *, table: EffectTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def BeginEffect(
        self, request: pb.BeginEffectRequest, context: grpc.aio.ServicerContext
    ) -> pb.BeginEffectResponse:
        """Begins an effect, or returns its state."""
        attempt, effect = await self._effect(request)
        view = await self._table.begin(effect, attempt=attempt.number, token=request.token, max_count=MAX_EFFECTS)
        if view is None:
            if await self._table.count(effect.rollout_id) >= MAX_EFFECTS:
                raise malformed("name", f"the rollout has {MAX_EFFECTS} effects")
            raise AttemptOver("The attempt has ended: it cannot begin an effect.", attempt=request.attempt)
        return pb.BeginEffectResponse(effect=_message(request, attempt, view))

    async def EndEffect(self, request: pb.EndEffectRequest, context: grpc.aio.ServicerContext) -> pb.EndEffectResponse:
        """Records the result of an effect."""
        attempt, effect = await self._effect(request)
        if len(request.result_json) > MAX_RESULT_BYTES or not _is_json(request.result_json):
            raise malformed("result_json", f"is not JSON of at most {MAX_RESULT_BYTES} bytes")
        view = await self._table.find(effect)
        if view is None or view.token != request.token:
            raise malformed("token", "no effect was begun with this token")
        await self._table.end(effect, token=request.token, result=request.result_json)
        view = await self._table.find(effect) or view
        return pb.EndEffectResponse(effect=_message(request, attempt, view))

    async def _effect(self, request: _Request) -> tuple[AttemptName, EffectKey]:
        attempt = parse_attempt_name(request.attempt, field="attempt")
        require_project(attempt.project)
        problems = []
        if not _NAME.fullmatch(request.name):
            problems.append(Violation(field="name", description="is not 1 to 64 characters of [A-Za-z0-9_.-]"))
        if len(request.key) > MAX_KEY or "\0" in request.key:
            problems.append(Violation(field="key", description=f"has a NUL, or more than {MAX_KEY} characters"))
        if not _TOKEN.fullmatch(request.token):
            problems.append(Violation(field="token", description="is not 16 to 64 characters of [A-Za-z0-9-]"))
        if problems:
            raise malformed_request(problems)
        project_id = await self._projects.require(attempt.project)
        return attempt, EffectKey(
            project_id=project_id, rollout_id=attempt.rollout_id, name=request.name, key=request.key
        )


def _message(request: _Request, attempt: AttemptName, view: EffectView) -> pb.Effect:
    state = pb.EFFECT_STATE_DONE
    if view.result is None:
        state = pb.EFFECT_STATE_BEGUN if view.token == request.token else pb.EFFECT_STATE_UNKNOWN
    return pb.Effect(
        name=request.name,
        key=request.key,
        state=state,
        result_json=view.result or b"",
        attempt=attempt_name(attempt.project, attempt.rollout_id, view.attempt),
    )


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
