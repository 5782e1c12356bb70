"""`fulmen model serve`: a trained model, held at the proxy for a time, with how to call it."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import UTC, datetime
from secrets import token_hex
from typing import Annotated, Final

import typer

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.client.aio.base import listed
from fulmen.ids import training_run_name
from fulmen.llm_proxy.v1 import completion_service_pb2
from fulmen.policy_versions import POLICY_PREFIX
from fulmen.rpc.services import Services
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.record import StackFolder, StackRecord
from fulmen_cli.model.versions import FORMS, find_version
from fulmen_cli.names import short_name
from fulmen_cli.output import console, print_json

__all__ = ["serve"]

ALGORITHM: Final = "serve"
SERVED: Final = "served_version"
POLL_S: Final = 0.5
CALL_LIMIT_S: Final = 60.0
CHAT: Final = "/v1/chat/completions"
OK: Final = 200
WAITING: Final = (pb.TRAINING_RUN_STATE_PENDING, pb.TRAINING_RUN_STATE_RUNNING)
TURN: Final = {"role": "user", "content": "Hello"}
MAX_ID_LENGTH: Final = 63


async def serve(
    connection: Connection,
    model: Annotated[str, typer.Argument(help=f"The model: {FORMS}.")],
    hours: Annotated[float, typer.Option(min=0.01, max=720, help="Time for which its engine is held.")] = 1.0,
    stop: Annotated[bool, typer.Option("--stop", help="Stop holding it instead.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Maximum time to wait for its first answer, seconds.")] = 300.0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Serves a trained model without a training, and shows how to call it once it answers.

    A run of the algorithm `serve` holds its engine, so that no other run uses it. It occupies a run slot, and a training of
    the same policy waits for its end. After --stop, or when the time is over, the engine keeps serving until its slot is
    needed.

    Examples:

        fulmen model serve solver

        fulmen model serve solver@12 --hours 8

        fulmen model serve solver --stop
    """
    async with connection.open() as client:
        version = await find_version(model, connection, client)
        policy, _, number = version.resource.name.removeprefix(POLICY_PREFIX).partition("/versions/")
        active = await _active(client, connection.project, policy)
        if stop:
            await _stop(client, policy, active)
            return
        run = active[0] if active else await _created(client, connection, version.resource.name, policy, hours)
        await _serving(client, run, policy, int(number), time.monotonic() + timeout)
    stack = _stack(connection)
    # Where the proxy of another deployment takes HTTP is not known here.
    url = f"{stack.targets['llm_proxy_http'] if stack is not None else 'http://LLM_PROXY:7200'}/v1"
    if output is Output.JSON:
        print_json({"model": policy, "version": version.resource.name, "run": run.name, "base_url": url})
        return
    body = json.dumps({"model": policy, "messages": [TURN]})
    token = f"$(cat {stack.client_token_file})" if stack is not None else "$FULMEN_TOKEN"
    console().print(
        f"{version.short} answers as model {policy!r} at {url}; {short_name(run.name)} holds it.\n\n"
        f'curl {url}/chat/completions -H "authorization: Bearer {token}" \\\n'
        f"  -H 'content-type: application/json' -d '{body}'",
        markup=False,
        soft_wrap=True,
        highlight=False,
    )


async def _active(client: Services, project: str, policy: str) -> list[pb.TrainingRun]:
    request = service_pb.ListTrainingRunsRequest(project=project, page_size=1000)
    runs = [run async for run in listed(client.training_runs.ListTrainingRuns, request, "training_runs")]
    return [run for run in runs if run.algorithm == ALGORITHM and run.policy.name == policy and run.state in WAITING]


async def _stop(client: Services, policy: str, active: list[pb.TrainingRun]) -> None:
    if not active:
        raise CommandFailed(f"Nothing holds {policy}.", exit_code=Exit.NOT_FOUND)
    for run in active:
        await client.training_runs.CancelTrainingRun(service_pb.CancelTrainingRunRequest(name=run.name))
    console().print(f"{policy} is no longer held; its engine keeps serving until its slot is needed.", markup=False)


async def _created(client: Services, connection: Connection, version: str, policy: str, hours: float) -> pb.TrainingRun:
    stamp = f"-{datetime.now(UTC):%Y%m%d-%H%M%S}-{token_hex(2)}"
    slug = policy.replace(".", "-").replace("_", "-").strip("-")
    run_id = f"serve-{slug}"[: MAX_ID_LENGTH - len(stamp)] + stamp
    run = pb.TrainingRun(
        name=training_run_name(connection.project, run_id),
        display_name=f"{policy}: serve",
        algorithm=ALGORITHM,
        settings_json=json.dumps({"hours": hours}),
        policy=pb.PolicySpec(name=policy, version=version),
    )
    request = service_pb.CreateTrainingRunRequest(training_run=run, request_id=run.name)
    return (await client.training_runs.CreateTrainingRun(request)).training_run


async def _serving(client: Services, run: pb.TrainingRun, policy: str, number: int, deadline_s: float) -> None:
    """Waits until the run serves the version, and the proxy answers a call of it.

    Raises:
        CommandFailed: if the run ends before, serves another version, or it takes too long.
    """
    while True:
        run = (await client.training_runs.GetTrainingRun(service_pb.GetTrainingRunRequest(name=run.name))).training_run
        if run.state not in WAITING:
            raise CommandFailed(f"{short_name(run.name)} ended before it served: {run.failure_message or 'stopped'}")
        found = int(run.results.get(SERVED, 0))
        if found and found != number:
            raise CommandFailed(
                f"{short_name(run.name)} holds {policy}@{found}. Stop it first: `fulmen model serve {policy} --stop`.",
                exit_code=Exit.CONFLICT,
            )
        problem = f"it is {pb.TrainingRunState.Name(run.state).rpartition('_')[2].lower()}; `fulmen run show` says why"
        if found and not (problem := await _call_problem(client, policy)):
            return
        if time.monotonic() > deadline_s:
            raise CommandFailed(
                f"{policy} does not answer yet ({short_name(run.name)}: {problem}). The run continues; end it with "
                f"`fulmen model serve {policy} --stop`."
            )
        await asyncio.sleep(POLL_S)


async def _call_problem(client: Services, policy: str) -> str:
    """Makes a call of one token; returns why it was refused, empty if it was answered."""
    body = json.dumps({"model": policy, "messages": [TURN], "max_tokens": 1}).encode()
    request = completion_service_pb2.CompleteRequest(path=CHAT, body_json=body)
    answer = await client.completions.Complete(request, timeout=CALL_LIMIT_S)
    return "" if answer.http_status == OK else f"status {answer.http_status}"


def _stack(connection: Connection) -> StackRecord | None:
    """Returns the local stack that is meant; None if it is another deployment."""
    folder = StackFolder(connection.state_dir.resolve())
    return None if connection.names_services or not folder.is_running() else folder.read()
