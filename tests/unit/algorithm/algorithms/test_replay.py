"""`replay` trains on stored groups: no rollout twice in an epoch, the same books wherever the process was killed."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.errors import SettingsInvalid
from fulmen.scores import GraderIdentity, Problem, RolloutScore, Scores, Source, write_scores
from fulmen_algorithm.algorithms.replay import StoredGroups
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.rollouts.scored_groups import scored_groups
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory
from fulmen_algorithm.runs.creation import RunDraft
from fulmen_algorithm.runs.run import RunState
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, live
from tests.support.soak import long_after
from tests.support.training import read_consumed

TRIALS = 4
STEPS = 4
GROUPS = 5
STORED_VERSION = 900


def score(group: str, number: int, value: float | None) -> RolloutScore:
    """Makes a score; None is a rollout that the grader failed on."""
    name = f"projects/default/rollouts/stored.{group}.{number}"
    rewards = {} if value is None else {("reward", None, b""): value}
    problem = Problem(kind="AGENT_ERROR", message="no") if value is None else None
    return RolloutScore(
        rollout=name, attempt=f"{name}/attempts/1", training_run="trainingRuns/old", group=group, rewards=rewards,
        problem=problem,
    )  # fmt: skip


def packed(rollouts: list[RolloutScore]) -> bytes:
    """Makes the content of scores."""
    grader = GraderIdentity(kind="python", entry="b.py:grade")
    return write_scores(Scores(grader=grader, source=Source(), rollouts=tuple(rollouts)))


STORED = [
    *(score(f"train/{group}", number, float(number % 2)) for group in range(GROUPS) for number in range(3)),
    *(score("train/flat", number, 1.0) for number in range(3)),
    score("train/few", 0, 1.0),
    score("train/few", 1, None),
    score("", 0, 1.0),
]


@pytest.fixture
def draft(grpo_draft: RunDraft, world: World) -> RunDraft:
    """Returns a small run on stored scores."""
    world.add_resource("resources/scores.better", packed(STORED))
    world.sampled_with |= {each.attempt: STORED_VERSION for each in STORED}
    values = {
        "steps": STEPS,
        "prompts_per_step": 2,
        "minibatches": 1,
        "checkpoint_every": 1,
        "validate_every": 2,
    }
    inputs = {use: grpo_draft.inputs[use] for use in ("agent", "validation_tasks")}
    return replace(
        grpo_draft,
        algorithm="replay",
        settings_json=json.dumps(values),
        inputs={**inputs, "scores": "resources/scores.better/versions/1"},
    )


def check(tmp_path: Path) -> None:
    """Checks that two epochs (2, 2 and 1 groups, then 2) trained every group as often as they should."""
    lines = read_consumed(tmp_path / "state/runs/small")
    assert [line["group"] for line in lines] == list(range(7))
    assert [line["step"] for line in lines] == [1, 1, 2, 2, 3, 4, 4]
    assert {line["outcome"] for line in lines} == {"trained"}
    first = [line["rollouts"][0].rpartition(".")[0] for line in lines[:GROUPS]]
    assert sorted(first) == [f"projects/default/rollouts/stored.train/{group}" for group in range(GROUPS)]
    assert len({line["rollouts"][0] for line in lines[GROUPS:]}) == 2


@pytest.mark.parametrize("trial", long_after(2, range(TRIALS)))
async def test_stored_groups_are_trained_on_once_an_epoch_however_often_the_process_is_killed(
    trial: int, world: World, draft: RunDraft, open_service: Callable[[World], Service], tmp_path: Path
) -> None:
    chance = random.Random(trial)
    world.chance = chance
    run = await created(draft, world)
    service = open_service(world)
    service.runs.add(run)
    lives = 0
    while True:
        lives += 1
        crash_at = chance.randrange(1, 14) if trial and lives <= 4 else None
        world.crashes = Crashes(at_call=crash_at, after_effect=chance.random() < 0.5)
        if await live(service, run, world.crashes):
            break
        service = open_service(world)
    entry = service.runs.entry(run.name)
    assert entry.run.state is RunState.SUCCEEDED, entry.run.failure_message
    check(tmp_path)
    assert not [name for name in world.groups if name.startswith("train/")], "no training rollout is made"
    assert {"validation_accuracy_before", "validation_accuracy_after"} <= set(entry.run.results)
    assert entry.run.results["groups_stored"] == GROUPS
    assert entry.run.results["groups_stored_no_variance"] == entry.run.results["groups_stored_too_few_scored"] == 1
    assert world.served is not None
    assert entry.run.policy_version == world.served.name
    metrics = entry.events.steps()[-1].values
    assert {"importance_mean", "effective_sample_share", "capped_share"} <= set(metrics)
    assert not [name for name in metrics if name.startswith("staleness")]


async def test_without_validation_tasks_no_agent_is_needed_and_nothing_is_served(
    world: World, draft: RunDraft, open_service: Callable[[World], Service]
) -> None:
    run = await created(replace(draft, inputs={"scores": draft.inputs["scores"]}), world)
    service = open_service(world)
    service.runs.add(run)

    assert await live(service, run, world.crashes)

    final = service.runs.entry(run.name).run
    assert final.state is RunState.SUCCEEDED, final.failure_message
    assert final.policy_version
    assert not world.groups
    assert world.served is None


@pytest.mark.parametrize(
    ("setting", "answer_tokens", "truncated", "cause"),
    [
        ({"token_budget": 16}, 20, False, "longer than 16 tokens: "),
        ({"mask_truncated": True}, 2, True, "ended at its token limit (mask_truncated; max_tokens): "),
    ],
)
async def test_a_run_whose_stored_rollouts_cannot_be_used_fails_and_says_why(
    world: World,
    draft: RunDraft,
    open_service: Callable[[World], Service],
    setting: dict[str, object],
    answer_tokens: int,
    truncated: bool,
    cause: str,
) -> None:
    values = {**json.loads(draft.settings_json), "prompts_per_step": 8, **setting}
    run = await created(replace(draft, settings_json=json.dumps(values)), world)
    world.answer_tokens, world.truncated = answer_tokens, truncated
    service = open_service(world)
    service.runs.add(run)

    assert await live(service, run, world.crashes)

    final = service.runs.entry(run.name).run
    assert final.state is RunState.FAILED
    assert f"No rollout of {GROUPS} groups could be used" in final.failure_message
    assert cause in final.failure_message


@pytest.mark.parametrize(
    ("content", "inputs", "problem"),
    [
        (b"not scores", {}, "inputs.scores: these are no scores"),
        (packed([score("a", 0, 1.0), score("a", 1, 1.0), score("b", 0, 1.0)]), {}, "no group can be trained on: 1"),
        (packed(STORED), {"train_tasks": "resources/dataset.train/versions/1"}, "inputs.train_tasks: is not used"),
        (packed(STORED), {"agent": ""}, "inputs.agent: is needed to validate"),
    ],
)
async def test_a_run_that_could_not_train_is_not_created(
    content: bytes, inputs: dict[str, str], problem: str, world: World, draft: RunDraft
) -> None:
    name = world.add_resource("resources/scores.other", content)
    named = {**draft.inputs, "scores": name, **inputs}

    with pytest.raises(SettingsInvalid) as caught:
        await created(replace(draft, inputs={use: each for use, each in named.items() if each}), world)

    assert any(problem in f"{each.field}: {each.description}" for each in caught.value.violations)


async def nothing(groups: object) -> dict[str, RolloutTrajectory]:
    """Reads nothing."""
    return {}


@given(
    count=st.integers(1, 7), size=st.integers(1, 9), steps=st.integers(1, 9), seed=st.integers(0, 99),
    killed_at=st.integers(0, 8),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
async def test_every_epoch_has_every_group_once_and_no_step_has_one_twice(
    count: int, size: int, steps: int, seed: int, killed_at: int
) -> None:
    groups = [(FinishedRollout(name=str(n), attempt="", succeeded=True, reward=0.0),) for n in range(count)]
    taken: list[FinishedGroup] = []
    source = StoredGroups(groups, seed=seed, read=nothing)
    for step in range(steps):
        if step == killed_at:
            source = StoredGroups(groups, seed=seed, read=nothing)
        source.begin_step(len(taken))
        found = (
            [*await source.poll(limit=1), *await source.poll(limit=size - 1)]
            if size > 1
            else await source.poll(limit=1)
        )
        assert found
        assert len({each.rollouts[0].name for each in found}) == len(found) <= size
        taken += found
    assert [each.index for each in taken] == list(range(len(taken)))
    for start in range(0, len(taken), count):
        epoch = [each.rollouts[0].name for each in taken[start : start + count]]
        assert len(set(epoch)) == len(epoch)


def test_rollouts_are_grouped_by_run_and_group_and_those_that_teach_nothing_are_counted() -> None:
    other = [replace(each, training_run="trainingRuns/other") for each in STORED if each.group == "train/0"]

    found = scored_groups([*STORED, *other])

    assert [len(group) for group in found.groups] == [3] * (GROUPS + 1)
    assert (found.no_variance, found.too_few) == (1, 1)
