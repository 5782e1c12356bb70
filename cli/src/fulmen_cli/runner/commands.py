"""`fulmen runners`: who works, on what, and how busy they are."""

from __future__ import annotations

from typing import Final

import typer

from fulmen.store.v1 import lease_pb2, runner_registry_service_pb2
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.output import print_rows, when
from fulmen_cli.runner import group

__all__ = ["register"]

PAGE_SIZE: Final = 1000
GIB: Final = 2**30


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    remote_command(app, "runners")(runners)
    group.register(app)


async def runners(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the runners that are alive.

    Example:

        fulmen runners
    """
    found: list[runner_registry_service_pb2.Runner] = []
    async with connection.open() as client:
        token = ""
        while True:
            request = runner_registry_service_pb2.ListRunnersRequest(page_size=PAGE_SIZE, page_token=token)
            answer = await client.runners.ListRunners(request)
            found += answer.runners
            token = answer.next_page_token
            if not token:
                break
    rows = [
        (each.info.host, _slots(each), str(each.running_count),
         _load(each.load) if each.HasField("load") else "", _failed(each), each.info.version,
         ", ".join(f"{key}={value}" for key, value in sorted(each.info.labels.items())), when(each.create_time),
         each.name)
        for each in found
    ]  # fmt: skip
    columns = ("host", "slots", "running", "load", "failed", "version", "labels", "since (UTC)", "runner")
    print_rows(output, columns, rows, messages=found, empty="No runner is alive.")


def _slots(runner: runner_registry_service_pb2.Runner) -> str:
    """Writes the slots in use, those that there are and, if that differs, may be: `12/40 (auto, at most 512)`."""
    if not runner.load.HasField("slots"):
        return str(runner.info.slot_count)
    slots = runner.load.slots
    text = f"{slots.in_use_count}/{slots.limit_count}"
    if slots.automatic:
        return f"{text} (auto, at most {slots.configured_count})"
    return text if slots.limit_count == slots.configured_count else f"{text} (setting: {slots.configured_count})"


def _load(load: lease_pb2.RunnerLoad) -> str:
    """Writes a load such as `cpu 40 %, 1.5/8.0 GiB, gpu 93 % 80.0/141.0 GiB`."""
    memory = _memory(load.memory_bytes, load.memory_limit_bytes)
    gpus = [f"gpu {gpu.utilization_ratio:.0%} {_memory(gpu.memory_bytes, gpu.memory_limit_bytes)}" for gpu in load.gpus]
    return ", ".join([f"cpu {load.cpu_ratio:.0%}", memory, *gpus])


def _memory(used: int, limit: int) -> str:
    return f"{used / GIB:.1f}/{limit / GIB:.1f} GiB" if limit else f"{used / GIB:.1f} GiB"


def _failed(runner: runner_registry_service_pb2.Runner) -> str:
    """Writes how many of the ended attempts failed."""
    if not runner.ended_count:
        return ""
    return f"{runner.failed_count}/{runner.ended_count} ({runner.failed_count / runner.ended_count:.0%})"
