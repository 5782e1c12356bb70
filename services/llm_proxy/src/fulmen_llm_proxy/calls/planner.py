"""Plans the tries of a call: which target, in which API, with which request body."""

from __future__ import annotations

from fulmen.errors import ModelLimitExceeded
from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.collected import PolicyChange
from fulmen_llm_proxy.apis.usage import BYTES_PER_TOKEN
from fulmen_llm_proxy.backends.call_plan import CallPlan, plan_call
from fulmen_llm_proxy.backends.client import Dispatch
from fulmen_llm_proxy.calls.responses.kept_responses import KeptResponses
from fulmen_llm_proxy.calls.responses.response_ids import StoredResponseRouter
from fulmen_llm_proxy.calls.running_call import RunningCall
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.balancing import Balancing
from fulmen_llm_proxy.routing.retry import NextTry
from fulmen_llm_proxy.routing.table import Choice, RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder

_TRAIN = "train"


class CallPlanner:
    """Plans each try on the routing table in force at that moment."""

    def __init__(
        self, *, tables: TableHolder, states: BackendStates, responses: StoredResponseRouter, kept: KeptResponses
    ) -> None:
        self._tables = tables
        self._states = states
        self._responses = responses
        self._kept = kept

    def plan(self, call: RunningCall, next_try: NextTry, *, whole: bool = False) -> Dispatch:
        """Returns the target and the request of the next try.

        Args:
            whole: whether the answer will be complete, though the caller wants a stream.

        Raises:
            FulmenError: if no target can take the call.
        """
        self._tables.current.route(call.request.model, call.caller.models_of)
        request, stored = call.request, None
        by_responses = request.api.name is ApiName.RESPONSES
        if by_responses:
            request, stored = self._responses.resolve(request, call.caller.project)
        if stored is None:
            choice = self._choose(call, next_try)
        else:
            choice = self._responses.choice(self._tables.current, request.model, stored)
            call.permit.enter(choice.backend, choice.target)
        attribution = call.caller.attribution
        mode = "" if attribution is None else attribution.mode
        plan = plan_call(
            request,
            choice,
            overrides=choice.route.overrides.get(mode, {}),
            attributed=attribution is not None,
            whole=whole,
        )
        if by_responses:
            plan = self._responses.seal(plan, choice.backend.id, call.caller.project)
            plan = self._kept.plan(call, plan)
        call.choice, call.plan = choice, plan
        return Dispatch(choice=choice, plan=plan, headers=call.headers)

    def count_routes(self, call: RunningCall, choice: Choice | None) -> int:
        """Returns how many routes the call may use: its own and the fallbacks.

        A training call of a policy uses its own route only: its tokens must come from that policy.
        """
        route = self._tables.current.routes.get(call.request.model)
        if route is None:
            return 1
        attribution = call.caller.attribution
        if attribution is not None and attribution.mode == _TRAIN:
            trained = any(target.policy for target in (route.targets if choice is None else [choice.target]))
            if trained:
                return 1
        # A missing fallback must not turn a backend's failure into RouteNotFound for a model that was never requested.
        routes, project = self._tables.current.routes, call.caller.models_of
        fallbacks = [model for model in route.fallbacks if model in routes and routes[model].is_open_to(project)]
        call.models = (call.request.model, *fallbacks)
        return len(call.models)

    def _choose(self, call: RunningCall, next_try: NextTry) -> Choice:
        """Chooses a target; skips replicas whose limits are exhausted while others remain."""
        model = call.models[next_try.route] if next_try.route else call.request.model
        avoid = next_try.avoid
        while True:
            choice = self._tables.current.choose(model, call.affinity, self._states, avoid)
            try:
                call.permit.enter(choice.backend, choice.target)
            except ModelLimitExceeded:
                if choice.backend.id in avoid or len(choice.variant.replicas) == 1:
                    raise
                avoid |= {choice.backend.id}
            else:
                if not avoid:
                    self._seat(call, choice, model)
                return choice

    def _seat(self, call: RunningCall, choice: Choice, model: str) -> None:
        """Seats the attempt at the backend, if that is of use: to be found again, or to be let in by turns."""
        if choice.route.balancing is not Balancing.STICKY or not call.affinity.is_named:
            return
        row = self._states.of(choice.backend.id).row
        if len(choice.variant.replicas) > 1 or row.cache_tokens:
            seat = self._states.seats.take(call.affinity.attempt, model, row)
            call.permit.sit(seat, call.size_bytes // BYTES_PER_TOKEN)


def note_version(choice: Choice, plan: CallPlan, table: RoutingTable) -> None:
    """Records in the capture of a running call that its target now serves another policy version."""
    collected = plan.reader.collected
    changes = collected.policy_changes
    version = table.version_of(choice.route.model, choice.target)
    if version is None or version == (changes[-1].version if changes else choice.target.policy_version):
        return
    pieces = {index: len(kept.token_ids) for index, kept in collected.choices.items()}
    changes.append(PolicyChange(version=version, pieces=pieces))
