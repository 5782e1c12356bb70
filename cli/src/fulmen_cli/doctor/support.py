"""`fulmen support-bundle`: diagnostics in one file, without secrets, prompts or payloads."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import io
import json
import os
import platform
import sys
import tarfile
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fulmen.algorithm.v1 import training_run_service_pb2
from fulmen.errors import FulmenError
from fulmen.store.v1 import rollout_service_pb2
from fulmen_cli.command import remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.doctor.commands import findings_of
from fulmen_cli.doctor.scrubbing import Scrubber, secrets_in
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.credentials import Credentials
from fulmen_cli.local.ports import LOOPBACK
from fulmen_cli.local.record import StackFolder
from fulmen_cli.output import as_dict, console, enum_word, when, working

__all__ = ["register"]

LIMIT_S: Final = 10.0
LOG_LINES: Final = 5000
PAGE_SIZE: Final = 200
# What of the environment matters: our own, and what changes how we connect.
PREFIXES: Final = ("FULMEN_", "OTEL_", "GRPC_")
README: Final = """\
Diagnostics collected by `fulmen support-bundle`. Review them before you share them.

doctor.json       what `fulmen doctor` says
versions.json     Python, system, installed packages
settings/         variables of the caller's environment, and of the processes of the stack; secrets masked
stack.json        processes of the stack of this machine, if there is one
queue.json        how full the queue is, and its rules
runs.json         training runs: names, states, steps
metrics/          /metrics of the services
logs/             structured lines of the services' logs; free text in them is left out

There is no token, key, password, prompt, answer, task or other payload in it.
"""


def register(app: typer.Typer) -> None:
    """Adds the command."""
    remote_command(app, "support-bundle")(support_bundle)


async def support_bundle(
    connection: Connection,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File to write, a .tar.gz; must not exist.")] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option("--metrics", metavar="URL", help="URL of a metrics page to include. May be repeated."),
    ] = None,
    log: Annotated[
        list[Path] | None, typer.Option("--log", metavar="FILE", help="Log file to include. May be repeated.")
    ] = None,
) -> None:
    """Collects diagnostics into one file: doctor's findings, versions, settings, metrics, logs, queue, runs.

    Secrets are masked. Prompts, answers, tasks and other payloads are left out; of logs only structured lines without
    free text are included. Logs and metrics of the local stack are found automatically; logs and metrics of a
    deployment must be named.

    Examples:

        fulmen support-bundle

        docker compose -f deploy/docker-compose.yml logs --no-color > all.log

        fulmen support-bundle --store-target 127.0.0.1:7101 --log all.log --metrics http://127.0.0.1:7102/metrics
    """
    made = datetime.datetime.now(datetime.UTC)
    path = file or Path(f"fulmen-support-{made:%Y%m%d-%H%M%S}.tar.gz")
    folder = StackFolder(connection.state_dir.resolve())
    environments = {"caller": dict(os.environ), **_environments(folder)}
    scrubber = Scrubber(
        [*_secrets(connection, folder), *(each for one in environments.values() for each in secrets_in(one))]
    )
    with working("Collecting…"):
        parts = {"README.txt": README, **_facts(folder), **await _asked(connection)}
        parts |= await asyncio.to_thread(_metrics, _pages(connection, folder, metrics or []))
    texts = {name: scrubber.text(text) for name, text in parts.items()}
    for name, variables in environments.items():
        ours = {key: value for key, value in variables.items() if key.startswith(PREFIXES)}
        texts[f"settings/{name}.json"] = _json(scrubber.variables(ours))
    for name, source in _logs(connection, folder, log or []):
        texts[name] = "".join(f"{line}\n" for line in scrubber.log(_last_lines(source)))
    _write(path, texts, made)
    console().print(f"wrote {path}: {len(texts)} files. Review it before sharing.", soft_wrap=True)


def _secrets(connection: Connection, folder: StackFolder) -> Iterator[str]:
    """Yields the known secrets."""
    yield connection.bearer() or ""
    credentials = Credentials(folder.path)
    for path in (
        credentials.signing_key_file,
        credentials.client_token_file,
        *folder.path.glob("*.key"),
        *folder.path.glob("*.token"),
    ):
        if path.is_file() and os.access(path, os.R_OK):
            yield path.read_text(encoding="utf-8").strip()


def _environments(folder: StackFolder) -> dict[str, dict[str, str]]:
    """Returns the variables of the processes of this machine's stack, as far as the system shows them."""
    record = folder.read() if folder.is_running() else None
    found = {}
    for service in record.services if record is not None else ():
        with suppress(OSError):
            text = Path(f"/proc/{service.pid}/environ").read_text(encoding="utf-8", errors="replace")
            found[service.name] = dict(each.split("=", 1) for each in text.split("\0") if "=" in each)
    return found


def _facts(folder: StackFolder) -> dict[str, str]:
    """Returns the local facts."""
    packages = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    record = folder.read()
    return {
        "versions.json": _json({
            "python": sys.version, "platform": platform.platform(), "packages": dict(sorted(packages.items())),
        }),
        **({"stack.json": _json(dataclasses.asdict(record))} if record is not None else {}),
    }  # fmt: skip


async def _asked(connection: Connection) -> dict[str, str]:
    """Returns the deployment's facts; an error in place of those it does not answer."""
    findings = [dataclasses.asdict(each) for each in await findings_of(connection)]
    asked: dict[str, Any] = {"doctor.json": findings}
    try:
        async with connection.open() as client:
            try:
                stats = await client.rollouts.GetQueueStats(rollout_service_pb2.GetQueueStatsRequest(), timeout=LIMIT_S)
                asked["queue.json"] = as_dict(stats)
            except FulmenError as error:
                asked["queue.json"] = {"error": error.message}
            try:
                request = training_run_service_pb2.ListTrainingRunsRequest(page_size=PAGE_SIZE)
                runs = await client.training_runs.ListTrainingRuns(request, timeout=LIMIT_S)
                asked["runs.json"] = [_run(each) for each in runs.training_runs]
            except FulmenError as error:
                asked["runs.json"] = {"error": error.message}
    except CommandFailed as error:
        asked["queue.json"] = {"error": str(error)}
    return {name: _json(value) for name, value in asked.items()}


def _run(run: Any) -> dict[str, Any]:
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "state": enum_word(run, "state"),
        "step": run.step,
        "step_count": run.step_count,
        "create_time": when(run.create_time),
        "end_time": when(run.end_time),
    }


def _pages(connection: Connection, folder: StackFolder, more: list[str]) -> dict[str, str]:
    """Returns where to read metrics, by the name of the file."""
    pages = {f"further-{number}": url for number, url in enumerate(more, 1)}
    record = folder.read() if folder.is_running() and not connection.names_services else None
    for service in record.services if record is not None else ():
        for name, port in service.ports.items():
            if name.endswith("_metrics"):
                pages[service.name] = f"http://{LOOPBACK}:{port}/metrics"
    return pages


def _metrics(pages: Mapping[str, str]) -> dict[str, str]:
    found = {}
    for name, url in pages.items():
        if not url.startswith(("http://", "https://")):
            raise CommandFailed(
                f"--metrics {url}: not a URL such as http://127.0.0.1:7102/metrics.", exit_code=Exit.USAGE
            )
        try:
            with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:  # noqa: S310  # http or https, as checked above
                found[f"metrics/{name}.txt"] = answer.read().decode(errors="replace")
        except (urllib.error.URLError, OSError) as error:
            found[f"metrics/{name}.txt"] = f"# {url} does not answer: {error}\n"
    return found


def _logs(connection: Connection, folder: StackFolder, more: list[Path]) -> Iterator[tuple[str, Path]]:
    if not connection.names_services:
        yield from ((f"logs/{path.name}", path) for path in sorted(folder.logs.glob("*.log")))
    for number, path in enumerate(more, 1):
        if not path.is_file():
            raise CommandFailed(f"File {path} does not exist.", exit_code=Exit.NOT_FOUND)
        yield f"logs/further-{number}-{path.name}", path


def _last_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as lines:
        yield from deque(lines, maxlen=LOG_LINES)


def _write(path: Path, texts: Mapping[str, str], made: datetime.datetime) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CommandFailed(f"{path} already exists: choose another with --file.", exit_code=Exit.CONFLICT) from None
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, text in texts.items():
            content = text.encode()
            entry = tarfile.TarInfo(f"fulmen-support/{name}")
            entry.size, entry.mtime, entry.mode = len(content), int(made.timestamp()), 0o600
            archive.addfile(entry, io.BytesIO(content))


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
