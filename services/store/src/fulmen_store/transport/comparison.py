"""`RolloutService.CompareRollouts`: reads both sides, and encodes what was found."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Final

from fulmen.errors import Violation
from fulmen.ids import DEFAULT_PROJECT, parse_training_run_name
from fulmen.store.v1 import rollout_comparison_pb2 as pb
from fulmen.store.v1 import rollout_pb2
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_store.malformed import malformed, malformed_request, noted
from fulmen_store.rollouts.comparison import METHOD, Comparison, Pair, Side, SideTask, compared
from fulmen_store.rollouts.filter import Expression
from fulmen_store.rollouts.filter_parser import parse_filter
from fulmen_store.rollouts.lists import RolloutLists
from fulmen_store.rollouts.records import RolloutView
from fulmen_store.rollouts.table import RolloutTable
from fulmen_store.transport.access import run_project
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.wire.rollouts import rollout_of

__all__ = ["RolloutComparison"]

MAX_ROLLOUTS: Final = 20_000
MAX_TASKS: Final = 5_000
MAX_PREFIX: Final = 128
MAX_INPUT: Final = 1024
READ_AT_ONCE: Final = 500
DEFAULT_PAGE: Final = 50
PLACE_BYTES: Final = 4


class RolloutComparison:
    """Compares two sets of rollouts."""

    def __init__(self, *, lists: RolloutLists, table: RolloutTable) -> None:
        self._lists = lists
        self._table = table

    async def compare(self, request: pb.CompareRolloutsRequest) -> pb.CompareRolloutsResponse:
        """Compares the rewards of two sets of rollouts of the same tasks.

        Raises:
            ArgumentInvalid: If the request is malformed, or a side has too many rollouts or tasks.
            PermissionDenied: If the caller is bound to another project.
        """
        project = run_project(request.project or _project(request), request.baseline.training_run)
        run_project(project, request.candidate.training_run)
        filters = _filters(request)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        listed = f"comparison/{project}/{hashlib.sha256(_unpaged(request)).hexdigest()}"
        key = decode_token(request.page_token, listed=listed, key_bytes=PLACE_BYTES)
        project_id = await self._table.project_id(project)
        sides = [
            await self._side(project_id, field, side, where, request)
            for field, side, where in zip(
                ("baseline", "candidate"), (request.baseline, request.candidate), filters, strict=True
            )
        ]
        found = await asyncio.to_thread(compared, sides[0].tasks, sides[1].tasks)
        start = 0 if key is None else int.from_bytes(key)
        message = _message(found, sides)
        message.pairs.extend(fitting(_pair(each) for each in found.pairs[start : start + limit]))
        end = start + len(message.pairs)
        if end < len(found.pairs):
            message.next_page_token = encode_token(end.to_bytes(PLACE_BYTES), listed=listed)
        return message

    async def _side(
        self,
        project_id: int,
        field: str,
        side: pb.RolloutSide,
        where: Expression | None,
        request: pb.CompareRolloutsRequest,
    ) -> Side:
        run_id = await self._table.find_run(project_id, side.training_run) if side.training_run else None
        found, before, read = Side(), None, 0
        failure = request.failure_reward if request.HasField("failure_reward") else None
        while True:
            page = await self._lists.page(project_id, run_id, where=where, before=before, limit=READ_AT_ONCE)
            read += len(page.views)
            for view in page.views:
                _add(found, view, side.group_id_prefix, failure)
            if read > MAX_ROLLOUTS or len(found.tasks) > MAX_TASKS:
                text = f"has more than {MAX_ROLLOUTS} rollouts, or {MAX_TASKS} tasks: restrict it by a run or a filter"
                raise malformed(field, text)
            if page.next_before is None:
                return found
            before = page.next_before


def _add(side: Side, view: RolloutView, prefix: str, failure_reward: float | None) -> None:
    message = rollout_of(view)
    if not message.group_id.startswith(prefix):
        return
    reward = view.reward
    if reward is None and message.state == rollout_pb2.ROLLOUT_STATE_FAILED:
        reward = failure_reward
    if reward is None:
        side.unscored += 1
        return
    digest = hashlib.sha256(message.input).digest()
    task = side.tasks.setdefault(digest, SideTask(input=message.input[:MAX_INPUT]))
    task.add(message.name, reward)


def _project(request: pb.CompareRolloutsRequest) -> str:
    for side in (request.baseline, request.candidate):
        if side.training_run:
            return parse_training_run_name(side.training_run).project
    return DEFAULT_PROJECT


def _filters(request: pb.CompareRolloutsRequest) -> list[Expression | None]:
    """Returns the filters of both sides, and refuses a request with all of its problems."""
    problems: list[Violation] = []
    found: list[Expression | None] = []
    for field, side in (("baseline", request.baseline), ("candidate", request.candidate)):
        if not request.HasField(field):
            problems.append(Violation(field=field, description="is required"))
        if len(side.group_id_prefix) > MAX_PREFIX:
            text = f"is longer than {MAX_PREFIX} characters"
            problems.append(Violation(field=f"{field}.group_id_prefix", description=text))
        own: list[Violation] = []
        with noted(own):
            found.append(parse_filter(side.filter))
        problems += [Violation(field=f"{field}.{each.field}", description=each.description) for each in own]
    if problems:
        raise malformed_request(problems)
    return found


def _unpaged(request: pb.CompareRolloutsRequest) -> bytes:
    """Returns what identifies a request whatever its page."""
    plain = pb.CompareRolloutsRequest()
    plain.CopyFrom(request)
    plain.ClearField("page_token")
    plain.ClearField("page_size")
    return plain.SerializeToString(deterministic=True)


def _message(found: Comparison, sides: list[Side]) -> pb.CompareRolloutsResponse:
    differences = [pair.difference for pair in found.pairs]
    message = pb.CompareRolloutsResponse(
        task_count=len(differences),
        win_count=sum(each > 0 for each in differences),
        loss_count=sum(each < 0 for each in differences),
        tie_count=sum(each == 0 for each in differences),
        baseline_mean=found.baseline_mean,
        candidate_mean=found.candidate_mean,
        mean_difference=found.candidate_mean - found.baseline_mean,
        interval_method=METHOD,
        baseline=_counts(sides[0], len(differences)),
        candidate=_counts(sides[1], len(differences)),
    )
    if found.interval is not None:
        message.difference_low, message.difference_high = found.interval
    return message


def _counts(side: Side, paired: int) -> pb.SideCounts:
    return pb.SideCounts(
        scored_count=side.scored, unscored_count=side.unscored, unpaired_task_count=len(side.tasks) - paired
    )


def _pair(pair: Pair) -> pb.TaskPair:
    return pb.TaskPair(
        input=pair.baseline.input,
        baseline_reward=pair.baseline.mean,
        candidate_reward=pair.candidate.mean,
        baseline_rollouts=pair.baseline.rollouts,
        candidate_rollouts=pair.candidate.rollouts,
    )
