"""Sessions of programs, with their models and samplers. They end when their program ends them, or sends nothing for a
while.

In memory: after a restart of the console a program begins again from its last checkpoint. What is trained is on the algorithm
service.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog

from fulmen.errors import FulmenError, NotFound, QuotaExceeded
from fulmen.ids import uuid7
from fulmen_console.tinker.models import Model, remove_unsaved
from fulmen_console.tinker.names import SAMPLER_POLICY
from fulmen_console.tinker.samplers import Sampler
from fulmen_console.tinker.trainer_calls import TrainerCalls

__all__ = ["Session", "Sessions", "remove_strays"]

MAX_SESSIONS: Final = 256
"""Of a project."""
MAX_OF_SESSION: Final = 4096
"""Models and samplers of a session, those whose weights were removed included."""
MAX_OPEN_SAMPLERS: Final = 8
"""Samplers of a project with a trainer; beyond it, the least recently used is closed."""
SILENCE_S: Final = 900.0
"""Time without a request after which a session ends; the package sends a heartbeat every 10 s."""
SWEEP_S: Final = 15.0
STRAY_S: Final = 3600.0
"""Time without a call after which a trainer that only samples is treated as left behind by a lost console."""
_log = structlog.get_logger()
Owned = TypeVar("Owned", Model, Sampler)


@dataclass(slots=True)
class Session:
    """A session; `calls` has the token of its last request."""

    id: str
    project: str
    calls: TrainerCalls
    heard_s: float
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Sampler] = field(default_factory=dict)


class Sessions:
    """All sessions, and the background role that ends sessions of programs that have ended. Thread: the event
    loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._open: dict[str, Sampler] = {}  # the least recently used first

    def begin(self, project: str, calls: TrainerCalls) -> Session:
        """Begins a session. Raises QuotaExceeded if the project has too many."""
        if sum(each.project == project for each in self._sessions.values()) >= MAX_SESSIONS:
            raise QuotaExceeded(f"{project} has {MAX_SESSIONS} sessions, which is the maximum.", quota="sessions")
        session = Session(str(uuid7()), project, calls, self._clock())
        self._sessions[session.id] = session
        return session

    def find(self, session_id: str, project: str, calls: TrainerCalls) -> Session:
        """Returns a session, which was heard now. Raises NotFound if there is none, or it is another project's."""
        session = self._sessions.get(session_id)
        if session is None or session.project != project:
            raise NotFound("The session does not exist: it ended, or the console was restarted.")
        session.calls, session.heard_s = calls, self._clock()
        return session

    def model(self, model_id: str, project: str, calls: TrainerCalls) -> Model:
        """Returns a model. Raises NotFound if there is none."""
        session = self.find(model_id.partition(":")[0], project, calls)
        return _owned(session.models, model_id, "model")

    def sampler(self, sampler_id: str, project: str, calls: TrainerCalls) -> Sampler:
        """Returns a sampler. Raises NotFound if there is none."""
        session = self.find(sampler_id.partition(":")[0], project, calls)
        return _owned(session.samplers, sampler_id, "sampler")

    def add(self, session: Session, owned: Model | Sampler) -> None:
        """Adds a model or a sampler; one with its name is replaced.

        Raises:
            NotFound: if the session has ended meanwhile.
            QuotaExceeded: if it has too many.
        """
        if self._sessions.get(session.id) is not session:
            raise NotFound("The session ended before its model was made.")
        if len(session.models) + len(session.samplers) >= MAX_OF_SESSION:
            text = f"The session has {MAX_OF_SESSION} models and samplers, which is the maximum."
            raise QuotaExceeded(text, quota="session")
        if isinstance(owned, Model):
            session.models[owned.id] = owned
        else:
            session.samplers[owned.id] = owned

    async def use(self, sampler: Sampler, calls: TrainerCalls) -> None:
        """Notes that a sampler is used, and closes another one if too many are open."""
        self._open.pop(sampler.id, None)
        self._open[sampler.id] = sampler
        idle = [each for each in self._open.values() if each.project == sampler.project and not each.calls]
        of_project = sum(each.project == sampler.project for each in self._open.values())
        for each in [each for each in idle if each is not sampler][: max(0, of_project - MAX_OPEN_SAMPLERS)]:
            # Another call may have closed it meanwhile, or begun to use it.
            if not each.calls and self._open.pop(each.id, None) is not None:
                await each.close(calls)

    async def finish(self, session: Session) -> None:
        """Ends a session: samplers and unsaved models are removed from the algorithm service."""
        self._sessions.pop(session.id, None)
        for sampler in session.samplers.values():
            self._open.pop(sampler.id, None)
            await sampler.close(session.calls)
        for model in session.models.values():
            await remove_unsaved(session.calls, model.trainer)

    async def run(self) -> None:
        """Ends sessions of programs that are not heard, until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_S)
            for session in [each for each in self._sessions.values() if self._clock() - each.heard_s > SILENCE_S]:
                try:
                    await self.finish(session)
                except FulmenError as error:
                    _log.warning("tinker_session_not_removed", session=session.id, reason=error.message)


async def remove_strays(calls: TrainerCalls) -> None:
    """Removes trainers of a project that only sampled and were not used for a long time: their console is lost."""
    now = time.time()
    for trainer in await calls.list():
        if trainer.policy.name == SAMPLER_POLICY and now - trainer.use_time.seconds > STRAY_S:
            await calls.delete(trainer.name)


def _owned(found: dict[str, Owned], name: str, what: str) -> Owned:
    if name not in found:
        raise NotFound(f"The {what} does not exist in its session.")
    return found[name]
