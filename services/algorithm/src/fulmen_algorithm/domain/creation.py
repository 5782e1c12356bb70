"""Checks a run before it exists: every problem is found and reported at once, and nothing is created."""

import asyncio
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from fulmen.errors import ResourceNotFound, SettingsInvalid, Violation
from fulmen.ids import uuid7
from fulmen_algorithm.domain.algorithm import AlgorithmEntry, AlgorithmSettings, Registry
from fulmen_algorithm.domain.context import RunInputs
from fulmen_algorithm.domain.inputs import Demonstration, read_demonstrations, read_tasks
from fulmen_algorithm.domain.ports import ResourceShelf
from fulmen_algorithm.domain.run import PolicyOrigin, PolicySpec, TrainingRun
from fulmen_algorithm.domain.scored_groups import ScoredGroups, read_scored_groups

_RUN_NAME = re.compile(r"trainingRuns/[a-z0-9-]{1,63}")
_POLICY_NAME = re.compile(r"[a-z0-9._-]{1,63}")
_PINNED = re.compile(r"resources/[a-z0-9._-]{1,128}/versions/[1-9][0-9]*")
_BUILD = re.compile(r"[^:]+\.py:[A-Za-z_]\w*")
MAX_DISPLAY_NAME = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDraft:
    """A run as a caller asks for it; names as in `TrainingRun`, an empty `name` for a new one."""

    name: str
    project: str
    display_name: str
    algorithm: str
    settings_json: str
    policy: PolicySpec
    inputs: Mapping[str, str]
    request_id: str = ""


def digest(draft: RunDraft) -> str:
    """Tells whether two drafts ask for the same run; the request id does not count."""
    parts = [draft.project, draft.display_name, draft.algorithm, draft.settings_json, sorted(draft.inputs.items())]
    policy = [draft.policy.name, draft.policy.origin.value, draft.policy.source]
    return hashlib.sha256(json.dumps([*parts, policy]).encode()).hexdigest()


def parse_settings(entry: AlgorithmEntry[Any], settings_json: str) -> AlgorithmSettings:
    """Reads settings strictly.

    Raises:
        SettingsInvalid: with every problem.
    """
    try:
        return entry.settings.model_validate_json(settings_json or "{}")
    except ValidationError as error:
        raise SettingsInvalid("The settings of the run are not valid.", violations=_violations(error)) from None


async def checked_run(draft: RunDraft, *, registry: Registry, shelf: ResourceShelf, now: datetime) -> TrainingRun:
    """Checks a draft and everything that it names.

    Raises:
        SettingsInvalid: with every problem, bad lines of data sets included.
        ResourceNotFound: if an input is unknown.
    """
    violations = [*_problems(draft)]
    entry = registry.get(draft.algorithm)
    settings: AlgorithmSettings | None = None
    if entry is None:
        known = ", ".join(sorted(registry))
        violations.append(Violation(field="algorithm", description=f"{draft.algorithm!r} is not one of: {known}"))
    else:
        try:
            settings = parse_settings(entry, draft.settings_json)
        except SettingsInvalid as error:
            violations += error.violations
        violations += _input_problems(draft, entry)
        violations += await _content_problems(draft, shelf)
    if violations or settings is None:
        raise SettingsInvalid("The training run is not valid.", violations=violations)
    return TrainingRun(
        name=draft.name or f"trainingRuns/{uuid7()}",
        project=draft.project,
        display_name=draft.display_name,
        algorithm=draft.algorithm,
        settings_json=settings.model_dump_json(),
        policy=draft.policy,
        inputs=dict(draft.inputs),
        create_time=now,
        step_count=settings.steps,
        request_id=draft.request_id,
        request_digest=digest(draft),
    )


async def read_inputs(inputs: Mapping[str, str], shelf: ResourceShelf) -> tuple[RunInputs, list[Violation]]:
    """Reads the data sets that a run names.

    Returns:
        What could be read, and what is wrong with the rest.

    Raises:
        ResourceNotFound: if one is unknown.
    """
    violations: list[Violation] = []
    tasks: dict[str, list[bytes]] = {"train_tasks": [], "validation_tasks": []}
    for use in tasks:
        if use in inputs:
            tasks[use], bad = read_tasks((await shelf.get(inputs[use])).data, field=f"inputs.{use}")
            violations += bad
    demonstrations: list[Demonstration] = []
    if "demonstrations" in inputs:
        content = (await shelf.get(inputs["demonstrations"])).data
        demonstrations, bad = read_demonstrations(content, field="inputs.demonstrations")
        violations += bad
    scored: ScoredGroups | None = None
    if "scores" in inputs:
        content = (await shelf.get(inputs["scores"])).data
        # Up to half a gigabyte unpacked: in a thread, so that rpcs go on.
        scored, bad = await asyncio.to_thread(read_scored_groups, content, field="inputs.scores")
        violations += bad
    read = RunInputs(
        **{use: tuple(lines) for use, lines in tasks.items()}, demonstrations=tuple(demonstrations), scored=scored
    )
    return read, violations


def _problems(draft: RunDraft) -> list[Violation]:
    found = []
    if draft.name and not _RUN_NAME.fullmatch(draft.name):
        found.append(Violation(field="name", description="must be trainingRuns/ and 1 to 63 of [a-z0-9-]"))
    if len(draft.display_name) > MAX_DISPLAY_NAME:
        found.append(Violation(field="display_name", description=f"is longer than {MAX_DISPLAY_NAME} characters"))
    if not _POLICY_NAME.fullmatch(draft.policy.name):
        found.append(Violation(field="policy.name", description="must be 1 to 63 of [a-z0-9._-]"))
    match draft.policy.origin:
        case PolicyOrigin.VERSION:
            prefix = f"resources/policy.{draft.policy.name}/versions/"
            if not draft.policy.source.startswith(prefix) or not _PINNED.fullmatch(draft.policy.source):
                found.append(Violation(field="policy.version", description=f"must be {prefix}<number>"))
        case PolicyOrigin.BUILD:
            if not _BUILD.fullmatch(draft.policy.source):
                found.append(Violation(field="policy.build", description="must be of the form file.py:function"))
            if "bundle" not in draft.inputs:
                found.append(Violation(field="inputs.bundle", description="is needed to build the policy"))
        case PolicyOrigin.PATH:
            if not draft.policy.source:
                found.append(Violation(field="policy.path", description="must be a folder"))
        case PolicyOrigin.NEWEST:
            pass
    return found


def _input_problems(draft: RunDraft, entry: AlgorithmEntry[Any]) -> list[Violation]:
    known = {*entry.needs, *entry.takes, "bundle"}
    found = [
        Violation(field=f"inputs.{use}", description=f"is needed by {draft.algorithm}")
        for use in entry.needs
        if use not in draft.inputs
    ]
    if "validation_tasks" in draft.inputs and not {"agent"} & {*draft.inputs, *entry.needs}:
        found.append(Violation(field="inputs.agent", description="is needed to validate"))
    for use, name in sorted(draft.inputs.items()):
        if use not in known:
            found.append(Violation(field=f"inputs.{use}", description=f"is not used by {draft.algorithm}"))
        elif not _PINNED.fullmatch(name):
            text = "must be pinned: resources/<id>/versions/<number>"
            found.append(Violation(field=f"inputs.{use}", description=text))
    return found


async def _content_problems(draft: RunDraft, shelf: ResourceShelf) -> list[Violation]:
    """Reads the data sets; those whose name is malformed were reported already."""
    readable = {use: name for use, name in draft.inputs.items() if _PINNED.fullmatch(name)}
    for use in sorted({"agent", "bundle"} & set(readable)):
        await shelf.get(readable[use])
    _, violations = await read_inputs(readable, shelf)
    if draft.policy.origin is PolicyOrigin.VERSION and _PINNED.fullmatch(draft.policy.source):
        await shelf.get(draft.policy.source)
    if draft.policy.origin is PolicyOrigin.NEWEST and _POLICY_NAME.fullmatch(draft.policy.name):
        try:
            await shelf.get(f"resources/policy.{draft.policy.name}")
        except ResourceNotFound:
            text = "has no published version: say where the first weights come from"
            violations.append(Violation(field="policy", description=text))
    return violations


def _violations(error: ValidationError) -> list[Violation]:
    found = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(["settings", *(str(part) for part in item["loc"])])
        text = "no such setting" if item["type"] == "extra_forbidden" else item["msg"]
        found.append(Violation(field=field, description=text))
    return found
