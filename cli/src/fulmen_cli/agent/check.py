"""`fulmen agent check`: runs one agent once, in this process, and shows all that it did."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from fulmen.agent_config import agent_spec
from fulmen_cli.agent.hints import Attempt, hints
from fulmen_cli.agent.models import EchoModel, Endpoint, Models
from fulmen_cli.agent.recording import Recording
from fulmen_cli.agent.server import listening
from fulmen_cli.agent.show import as_json, show
from fulmen_cli.agent.subject import Given, Subject, subject_of
from fulmen_cli.command import Output, OutputOption, StateDirOption, local_command, new_group
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.errors import extra_needed
from fulmen_cli.local.record import DEFAULT_STATE_DIR, StackFolder
from fulmen_cli.output import console, print_json
from fulmen_cli.runner_output import prints_beside, quieten_runner

__all__ = ["register"]

MAX_TIMES: Final = 1000
_MODEL_PANEL: Final = "Which model answers"
_INPUT_PANEL: Final = "What the agent is given"

TimesOption = Annotated[
    int, typer.Option(min=1, max=MAX_TIMES, rich_help_panel=_INPUT_PANEL, help="How often it is run.")
]
TimeoutOption = Annotated[
    float | None, typer.Option(min=0.1, help="Ends an attempt after so many seconds; by default none is ended.")
]


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Tries agents before they are trained.")
    local_command(group, "check")(check)
    app.add_typer(group, name="agent")


def check(
    what: Annotated[
        str | None, typer.Argument(metavar="[TRAIN.TOML|FILE.PY:NAME]", help="The configuration, or the callable.")
    ] = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PROGRAM ARGUMENT…]", help="With --command: what to run, after --.")
    ] = None,
    is_command: Annotated[bool, typer.Option("--command", help="The agent is the program after --.")] = False,
    grader: Annotated[
        str | None, typer.Option(help="What scores, as FILE.PY:NAME; by default as the train.toml says.")
    ] = None,
    task: Annotated[
        int | None,
        typer.Option(min=0, rich_help_panel=_INPUT_PANEL, help="Line of the train.toml's tasks, from 0, the default."),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--input", rich_help_panel=_INPUT_PANEL, help="The input itself: JSON, or text.")
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option(rich_help_panel=_INPUT_PANEL, help="A file with the input.")
    ] = None,
    times: TimesOption = 1,
    model_url: Annotated[
        str | None,
        typer.Option(rich_help_panel=_MODEL_PANEL, help="An OpenAI-compatible endpoint, such as https://host/v1."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=_MODEL_PANEL, help="The key for --model-url."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MODEL_PANEL, help="The model to ask for instead of the one that the agent names."
        ),
    ] = None,
    fake_model: Annotated[
        bool, typer.Option("--fake-model", rich_help_panel=_MODEL_PANEL, help="A built-in model that only repeats.")
    ] = False,
    timeout: TimeoutOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIR),
    output: OutputOption = Output.TABLE,
) -> None:
    """Runs an agent once and shows its spans, model calls, tokens and rewards.

    A Python agent runs in the main thread of this very process, from its own folder, and without a time limit: a
    `breakpoint()` in it stops there. Models are those of the running stack, of --model-url, or --fake-model. Nothing is
    stored, also in a running stack: `fulmen trace` will not find it. Nothing is trained.

    Exits with 0 if every attempt ended with a reward, with 1 if one did not.

    Examples:

        fulmen agent check train.toml --fake-model

        fulmen agent check train.toml --task 3 --times 5

        fulmen agent check agent.py:solve --input '{"question": "12+34="}' --model-url https://api.openai.com/v1

        fulmen agent check --command --input hello -- node agent.js
    """
    given = Given(task=task, text=text, file=input_file)
    argv = [each for each in (what, *(words or ())) if each is not None] if is_command else list(words or ())
    subject = subject_of(None if is_command else what, argv, given, grader=grader)
    models = _models(model_url, api_key, model, fake=fake_model, state_dir=state_dir)
    if output is Output.TABLE:
        console().print(f"{subject.title}, input {_shown(subject.data)}\nmodels: {models.name}", markup=False)
    failed = _run(subject, models, times=times, timeout_s=timeout, output=output)
    if failed:
        raise typer.Exit(Exit.FAILED)


def _run(subject: Subject, models: Models, *, times: int, timeout_s: float | None, output: Output) -> int:
    """Runs the attempts and shows each as it ends; returns how many failed."""
    with extra_needed("Agents are run by the runner"):
        from fulmen_runner import once
    quieten_runner()
    recording = Recording()
    _watch_hosts(recording)
    documents: list[dict[str, Any]] = []
    spec = agent_spec(subject.agent, "")

    def ended(attempt: dict[str, Any]) -> None:
        advice = hints(
            Attempt(
                ended=attempt,
                calls=recording.calls(attempt["rollout"]),
                refused=recording.refused(),
                hosts=frozenset(recording.hosts),
                in_process=bool(subject.agent.python),
                judged=bool(subject.agent.grader or subject.agent.grader_command or subject.agent.judge),
            )
        )
        documents.append(as_json(attempt, recording, advice))
        if output is Output.TABLE:
            show(console(), attempt, recording, advice)

    with listening(models, recording) as where:
        stage = once.Stage(
            folder=subject.folder,
            archive=subject.archive,
            archive_sha256_hex=subject.archive_sha256_hex,
            llm_proxy_url=where.models_url,
            otlp_url=where.otlp_url,
            calls_of=recording.count,
            timeout_s=timeout_s,
        )
        os.chdir(subject.folder)
        sys.path.insert(0, str(subject.folder))
        inputs = [(subject.data, subject.content_type)] * times
        with prints_beside(output):
            once.run_attempts(spec, inputs, stage, on_start=recording.begin, on_end=ended)
    if output is Output.JSON:
        print_json(documents)
    failed = sum(each["failure"] is not None for each in documents)
    if times > 1 and output is Output.TABLE:
        console().print(f"{times - failed} of {times} attempts ended with a reward.")
    return failed


def _models(url: str | None, key: str | None, model: str | None, *, fake: bool, state_dir: Path) -> Models:
    """Decides what answers model calls.

    Raises:
        CommandFailed: if nothing does.
    """
    if fake and url:
        raise CommandFailed("Give --model-url or --fake-model, not both.", exit_code=Exit.USAGE)
    if fake:
        return EchoModel()
    if url:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise CommandFailed(f"--model-url {url}: write it as https://host/v1.", exit_code=Exit.USAGE)
        return Endpoint(base_url=url, key=key or "", model=model or "")
    folder = StackFolder(state_dir.resolve())
    record = folder.read() if folder.is_running() else None
    if record is None or "llm_proxy_http" not in record.targets:
        raise CommandFailed(
            "No model answers the agent: start a stack with `fulmen up`, give --model-url URL (with --api-key), or "
            "--fake-model for one that only repeats what it is told.",
            exit_code=Exit.USAGE,
        )
    token = Connection(state_dir=state_dir).bearer() or ""
    return Endpoint(base_url=f"{record.targets['llm_proxy_http']}/v1", key=token, model=model or "")


def _watch_hosts(recording: Recording) -> None:
    """Notes which hosts this process looks up; a hook cannot be taken away again, and the process ends soon."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" and isinstance(arguments[0], str):
            recording.hosts.add(arguments[0].lower())

    sys.addaudithook(hook)


def _shown(data: bytes) -> str:
    text = data.decode(errors="replace").strip()
    return text if len(text) <= 120 else f"{text[:120]}…"
