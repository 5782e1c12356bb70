"""The stages of a training: runs that are created together and follow each other.

Invariant: a stage begins at most once, after the one before it has succeeded, where the stages before it have ended; a
stage whose predecessor failed or was cancelled ends without having begun.
"""

from collections.abc import Sequence
from dataclasses import replace

from fulmen_algorithm.runs.run import PolicyOrigin, RunState, TrainingRun


class StageNotBegun(Exception):
    """Ends a stage that does not begin, in a state; the text is shown to users."""

    def __init__(self, state: RunState, message: str) -> None:
        super().__init__(message)
        self.state = state
        self.message = message


def continued(run: TrainingRun, before: Sequence[TrainingRun]) -> TrainingRun:
    """Returns a stage as it begins: with the weights that were published last and the best prompt that was found.

    Args:
        run: A stage that has not begun.
        before: The stages before it that still exist, in order.

    Raises:
        StageNotBegun: if the one right before it has not succeeded, or no longer exists.
    """
    last = before[-1] if before else None
    if last is None or last.name != run.stages_before[-1]:
        text = f"The stage before it, {run.stages_before[-1]}, no longer exists."
        raise StageNotBegun(RunState.FAILED, text)
    if last.state is RunState.CANCELLED:
        raise StageNotBegun(RunState.CANCELLED, "")
    if last.state is not RunState.SUCCEEDED:
        raise StageNotBegun(RunState.FAILED, f"The stage before it, {last.name}, is {last.state}.")
    policy, inputs = run.policy, dict(run.inputs)
    versions = [each.policy_version for each in before if each.policy.name == policy.name and each.policy_version]
    if versions and policy.origin is PolicyOrigin.NEWEST:
        policy = replace(policy, origin=PolicyOrigin.VERSION, source=versions[-1])
    prompts = [each.prompt_version for each in before if each.prompt_version]
    if prompts and "prompt" in inputs:
        inputs["prompt"] = prompts[-1]
    return replace(run, policy=policy, inputs=inputs)
