"""`fulmen agent`: `check` runs an agent in this process and shows its spans, model calls and rewards; `resume` leases
rollouts of a paused agent version again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.train_toml.agent import agent_spec
from fulmen_cli.agent.hints import Attempt, hints
from fulmen_cli.agent.models import EchoModel, Endpoint, Models
from fulmen_cli.agent.recording import Recording
from fulmen_cli.agent.server import listening
from fulmen_cli.agent.show import as_json, show
from fulmen_cli.agent.subject import AgentOptions, InputOptions, Subject, subject_of
from fulmen_cli.command import Output, OutputOption, StateDirOption, local_command, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.errors import extra_needed
from fulmen_cli.local.record import DEFAULT_STATE_DIR, StackFolder
from fulmen_cli.output import as_dict, console, print_json, prints_beside, quieten_runner
from fulmen_cli.project.commands import project_name

__all__ = ["register"]

_PANEL: Final = "Model"

TimeoutOption = Annotated[float | None, typer.Option(min=0.1, help="Timeout of an attempt, seconds; by default none.")]


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Try agents before training them; resume paused ones.")
    local_command(group, "check")(check)
    remote_command(group, "resume")(resume)
    app.add_typer(group, name="agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Where model calls are answered."""

    model_url: Annotated[
        str | None,
        typer.Option(rich_help_panel=_PANEL, help="An OpenAI-compatible endpoint, such as https://host/v1."),
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", rich_help_panel=_PANEL, help="The key for --model-url."),
    ] = field(default=None, repr=False)
    model: Annotated[
        str | None,
        typer.Option(rich_help_panel=_PANEL, help="Model name to send instead of the agent's."),
    ] = None
    fake_model: Annotated[
        bool,
        typer.Option(
            "--fake-model",
            rich_help_panel=_PANEL,
            help="Use a built-in model that calls each tool once and repeats its input.",
        ),
    ] = False


def check(
    agent: AgentOptions,
    given: InputOptions,
    model: ModelOptions,
    timeout: TimeoutOption = None,
    state_dir: StateDirOption = Path(DEFAULT_STATE_DIR),
    output: OutputOption = Output.TABLE,
) -> None:
    """Runs an agent once and shows its spans, model calls, tokens and rewards.

    A Python agent runs in the main thread of this process, in its own directory and without a timeout: a `breakpoint()` in it works. An
    agent with `venv` or `requirements` runs in a process of that Python instead. Model calls go to the running stack, to --model-url, or to
    --fake-model. Nothing is stored or trained.

    Exit status 1 if an attempt ended without a reward.

    Examples:

        fulmen agent check train.toml --fake-model

        fulmen agent check train.toml --task 3 --times 5

        fulmen agent check agent.py:solve --input '{"question": "12+34="}' --model-url https://api.openai.com/v1

        fulmen agent check --command --input hello -- node agent.js
    """
    subject = subject_of(agent, given)
    models = _models(model, state_dir)
    if output is Output.TABLE:
        console().print(f"{subject.title}, input {_shown(subject.data)}\nmodels: {models.name}", markup=False)
        if subject.bundle:
            console().print(f"bundle: {subject.bundle}", markup=False)
    failed = _run(subject, models, times=given.times, timeout_s=timeout, output=output)
    if failed:
        raise typer.Exit(Exit.FAILED)


async def resume(
    connection: Connection,
    agent: Annotated[str, typer.Argument(help="Agent version, resources/agent.NAME/versions/N; see `fulmen queue`.")],
    project: Annotated[str, typer.Option(help="Its project; by default the token's.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Resumes an agent version that was paused because runners were lost while they ran it. Requires an admin token.

    Its queued rollouts are leased again. If runners are lost again, it is paused again.

    Example:

        fulmen agent resume resources/agent.arithmetic/versions/3
    """
    request = pb.ResumeAgentRequest(project=project_name(project) if project else "", agent=agent)
    async with connection.open() as client:
        answer = await client.projects.ResumeAgent(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
        return
    console().print(f"Resumed {agent}." if answer.was_paused else f"{agent} was not paused.")


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
            secrets=_secrets(subject.agent.secrets),
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


def _models(options: ModelOptions, state_dir: Path) -> Models:
    """Returns the models that the options choose; by default the running stack's models.

    Raises:
        CommandFailed: if there are none.
    """
    url, model = options.model_url, options.model or ""
    if options.fake_model and url:
        raise CommandFailed("Give --model-url or --fake-model, not both.", exit_code=Exit.USAGE)
    if options.fake_model:
        return EchoModel()
    if url:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
            raise CommandFailed(f"--model-url {url}: must have the form https://host/v1.", exit_code=Exit.USAGE)
        return Endpoint(base_url=url, key=options.api_key or "", model=model)
    folder = StackFolder(state_dir.resolve())
    record = folder.read() if folder.is_running() else None
    if record is None or "llm_proxy_http" not in record.targets:
        raise CommandFailed(
            "No model to call: start a stack with `fulmen up`, give --model-url URL (with --api-key), or --fake-model "
            "for a built-in model that calls each tool once and repeats its input.",
            exit_code=Exit.USAGE,
        )
    token = Connection(state_dir=state_dir).bearer() or ""
    return Endpoint(base_url=f"{record.targets['llm_proxy_http']}/v1", key=token, model=model)


def _secrets(names: Sequence[str]) -> dict[str, str]:
    """Returns the agent's secrets, from the variables of the same names.

    Raises:
        CommandFailed: if any is not set.
    """
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        text = f"The agent's secrets {', '.join(missing)} are not set in this shell; stored ones are not read here."
        raise CommandFailed(text, exit_code=Exit.USAGE)
    return {name: os.environ[name] for name in names}


def _watch_hosts(recording: Recording) -> None:
    """Records the host names that this process resolves. An audit hook cannot be removed, but the process ends soon."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" and isinstance(arguments[0], str):
            recording.hosts.add(arguments[0].lower())

    sys.addaudithook(hook)


def _shown(data: bytes) -> str:
    text = data.decode(errors="replace").strip()
    return text if len(text) <= 120 else f"{text[:120]}…"
