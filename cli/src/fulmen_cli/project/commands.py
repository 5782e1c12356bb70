"""`fulmen project`: tenants, their share, quotas, retention, rules and limits of model calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2 as rollouts_pb
from fulmen.store.v1.model_limits_pb2 import CallLimits, ModelLimits
from fulmen.store.v1.rollout_service_pb2 import QueueRules
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import as_dict, console, print_json, print_rows, when
from fulmen_cli.project.budgets import BUDGET_FORM, budget_text, set_budget

__all__ = ["project_name", "register"]

SECONDS_PER_DAY: Final = 86_400
PAGE_SIZE: Final = 1000
AGEING: Final = "ageing_interval"
SWITCHES: Final = ("match_labels", "affinity", "longest_first", "hedging", "weighted_share")
LIMITS: Final = ("requests_per_minute", "tokens_per_minute", "concurrent_calls")
BUDGET: Final = "attempt_token_budget"
PER_ATTEMPT: Final = "attempt."
ON_OFF: Final = {"on": True, "off": False}

NameArgument = Annotated[str, typer.Argument(help="For example team-a, or projects/team-a.")]
WeightOption = Annotated[
    int | None, typer.Option(help="Share of the runners relative to other projects, 1 to 1000; by default 100.")
]
RunningOption = Annotated[int | None, typer.Option(help="Quota of running rollouts; 0: unlimited.")]
QueuedOption = Annotated[int | None, typer.Option(help="Quota of queued rollouts; 0: unlimited.")]
RetentionOption = Annotated[
    float | None, typer.Option(help="Retention of final rollouts and their spans, days; 0: unlimited.")
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option("--rule", help=f"NAME=on|off of {', '.join(SWITCHES)}; or {AGEING}=SECONDS. May be repeated."),
]
LimitOption = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        help=f"NAME=NUMBER of {', '.join(LIMITS)}, for all model calls; {PER_ATTEMPT}NAME=NUMBER for each attempt's; "
        f"or {BUDGET}=NUMBER. 0: no limit. May be repeated.",
    ),
]
BudgetOption = Annotated[
    list[str] | None,
    typer.Option("--budget", help=f"{BUDGET_FORM}: stops model calls at this cost. 0: none. May be repeated."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    projects = new_group("Projects: tenants with weights, quotas, retention, queue rules and limits of model calls.")
    app.add_typer(projects, name="project")
    remote_command(projects, "create")(create)
    remote_command(projects, "get")(get)
    remote_command(projects, "update")(update)
    remote_command(projects, "list")(list_projects)
    remote_command(projects, "delete")(delete)
    remote_command(projects, "pause")(pause)
    remote_command(projects, "resume")(resume)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectOptions:
    """Settings of a project; unset ones stay as they are."""

    weight: WeightOption = None
    max_running: RunningOption = None
    max_queued: QueuedOption = None
    retention_days: RetentionOption = None
    rule: RuleOption = None
    limit: LimitOption = None
    budget: BudgetOption = None

    def apply(self, project: pb.Project) -> None:
        """Sets what is given and leaves the rest.

        Raises:
            CommandFailed: if a rule, limit or budget is malformed.
        """
        if self.weight is not None:
            project.weight = self.weight
        if self.max_running is not None:
            project.max_running = self.max_running
        if self.max_queued is not None:
            project.max_queued = self.max_queued
        if self.retention_days == 0:
            project.ClearField("retention")
        elif self.retention_days is not None:
            project.retention.FromSeconds(round(self.retention_days * SECONDS_PER_DAY))
        for rule in self.rule or ():
            _set_rule(project.rules, rule)
        for limit in self.limit or ():
            _set_limit(project.model_limits, limit)
        for budget in self.budget or ():
            set_budget(project.model_limits, budget)


async def create(
    connection: Connection,
    name: NameArgument,
    settings: ProjectOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Creates a project; requires a token for all projects.

    Examples:

        fulmen project create team-a

        fulmen project create team-b --weight 300 --max-running 64 --retention-days 30 --rule hedging=on
    """
    project = pb.Project(name=project_name(name))
    settings.apply(project)
    async with connection.open() as client:
        created = (await client.projects.CreateProject(pb.CreateProjectRequest(project=project))).project
    _show(created, output)


async def get(connection: Connection, name: NameArgument = "", output: OutputOption = Output.TABLE) -> None:
    """Shows a project; by default the token's.

    Examples:

        fulmen project get team-a
    """
    async with connection.open() as client:
        request = pb.GetProjectRequest(name=project_name(name) if name else "")
        found = (await client.projects.GetProject(request)).project
    _show(found, output)


async def update(
    connection: Connection,
    name: NameArgument,
    settings: ProjectOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Changes settings of a project; fails if it was changed concurrently.

    Examples:

        fulmen project update team-a --max-queued 100000

        fulmen project update team-a --rule affinity=off --rule ageing_interval=30

        fulmen project update team-a --limit tokens_per_minute=2000000 --limit attempt_token_budget=50000

        fulmen project update team-a --budget project=500/month --budget run/demo=20
    """
    async with connection.open() as client:
        project = (await client.projects.GetProject(pb.GetProjectRequest(name=project_name(name)))).project
        settings.apply(project)
        changed = (await client.projects.UpdateProject(pb.UpdateProjectRequest(project=project))).project
    _show(changed, output)


async def list_projects(connection: Connection, output: OutputOption = Output.TABLE) -> None:
    """Lists the projects that the token can access.

    Examples:

        fulmen project list
    """
    found: list[pb.Project] = []
    request = pb.ListProjectsRequest(page_size=PAGE_SIZE)
    async with connection.open() as client:
        while True:
            page = await client.projects.ListProjects(request)
            found += page.projects
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
    rows = [
        (each.name, str(each.weight), _limit(each.max_running), _limit(each.max_queued), _kept(each)) for each in found
    ]
    columns = ("project", "weight", "max running", "max queued", "retention")
    print_rows(output, columns, rows, messages=found, empty="No projects.")


async def delete(
    connection: Connection,
    name: NameArgument,
    cancel: Annotated[
        bool,
        typer.Option(
            "--cancel", help="Cancel running rollouts; without it, a project with running rollouts is not deleted."
        ),
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Permanently deletes a project with all its data in the store, and revokes its tokens.

    Requires a token for all projects. The data is deleted in the background. The name cannot be used again.

    Examples:

        fulmen project delete team-a

        fulmen project delete team-a --cancel
    """
    request = pb.DeleteProjectRequest(name=project_name(name), cancel_running=cancel)
    async with connection.open() as client:
        answer = await client.projects.DeleteProject(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
    else:
        console().print(f"Deleted {request.name}. Its data is removed in the background.", markup=False)


async def pause(
    connection: Connection,
    name: NameArgument = "",
    reason: Annotated[str, typer.Option(help="The reason, shown to people who look at the queue.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Pauses the queue of a project, by default the token's: its rollouts are not assigned to runners.

    Running rollouts continue, and new ones can be created. `fulmen queue` and `fulmen status` show the pause.

    Examples:

        fulmen project pause

        fulmen project pause team-a --reason "the model server is replaced"
    """
    request = rollouts_pb.PauseQueueRequest(project=project_name(name) if name else "", reason=reason)
    async with connection.open() as client:
        answer = await client.rollouts.PauseQueue(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
    else:
        console().print(f"Paused since {when(answer.pause_time)} UTC.")


async def resume(connection: Connection, name: NameArgument = "", output: OutputOption = Output.TABLE) -> None:
    """Resumes the queue of a project, by default the token's.

    Examples:

        fulmen project resume team-a
    """
    request = rollouts_pb.ResumeQueueRequest(project=project_name(name) if name else "")
    async with connection.open() as client:
        answer = await client.rollouts.ResumeQueue(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
    else:
        console().print("Resumed." if answer.was_paused else "The queue was not paused.")


def project_name(given: str) -> str:
    """Returns `projects/{project}` for either form of a name."""
    return given if given.startswith("projects/") else f"projects/{given}"


def _set_rule(rules: QueueRules, text: str) -> None:
    name, _, value = text.partition("=")
    if name == AGEING and value.replace(".", "", 1).isdecimal():
        rules.ageing_interval.FromMilliseconds(round(float(value) * 1000))
    elif name in SWITCHES and value in ON_OFF:
        setattr(rules, name, ON_OFF[value])
    else:
        raise CommandFailed(
            f"--rule {text}: give NAME=on|off, NAME one of {', '.join(SWITCHES)}, or {AGEING}=SECONDS.",
            exit_code=Exit.USAGE,
        )


def _set_limit(limits: ModelLimits, text: str) -> None:
    name, _, value = text.partition("=")
    target: ModelLimits | CallLimits = limits
    if name.removeprefix(PER_ATTEMPT) in LIMITS:
        target = limits.attempt if name.startswith(PER_ATTEMPT) else limits.project
    elif name != BUDGET:
        value = ""
    if not value.isdecimal():
        raise CommandFailed(
            f"--limit {text}: give NAME=NUMBER, NAME one of {', '.join(LIMITS)}, the same after {PER_ATTEMPT}, or {BUDGET}.",
            exit_code=Exit.USAGE,
        )
    setattr(target, name.removeprefix(PER_ATTEMPT), int(value))


def _limits_set(limits: ModelLimits) -> list[str]:
    found = [f"{name}={getattr(limits.project, name)}" for name in LIMITS if getattr(limits.project, name)]
    found += [
        f"{PER_ATTEMPT}{name}={getattr(limits.attempt, name)}" for name in LIMITS if getattr(limits.attempt, name)
    ]
    return [*found, *([f"{BUDGET}={limits.attempt_token_budget}"] if limits.attempt_token_budget else [])]


def _show(project: pb.Project, output: Output) -> None:
    if output is Output.JSON:
        print_json(as_dict(project))
        return
    rules = project.rules
    switched = [f"{name}={'on' if getattr(rules, name) else 'off'}" for name in SWITCHES if rules.HasField(name)]
    if rules.HasField(AGEING):
        switched.append(f"{AGEING}={rules.ageing_interval.ToMilliseconds() / 1000:g}")
    facts = [
        ("project", project.name),
        ("weight", str(project.weight)),
        ("max running", _limit(project.max_running)),
        ("max queued", _limit(project.max_queued)),
        ("retention", _kept(project)),
        ("rules", ", ".join(switched) or "the defaults"),
        ("limits", ", ".join(_limits_set(project.model_limits)) or "none"),
        *(("budget", budget_text(each)) for each in project.model_limits.budgets),
        ("created", when(project.create_time)),
    ]
    screen = console()
    for label, value in facts:
        screen.print(f"{label:<14}{value}", markup=False, soft_wrap=True)


def _limit(value: int) -> str:
    return str(value) if value else "unlimited"


def _kept(project: pb.Project) -> str:
    return f"{project.retention.ToSeconds() / SECONDS_PER_DAY:g} days" if project.HasField("retention") else "unlimited"
