"""What is in the weights after crashes at any call, pauses and rollbacks, in two runs at a time.

The weights of these runs are the list of what they were made with, so that it can be read what they hold.
"""

import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import TrainingRunStateInvalid
from fulmen_algorithm.rollouts.groups import in_branch
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState, TrainingRun
from fulmen_algorithm.transport.training_runs import own_past
from tests.support.algorithm.book_trainer import BookTrainer, read_book, write_book
from tests.support.algorithm.model_services import Crashes, World
from tests.support.algorithm.run_service import Service, created, made_world, service_at
from tests.support.algorithm.training import check_books, newest_journal, read_consumed

STEPS = 4
GROUP_SIZE = 3
LIFE_LIMIT_S = 30
NAMES = ("one", "two")
CALLS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What happens in one life of the service.

    Attributes:
        kind: `kill`, `pause` or `rollback`.
        call: At which call of a port, of whichever run.
        after_effect: kill: whether the call had its effect.
        run: pause, rollback: which run.
        checkpoint: rollback: to which of its checkpoints.
    """

    kind: str
    call: int
    after_effect: bool = False
    run: int = 0
    checkpoint: int = 0


EVENTS = st.builds(
    Event,
    kind=st.sampled_from(["kill", "pause", "rollback"]),
    call=st.integers(1, CALLS),
    after_effect=st.booleans(),
    run=st.integers(0, 1),
    checkpoint=st.integers(0, 3),
)


def draft(name: str, first: Path, **more: object) -> RunDraft:
    asked = {"steps": STEPS, "prompts_per_step": 2, "group_size": GROUP_SIZE, "checkpoint_every": 2, **more}
    return RunDraft(
        name=f"projects/default/trainingRuns/{name}",
        project="projects/default",
        display_name="",
        algorithm="grpo",
        settings_json=json.dumps({"validate_every": 2, **asked}),
        policy=PolicySpec(name=name, origin=PolicyOrigin.PATH, source=str(first)),
        inputs={
            "agent": "resources/agent.solver/versions/1",
            "train_tasks": "resources/dataset.train/versions/1",
            "validation_tasks": "resources/dataset.validation/versions/1",
        },
    )


class Story:
    """Two runs in a state folder, and the lives of the service over it."""

    def __init__(self, folder: Path, seed: int, staleness: Sequence[int], *, behind: bool = False) -> None:
        self.folder = folder
        self.world = made_world()
        self.world.chance = random.Random(seed)
        self.staleness = dict(zip(NAMES, staleness, strict=True))
        self.behind = behind
        for name in NAMES:
            child = self.world.child(name)
            child.sampled_early = True
            # No version is better than the last, so that the last serves in the end.
            child.reward_of = lambda rollout: 0.0 if "validation/" in rollout else float(self.world.chance.randrange(2))

    async def begin(self) -> None:
        write_book(self.folder / "first", [])
        service = self.open()
        for name, staleness in self.staleness.items():
            more = {"max_staleness": staleness, "write_behind": self.behind and staleness > 0}
            service.runs.add(await created(draft(name, self.folder / "first", **more), self.world))
        service.close()

    def open(self) -> Service:
        return service_at(self.folder / "state", self.world, BookTrainer.open)

    async def live(self, event: Event | None) -> None:
        """Runs the service until the event has happened or both runs have ended, then kills it."""
        service = self.open()
        crashes = Crashes()
        if event is not None:
            act = None if event.kind == "kill" else partial(self.ask_to_pause, service, NAMES[event.run])
            crashes = Crashes(at_call=event.call, after_effect=event.after_effect, act=act)
        self.world.new_life(crashes)
        tasks = [
            asyncio.create_task(service.worker.run()),
            asyncio.create_task(crashes.killed.wait()),
            asyncio.create_task(self.all_ended(service)),
        ]
        try:
            async with asyncio.timeout(LIFE_LIMIT_S):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if event is not None and event.kind != "kill":
                    await self.paused(service, event)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            service.close()

    @staticmethod
    def ask_to_pause(service: Service, name: str) -> None:
        """Asks for a pause; a run that has ended refuses."""
        with suppress(TrainingRunStateInvalid):
            service.runs.pause(f"projects/default/trainingRuns/{name}")

    async def paused(self, service: Service, event: Event) -> None:
        """Waits until the run is paused, then resumes it or rolls it back to a checkpoint."""
        entry = service.runs.entry(f"projects/default/trainingRuns/{NAMES[event.run]}")
        while not (entry.run.state.final or entry.run.state is RunState.PAUSED):
            if entry.run.name in service.runs.active and not service.runs.active[entry.run.name].control.requested:
                return  # both runs ended their lives before the event
            await asyncio.sleep(0)
        found = service.folder.run_files(entry.run).checkpoint_store().listed()
        own = [each for each in found if own_past(entry.run, each)]
        if event.kind == "rollback" and own:
            target = own[event.checkpoint % len(own)]
            service.runs.rollback(entry.run.name, sequence=target.sequence, step=int(target.progress["step"]))
        elif entry.run.state is RunState.PAUSED:
            service.runs.resume(entry.run.name)

    @staticmethod
    async def all_ended(service: Service) -> None:
        """Waits until both runs have ended."""
        for name in NAMES:
            await service.runs.wait_final(f"projects/default/trainingRuns/{name}", timeout_s=LIFE_LIMIT_S)

    def check(self) -> None:
        """Checks the weights and the books of both runs."""
        service = self.open()
        for name in NAMES:
            run = service.runs.entry(f"projects/default/trainingRuns/{name}").run
            assert run.state is RunState.SUCCEEDED, run.failure_message
            self.check_run(run, self.world.child(name))
        service.close()

    def check_run(self, run: TrainingRun, world: World) -> None:
        """Checks one run: no rollout skipped, used twice, too old, or from an abandoned branch."""
        lines = read_consumed(self.folder / f"state/runs/{run.folder}")
        check_books(lines, [group.group_id for group in world.feed], steps=STEPS)
        book = read_book(Path(run.model_path))
        in_weights = [(line["rollout"], line["step"]) for line in book]
        assert len(set(in_weights)) == len(in_weights), "a rollout is in the weights twice"
        assert sorted(in_weights) == sorted((name, line["step"]) for line in lines for name in line["trained"])
        assert all(line["age"] <= self.staleness[run.run_id] for line in book), "a row was too old"
        assert all(len(line["rollouts"]) == GROUP_SIZE for line in lines), "a partial group was dealt with"
        consumed = {line["group"] for line in lines}
        assert len(consumed) == len(lines), "a prompt was used twice"
        branch = len(run.branch_points)
        waiting = {i for i in range(max(consumed)) if in_branch(f"train/{i}", branch) in world.groups}
        assert consumed | waiting >= set(range(max(consumed))), "a prompt was skipped"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(EVENTS, max_size=6),
    seed=st.integers(0, 2**32),
    staleness=st.tuples(*[st.integers(0, 2)] * 2),
    behind=st.booleans(),
)
def test_through_any_kills_pauses_and_rollbacks_each_prompt_is_in_the_weights_once_and_no_row_is_too_old(
    events, seed, staleness, behind
):
    async def tell() -> None:
        with tempfile.TemporaryDirectory() as folder:
            story = Story(Path(folder), seed, staleness, behind=behind)
            await story.begin()
            for event in [*events, None]:
                await story.live(event)
            story.check()

    asyncio.run(tell())


async def test_a_run_that_publishes_and_saves_behind_trains_and_serves_every_version(tmp_path):
    story = Story(tmp_path, 5, (2, 2), behind=True)
    await story.begin()
    await story.live(None)
    story.check()
    for name in NAMES:
        folder = tmp_path / f"state/runs/default/{name}"
        versions = [json.loads(line) for line in (newest_journal(folder) / "versions.jsonl").read_text().splitlines()]
        # A step whose rewards do not differ changes no weights: the version before it has those of this step too.
        covered = {step for each in versions for step in range(each["step"], each.get("last_step", each["step"]) + 1)}
        assert covered == set(range(STEPS + 1))


async def test_without_staleness_no_rollout_of_a_step_is_made_before_its_version_is_served(tmp_path):
    story = Story(tmp_path, 7, (0, 0))
    await story.begin()
    await story.live(Event(kind="kill", call=20))
    await story.live(None)
    story.check()
    for name in NAMES:
        world, folder = story.world.child(name), tmp_path / f"state/runs/default/{name}"
        versions = [json.loads(line) for line in (newest_journal(folder) / "versions.jsonl").read_text().splitlines()]
        # A version has the weights of later steps too, if these changed none.
        steps_of = {each["version"]: (each["step"], each.get("last_step", each["step"])) for each in versions}
        for line in read_consumed(folder):
            first, last = steps_of[world.submitted_with[f"train/{line['group']}"]]
            assert first <= line["step"] - 1 <= last


async def test_finished_groups_that_wait_for_their_step_are_kept_over_a_restart(tmp_path):
    story = Story(tmp_path, 3, (2, 2))
    await story.begin()
    await story.live(Event(kind="kill", call=24))
    finished = {name: [g.group_id for g in story.world.child(name).feed] for name in NAMES}
    consumed = {name: {f"train/{line['group']}" for line in _consumed(tmp_path, name)} for name in NAMES}
    submitted = {name: dict(story.world.child(name).submitted_with) for name in NAMES}
    waiting = {
        name: [g for g in finished[name] if g.startswith("train/") and g not in consumed[name]] for name in NAMES
    }
    assert any(waiting.values()), "the crash came when nothing waited"
    await story.live(None)
    story.check()
    for name in NAMES:
        later = {f"train/{line['group']}" for line in _consumed(tmp_path, name)}
        assert set(waiting[name]) <= later
        assert {g: story.world.child(name).submitted_with[g] for g in submitted[name]} == submitted[name]


def _consumed(folder: Path, name: str) -> list[dict]:
    path = newest_journal(folder / f"state/runs/default/{name}") / "consumed.jsonl"
    return read_consumed(path.parent.parent) if path.exists() else []
