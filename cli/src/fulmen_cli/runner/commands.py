"""`fulmen runners`: the connected runners; `fulmen runner`: one of them."""

from __future__ import annotations

import asyncio
import datetime
import time
from typing import Annotated, Final

import typer
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import RunnerNotFound, Unavailable
from fulmen.ids import runner_name
from fulmen.runner.v1 import runner_service_pb2 as pb
from fulmen.runner.v1.runner_service_pb2_grpc import RunnerServiceStub
from fulmen.store.v1 import lease_pb2
from fulmen.store.v1 import runner_registry_service_pb2 as registry_pb
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.ports import LOOPBACK
from fulmen_cli.local.record import StackFolder
from fulmen_cli.output import as_dict, console, print_json, print_rows, when, working

__all__ = ["register"]

PAGE_SIZE: Final = 1000
GIB: Final = 2**30


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    remote_command(app, "runners")(runners)
    group = new_group("One runner: status, slots, drain.")
    remote_command(group, "status")(status)
    remote_command(group, "slots")(slots)
    remote_command(group, "stacks")(stacks)
    remote_command(group, "drain")(drain)
    app.add_typer(group, name="runner")


async def runners(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the connected runners.

    Example:

        fulmen runners
    """
    found: list[registry_pb.Runner] = []
    async with connection.open() as client:
        token = ""
        while True:
            request = registry_pb.ListRunnersRequest(page_size=PAGE_SIZE, page_token=token)
            answer = await client.runners.ListRunners(request)
            found += answer.runners
            token = answer.next_page_token
            if not token:
                break
    rows = [
        (each.info.host, _slots(each) + _ordered(each), str(each.running_count),
         _load(each.load) if each.HasField("load") else "", _failed(each), each.info.version,
         ", ".join(f"{key}={value}" for key, value in sorted(each.info.labels.items())), when(each.create_time),
         each.name)
        for each in found
    ]  # fmt: skip
    columns = ("host", "slots", "running", "load", "failed", "version", "labels", "since (UTC)", "runner")
    print_rows(output, columns, rows, messages=found, empty="No runner is connected.")


def _slots(runner: registry_pb.Runner) -> str:
    """Formats slots in use, total and, if different, maximum: `12/40 (auto, at most 512)`."""
    if not runner.load.HasField("slots"):
        return str(runner.info.slot_count)
    slots = runner.load.slots
    text = f"{slots.in_use_count}/{slots.limit_count}"
    if slots.automatic:
        return f"{text} (auto, at most {slots.configured_count})"
    return text if slots.limit_count == slots.configured_count else f"{text} (setting: {slots.configured_count})"


def _ordered(runner: registry_pb.Runner) -> str:
    """Formats what was ordered and not confirmed, and a drain: `, ordered 8`, `, drains`."""
    order, words = runner.order, ""
    if runner.order_pending and order.HasField("slots"):
        words += ", ordered " + ("auto" if order.slots.automatic else str(order.slots.slot_count))
    if order.HasField("drain"):
        words += ", drain ordered" if runner.order_pending else ", drains"
    return words


def _load(load: lease_pb2.RunnerLoad) -> str:
    """Formats a load such as `cpu 40 %, 1.5/8.0 GiB, gpu 93 % 80.0/141.0 GiB`."""
    memory = _memory(load.memory_bytes, load.memory_limit_bytes)
    gpus = [f"gpu {gpu.utilization_ratio:.0%} {_memory(gpu.memory_bytes, gpu.memory_limit_bytes)}" for gpu in load.gpus]
    return ", ".join([f"cpu {load.cpu_ratio:.0%}", memory, *gpus])


def _memory(used: int, limit: int) -> str:
    return f"{used / GIB:.1f}/{limit / GIB:.1f} GiB" if limit else f"{used / GIB:.1f} GiB"


def _failed(runner: registry_pb.Runner) -> str:
    """Formats the number of failed attempts."""
    if not runner.ended_count:
        return ""
    return f"{runner.failed_count}/{runner.ended_count} ({runner.failed_count / runner.ended_count:.0%})"


CALL_LIMIT_S: Final = 10.0
POLL_INTERVAL_S: Final = 0.5
# The longest grace that a runner's settings allow, plus the time to exit.
MAX_GRACE_S: Final = 3600.0
END_S: Final = 60.0
AUTOMATIC: Final = "auto"

Target = Annotated[
    str,
    typer.Argument(
        help="The runner: HOST:PORT, a name in the local stack (`runner-1`), or its session or host as in `fulmen runners`."
    ),
]


ThroughStore = Annotated[
    bool,
    typer.Option(
        "--through-store",
        help="Order it through the store, for runners that cannot be reached from here; return once the order is recorded.",
    ),
]


async def status(connection: Connection, target: Target, output: OutputOption = Output.TABLE) -> None:
    """Shows the state of a runner.

    Examples:

        fulmen runner status runner-1

        fulmen runner status 10.0.0.7:7401 --output json
    """
    async with connection.channel(await _address(connection, target)) as channel:
        found = await RunnerServiceStub(channel).GetStatus(pb.GetStatusRequest(), timeout=CALL_LIMIT_S)
    if output is Output.JSON:
        print_json(as_dict(found))
        return
    in_use = len(found.running) + found.straggler_count
    row = (found.runner, f"{in_use}/{found.slot_count}", _decided(found), "yes" if found.draining else "",
           str(found.completed_count), str(found.unacknowledged_count), str(found.straggler_count), found.version)  # fmt: skip
    columns = ("runner", "slots", "decided", "drains", "ended", "unreported", "stragglers", "version")
    print_rows(output, columns, [row], messages=[found], empty="")
    if found.isolation:
        console().print()
        told = (
            found.isolation_problem or ", ".join(found.isolation_layers) or "agents run with the runner's permissions"
        )
        console().print(f"isolation: {found.isolation} ({told})")
    if found.running:
        console().print()
        rows = [(one.attempt, when(one.start_time), _ago(one.start_time.ToDatetime())) for one in found.running]
        print_rows(output, ("attempt", "since (UTC)", "for"), rows, messages=found.running, empty="")


async def slots(
    connection: Connection,
    target: Target,
    count: Annotated[str, typer.Argument(metavar="COUNT|auto", help="Number of slots.")],
    through_store: ThroughStore = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Sets the number of slots, or lets the runner adjust it; running attempts continue.

    Examples:

        fulmen runner slots runner-1 32

        fulmen runner slots runner-1 auto

        fulmen runner slots worker-7 32 --through-store
    """
    if count != AUTOMATIC and not count.isdecimal():
        raise CommandFailed(f"{count!r}: must be a number or `auto`.", exit_code=Exit.USAGE)
    request = (
        pb.SetSlotsRequest(automatic=True) if count == AUTOMATIC else pb.SetSlotsRequest(slot_count=int(count[:9]))
    )
    if through_store:
        name = (await _registered(connection, target)).name
        order = registry_pb.SetRunnerSlotsRequest(name=name, slot_count=request.slot_count, automatic=request.automatic)
        async with connection.open() as client:
            _print_ordered((await client.runners.SetRunnerSlots(order)).runner, output)
        return
    async with connection.channel(await _address(connection, target)) as channel:
        answer = await RunnerServiceStub(channel).SetSlots(request, timeout=CALL_LIMIT_S)
    if output is Output.JSON:
        print_json(as_dict(answer))
        return
    decides = ", and sizes them automatically from now on" if answer.automatic else ""
    console().print(f"The runner has {answer.slot_count} slots{decides}.")


async def stacks(connection: Connection, target: Target, output: OutputOption = Output.TABLE) -> None:
    """Shows the stacks of a runner's threads and tasks: files, lines and functions, no values.

    Example:

        fulmen runner stacks runner-1
    """
    async with connection.channel(await _address(connection, target)) as channel:
        answer = await RunnerServiceStub(channel).DumpStacks(pb.DumpStacksRequest(), timeout=CALL_LIMIT_S)
    if output is Output.JSON:
        print_json(as_dict(answer))
        return
    typer.echo(answer.text, nl=False)


async def drain(
    connection: Connection,
    target: Target,
    grace: Annotated[
        float | None,
        typer.Option(
            min=0, max=MAX_GRACE_S, help="Grace for running attempts, seconds. By default the runner's setting."
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until the runner has exited, or return immediately.")
    ] = True,
    through_store: ThroughStore = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Drains a runner: it accepts no more assignments, finishes running attempts, releases the rest, and exits.

    A supervisor may restart it; the local stack does.

    Examples:

        fulmen runner drain 10.0.0.7:7401 --grace 600

        fulmen runner drain runner-1 --no-wait

        fulmen runner drain worker-7 --through-store
    """
    request = pb.DrainRequest()
    if grace is not None:
        request.grace.CopyFrom(_duration(grace))
    if through_store:
        order = registry_pb.DrainRunnerRequest(name=(await _registered(connection, target)).name)
        if grace is not None:
            order.grace.CopyFrom(request.grace)
        async with connection.open() as client:
            _print_ordered((await client.runners.DrainRunner(order)).runner, output)
        return
    async with connection.channel(await _address(connection, target)) as channel:
        stub = RunnerServiceStub(channel)
        running = (await stub.Drain(request, timeout=CALL_LIMIT_S)).running_count
        ended = wait and await _ended(stub, running, MAX_GRACE_S if grace is None else grace)
    if output is Output.JSON:
        print_json({"running_count": running, "ended": ended})
    elif ended:
        console().print(f"The runner has exited; {running} attempts were running when the drain began.")
    else:
        console().print(f"The runner is draining; {running} attempts are running.")
    if wait and not ended:
        raise CommandFailed("The runner has not exited after its grace: see `fulmen runner stacks`.")


def _print_ordered(runner: registry_pb.Runner, output: Output) -> None:
    if output is Output.JSON:
        print_json(as_dict(runner))
    else:
        console().print(
            f"Ordered (number {runner.order.number}); `fulmen runners` shows whether the runner has confirmed it."
        )


async def _ended(stub: RunnerServiceStub, running: int, grace_s: float) -> bool:
    """Waits until a draining runner has exited; returns False if it has not, well after its grace."""
    deadline = time.monotonic() + grace_s + END_S
    with working(f"{running} attempts run…") as say:
        while time.monotonic() < deadline:
            try:
                found = await stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_LIMIT_S)
            except Unavailable:
                return True
            if not found.draining:
                return True  # A supervisor has started another one in its place.
            say(f"{len(found.running)} attempts run, {found.unacknowledged_count} reports are not acknowledged yet…")
            await asyncio.sleep(POLL_INTERVAL_S)
    return False


async def _address(connection: Connection, target: str) -> str:
    """Returns a runner's address.

    Raises:
        CommandFailed: if no runner or several match, or it does not answer.
    """
    if ":" in target:
        return target
    folder = StackFolder(connection.state_dir)
    record = folder.read() if folder.is_running() else None
    local = {each.name: each.ports[each.name] for each in record.services if each.name in each.ports} if record else {}
    if target.startswith("runner-") and target in local:
        return f"{LOOPBACK}:{local[target]}"
    found = await _registered(connection, target)
    if not found.info.address:
        raise CommandFailed(f"The runner {target} reports no address: name it as HOST:PORT.")
    address: str = found.info.address
    return address


async def _registered(connection: Connection, target: str) -> registry_pb.Runner:
    name = target if target.startswith("runners/") else runner_name(target)
    async with connection.open() as client:
        try:
            answer = await client.runners.GetRunner(registry_pb.GetRunnerRequest(name=name))
        except RunnerNotFound:
            request = registry_pb.ListRunnersRequest(page_size=PAGE_SIZE)
            alive = (await client.runners.ListRunners(request)).runners
        else:
            found: registry_pb.Runner = answer.runner
            return found
    same = [each for each in alive if each.info.host == target]
    if len(same) != 1:
        known = f"{len(same)} runners have the host {target}" if same else f"No runner is called {target}"
        raise CommandFailed(f"{known}: see `fulmen runners`.", exit_code=Exit.CONFLICT if same else Exit.NOT_FOUND)
    return same[0]


def _decided(found: pb.GetStatusResponse) -> str:
    """Formats who sets the slots, and the last change: `auto 1-512, 16 to 11 (throttled)`."""
    if not found.slots.automatic:
        return "fixed"
    text = f"auto {found.slots.min_count}-{found.slots.max_count}"
    if not found.slots.HasField("last_change"):
        return text
    last = found.slots.last_change
    return f"{text}, {last.from_count} to {last.to_count} ({last.reason})"


def _ago(began: datetime.datetime) -> str:
    took_s = (datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - began).total_seconds()
    return f"{max(0.0, took_s):.0f} s"


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromNanoseconds(round(seconds * 1e9))
    return duration
