"""Gets a call answered: the tries that follow one another, and the waits between them.

Invariant: nothing here runs after the first byte of an answer; what the caller has seen is never sent again. A call
that is answered at its first try pays for one timer and nothing else of this.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from fulmen.errors import BackendUnavailable, DeadlineExceeded, FulmenError, ModelLimitExceeded
from fulmen_llm_proxy.backends.client import BackendAnswer, BackendClient, Dispatch, TryFailed
from fulmen_llm_proxy.backends.hold import BackendHold
from fulmen_llm_proxy.routing.backend_state import BackendState, BackendStates, QueueFull
from fulmen_llm_proxy.routing.retry import Failed, Recovery, RetryPolicy, Step, retry_after_s
from fulmen_llm_proxy.routing.table import Choice

_AGAIN = frozenset({429, 502, 503, 504})
FIRST = Step(route=0)
_BREAKER = "breaker"
_QUEUE_RETRY_AFTER_S = 2.0

Plan = Callable[[Step], Dispatch]
"""Says where a try goes; asked anew for each, and after each wait, so that a try after a swap goes to the new place."""

Routes = Callable[[Choice | None], int]
"""Says how many routes a call may take, its own and fallbacks, given what its own route chose."""

_Outcome = BackendAnswer | TryFailed


class SendFigures(Protocol):
    """Counts what happens beside the ordinary."""

    def retried(self, cause: str) -> None:
        """Counts a further try, by what was wrong with the one before."""

    def fell_back(self, cause: str) -> None:
        """Counts a try on a fallback route."""

    def hedged(self, outcome: str) -> None:
        """Counts a hedge, `won` by the second backend or `lost`."""

    def queue_refused(self) -> None:
        """Counts a call that found no place in a backend's queue, or waited too long in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLimits:
    """How long calls wait, unless their route says otherwise.

    Attributes:
        deadline_s: for the whole answer, or the first event.
        queue_timeout_s: for a place at a backend.
        max_waiting: calls that may wait for a place at one backend.
    """

    deadline_s: float
    queue_timeout_s: float
    max_waiting: int


class CallSender:
    """Sends calls, again if need be."""

    def __init__(
        self,
        *,
        client: BackendClient,
        states: BackendStates,
        hold: BackendHold,
        retry: RetryPolicy,
        limits: SendLimits,
        figures: SendFigures,
    ) -> None:
        """Takes what tries go through."""
        self._client = client
        self._states = states
        self._hold = hold
        self._retry = retry
        self._limits = limits
        self._figures = figures

    async def send(self, plan: Plan, routes: Routes) -> BackendAnswer:
        """Returns the first good answer, or the last outcome when there is none in time.

        A connection that fails is followed by another replica at once, an answer 429, 502, 503 or 504 and an answer
        that breaks off by a wait; then come the fallbacks; and all of it again until the retries' deadline.

        Raises:
            BackendUnavailable: if the last try got no answer.
            DeadlineExceeded: if the call's deadline is over.
            ModelLimitExceeded: if there was no place at the backend.
        """
        first = self._planned(plan, FIRST)
        deadline_s = self._limits.deadline_s
        if isinstance(first, Dispatch):
            deadline_s = first.choice.route.deadline_s or deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._answer(plan, routes, first)
        except TimeoutError:
            raise DeadlineExceeded(f"There was no answer within {deadline_s:g} s.") from None

    async def _answer(self, plan: Plan, routes: Routes, first: Dispatch | TryFailed) -> BackendAnswer:
        outcome: _Outcome
        if isinstance(first, TryFailed):
            outcome = first
        elif first.choice.route.fallbacks and self._is_out_of_order(first) and routes(first.choice) > 1:
            error = BackendUnavailable(f"The backend '{first.backend.id}' is out of order.")
            outcome = TryFailed(kind=_BREAKER, error=error, dispatch=first)
        else:
            outcome = await self._try(plan, FIRST, first)
        if isinstance(outcome, BackendAnswer) and outcome.status not in _AGAIN:
            return outcome
        outcome = await self._recover(plan, routes, outcome)
        if isinstance(outcome, TryFailed):
            raise outcome.error
        return outcome

    def _is_out_of_order(self, dispatch: Dispatch) -> bool:
        """Tells whether its breaker would not let the call through, and others may be tried first."""
        return self._retry.deadline_s > 0 and not self._states.of(dispatch.backend.id).breaker.admits

    def _planned(self, plan: Plan, step: Step) -> Dispatch | TryFailed:
        """Plans a try.

        Raises:
            FulmenError: see `_unplanned`.
        """
        try:
            return plan(step)
        except FulmenError as error:
            return _unplanned(error, step)

    async def _recover(self, plan: Plan, routes: Routes, outcome: _Outcome) -> _Outcome:
        choice = None if outcome.dispatch is None else outcome.dispatch.choice
        recovery = Recovery(routes=routes(choice), policy=self._retry, random=random.random)
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            failed, cause = self._failed(outcome), _cause(outcome)
            step = recovery.after(failed, elapsed_s=loop.time() - started)
            if step is None:
                return outcome
            if isinstance(outcome, BackendAnswer):
                outcome.close()
            if step.wait_s:
                await asyncio.sleep(step.wait_s)
                if not failed.at_once and not await self._within_budget(failed, recovery, started):
                    return outcome
            if step.route:
                self._figures.fell_back(cause)
            else:
                self._figures.retried(cause)
            planned = self._planned(plan, step)
            outcome = planned if isinstance(planned, TryFailed) else await self._try(plan, step, planned)
            if isinstance(outcome, BackendAnswer) and outcome.status not in _AGAIN:
                return outcome

    def _failed(self, outcome: _Outcome) -> Failed:
        dispatch = outcome.dispatch
        if dispatch is None:
            return Failed(backend_id="", replicas=(), again=False)
        # Where the breaker spoke, none of the replicas is worth a try before the fallbacks.
        spoken_for = isinstance(outcome, TryFailed) and outcome.kind == _BREAKER
        replicas = [] if spoken_for else [replica.backend_id for replica in dispatch.choice.variant.replicas]
        if isinstance(outcome, TryFailed):
            return Failed(
                backend_id=dispatch.backend.id, replicas=replicas, at_once=outcome.at_once, again=outcome.again
            )
        wait_s = retry_after_s(outcome.retry_after, self._states.wall_clock())
        return Failed(backend_id=dispatch.backend.id, replicas=replicas, retry_after_s=wait_s)

    async def _within_budget(self, failed: Failed, recovery: Recovery, started: float) -> bool:
        """Waits until the failing backend's budget has room for one more try; False if that takes too long."""
        if not failed.backend_id:
            return True
        state = self._states.of(failed.backend_id)
        loop = asyncio.get_running_loop()
        state.budget.waiting += 1
        try:
            while not state.budget.take(state.requests):
                delay_s = recovery.delay_s()
                if loop.time() + delay_s > started + self._retry.deadline_s:
                    return False
                await asyncio.sleep(delay_s)
        finally:
            state.budget.waiting -= 1
        return True

    async def _try(self, plan: Plan, step: Step, dispatch: Dispatch) -> _Outcome:
        hedge_delay_s = dispatch.choice.route.hedge_delay_s
        if hedge_delay_s is None or len(dispatch.choice.variant.replicas) == 1:
            return await self._ask(plan, step, dispatch)
        return await self._hedge(plan, step, dispatch, hedge_delay_s)

    async def _ask(self, plan: Plan, step: Step, dispatch: Dispatch) -> _Outcome:
        backend = dispatch.backend
        state = self._states.of(backend.id)
        if self._hold.in_force(backend) or not state.try_acquire(backend.max_in_flight):
            try:
                admitted = await self._admit(plan, step, dispatch)
            except FulmenError as error:  # of a plan that was made anew
                return _unplanned(error, step)
            if isinstance(admitted, TryFailed):
                return admitted
            dispatch, state = admitted
        return await self._client.ask(dispatch, state)

    async def _admit(self, plan: Plan, step: Step, dispatch: Dispatch) -> tuple[Dispatch, BackendState] | TryFailed:
        """Returns a plan for which a slot of its backend is taken; waits for it, and for the end of a hold."""
        while True:
            if self._hold.in_force(dispatch.backend):
                dispatch = await self._hold.over(lambda: plan(step))
            backend = dispatch.backend
            state = self._states.of(backend.id)
            try:
                async with asyncio.timeout(self._limits.queue_timeout_s):
                    waited = await state.acquire(backend.max_in_flight, max_waiting=self._limits.max_waiting)
            except (TimeoutError, QueueFull):
                self._figures.queue_refused()
                error = ModelLimitExceeded(
                    f"The backend '{backend.id}' has as many calls as it may, and others wait.",
                    backend=f"backends/{backend.id}",
                    retry_after_s=_QUEUE_RETRY_AFTER_S,
                )
                return TryFailed(kind="queue", error=error, dispatch=dispatch, again=False)
            if not waited:
                return dispatch, state
            try:
                dispatch = plan(step)
            except BaseException:
                state.release()
                raise
            if dispatch.backend.id == backend.id and not self._hold.in_force(dispatch.backend):
                return dispatch, state
            state.release()

    async def _hedge(self, plan: Plan, step: Step, dispatch: Dispatch, delay_s: float) -> _Outcome:
        """Asks a second replica if the first is slow; the first good answer counts, the other try is cancelled."""
        first = asyncio.create_task(self._ask(plan, step, dispatch), name="hedge-first")
        tries = [first]
        try:
            done, _ = await asyncio.wait(tries, timeout=delay_s)
            if not done:
                second = self._second(plan, step, dispatch)
                if second is not None:
                    tries.append(asyncio.create_task(second, name="hedge-second"))
            winner = await _first_good(tries)
            if len(tries) > 1:
                self._figures.hedged("lost" if winner is first else "won")
            tries.remove(winner)
            return winner.result()
        finally:
            give_up(tries)

    def _second(self, plan: Plan, step: Step, dispatch: Dispatch) -> Coroutine[Any, Any, _Outcome] | None:
        """Returns a try at another replica; None if there is none that is well and has budget for it."""
        planned = self._planned(plan, Step(route=step.route, avoid=step.avoid | {dispatch.backend.id}))
        if isinstance(planned, TryFailed) or planned.backend.id == dispatch.backend.id:
            return None
        state = self._states.of(planned.backend.id)
        if not state.breaker.admits or not state.budget.take(state.requests):
            return None
        return self._ask(plan, step, planned)


def _unplanned(error: FulmenError, step: Step) -> TryFailed:
    """Returns what a route without a backend is: a try that failed.

    Raises:
        FulmenError: the error itself, where it is the call's: any other one of the first route.
    """
    if isinstance(error, BackendUnavailable):
        return TryFailed(kind="no_backend", error=error, again=False)
    if step is FIRST:
        raise error
    return TryFailed(kind="not_planned", error=error, again=False)


def _cause(outcome: _Outcome) -> str:
    return outcome.kind if isinstance(outcome, TryFailed) else f"http_{outcome.status}"


async def _first_good(tries: list[asyncio.Task[_Outcome]]) -> asyncio.Task[_Outcome]:
    """Returns the first try with a good answer; if there is none, the last to end."""
    pending = set(tries)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            outcome = None if task.exception() else task.result()
            if isinstance(outcome, BackendAnswer) and outcome.status not in _AGAIN:
                return task
        if not pending:
            return done.pop()


def give_up(tries: Iterable[asyncio.Task[_Outcome]]) -> None:
    """Cancels tries, and closes what they brought or may still bring.

    Waits for none of them: whoever is cancelled in such a wait would lose the answer that it holds already.
    """
    for task in tries:
        task.cancel()
        task.add_done_callback(_close_answer)


def _close_answer(task: asyncio.Task[_Outcome]) -> None:
    if not task.cancelled() and task.exception() is None and isinstance(outcome := task.result(), BackendAnswer):
        outcome.close()
