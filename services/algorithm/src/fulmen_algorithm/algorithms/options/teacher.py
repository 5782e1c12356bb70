"""A teacher adds log teacher - log mu of each sampled token to its advantage; see `teacher_settings`.

The teacher scores what the policy itself sampled, so its signal is dense and on the states that the policy visits. The
estimate is unbiased however old mu is, up to the correction of the loss.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from fulmen_algorithm.algorithms.options.teacher_settings import (
    NoTeacher,
    SelfTeacher,
    ServedTeacher,
    TeacherSettings,
)
from fulmen_algorithm.algorithms.sampling import sequence_row
from fulmen_algorithm.algorithms.scoring import TokenNumbers
from fulmen_algorithm.rollouts.trajectory import TokenSequence
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.settings import StepSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LogProbs = list[float] | None
"""Log-probability of each token of a sequence under the teacher; None if it has no opinion of the sequence."""


class Scores(Protocol):
    """Scores sequences with a teacher."""

    async def __call__(self, ctx: RunContext, numbers: Sequence[TokenNumbers]) -> list[LogProbs]:
        """Returns the log-probabilities of each sequence."""


class Teacher:
    """The teacher of a run."""

    def __init__(self, ctx: RunContext, scores: Scores, *, coefficient: float) -> None:
        """`scores` asks the teacher."""
        self._ctx = ctx
        self._scores = scores
        self._coefficient = coefficient

    async def guided(self, numbers: Sequence[TokenNumbers]) -> tuple[list[TokenNumbers], dict[str, float]]:
        """Adds the teacher's signal to the advantages of a batch.

        Returns:
            The numbers, and the metrics `teacher_reverse_kl` (nats per token; the k1 estimate of KL(mu || teacher)) and
            `teacher_rows`, the rows that the teacher scored.

        Raises:
            RunFailed: if the teacher cannot score tokens.
            Interrupted: if the run was asked to stop.
        """
        asked = await self._ctx.control.unless_stopped(self._scores(self._ctx, numbers))
        found, divergence, tokens = [], 0.0, 0
        for each, logprobs in zip(numbers, asked, strict=True):
            if logprobs is None:
                found.append(each)
                continue
            gaps = each.sequence.gaps(logprobs)
            divergence += sum(gaps)
            tokens += sum(each.sequence.loss_mask)
            advantages = tuple(a - self._coefficient * gap for a, gap in zip(each.advantages, gaps, strict=True))
            found.append(replace(each, advantages=advantages))
        scored = float(sum(logprobs is not None for logprobs in asked))
        return found, {"teacher_reverse_kl": divergence / max(tokens, 1), "teacher_rows": scored}


def teacher_of(ctx: RunContext, settings: TeacherSettings, step: StepSettings) -> Teacher | None:
    """Returns a run's teacher; None for none.

    Args:
        ctx: The run.
        settings: The teacher.
        step: Settings of a step, with the temperature at which the rollouts were sampled.
    """
    match settings:
        case NoTeacher():
            return None
        case ServedTeacher():
            return Teacher(ctx, _Served(settings), coefficient=settings.coefficient)
        case SelfTeacher():
            return Teacher(ctx, _Hinted(settings, step), coefficient=settings.coefficient)


class _Served:
    """Asks a model behind the proxy, a few rows at a time."""

    def __init__(self, settings: ServedTeacher) -> None:
        self._settings = settings

    async def __call__(self, ctx: RunContext, numbers: Sequence[TokenNumbers]) -> list[LogProbs]:
        room = asyncio.Semaphore(self._settings.concurrency)

        async def scored(each: TokenNumbers) -> LogProbs:
            async with room:
                return await ctx.chat.score(self._settings.model, each.sequence.token_ids)

        tasks: list[asyncio.Task[LogProbs]] = []
        try:
            async with asyncio.TaskGroup() as group:
                tasks += [group.create_task(scored(each)) for each in numbers]
        except* RunFailed as errors:
            # All of them agree, so one is enough.
            raise _first(errors) from errors
        return [task.result() for task in tasks]


def _first(errors: BaseExceptionGroup[RunFailed]) -> RunFailed:
    found: BaseException = errors
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, RunFailed)
    return found


class _Hinted:
    """Asks the trainer's own weights, with a hint before each row."""

    def __init__(self, settings: SelfTeacher, step: StepSettings) -> None:
        self._settings = settings
        self._step = step

    async def __call__(self, ctx: RunContext, numbers: Sequence[TokenNumbers]) -> list[LogProbs]:
        prefixes = [self._prefix(ctx.policy.tokenizer, each) for each in numbers]
        known = [
            index
            for index, prefix in enumerate(prefixes)
            # A row that does not fit with its hint has no opinion.
            if prefix and len(prefix) + len(numbers[index].sequence.token_ids) <= self._step.token_budget
        ]
        found: list[LogProbs] = [None] * len(numbers)
        if not known:
            return found
        rows = []
        for index in known:
            hinted = _prefixed(numbers[index].sequence, prefixes[index], ctx.policy.tokenizer.bos_token_id)
            nothing = (0.0,) * len(hinted.token_ids)
            rows.append(sequence_row(numbers[index].rollout.name, hinted, advantages=nothing))
        initial = self._settings.weights == "initial"
        asked = ctx.policy.reference_logprobs if initial else ctx.policy.logprobs
        for index, logprobs in zip(known, await asked(rows, settings=self._step), strict=True):
            found[index] = logprobs[-len(numbers[index].sequence.token_ids) :]
        return found

    def _prefix(self, tokenizer: "PreTrainedTokenizerBase", numbers: TokenNumbers) -> list[int]:
        """Renders the hint of a rollout's task; empty without one."""
        try:
            hint = json.loads(numbers.rollout.task)[self._settings.hint]
        except (ValueError, LookupError, TypeError):
            return []
        if not isinstance(hint, str) or not hint:
            return []
        return rendered_hint(tokenizer, hint)


def rendered_hint(tokenizer: "PreTrainedTokenizerBase", hint: str) -> list[int]:
    """Renders a system message by the tokenizer's chat template.

    Raises:
        RunFailed: if the template takes no system message alone.
    """
    from jinja2 import TemplateError  # imported late: only templates depend on it

    try:
        ids: list[int] = tokenizer.apply_chat_template(
            [{"role": "system", "content": hint}], add_generation_prompt=False, tokenize=True, return_dict=False
        )  # type: ignore[assignment]  # one conversation, tokenised, gives a list of ids
    except TemplateError as error:
        raise RunFailed(
            f"The chat template of the policy does not accept a system message with a hint: {error}"
        ) from error
    return ids


def _prefixed(sequence: TokenSequence, prefix: Sequence[int], bos_token_id: int | None) -> TokenSequence:
    """Puts tokens before a sequence; one that begins with the token of the beginning has it once."""
    tokens, both = tuple(prefix), sequence.token_ids
    if bos_token_id is not None and tokens[0] == both[0] == bos_token_id:
        tokens = tokens[1:]
        both = (bos_token_id, *tokens, *both[1:])
    else:
        both = (*tokens, *both)
    before = len(both) - len(sequence.token_ids)
    return replace(
        sequence,
        token_ids=both,
        loss_mask=(False,) * before + sequence.loss_mask,
        logprobs=(0.0,) * before + sequence.logprobs,
        policy_versions=(0,) * before + sequence.policy_versions,
        calls=(),
    )
