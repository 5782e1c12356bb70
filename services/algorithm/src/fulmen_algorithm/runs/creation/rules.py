"""Validates a run before it is created: all problems are reported together, and nothing is stored; see `stages`."""

import asyncio
import hashlib
import json
import re
import shutil
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fulmen.errors import SettingsInvalid, Violation
from fulmen.train_toml.reader import hint
from fulmen_algorithm.policy.engine_settings import EngineSettings, ExternalEngine, VllmEngine, each_engine
from fulmen_algorithm.policy.model_roots import ANY_FOLDER, ModelRoots
from fulmen_algorithm.rollouts.scored_groups import ScoredGroups, no_groups, read_scored_groups
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, AlgorithmSettings, Registry, RunSettings, Settings
from fulmen_algorithm.runs.context import RunInputs
from fulmen_algorithm.runs.creation.descriptions import description_problems
from fulmen_algorithm.runs.creation.earlier_runs import earlier_problems
from fulmen_algorithm.runs.creation.inputs import (
    Demonstration,
    Preference,
    prompt_problems,
    read_demonstrations,
    read_preferences,
    read_tasks,
)
from fulmen_algorithm.runs.creation.policies import (
    PINNED,
    POLICY_NAME,
    form_problems,
    name_problems,
    place_problems,
    version_problems,
)
from fulmen_algorithm.runs.creation.replay_problems import replay_problems
from fulmen_algorithm.runs.creation.reward_models import reward_model_problems
from fulmen_algorithm.runs.creation.settings_problems import settings_problems
from fulmen_algorithm.runs.ports import BaseModels, Content, GpuPlan, ResourceStore
from fulmen_algorithm.runs.run import NO_POLICY, PolicyOrigin, PolicySpec
from fulmen_algorithm.training.compute import THIS_MACHINE
from fulmen_algorithm.training.context_plan import context_folder_problems
from fulmen_algorithm.training.passes import pass_problems
from fulmen_algorithm.training.tensor_plan import folder_problems

RUN_NAME = re.compile(r"(projects/[a-z0-9-]{1,63})/trainingRuns/[a-z0-9-]{1,63}")
RUN_FORM = "must be projects/<project>/trainingRuns/ and 1 to 63 of [a-z0-9-], in the project of the run"
_FIRST_WEIGHTS = (PolicyOrigin.PATH, PolicyOrigin.BASE, PolicyOrigin.BUILD)
"""Origins of which there is no version yet."""
ROLLOUTS = "rollouts"
"""The input that names a run, whose stored rollouts are read, instead of a resource."""
MAX_SETTINGS = 256 * 1024
"""Characters of settings, JSON."""


KnowsRun = Callable[[str], bool]
"""Returns whether the service has a run of this name."""

GpuPlans = Callable[[RunSettings, bool], Awaitable[GpuPlan]]
IsTaken = Callable[[str, str], Awaitable[bool]]
"""Returns whether a model name is in use outside a project."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDraft:
    """A requested run. Field names as in `TrainingRun`; `name` is empty for a new run."""

    name: str
    project: str
    display_name: str
    algorithm: str
    settings_json: str
    policy: PolicySpec
    inputs: Mapping[str, str]
    request_id: str = ""
    tags: tuple[str, ...] = ()
    pause_at_step: int = 0


def digest(*stages: RunDraft) -> str:
    """Computes a digest of a draft and those that follow it, without request ids; equal drafts have equal digests."""
    return hashlib.sha256(json.dumps([_parts(draft) for draft in stages]).encode()).hexdigest()


def _parts(draft: RunDraft) -> list[object]:
    parts = [draft.project, draft.display_name, draft.algorithm, draft.settings_json, sorted(draft.inputs.items())]
    policy = [draft.policy.name, draft.policy.origin.value, draft.policy.source]
    pause = [draft.pause_at_step] if draft.pause_at_step else []
    return [*parts, policy, *([list(draft.tags)] if draft.tags else []), *pause]


def parse_settings(entry: AlgorithmEntry[Settings], settings_json: str) -> Settings:
    """Reads settings strictly.

    Raises:
        SettingsInvalid: with every problem.
    """
    if len(settings_json) > MAX_SETTINGS:
        text = f"have {len(settings_json)} characters; allowed are {MAX_SETTINGS}"
        raise SettingsInvalid(
            "The settings of the run are not valid.", violations=[Violation(field="settings", description=text)]
        )
    try:
        return entry.settings.model_validate_json(settings_json or "{}")
    except ValidationError as error:
        raise SettingsInvalid(
            "The settings of the run are not valid.", violations=settings_problems(error, entry.settings)
        ) from None


async def _fits(settings: RunSettings, trains: bool) -> GpuPlan:
    return GpuPlan()


async def _is_free(policy: str, project: str) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationRules:
    """Restrictions of this service on its runs.

    Attributes:
        registry: Algorithms.
        vllm_command: The vLLM program; empty if it is not checked.
        external_engines: Addresses of the vLLM servers that a run may name as its engine.
        max_engines: Maximum number of engines of all runs together; 0 if it is not checked.
        endpoints: Addresses that a run may call.
        exchange_targets: Addresses of services through which ranks may exchange gradients.
        clusters: Names of the clusters on which ranks may run.
        joined_clusters: Those of machines that join, on which engines may not.
        ray_clusters: Those of Ray.
        model_roots: Folders below which `policy.path` may be.
        models: Models that `policy.base` may name.
        is_taken: Whether a model name is in use outside a project.
        gpu_plan: Plans the GPUs of this machine for a run, which trains weights or not, whatever others hold.
        cluster_plan: Plans a run on the clusters that it names, which are asked what they have.
        device: Device of training, `cpu` or `cuda`.
    """

    registry: Registry
    vllm_command: str = ""
    external_engines: Collection[str] = ()
    max_engines: int = 0
    endpoints: Collection[str] = ()
    exchange_targets: Collection[str] = ()
    clusters: Collection[str] = (THIS_MACHINE,)
    joined_clusters: Collection[str] = ()
    ray_clusters: Collection[str] = ()
    model_roots: ModelRoots = ANY_FOLDER
    models: BaseModels | None = None
    is_taken: IsTaken = _is_free
    gpu_plan: GpuPlans = _fits
    cluster_plan: GpuPlans = _fits
    device: str = "cpu"


def checked_draft(draft: RunDraft, registry: Registry) -> tuple[RunSettings | None, list[Violation]]:
    """Checks what is the same in every deployment: the algorithm, its settings, and which inputs it needs.

    Returns:
        The settings, None if they cannot be read, and every problem.
    """
    settings, violations = checked_settings(draft, registry)
    violations = [*_problems(draft), *violations]
    if (entry := registry.get(draft.algorithm)) is not None:
        violations += [*_policy_problems(draft, entry), *_input_problems(draft, entry)]
    return settings, violations


def checked_settings(draft: RunDraft, registry: Registry) -> tuple[RunSettings | None, list[Violation]]:
    """Checks the algorithm and its settings alone; see `checked_draft`."""
    entry = registry.get(draft.algorithm)
    if entry is None:
        known = sorted(registry)
        text = f"{draft.algorithm!r} is not one of: {', '.join(known)}{hint(draft.algorithm, known, list_all=False)}"
        return None, [Violation(field="algorithm", description=text)]
    try:
        return parse_settings(entry, draft.settings_json), []
    except SettingsInvalid as error:
        return None, list(error.violations)


async def checked_with_resources(
    draft: RunDraft, rules: CreationRules, resources: ResourceStore, knows_run: KnowsRun, trained: Collection[str]
) -> tuple[RunSettings | None, list[Violation]]:
    """Returns the settings of a draft and every problem; `trained` are the policies that the stages before it train."""
    settings, violations = checked_draft(draft, rules.registry)
    if settings is not None:
        violations += _engine_problems(settings.engine, rules, beside=settings.engines_beside)
        violations += _endpoint_problems(settings, rules.endpoints)
        violations += _target_problems(settings, rules.exchange_targets)
        violations += _cluster_problems(settings.cluster, rules.clusters, field="parallel")
        if isinstance(settings, AlgorithmSettings):
            problems = pass_problems(settings.passes, rules.device)
            violations += [Violation(field="settings.passes", description=text) for text in problems]
        if not isinstance(settings.engine, ExternalEngine) and settings.engine.cluster != THIS_MACHINE:
            violations += _cluster_problems(settings.engine.cluster, rules.clusters, field="engine")
            if settings.engine.cluster in rules.joined_clusters:
                text = f"on {settings.engine.cluster!r} are only for ranks: engines join with fulmen-weight-agent (docs/engines.md)"
                violations.append(Violation(field="settings.engine.cluster", description=text))
        plan = await rules.gpu_plan(settings, rules.registry[draft.algorithm].trains)
        violations += [Violation(field="settings", description=problem) for problem in plan.problems]
    if draft.algorithm in rules.registry:
        places = await place_problems(draft.policy, project=draft.project, roots=rules.model_roots, models=rules.models)
        violations += places
        if not places and isinstance(settings, AlgorithmSettings):
            violations += await _split_problems(settings, draft.policy)
            violations += await asyncio.to_thread(replay_problems, settings, draft.policy)
        violations += await _taken_problems(draft, rules.is_taken)
        violations += await _content_problems(draft, rules.registry[draft.algorithm], resources)
        violations += await _source_problems(draft, resources, knows_run)
        if settings is not None:
            violations += await earlier_problems(draft.project, settings, resources, knows_run)
            violations += await reward_model_problems(
                draft.project, draft.policy, settings, resources, rules.model_roots
            )
        if draft.policy.origin is not PolicyOrigin.NEWEST or draft.policy.name not in trained:
            violations += await version_problems(draft.policy, resources)
    return settings, violations


async def _split_problems(settings: AlgorithmSettings, policy: PolicySpec) -> list[Violation]:
    """Checks whether matrices or rows can be split; for models that are not yet on this machine, the trainer checks it."""
    if policy.origin is not PolicyOrigin.PATH:
        return []
    found, folder = [], Path(policy.source)
    if settings.parallel.tensor > 1:
        found += await asyncio.to_thread(folder_problems, folder, settings.parallel.tensor)
    if settings.parallel.context > 1:
        found += await asyncio.to_thread(context_folder_problems, folder)
    return [Violation(field="settings.parallel", description=text) for text in found]


async def _taken_problems(draft: RunDraft, is_taken: IsTaken) -> list[Violation]:
    if not POLICY_NAME.fullmatch(draft.policy.name) or not await is_taken(draft.policy.name, draft.project):
        return []
    text = f"the model name {draft.policy.name!r} is in use outside {draft.project}: choose another"
    return [Violation(field="policy.name", description=text)]


def _engine_problems(engine: EngineSettings, rules: CreationRules, *, beside: int) -> list[Violation]:
    problems, engines = [], each_engine(engine)
    if rules.max_engines and len(engines) + beside > rules.max_engines:
        problems.append(
            f"needs {len(engines) + beside} engines; the service has at most {rules.max_engines} (its setting "
            "FULMEN_ALGORITHM_MAX_ENGINES)"
        )
    is_here = isinstance(engine, VllmEngine) and engine.cluster == THIS_MACHINE
    if is_here and rules.vllm_command and shutil.which(rules.vllm_command) is None:
        problems.append(
            f"the program {rules.vllm_command!r} does not exist: install vLLM, or name it in the service's setting "
            "FULMEN_ALGORITHM_VLLM_COMMAND (docs/engines.md)"
        )
    if isinstance(engine, VllmEngine) and engine.nodes > 1 and engine.cluster not in rules.ray_clusters:
        problems.append("nodes is more than 1, which needs a cluster of kind ray (docs/engines.md)")
    setting = "the service's setting FULMEN_ALGORITHM_EXTERNAL_ENGINES (docs/engines.md)"
    problems += [
        f"{one.base_url} is not in {setting}"
        for one in engines
        if isinstance(one, ExternalEngine) and one.base_url not in rules.external_engines
    ]
    return [Violation(field="settings.engine", description=problem) for problem in problems]


def _endpoint_problems(settings: RunSettings, known: Collection[str]) -> list[Violation]:
    # Otherwise a run could make the service call any address and send it a key.
    setting = "the service's setting FULMEN_ALGORITHM_CHAT_ENDPOINTS (docs/apo.md)"
    return [
        Violation(field=f"settings.{field}.base_url", description=f"{address} is not in {setting}")
        for field, address in settings.endpoints.items()
        if address not in known
    ]


def _target_problems(settings: RunSettings, known: Collection[str]) -> list[Violation]:
    # Ranks send the service's token to exchange servers.
    setting = "the service's setting FULMEN_ALGORITHM_EXCHANGE_TARGETS (docs/exchange.md)"
    return [
        Violation(field=f"settings.exchange.link.{field}", description=f"{target} is not in {setting}")
        for field, target in settings.exchange_targets.items()
        if target not in known
    ]


def _cluster_problems(cluster: str, known: Collection[str], *, field: str) -> list[Violation]:
    if not cluster or cluster in known:
        return []
    there = ", ".join(sorted(known)) or "none"
    text = f"{cluster!r} is not in the service's setting FULMEN_ALGORITHM_CLUSTERS ({there}; docs/clusters.md)"
    return [Violation(field=f"settings.{field}.cluster", description=text)]


async def read_inputs(inputs: Mapping[str, str], resources: ResourceStore) -> tuple[RunInputs, list[Violation]]:
    """Reads the run's data sets.

    Returns:
        The inputs that could be read, and the violations of the others.

    Raises:
        ResourceNotFound: if one is unknown.
    """
    violations: list[Violation] = []
    tasks: dict[str, list[bytes]] = {"train_tasks": [], "validation_tasks": [], "test_tasks": []}
    for use in tasks:
        if use in inputs:
            content = (await resources.get(inputs[use])).data
            # Data sets are megabytes; read in a thread to keep the event loop free.
            tasks[use], bad = await asyncio.to_thread(read_tasks, content, field=f"inputs.{use}")
            violations += bad
    demonstrations: dict[str, list[Demonstration]] = {"demonstrations": [], "validation_demonstrations": []}
    for use in demonstrations:
        if use in inputs:
            content = (await resources.get(inputs[use])).data
            demonstrations[use], bad = await asyncio.to_thread(read_demonstrations, content, field=f"inputs.{use}")
            violations += bad
    preferences: list[Preference] = []
    if "preferences" in inputs:
        content = (await resources.get(inputs["preferences"])).data
        preferences, bad = await asyncio.to_thread(read_preferences, content, field="inputs.preferences")
        violations += bad
    scored: ScoredGroups | None = None
    if "scores" in inputs:
        content = (await resources.get(inputs["scores"])).data
        # Up to half a gigabyte unpacked.
        scored, bad = await asyncio.to_thread(read_scored_groups, content, field="inputs.scores")
        violations += bad
    prompt: Content | None = None
    if "prompt" in inputs:
        prompt = await resources.get(inputs["prompt"])
        violations += prompt_problems(prompt.data, field="inputs.prompt")
    read = RunInputs(
        train_tasks=tuple(tasks["train_tasks"]),
        validation_tasks=tuple(tasks["validation_tasks"]),
        test_tasks=tuple(tasks["test_tasks"]),
        demonstrations=tuple(demonstrations["demonstrations"]),
        validation_demonstrations=tuple(demonstrations["validation_demonstrations"]),
        preferences=tuple(preferences),
        scored=scored,
        prompt=prompt,
    )
    return read, violations


def _problems(draft: RunDraft) -> list[Violation]:
    found = []
    if draft.name and not _is_run_of(draft.project, draft.name):
        found.append(Violation(field="name", description=RUN_FORM))
    if draft.pause_at_step < 0:
        found.append(Violation(field="pause_at_step", description="must be 0 or more"))
    found += description_problems(draft.display_name, draft.tags)
    return found


def _is_run_of(project: str, name: str) -> bool:
    match = RUN_NAME.fullmatch(name)
    return match is not None and match[1] == project


def _policy_problems(draft: RunDraft, entry: AlgorithmEntry[Any]) -> list[Violation]:
    if not entry.trains and draft.policy == NO_POLICY:
        return []
    found = name_problems(draft.policy)
    if not entry.trains and draft.policy.origin in _FIRST_WEIGHTS:
        text = f"{draft.algorithm} trains no weights: name a published version of the policy, or no policy"
        found.append(Violation(field=f"policy.{draft.policy.origin.value}", description=text))
        return found
    found += form_problems(draft.policy)
    if draft.policy.origin is PolicyOrigin.BUILD and "bundle" not in draft.inputs:
        found.append(Violation(field="inputs.bundle", description="is required to build the policy"))
    return found


def _input_problems(draft: RunDraft, entry: AlgorithmEntry[Any]) -> list[Violation]:
    found = [
        Violation(field=f"inputs.{use}", description=f"is required by {draft.algorithm}")
        for use in entry.needs
        if use not in draft.inputs
    ]
    if entry.any_of and not {*entry.any_of} & {*draft.inputs}:
        text = f"{draft.algorithm} needs one of: {', '.join(entry.any_of)}"
        found.append(Violation(field=f"inputs.{entry.any_of[0]}", description=text))
    if "validation_tasks" in draft.inputs and not {"agent"} & {*draft.inputs, *entry.needs}:
        found.append(Violation(field="inputs.agent", description="is required to validate"))
    for use, name in sorted(draft.inputs.items()):
        if use not in entry.inputs:
            found.append(Violation(field=f"inputs.{use}", description=f"is not used by {draft.algorithm}"))
        elif use == ROLLOUTS:
            if not _is_run_of(draft.project, name):
                found.append(Violation(field=f"inputs.{use}", description=RUN_FORM))
        elif not PINNED.fullmatch(name):
            text = "must be pinned: resources/<id>/versions/<number>"
            found.append(Violation(field=f"inputs.{use}", description=text))
    return found


async def _source_problems(draft: RunDraft, resources: ResourceStore, knows_run: KnowsRun) -> list[Violation]:
    """Checks that the source run exists; a malformed name is reported elsewhere."""
    name = draft.inputs.get(ROLLOUTS, "")
    if not _is_run_of(draft.project, name) or knows_run(name) or await resources.has_rollouts(name):
        return []
    text = f"there is no training run {name} in {draft.project}, and no rollout of one"
    return [Violation(field=f"inputs.{ROLLOUTS}", description=text)]


async def _content_problems(draft: RunDraft, entry: AlgorithmEntry[Any], resources: ResourceStore) -> list[Violation]:
    """Checks the data sets' contents; malformed names are already reported."""
    readable = {use: name for use, name in draft.inputs.items() if PINNED.fullmatch(name)}
    for use in sorted({"agent", "bundle"} & set(readable)):
        await resources.get(readable[use])
    read, violations = await read_inputs(readable, resources)
    if read.scored is not None and not entry.single_scores and (problem := no_groups(read.scored)):
        violations.append(Violation(field="inputs.scores", description=problem))
    return violations
