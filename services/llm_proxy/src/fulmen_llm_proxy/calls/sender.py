"""Sends calls to backends: tries, retries, fallbacks, hedges, and the waits between them.

Invariant: nothing here runs after the first byte of an answer, so a request whose answer the caller has started to see
is never sent again. A call that is answered at its first try pays for one timer only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from fulmen.errors import BackendUnavailable, DeadlineExceeded, FulmenError, ModelLimitExceeded
from fulmen_llm_proxy.backends.client import BackendAnswer, BackendClient, Dispatch, TryFailed
from fulmen_llm_proxy.calls.planner import CallPlanner
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.routing.backend_state import BackendState, BackendStates, QueueFull
from fulmen_llm_proxy.routing.retry import (
    Failed,
    NextTry,
    Recovery,
    RetryPolicy,
    is_retryable,
    may_be_its_own_fault,
    retry_after_s,
)
from fulmen_llm_proxy.routing.seats import Seat
from fulmen_llm_proxy.routing.table import Backend
from fulmen_llm_proxy.routing.table_holder import TableHolder

FIRST_TRY = NextTry(route=0)
_BREAKER = "breaker"
_QUEUE_RETRY_AFTER_S = 2.0

_Outcome = BackendAnswer | TryFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class SendLimits:
    """Timeouts of calls, unless their route sets others.

    Attributes:
        deadline_s: seconds until the complete answer, or the first event of a stream.
        queue_timeout_s: longest wait for a free slot of a backend, seconds.
        max_waiting: maximum number of calls that wait for a slot of one backend.
    """

    deadline_s: float
    queue_timeout_s: float
    max_waiting: int


class CallSender:
    """Sends calls, and retries them if necessary."""

    def __init__(
        self,
        *,
        planner: CallPlanner,
        client: BackendClient,
        tables: TableHolder,
        states: BackendStates,
        retry: RetryPolicy,
        limits: SendLimits,
        metrics: RoutingMetrics,
    ) -> None:
        self._planner = planner
        self._client = client
        self._tables = tables
        self._states = states
        self._retry = retry
        self._limits = limits
        self._metrics = metrics

    async def send(self, call: RunningCall) -> BackendAnswer:
        """Returns the first good answer, or the last outcome if none arrives in time.

        After a failed connection another replica is tried immediately; after a status that `is_retryable`, or a broken
        answer, after a back-off. Then the fallback routes are tried, and all of it again until the retry deadline, which
        comes before the caller leaves.

        Raises:
            BackendUnavailable: if the last try got no answer.
            DeadlineExceeded: if the call's deadline has passed.
            ModelLimitExceeded: if the backend had no free slot.
        """
        first = self._plan(call, FIRST_TRY)
        deadline_s = self._limits.deadline_s
        if isinstance(first, Dispatch):
            deadline_s = first.choice.route.deadline_s or deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                return await self._answer(call, first)
        except TimeoutError:
            raise DeadlineExceeded(f"No answer within {deadline_s:g} s.") from None

    async def _answer(self, call: RunningCall, first: Dispatch | TryFailed) -> BackendAnswer:
        outcome: _Outcome
        if isinstance(first, TryFailed):
            outcome = first
        elif (
            first.choice.route.fallbacks
            and self._is_out_of_order(first)
            and self._planner.count_routes(call, first.choice) > 1
        ):
            error = BackendUnavailable(f"The circuit breaker of backend '{first.backend.id}' is open.")
            outcome = TryFailed(kind=_BREAKER, error=error, dispatch=first)
        else:
            outcome = await self._try(call, FIRST_TRY, first)
        if isinstance(outcome, BackendAnswer) and not is_retryable(outcome.status):
            return outcome
        outcome = await self._recover(call, outcome)
        if isinstance(outcome, TryFailed):
            raise outcome.error
        return outcome

    def _is_out_of_order(self, dispatch: Dispatch) -> bool:
        """Whether the backend's breaker rejects the call and retries are enabled."""
        return self._retry.deadline_s > 0 and not self._states.of(dispatch.backend.id).breaker.admits

    def _plan(self, call: RunningCall, next_try: NextTry) -> Dispatch | TryFailed:
        """Plans a try.

        Raises:
            FulmenError: see `_unplanned`.
        """
        try:
            return self._planner.plan(call, next_try)
        except FulmenError as error:
            return _unplanned(error, next_try)

    async def _recover(self, call: RunningCall, outcome: _Outcome) -> _Outcome:
        choice = None if outcome.dispatch is None else outcome.dispatch.choice
        routes = self._planner.count_routes(call, choice)
        recovery = Recovery(routes=routes, policy=self._retry.within(call.patience_s()), random=random.random)
        loop = asyncio.get_running_loop()
        started = loop.time()
        while True:
            failed, cause = self._failed(outcome), _cause(outcome)
            next_try = recovery.after(failed, elapsed_s=loop.time() - started)
            if next_try is None:
                return outcome
            if isinstance(outcome, BackendAnswer):
                outcome.close()
            if next_try.wait_s:
                await asyncio.sleep(next_try.wait_s)
                if not failed.at_once and not await self._within_budget(failed, recovery, started):
                    return outcome
            if next_try.route:
                self._metrics.fell_back(cause)
            else:
                self._metrics.retried(cause)
            planned = self._plan(call, next_try)
            outcome = planned if isinstance(planned, TryFailed) else await self._try(call, next_try, planned)
            if isinstance(outcome, BackendAnswer) and not is_retryable(outcome.status):
                return outcome

    def _failed(self, outcome: _Outcome) -> Failed:
        dispatch = outcome.dispatch
        if dispatch is None:
            return Failed(backend_id="", replicas=(), again=False)
        # If the breaker rejected the try, the fallbacks come before the other replicas.
        rejected = isinstance(outcome, TryFailed) and outcome.kind == _BREAKER
        replicas = [] if rejected else [replica.backend_id for replica in dispatch.choice.variant.replicas]
        if isinstance(outcome, TryFailed):
            return Failed(
                backend_id=dispatch.backend.id, replicas=replicas, at_once=outcome.at_once, again=outcome.again
            )
        return Failed(
            backend_id=dispatch.backend.id,
            replicas=replicas,
            own_fault=may_be_its_own_fault(outcome.status),
            retry_after_s=retry_after_s(outcome.retry_after, self._states.wall_clock()),
        )

    async def _within_budget(self, failed: Failed, recovery: Recovery, started: float) -> bool:
        """Waits until the retry budget of the failing backend allows another try; False if the deadline is earlier."""
        if not failed.backend_id:
            return True
        state = self._states.of(failed.backend_id)
        loop = asyncio.get_running_loop()
        state.budget.waiting += 1
        try:
            while not state.budget.take(state.requests):
                delay_s = recovery.delay_s()
                if loop.time() + delay_s > started + recovery.policy.deadline_s:
                    return False
                await asyncio.sleep(delay_s)
        finally:
            state.budget.waiting -= 1
        return True

    async def _try(self, call: RunningCall, next_try: NextTry, dispatch: Dispatch) -> _Outcome:
        hedge_delay_s = dispatch.choice.route.hedge_delay_s
        if hedge_delay_s is None or len(dispatch.choice.variant.replicas) == 1:
            return await self._ask(call, next_try, dispatch)
        return await self._hedge(call, next_try, dispatch, hedge_delay_s)

    async def _ask(self, call: RunningCall, next_try: NextTry, dispatch: Dispatch) -> _Outcome:
        backend = dispatch.backend
        state = self._states.of(backend.id)
        if (
            self._is_held(backend)
            or _waits_for_turn(call, state) is not None
            or not state.try_acquire(backend.max_in_flight)
        ):
            try:
                admitted = await self._acquire(call, next_try, dispatch)
            except FulmenError as error:  # raised by planning again
                return _unplanned(error, next_try)
            if isinstance(admitted, TryFailed):
                return admitted
            dispatch, state = admitted
        call.tries += 1
        return await self._client.ask(dispatch, state)

    async def _acquire(
        self, call: RunningCall, next_try: NextTry, dispatch: Dispatch
    ) -> tuple[Dispatch, BackendState] | TryFailed:
        """Waits for a slot, the attempt's turn and the end of a hold; returns the plan that the slot is for."""
        while True:
            if self._is_held(dispatch.backend):
                dispatch = await self._hold_over(call, next_try)
            backend = dispatch.backend
            state = self._states.of(backend.id)
            if (seat := _waits_for_turn(call, state)) is not None:
                if state.row.waiting >= self._limits.max_waiting:
                    return self._queue_refused(dispatch)
                await seat.turn()  # at most until the call's deadline
                dispatch = self._planner.plan(call, next_try)
                continue
            try:
                async with asyncio.timeout(self._limits.queue_timeout_s):
                    waited = await state.acquire(backend.max_in_flight, max_waiting=self._limits.max_waiting)
            except (TimeoutError, QueueFull):
                return self._queue_refused(dispatch)
            if not waited:
                return dispatch, state
            # The routing table may have changed during the wait.
            try:
                dispatch = self._planner.plan(call, next_try)
            except BaseException:
                state.release()
                raise
            if dispatch.backend.id == backend.id and not self._is_held(dispatch.backend):
                return dispatch, state
            state.release()

    def _queue_refused(self, dispatch: Dispatch) -> TryFailed:
        self._metrics.queue_refused()
        backend_id = dispatch.backend.id
        error = ModelLimitExceeded(
            f"Backend '{backend_id}' has no free slot.",
            backend=f"backends/{backend_id}",
            retry_after_s=_QUEUE_RETRY_AFTER_S,
        )
        return TryFailed(kind="queue", error=error, dispatch=dispatch, again=False)

    def _is_held(self, backend: Backend) -> bool:
        return backend.hold_until_s > 0 and backend.hold_until_s > self._states.wall_clock()

    async def _hold_over(self, call: RunningCall, next_try: NextTry) -> Dispatch:
        """Waits for the end of the hold; returns a plan made afterwards, whose backend is not held.

        A hold is part of the backend in the routing table, so every replica of the proxy observes it. It ends when the
        table ends it, or when it expires. The new plan may have another policy version or another backend.
        """
        while True:
            dispatch = self._planner.plan(call, next_try)
            left_s = dispatch.backend.hold_until_s - self._states.wall_clock()
            if left_s <= 0:
                return dispatch
            state = self._states.of(dispatch.backend.id)
            state.held += 1
            try:
                async with asyncio.timeout(left_s):
                    await self._tables.next_change()
            except TimeoutError:
                continue
            finally:
                state.held -= 1

    async def _hedge(self, call: RunningCall, next_try: NextTry, dispatch: Dispatch, delay_s: float) -> _Outcome:
        """Tries a second replica if the first is slow; returns the first good answer and cancels the other try."""
        first = asyncio.create_task(self._ask(call, next_try, dispatch), name="hedge-first")
        tries = [first]
        try:
            done, _ = await asyncio.wait(tries, timeout=delay_s)
            if not done:
                second = self._second(call, next_try, dispatch)
                if second is not None:
                    tries.append(asyncio.create_task(second, name="hedge-second"))
            winner = await _first_good(tries)
            if len(tries) > 1:
                self._metrics.hedged("lost" if winner is first else "won")
            tries.remove(winner)
            return winner.result()
        finally:
            give_up(tries)

    def _second(self, call: RunningCall, next_try: NextTry, dispatch: Dispatch) -> Coroutine[Any, Any, _Outcome] | None:
        """Returns a try at another replica; None if no healthy replica has retry budget left, or it is not its turn."""
        if (seat := call.permit.seat) is not None and seat.waits:
            return None
        planned = self._plan(call, NextTry(route=next_try.route, avoid=next_try.avoid | {dispatch.backend.id}))
        if isinstance(planned, TryFailed) or planned.backend.id == dispatch.backend.id:
            return None
        state = self._states.of(planned.backend.id)
        if not state.breaker.admits or not state.budget.take(state.requests):
            return None
        return self._ask(call, next_try, planned)


def _waits_for_turn(call: RunningCall, state: BackendState) -> Seat | None:
    """Returns the seat at the backend whose turn has not come; no seat if a wait would gain nothing."""
    seat = call.permit.seat
    if seat is None or seat.row is not state.row or seat.may_call or not state.is_busy or not state.breaker.admits:
        return None
    return seat


def _unplanned(error: FulmenError, next_try: NextTry) -> TryFailed:
    """Returns the failed try of a route that has no backend for the call.

    Raises:
        FulmenError: the error itself, if it concerns the call rather than the route: any other error of the first try.
    """
    if isinstance(error, BackendUnavailable):
        return TryFailed(kind="no_backend", error=error, again=False)
    if next_try is FIRST_TRY:
        raise error
    return TryFailed(kind="not_planned", error=error, again=False)


def _cause(outcome: _Outcome) -> str:
    return outcome.kind if isinstance(outcome, TryFailed) else f"http_{outcome.status}"


async def _first_good(tries: list[asyncio.Task[_Outcome]]) -> asyncio.Task[_Outcome]:
    """Returns the first try with a good answer; the last one to end if none has one."""
    pending = set(tries)
    while True:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            outcome = None if task.exception() else task.result()
            if isinstance(outcome, BackendAnswer) and not is_retryable(outcome.status):
                return task
        if not pending:
            return done.pop()


def give_up(tries: Iterable[asyncio.Task[_Outcome]]) -> None:
    """Cancels tries, and closes the answers that they have or may still get.

    Does not wait for them: a cancellation during such a wait would lose the answer already obtained.
    """
    for task in tries:
        task.cancel()
        task.add_done_callback(_close_answer)


def _close_answer(task: asyncio.Task[_Outcome]) -> None:
    if not task.cancelled() and task.exception() is None and isinstance(outcome := task.result(), BackendAnswer):
        outcome.close()
