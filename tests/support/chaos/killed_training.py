"""Trains while parts of the stack are killed at chosen points, and checks the books afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.rpc.services import Services
from fulmen_cli.local.stack import LocalStack
from tests.chaos.agent.grader import LEAST
from tests.support.algorithm.runs import FINAL_RUN_STATES, eventually, read_run, start_run
from tests.support.chaos.kills import Victim, kill_in_mid_work, restart_in_mid_work
from tests.support.chaos.oracle import Books, collect_books, failure_counts, problems_of

# What `agent/agent.py` does: it is a program of its own, which cannot be imported without a key.
TURNS = 2
# Far beyond what is needed: a busy machine takes minutes for what takes seconds elsewhere.
RUN_DEADLINE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """A stack to do harm to, and what to train on it."""

    stack: LocalStack
    client: Services
    state_dir: Path
    agent: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Who dies, and after which training step of the run."""

    victim: Victim
    step: int
    is_polite: bool = False
    """Whether it is stopped and started again as in an upgrade, instead of being killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aftermath:
    """What a run went through."""

    books: Books
    failures: Counter[str]


async def train_and_kill(arena: Arena, name: str, kills: Sequence[Kill], *, steps: int) -> Aftermath:
    """Runs a training to its end while parts of the stack are killed, and checks its books.

    Args:
        arena: the stack and the agent.
        name: the run's id; it says in a failed test which kills it were.
        kills: in the order of their steps.
        steps: training steps of the run.

    Raises:
        AssertionError: if the run does not succeed, or its books contradict the promises.
    """
    run = await start_run(arena.client, arena.agent, name, settings={"steps": steps})
    for kill in kills:
        await _reached(arena, run, kill.step)
        end = restart_in_mid_work if kill.is_polite else kill_in_mid_work
        await end(arena.stack, arena.client, run, kill.victim)
    ended = await _ended(arena, run)
    story = f"{run} after {[f'{kill.victim} at step {kill.step}' for kill in kills]}"
    assert ended.state == training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED, f"{story}: {ended.failure_message}"
    assert ended.step == steps, story
    books = await collect_books(arena.client, run, arena.state_dir)
    problems = problems_of(books, calls_per_rollout=TURNS, min_reward=LEAST)
    assert not problems, "\n".join([story, *problems])
    assert {line["step"] for line in books.consumed} == set(range(1, steps + 1)), story
    assert any(line["trained"] for line in books.consumed), story
    return Aftermath(books=books, failures=failure_counts(books))


async def _reached(arena: Arena, run: str, step: int) -> None:
    async def reached() -> bool:
        now = await read_run(arena.client, run)
        assert now.state not in FINAL_RUN_STATES, f"{run} ended before step {step}: {now.failure_message}"
        return bool(now.state == training_run_pb2.TRAINING_RUN_STATE_RUNNING and now.step >= step)

    await eventually(reached, what=f"{run} reaches step {step}", deadline_s=RUN_DEADLINE_S)


async def _ended(arena: Arena, run: str) -> training_run_pb2.TrainingRun:
    async def ended() -> training_run_pb2.TrainingRun | None:
        now = await read_run(arena.client, run)
        return now if now.state in FINAL_RUN_STATES else None

    return await eventually(ended, what=f"{run} ends", deadline_s=RUN_DEADLINE_S)
