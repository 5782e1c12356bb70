"""A game of two players: the policy against its own past versions, on two real engines."""

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.rpc.services import connect
from tests.support.algorithm.small_training import SETTINGS, Watcher
from tests.support.algorithm.training import create_run, publish_training_inputs
from tests.support.stack import running_stack, stack_targets

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(420)]

# Whose answer is longer wins.
GAME = b"""\
from openai import AsyncOpenAI

client = AsyncOpenAI()


async def move(model, player, task):
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": task["input"]["question"]}],
        extra_headers={"x-fulmen-agent": player},
    )
    return completion.choices[0].message.content or ""


async def solve(task):
    mine = await move("tiny", "present", task)
    theirs = await move("tiny" + "-past", "past", task)
    return f"{mine}|{theirs}"


def grade(task, outcome):
    mine, _, theirs = outcome.partition("|")
    return float(sum(map(ord, mine)) > sum(map(ord, theirs)))
"""


async def test_a_policy_plays_against_its_past(short_tmp_path, repository_root):
    settings = {**SETTINGS, "steps": 4, "opponents": {"kind": "past", "every": 2, "pick": "latest"}}
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        inputs = await publish_training_inputs(client, repository_root, agent=GAME)
        watcher = Watcher(stack, client, await create_run(client, "game", inputs, settings))
        assert (await watcher.end()).state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        steps = [dict(event.step.values) for event in watcher.events if event.HasField("step") and event.step.step]
        assert [step["opponent_age_steps"] for step in steps] == [0, 1, 0, 1]
        assert all("role_past_rows" not in step for step in steps)
        assert sum(step.get("role_present_rows", 0) for step in steps) == sum(step["rows"] for step in steps) > 0
