"""`fulmen run pause|resume|stop|checkpoints|rollback`: what changes the state of a training run."""

from __future__ import annotations

from typing import Annotated

import typer

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.names import RUN_FORMS, run_name
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when

__all__ = ["RunArgument", "checkpoints", "pause", "resume", "rollback", "state_of", "stop"]

RunArgument = Annotated[str, typer.Argument(help=f"{RUN_FORMS}.")]


async def pause(connection: Connection, run: RunArgument, output: OutputOption = Output.TABLE) -> None:
    """Pauses a training run and writes a checkpoint; rollouts in flight are kept.

    Example:

        fulmen run pause arithmetic-20260314-101500-x7k2-2-grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.PauseTrainingRunRequest(name=await run_name(run, connection, client))
        found = (await client.training_runs.PauseTrainingRun(request)).training_run
    if found.state == training_run_pb2.TRAINING_RUN_STATE_RUNNING:
        _show(found, output, note="will pause after the current step")
    else:
        _show(found, output)


async def resume(connection: Connection, run: RunArgument, output: OutputOption = Output.TABLE) -> None:
    """Resumes a paused training run, once a run slot is free.

    Example:

        fulmen run resume arithmetic-20260314-101500-x7k2-2-grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.ResumeTrainingRunRequest(name=await run_name(run, connection, client))
        _show((await client.training_runs.ResumeTrainingRun(request)).training_run, output)


async def stop(connection: Connection, run: RunArgument, output: OutputOption = Output.TABLE) -> None:
    """Stops a training run permanently and cancels its rollouts; published versions are kept. The stages after it do not
    begin.

    If the named stage has ended, a later stage is stopped; if it has not begun, the stage that it waits for is.

    Example:

        fulmen run stop arithmetic-20260314-101500-x7k2-2-grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.CancelTrainingRunRequest(name=await run_name(run, connection, client))
        _show((await client.training_runs.CancelTrainingRun(request)).training_run, output)


async def checkpoints(connection: Connection, run: RunArgument, output: OutputOption = Output.TABLE) -> None:
    """Lists the checkpoints of a training run, newest first.

    Example:

        fulmen run checkpoints arithmetic-20260314-101500-x7k2-2-grpo
    """
    async with connection.open() as client:
        request = training_run_service_pb2.ListCheckpointsRequest(parent=await run_name(run, connection, client))
        found = list((await client.training_runs.ListCheckpoints(request)).checkpoints)
    rows = [
        (str(each.sequence), str(each.step), f"{each.reward_mean:.3g}" if each.HasField("reward_mean") else "",
         each.policy_version, f"{each.size_bytes / 1e6:.1f}", when(each.create_time))
        for each in found
    ]  # fmt: skip
    columns = ("checkpoint", "step", "reward", "policy version", "MB", "written (UTC)")
    print_rows(output, columns, rows, messages=found, empty="The run has written no checkpoint yet.")


async def rollback(
    connection: Connection,
    run: RunArgument,
    checkpoint: Annotated[int, typer.Argument(min=1, help="Number of the checkpoint; see `fulmen run checkpoints`.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Rolls a paused or ended training run back to a checkpoint; it resumes once a run slot is free.

    Later steps are discarded: their prompts are sampled again, and the checkpoint's weights are
    published and served as a new version.

    Example:

        fulmen run rollback arithmetic-20260314-101500-x7k2-2-grpo 3
    """
    async with connection.open() as client:
        name = f"{await run_name(run, connection, client)}/checkpoints/{checkpoint}"
        request = training_run_service_pb2.RollbackTrainingRunRequest(checkpoint=name)
        found = (await client.training_runs.RollbackTrainingRun(request)).training_run
    _show(found, output, note=f"resumes from step {found.step} once a run slot is free")


def state_of(run: training_run_pb2.TrainingRun) -> str:
    """Returns the state of a run in words, and what is unusual about it."""
    word = enum_word(run, "state")
    if run.state == training_run_pb2.TRAINING_RUN_STATE_PENDING and run.waiting_reason:
        return f"{word}, waits for a stage"
    if run.state != training_run_pb2.TRAINING_RUN_STATE_RUNNING:
        return word
    if not run.owner_address:
        return f"{word}, without an algorithm service"
    return f"{word}, waits for storage" if run.waiting_reason else word


def _show(run: training_run_pb2.TrainingRun, output: Output, *, note: str = "") -> None:
    if output is Output.JSON:
        print_json(as_dict(run))
    else:
        console().print(f"{run.name}: {enum_word(run, 'state')}{note and f' ({note})'}", markup=False, soft_wrap=True)
