"""The order of tasks by difficulty: its rules, its state over crashes, and what it is for."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms.options.curriculum import BEFORE, Curriculum, Difficulty
from fulmen_algorithm.algorithms.options.curriculum_settings import DifficultyCurriculum
from fulmen_algorithm.algorithms.sampling import task_index
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout
from fulmen_algorithm.runs.creation.rules import parse_settings
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import OptimizerSettings, StepSettings
from fulmen_algorithm.training.state import make_state
from fulmen_algorithm.training.step import sft_step, train_step
from tests.support.algorithm.run_service import ALGORITHMS, created, kills, run_folder, with_settings
from tests.support.algorithm.training import read_consumed

TASKS = [json.dumps({"n": n}).encode() for n in range(8)]
SOLVED, NEAR, HARD = [1.0] * 4, [1.0, 0.0, 1.0, 0.0], [0.0] * 4


def curriculum(seed: int = 0, **settings) -> Curriculum:
    return Curriculum(tasks=TASKS, settings=DifficultyCurriculum(**settings), seed=seed)


def epoch_of(one: Curriculum, epoch: int) -> Counter[int]:
    """How often each task is chosen in an epoch."""
    return Counter(one.choose(index) for index in range(epoch * len(TASKS), (epoch + 1) * len(TASKS)))


def test_a_task_that_was_never_tried_keeps_its_place():
    one = curriculum(retry=1.0)
    assert [one.choose(index) for index in range(16)] == [task_index(index, 8, 0) for index in range(16)]
    one.learn(TASKS[3], NEAR, epoch=0)
    assert all(epoch_of(one, 1)[task] >= 1 for task in range(8) if task != 3)


def test_a_solved_task_rests_for_longer_each_time_and_not_at_all_once_it_fails():
    one, due = curriculum(retry=0.0, rest=4), []
    for task in range(8):
        one.learn(TASKS[task], NEAR, epoch=0)
    for epoch in range(1, 30):
        if one.known[5].rests_until <= epoch:
            due.append(epoch)
            one.learn(TASKS[5], SOLVED, epoch=epoch)
        else:
            assert epoch_of(one, epoch)[5] == 0
    assert due == [1, 3, 6, 11, 16, 21, 26]
    one.learn(TASKS[5], NEAR, epoch=30)
    assert (one.known[5].streak, one.known[5].rests_until) == (0, 0)
    assert epoch_of(one, 31)[5] >= 1


def test_places_that_are_given_away_go_to_tasks_by_their_learnability():
    one = curriculum(retry=1.0)
    for task in range(8):
        one.learn(TASKS[task], SOLVED if task < 4 else NEAR if task < 6 else HARD, epoch=0)
    drawn = Counter(one.choose(index) for index in range(8, 16) for one.seed in range(200))
    assert set(drawn) == {4, 5, 6, 7}
    # Learnability of 2 of 4 is 1/2 * 1/2, that of 0 of 4 is 1/6 * 5/6.
    assert drawn[4] / drawn[6] == pytest.approx((1 / 4) / (5 / 36), rel=0.25)


def test_without_a_task_that_is_due_every_task_has_its_place():
    one = curriculum()
    for task in TASKS:
        one.learn(task, SOLVED, epoch=0)
    assert [one.choose(index) for index in range(8, 16)] == [task_index(index, 8, 0) for index in range(8, 16)]


def test_rewards_count_by_their_place_between_failed_and_solved():
    one = curriculum(failed=-1.0, solved=3.0)
    one.learn(TASKS[0], [-5.0, 1.0, 3.0, 7.0], epoch=0)
    assert one.known[0] == Difficulty(success=0 + 0.5 + 1 + 1, rollouts=4)
    one.learn(TASKS[0], [], epoch=1)
    one.learn(b"another", [1.0], epoch=1)
    assert list(one.known) == [0]


def test_equal_tasks_have_one_difficulty():
    one = Curriculum(tasks=[TASKS[0], TASKS[1], TASKS[0]], settings=DifficultyCurriculum(retry=0.0), seed=0)
    one.learn(TASKS[0], SOLVED, epoch=0)
    one.learn(TASKS[1], NEAR, epoch=0)
    assert Counter(one.choose(index) for index in range(3, 6)) == {1: 3}
    assert one.metrics(1) == {
        "curriculum_tried_share": 1.0,
        "curriculum_resting_share": 0.5,
        "curriculum_success_mean": 0.75,
    }


def test_a_choice_is_the_same_after_the_difficulties_were_stored():
    one, other = curriculum(seed=7), curriculum(seed=7)
    chance = random.Random(1)
    for task in TASKS:
        one.learn(task, [float(chance.random() < 0.5) for _ in range(4)], epoch=0)
    other.load(json.loads(json.dumps(one.dumped())))
    assert [one.choose(index) for index in range(8, 80)] == [other.choose(index) for index in range(8, 80)]


SETTINGS = {"curriculum": {"kind": "difficulty"}, "steps": 10, "checkpoint_every": 3, "max_staleness": 1, "seed": 3}
EASY = {b'{"question":"0+1="}', b'{"question":"1+1="}', b'{"question":"2+1="}'}


def reward_by_task(world):
    """Easy tasks are always solved; of others, every second rollout."""

    def reward(name: str) -> float:
        group, _, number = name.removeprefix("projects/default/rollouts/").rpartition(".")
        return 1.0 if world.groups[group].task in EASY else float(int(number) % 2)

    return reward


@pytest.mark.parametrize("trial", range(3))
async def test_solved_tasks_are_skipped_and_no_group_is_lost_whenever_the_process_is_killed(
    trial, world, grpo_draft, carry_out, tmp_path
):
    world.chance = random.Random(trial)
    world.in_order = True
    world.reward_of = reward_by_task(world)
    draft = with_settings(grpo_draft, **SETTINGS, validated=False)
    entry = await carry_out(draft, killed=kills(world.chance, calls=40) if trial else ())
    lines = read_consumed(run_folder(tmp_path))
    assert len({line["group"] for line in lines}) == len(lines)
    assert sorted({line["step"] for line in lines}) == list(range(1, 11))
    tasks = [world.groups[f"train/{line['group']}"].task for line in sorted(lines, key=lambda line: line["group"])]
    # Each task once in the first epoch; then, of 7 tasks of which 3 are easy, few groups are.
    assert len(set(tasks[:7])) == 7
    later = tasks[10:]
    assert sum(task in EASY for task in later) / len(later) < 0.25
    last = entry.events.steps()[-1].values
    assert last["curriculum_tried_share"] == 1.0
    assert last["curriculum_resting_share"] >= 2 / 7


async def test_without_a_curriculum_as_many_groups_are_easy_as_tasks(world, grpo_draft, carry_out, tmp_path):
    world.in_order = True
    world.reward_of = reward_by_task(world)
    await carry_out(with_settings(grpo_draft, **{**SETTINGS, "curriculum": {"kind": "none"}}, validated=False))
    tasks = [world.groups[f"train/{line['group']}"].task for line in read_consumed(run_folder(tmp_path))]
    assert sum(task in EASY for task in tasks[:21]) == 9


async def test_a_run_begins_with_what_an_earlier_one_has_found(world, grpo_draft, carry_out):
    def finished(number: int, task: bytes, reward: float) -> FinishedGroup:
        names = [f"projects/default/rollouts/{number}.{n}" for n in range(2)]
        rollouts = [FinishedRollout(name=n, attempt=n, succeeded=True, reward=reward, task=task) for n in names]
        return FinishedGroup(group_id=f"train/{number}", rollouts=tuple(rollouts), cursor="")

    world.others["projects/default/trainingRuns/before"] = [
        finished(number, task, 1.0) for number, task in enumerate(sorted(EASY))
    ]
    world.reward_of = reward_by_task(world)
    draft = with_settings(grpo_draft, **{**SETTINGS, "curriculum": {"kind": "difficulty", "run": "before"}, "steps": 2})
    entry = await carry_out(replace(draft, inputs={k: v for k, v in draft.inputs.items() if k != "validation_tasks"}))
    tasks = [world.groups[f"train/{index}"].task for index in range(4)]
    assert not EASY & set(tasks)
    assert "The rollouts of before cover 43% of the tasks." in [n.message for n in entry.events.notices()]


def test_what_an_earlier_run_solved_rests_in_the_first_epoch():
    one = curriculum(retry=0.0)
    one.learn(TASKS[2], SOLVED, epoch=BEFORE)
    one.learn(TASKS[3], NEAR, epoch=BEFORE)
    assert epoch_of(one, 0)[2] == 0


async def test_an_earlier_run_that_does_not_exist_is_refused(world, grpo_draft):
    draft = with_settings(grpo_draft, curriculum={"kind": "difficulty", "run": "nowhere"})
    with pytest.raises(SettingsInvalid) as caught:
        await created(draft, world)
    [violation] = caught.value.violations
    assert violation.field == "settings.curriculum.run"
    assert "there is no training run projects/default/trainingRuns/nowhere" in violation.description


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"curriculum": {"kind": "difficulty", "failed": 1.0}}, "failed must be less than solved"),
        ({"curriculum": {"kind": "difficulty", "retry": 2}}, "less than or equal to 1"),
        ({"curriculum": {"kind": "difficulty"}, "collapse": {"kind": "rollback"}}, "falls with a curriculum"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, problem):
    with pytest.raises(SettingsInvalid) as caught:
        parse_settings(ALGORITHMS["dapo"], json.dumps(settings))
    assert any(problem in each.description for each in caught.value.violations)


def test_every_policy_gradient_algorithm_that_samples_has_curricula():
    sampling = {"grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo"}
    assert all("curriculum" in ALGORITHMS[name].settings.model_fields for name in sampling)


DIGITS = 12
RATE = 3e-3
GROUPS, PROMPTS, SIZE = 120, 6, 8


def answer_of(task: int) -> int:
    """The token that solves a task."""
    return 6 + (task * 5) % DIGITS


def probabilities(policy: PolicyModel, task: int) -> np.ndarray:
    with torch.no_grad():
        logits = policy.model(torch.tensor([[4, 6 + task]])).logits[0, -1].double()
    found = logits.softmax(-1).numpy()
    return found / found.sum()


def accuracy(policy: PolicyModel) -> float:
    return float(np.mean([probabilities(policy, task)[answer_of(task)] for task in range(DIGITS)]))


def group_of(policy: PolicyModel, task: int, chance: np.random.Generator) -> tuple[list[Row], np.ndarray]:
    """Answers of one token that the policy draws, with their centred rewards as advantages; and the rewards."""
    p = probabilities(policy, task)
    tokens = chance.choice(len(p), size=SIZE, p=p)
    rewards = (tokens == answer_of(task)).astype(float)
    rows = [
        row_from_completion(
            rollout_id=str(number),
            prompt_ids=[4, 6 + task],
            completion_ids=[int(token)],
            logprobs=[float(np.log(p[token]))],
            advantage=float(reward - rewards.mean()),
            version=0,
        )
        for number, (token, reward) in enumerate(zip(tokens, rewards, strict=True))
    ]
    return rows, rewards


def trained(model_dir: Path, settings: DifficultyCurriculum | None) -> tuple[float, float, int]:
    """Imitates the answers of all tasks but three, then samples groups.

    Returns:
        The probability of right answers before and after, and the groups in vain, whose rewards were equal.
    """
    policy, chance, in_vain = PolicyModel.load(model_dir), np.random.default_rng(6), 0
    state = make_state(policy, OptimizerSettings(learning_rate=RATE))
    known = [group_of(policy, task, chance)[0][0] for task in range(DIGITS)]
    known = [replace(row, token_ids=(*row.token_ids[:-1], answer_of(task))) for task, row in enumerate(known)]
    for step in range(60):
        # Of the last three tasks it has seen little: they are nearly solved.
        sft_step(state, known if step % 6 == 0 else known[:-3], settings=StepSettings())
    before = accuracy(policy)
    tasks = [str(task).encode() for task in range(DIGITS)]
    order = None if settings is None else Curriculum(tasks=tasks, settings=settings, seed=1)
    for index in range(0, GROUPS, PROMPTS):
        batch: list[Row] = []
        chosen = [task_index(i, DIGITS, 1) if order is None else order.choose(i) for i in range(index, index + PROMPTS)]
        for task in chosen:
            rows, rewards = group_of(policy, task, chance)
            batch += [replace(row, rollout_id=f"{len(batch)}-{row.rollout_id}") for row in rows]
            in_vain += len(set(rewards)) == 1
            if order is not None:
                order.learn(tasks[task], rewards.tolist(), epoch=index // DIGITS)
        train_step(state, batch, settings=StepSettings())
    return before, accuracy(policy), in_vain


def test_a_policy_learns_with_a_curriculum_and_fewer_groups_are_in_vain(model_dir):
    *_, in_vain_without = trained(model_dir, None)
    before, after, in_vain = trained(model_dir, DifficultyCurriculum())
    assert after > before + 0.03
    assert in_vain < 0.8 * in_vain_without
