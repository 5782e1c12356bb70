"""A search improves a prompt with deterministic models, also when the process is killed."""

import asyncio
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.ports import ChatRequest
from fulmen_algorithm.runs.report import report
from fulmen_algorithm.runs.run import NO_POLICY, RunState
from fulmen_algorithm.transport.prompt_candidates import prompt_candidates
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import created, live, notices, run_folder, run_journal, with_settings

FIRST = "Answer {question}."
ADVICE = ("Think in steps.", "Answer with a number alone.", "Check the sign.")
SETTINGS = {
    "steps": 4,
    "critic": {"model": "critic"},
    "editor": {"model": "editor", "temperature": None},
    "beam_width": 2,
    "branch_factor": 2,
    "gradient_tasks": 3,
    "gradient_examples": 2,
    "selection": {"kind": "halving", "tasks": 3},
}


def answer(request: ChatRequest) -> str:
    """Answers as critic, with an instruction that is missing, or as editor, with the instruction added."""
    text = str(request.messages[-1]["content"])
    template = text.partition("<template>\n")[2].partition("\n</template>")[0]
    if request.purpose == "apo.paraphrase":
        return f"<prompt>{template} In other words.</prompt>"
    if request.model == "critic":
        missing = [advice for advice in ADVICE if advice not in template]
        # Another example, another criticism; sometimes a useless one.
        return random.Random(text).choice([*missing, "Forget the placeholder.", "Say please."])
    criticism = text.partition("<criticism>\n")[2].partition("\n</criticism>")[0]
    edited = template.replace("{question}", "it") if "Forget" in criticism else f"{template} {criticism}"
    return f"Here it is:\n<prompt>\n{edited}\n</prompt>"


def quality(prompt: str) -> float:
    """Scores a prompt: the share of the instructions that it has."""
    return sum(advice in prompt for advice in ADVICE) / len(ADVICE)


@pytest.fixture
def searched(world: World) -> World:
    """Returns a world with a prompt, models that improve it, and rewards by how good the prompt of a rollout is."""
    world.add_resource("resources/prompt.solver", FIRST.encode())
    world.answer = answer

    def reward(rollout: str) -> float:
        group = rollout.removeprefix("projects/default/rollouts/").rpartition(".")[0]
        resource, _, number = world.groups[group].resource_versions["prompt"].partition("/versions/")
        return quality(world.resources[resource][int(number) - 1].decode())

    world.reward_of = reward
    return world


@pytest.fixture
def draft(grpo_draft: RunDraft) -> RunDraft:
    inputs = {**grpo_draft.inputs, "prompt": "resources/prompt.solver/versions/1"}
    return replace(grpo_draft, algorithm="apo", settings_json=json.dumps(SETTINGS), policy=NO_POLICY, inputs=inputs)


def remembered(tmp_path: Path, name: str) -> dict:
    found = RunFiles(tmp_path / "state/runs/default" / name).checkpoint_store().newest().checkpoint
    assert found is not None
    return dict(found.progress)["memory"]["apo"]


@pytest.mark.parametrize(
    "selection",
    [{"kind": "halving", "tasks": 3}, {"kind": "ucb", "tasks": 2, "pulls": 12, "exploration": 0.3}],
    ids=lambda selection: selection["kind"],
)
async def test_a_prompt_gets_better_and_is_published_with_its_parent(searched, draft, carry_out, selection, tmp_path):
    settings = {"selection": selection, "patience": 0, "steps": 6}
    entry = await carry_out(with_settings(draft, **settings))
    versions = [content.decode() for content in searched.resources["resources/prompt.solver"]]
    assert len(versions) == 2
    assert quality(versions[1]) == 1.0
    assert "{question}" in versions[1]
    assert searched.aliases == {"resources/prompt.solver/aliases/best": 2}
    results = entry.run.results
    assert (results["validation_accuracy_before"], results["validation_accuracy_after"]) == (0.0, 1.0)
    assert searched.served is None
    notes = json.loads((run_journal(tmp_path) / "notes.json").read_text())
    shown = report(entry.run, entry.events.steps(), entry.events.notices(), notes, []).markdown
    for expected in ("**best**", f"-{FIRST}", "the placeholder {question} is missing", "calls of critic and editor"):
        assert expected in shown


@pytest.mark.parametrize(("concurrency", "paraphrases"), [(1, 0), (4, 1)])
async def test_a_search_that_was_killed_comes_to_the_same_candidates_and_pays_no_call_twice(
    searched, draft, carry_out, tmp_path, concurrency, paraphrases
):
    draft = with_settings(draft, concurrency=concurrency, paraphrases=paraphrases)
    chance, found = random.Random(0), list[list[tuple]]()
    for deaths in (0, 4, 4, 4):
        for queue in (searched.asked, searched.groups, searched.feed, searched.pending):
            queue.clear()
        calls = [chance.randrange(2, 15) for _ in range(deaths)]
        name = f"run{len(found)}"
        killed = [Crashes(at_call=call, after_effect=bool(call % 2)) for call in calls]
        await carry_out(replace(draft, name=f"projects/default/trainingRuns/{name}"), killed=killed)
        memory = remembered(tmp_path, name)
        assert len(searched.asked) - memory["calls"] <= deaths * concurrency
        assert memory["tokens"] == 15 * memory["calls"]
        found.append([(c["id"], c["parent"], c["text"], c["rewards"], c["validation"]) for c in memory["candidates"]])
        assert len({c["version"] for c in memory["candidates"]}) == len(memory["candidates"])
    assert found[1:] == found[:1] * 3
    assert len(found[0]) > 4
    assert searched.asking_most == concurrency
    reworded = [text for _, _, text, _, _ in found[0] if "In other words." in text]
    assert bool(reworded) == bool(paraphrases)


async def test_the_tree_of_candidates_is_listed_in_pages_with_texts_critiques_and_scores(searched, draft, carry_out):
    entry = await carry_out(with_settings(draft, patience=0, steps=3))
    whole = prompt_candidates(entry, 0, "")
    first, *edits = whole.candidates
    assert (first.id, first.parent, first.text, first.round) == ("c0", "", FIRST, 0)
    assert len(edits) >= 2
    known = {each.id for each in whole.candidates}
    assert all(each.parent in known and each.critique and each.version for each in edits)
    assert all(each.HasField("reward_mean") and each.reward_count for each in whole.candidates)
    assert set(whole.search.beam) <= known
    assert whole.search.call_count
    assert whole.search.rejected
    best = max(whole.candidates, key=lambda each: each.validation if each.HasField("validation") else -1)
    assert best.validation == entry.run.results["validation_accuracy_after"]
    pages, token = [], ""
    while not pages or token:
        page = prompt_candidates(entry, 2, token)
        pages += page.candidates
        token = page.next_page_token
    assert pages == list(whole.candidates)


async def test_a_search_ends_with_its_budget_and_keeps_what_it_found(searched, draft, carry_out):
    entry = await carry_out(with_settings(draft, budget={"calls": 3}, steps=50))
    assert len(searched.asked) == 3
    assert entry.run.step == 1
    assert any("the budget is used up: 3 calls" in text for text in notices(entry))


async def test_a_search_that_finds_nothing_keeps_the_first_prompt(searched, draft, carry_out):
    searched.answer = lambda request: "I would rather not."
    entry = await carry_out(draft)
    assert searched.resources["resources/prompt.solver"] == [FIRST.encode()]
    assert searched.aliases == {"resources/prompt.solver/aliases/best": 1}
    # Twice the same head is where patience ends.
    assert entry.run.step == 2


async def test_a_search_needs_a_prompt_and_a_critic(searched, draft):
    inputs = {use: name for use, name in draft.inputs.items() if use != "prompt"}
    with pytest.raises(SettingsInvalid) as caught:
        await created(replace(draft, inputs=inputs, settings_json="{}"), searched)
    assert [each.field for each in caught.value.violations] == ["settings.critic", "inputs.prompt"]


async def test_a_search_asks_only_endpoints_that_the_operator_names(searched, draft):
    named, other = "https://models.example/v1", "https://elsewhere.example/v1"
    models = {"critic": {"model": "m", "base_url": f"{named}/"}, "editor": {"model": "m", "base_url": other}}
    wanted = replace(draft, settings_json=json.dumps(models))
    with pytest.raises(SettingsInvalid) as caught:
        await created(wanted, searched, endpoints={named})
    [violation] = caught.value.violations
    assert violation.field == "settings.editor.base_url"
    assert violation.description.startswith(f"{other} is not in the service's setting FULMEN_ALGORITHM_CHAT_ENDPOINTS")
    assert (
        json.loads((await created(wanted, searched, endpoints={named, other})).settings_json)["editor"]["base_url"]
        == other
    )
    with pytest.raises(SettingsInvalid, match="must be an address such as"):
        await created(replace(draft, settings_json='{"critic": {"model": "m", "base_url": "file:///etc"}}'), searched)


async def test_a_rolled_back_search_tries_and_publishes_the_prompts_of_its_own_branch(
    searched, draft, carry_out, open_service, tmp_path
):
    folder, kept = run_folder(tmp_path) / "checkpoints/checkpoint-00000001-00000001", tmp_path / "kept"

    def politely(request: ChatRequest) -> str:
        if not kept.exists():  # the run itself keeps the newest ones alone
            shutil.copytree(folder, kept)
        return answer(request).replace("</prompt>", " Please.</prompt>")

    searched.answer = politely
    entry = await carry_out(draft)
    shutil.copytree(kept, folder)
    searched.answer, searched.changed = answer, asyncio.Event()
    service = open_service(searched)
    service.runs.rollback(entry.run.name, sequence=1, step=0)
    assert await live(service, entry.run, searched.crashes)
    again = service.runs.entry(entry.run.name).run
    assert again.state is RunState.SUCCEEDED, again.failure_message
    tried = {c["version"]: c["text"] for c in remembered(tmp_path, "small")["candidates"]}
    assert len(tried) > 2
    for version, text in tried.items():
        resource, _, number = version.partition("/versions/")
        assert searched.resources[resource][int(number) - 1].decode() == text
        assert "Please" not in text
    best = [content.decode() for content in searched.resources["resources/prompt.solver"]]
    assert [FIRST, *(" Please." in text for text in best[1:])] == [FIRST, True, False]
