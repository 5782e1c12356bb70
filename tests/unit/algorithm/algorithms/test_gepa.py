"""Reflection on traces improves a prompt with a scripted model; the front keeps what is the best at some task."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.algorithms.prompts.pareto import chosen, front, mean
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.ports import ChatRequest
from fulmen_algorithm.runs.run import NO_POLICY, TrainingRun
from fulmen_algorithm.transport.prompt_candidates import prompt_candidates
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import notices, with_settings

FIRST = "Answer {question}."
ADVICE = ("Think in steps.", "Answer with a number alone.", "Check the sign.")
TASKS = 12
SETTINGS = {
    "steps": 40,
    "reflector": {"model": "reflector"},
    "pareto_tasks": 8,
    "minibatch_tasks": 3,
    "merge_every": 4,
    "target_reward": 1.0,
}
APO = {
    "steps": 20, "critic": {"model": "reflector"}, "beam_width": 2, "branch_factor": 2, "gradient_tasks": 6,
    "gradient_examples": 3, "selection": {"kind": "halving", "tasks": 8}, "target_reward": 1.0, "patience": 0,
}  # fmt: skip


def template_of(text: str, tag: str = "template") -> str:
    return text.partition(f"<{tag}>\n")[2].partition(f"\n</{tag}>")[0]


def wanted_by(task: str) -> str:
    return ADVICE[int(json.loads(task)["question"].partition("+")[0]) % len(ADVICE)]


def answer(request: ChatRequest) -> str:
    """Reflects: adds the advice that a failing example lacks, or, sometimes, nothing of use; merges by joining advice."""
    text = str(request.messages[-1]["content"])
    template = template_of(text)
    if request.purpose == "gepa.merge":
        more = [advice for advice in ADVICE if advice in template_of(text, "other") and advice not in template]
        return f"<prompt>{' '.join([template, *more])}</prompt>"
    if request.purpose == "apo.editor":
        return f"<prompt>{template} {template_of(text, 'criticism')}</prompt>"
    tasks = [part.partition("</task>")[0] for part in text.split("<task>")[1:]]
    missing = [advice for task in tasks if (advice := wanted_by(task)) not in template]
    # Another sample of examples, another idea; one of three is useless.
    idea = random.Random(text).choice([*missing[:2], "Say please."])
    return idea if request.purpose == "apo.critic" else f"I see.\n<prompt>\n{template} {idea}\n</prompt>"


@pytest.fixture
def searched(world: World) -> World:
    """Returns a world in which each task needs an advice of its own in the prompt."""
    lines = "\n".join(json.dumps({"question": f"{i}+1="}) for i in range(TASKS))
    world.add_resource("resources/dataset.many", lines.encode())
    world.add_resource("resources/prompt.solver", FIRST.encode())
    world.answer = answer

    def reward(rollout: str) -> float:
        group = world.groups[rollout.removeprefix("projects/default/rollouts/").rpartition(".")[0]]
        resource, _, number = group.resource_versions["prompt"].partition("/versions/")
        prompt = world.resources[resource][int(number) - 1].decode()
        return float(wanted_by(group.task.decode()) in prompt)

    world.reward_of = reward
    return world


@pytest.fixture
def draft(grpo_draft: RunDraft) -> RunDraft:
    data = {"train_tasks": "resources/dataset.many/versions/1", "validation_tasks": "resources/dataset.many/versions/1"}
    inputs = {"agent": grpo_draft.inputs["agent"], "prompt": "resources/prompt.solver/versions/1", **data}
    return replace(grpo_draft, algorithm="gepa", settings_json=json.dumps(SETTINGS), policy=NO_POLICY, inputs=inputs)


def remembered(tmp_path: Path, run: TrainingRun) -> dict:
    found = RunFiles(tmp_path / "state/runs/default" / run.run_id).checkpoint_store().newest().checkpoint
    assert found is not None
    return dict(found.progress)["memory"]["apo"]


async def test_a_prompt_gets_better_by_reflection_on_its_failures(searched, draft, carry_out, tmp_path):
    entry = await carry_out(draft)
    results = entry.run.results
    assert (results["validation_accuracy_before"], results["validation_accuracy_after"]) == (0.0, 1.0)
    best = searched.resources["resources/prompt.solver"][1].decode()
    assert all(advice in best for advice in (*ADVICE, "{question}"))
    assert searched.aliases == {"resources/prompt.solver/aliases/best": 2}
    assert any("the mean reward reached 1" in text for text in notices(entry))
    memory = remembered(tmp_path, entry.run)
    # The console lists the search as that of any other algorithm.
    listed = prompt_candidates(entry, 0, "")
    assert len(listed.candidates) == len(memory["candidates"])
    assert listed.search.call_count == memory["calls"]


async def test_prompts_that_are_the_best_at_different_tasks_are_merged(searched, draft, carry_out, tmp_path):
    def forgetful(request: ChatRequest) -> str:
        """Reflects on the examples alone, and forgets what the prompt said."""
        if request.purpose == "gepa.merge":
            return answer(request)
        tasks = [part.partition("</task>")[0] for part in str(request.messages[-1]["content"]).split("<task>")[1:]]
        return f"<prompt>{FIRST} {random.Random(tasks[0]).choice([wanted_by(task) for task in tasks])}</prompt>"

    searched.answer = forgetful
    entry = await carry_out(with_settings(draft, merge_every=2))
    assert entry.run.results["validation_accuracy_after"] == 1.0
    memory = remembered(tmp_path, entry.run)
    assert any(candidate["gradient"].startswith("Merged with c") for candidate in memory["candidates"])
    reasons = [each["reason"] for each in memory["rejected"]]
    assert any("its mean reward on 3 tasks is" in reason or "it is the same as" in reason for reason in reasons)


async def test_what_the_reflector_sees_is_the_trace_of_the_rollouts(searched, draft, carry_out):
    told = [{"role": "user", "content": "how many?"}, {"role": "assistant", "content": "I count with my fingers"}]
    searched.conversations = ((told, ()),)
    await carry_out(with_settings(draft, steps=1))
    (asked,) = searched.asked
    text = str(asked.messages[-1]["content"])
    assert "<trace>user: how many?\nassistant: I count with my fingers</trace>" in text
    assert text.count("<reward>0</reward>") == 3


async def test_a_search_that_was_killed_comes_to_the_same_candidates_and_pays_no_call_twice(
    searched, draft, carry_out, tmp_path
):
    chance, found = random.Random(0), list[list[tuple]]()
    for deaths in (0, 5, 5):
        for queue in (searched.asked, searched.groups, searched.feed, searched.pending):
            queue.clear()
        calls = [chance.randrange(2, 15) for _ in range(deaths)]
        killed = [Crashes(at_call=call, after_effect=bool(call % 2)) for call in calls]
        name = f"projects/default/trainingRuns/run{len(found)}"
        entry = await carry_out(replace(draft, name=name), killed=killed)
        memory = remembered(tmp_path, entry.run)
        # Only a call that was under way is asked again.
        assert len(searched.asked) - memory["calls"] <= deaths
        found.append([(c["id"], c["parent"], c["text"], c["rewards"], c["validation"]) for c in memory["candidates"]])
    assert found[1:] == found[:1] * 2
    assert len(found[0]) > 2


@pytest.mark.parametrize("budget", [{"calls": 2}, {"rollouts": 20}])
async def test_a_search_ends_with_its_budget(budget, searched, draft, carry_out):
    entry = await carry_out(with_settings(draft, budget=budget))
    assert any("the budget is used up" in text for text in notices(entry))
    assert len(searched.asked) <= budget.get("calls", 40)


async def test_it_takes_fewer_rollouts_than_apo_to_the_same_prompt(searched, draft, carry_out, tmp_path):
    used: dict[str, list[float]] = {"gepa": [], "apo": []}
    for seed in range(3):
        for algorithm, settings in (("gepa", SETTINGS), ("apo", APO)):
            for queue in (searched.asked, searched.groups, searched.feed, searched.pending):
                queue.clear()
            run = replace(
                draft, algorithm=algorithm, name=f"projects/default/trainingRuns/{algorithm}{seed}",
                settings_json=json.dumps({**settings, "seed": seed}),
            )  # fmt: skip
            entry = await carry_out(run)
            reached = entry.run.results["validation_accuracy_after"]
            used[algorithm].append(remembered(tmp_path, entry.run)["rollouts"])
            assert reached == 1.0, (algorithm, seed)
    assert sum(used["gepa"]) < sum(used["apo"]), used


SCORES = st.integers(1, 4).flatmap(
    lambda tasks: st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=tasks, max_size=tasks), min_size=1
    )
)  # fmt: skip


@given(scores=SCORES, seed=st.integers(0, 9))
def test_the_front_covers_the_best_of_each_task_and_has_nothing_to_spare(scores, seed):
    found = front(scores)
    for task in range(len(next(iter(scores.values())))):
        known = {name: each[task] for name, each in scores.items() if each[task] is not None}
        best = {name for name, score in known.items() if score == max(known.values())}
        assert not known or best & set(found)
    for name, weight in found.items():
        assert weight == sum(
            each[t] is not None and each[t] == max(s[t] for s in scores.values() if s[t] is not None)
            for t, each in ((t, scores[name]) for t in range(len(scores[name])))
        )
    means = [mean(scores[name]) for name in found]
    assert means == sorted(means, reverse=True)
    if found:
        assert chosen(found, random.Random(seed)) in found


def test_a_prompt_that_is_the_best_nowhere_or_only_beside_better_ones_is_not_on_the_front():
    scores = {"a": [1.0, 0.0, 1.0], "b": [0.0, 1.0, 0.0], "c": [1.0, 0.5, 0.0], "d": [0.5, 0.5, 0.5]}
    assert front(scores) == {"a": 2, "b": 1}
