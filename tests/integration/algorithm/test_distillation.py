"""A run whose teacher is another run's policy, through the real proxy and engines."""

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.rpc.services import connect
from tests.support.algorithm.small_training import SETTINGS, Watcher, start_run
from tests.support.algorithm.training import create_run, publish_training_inputs
from tests.support.stack import running_stack, stack_targets

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(420)]

TEACHER, STUDENT = "tiny-teacher", "tiny"
DISTILL = {**SETTINGS, "teacher": {"kind": "model", "model": TEACHER}, "learning_rate": 1e-2, "steps": 3}


async def test_a_policy_is_distilled_from_a_served_one(short_tmp_path, repository_root):
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        first = await start_run(
            stack, client, repository_root, "teacher", policy=TEACHER, settings={**SETTINGS, "steps": 1}
        )
        assert (await first.end()).state == pb.TRAINING_RUN_STATE_SUCCEEDED, first.story()
        inputs = await publish_training_inputs(client, repository_root, policy=STUDENT)
        name = await create_run(client, "student", inputs, DISTILL, policy=STUDENT, algorithm="distill")
        second = Watcher(stack, client, name)
        assert (await second.end()).state == pb.TRAINING_RUN_STATE_SUCCEEDED, second.story()
        steps = [dict(event.step.values) for event in second.events if event.HasField("step") and event.step.step]
        assert [step["teacher_rows"] for step in steps] == [step["rows"] for step in steps] == [8.0] * 3
        # The same builder made both, and the teacher has taken one step.
        assert all(abs(step["teacher_reverse_kl"]) < 1.0 for step in steps)


async def test_a_teacher_without_a_route_fails_the_run_with_a_remedy(short_tmp_path, repository_root):
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        inputs = await publish_training_inputs(client, repository_root, policy=STUDENT)
        name = await create_run(client, "student", inputs, DISTILL, policy=STUDENT, algorithm="distill")
        watcher = Watcher(stack, client, name)
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_FAILED
        assert TEACHER in run.failure_message
        assert "fulmen proxy route put" in run.failure_message
