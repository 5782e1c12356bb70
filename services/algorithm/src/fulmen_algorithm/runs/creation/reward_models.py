"""Checks the reward model that is to score the rollouts of a run."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulmen.errors import ResourceNotFound, Violation
from fulmen_algorithm.persistence.run_files import RUNS_PLACE
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.policy.stored_weights import REWARD_MODEL, read_description
from fulmen_algorithm.runs.algorithm import AlgorithmSettings, RunSettings
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Content, ResourceStore
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec

FIELD = "settings.reward_model"
TOKENIZER = "tokenizer.json"


async def reward_model_problems(
    project: str, policy: PolicySpec, settings: RunSettings, resources: ResourceStore, roots: ModelRoots
) -> list[Violation]:
    """Returns why the reward model that settings name cannot score the rollouts of a policy.

    Tokenizers whose files are not at hand, such as that of a base that is yet to be downloaded, are compared when the
    run starts.

    Args:
        project: `projects/{id}`.
        policy: The policy to train.
        settings: Settings of the run.
        resources: Resources of the run's project; a model of another project is not among them.
        roots: Folders that may be read.
    """
    name = settings.scored_by if isinstance(settings, AlgorithmSettings) else ""
    if not name:
        return []
    try:
        content = await resources.get(name)
    except ResourceNotFound:
        return [Violation(field=FIELD, description=f"there is no {name} in the project of the run")]
    if _description(content).get("purpose") != REWARD_MODEL:
        text = f"{name} is not a reward model: train one with the algorithm reward_model"
        return [Violation(field=FIELD, description=text)]
    folders = (_folder(content, roots), await _policy_folder(policy, resources, roots))
    found = await asyncio.gather(*(asyncio.to_thread(_vocabulary, each, roots, project) for each in folders))
    if None not in found and found[0] != found[1]:
        text = f"{name} must have the tokenizer of the policy, whose tokens it scores"
        return [Violation(field=FIELD, description=text)]
    return []


def _description(content: Content) -> Mapping[str, Any]:
    """Returns the description of a version; empty if it is none of a policy."""
    try:
        description = read_description(content)
    except (RunFailed, ValueError, RecursionError):
        return {}
    return description if isinstance(description, dict) else {}


async def _policy_folder(policy: PolicySpec, resources: ResourceStore, roots: ModelRoots) -> Path | None:
    """Returns the folder of the first weights; None if it is not known yet."""
    match policy.origin:
        case PolicyOrigin.PATH:
            return Path(policy.source)
        case PolicyOrigin.VERSION | PolicyOrigin.NEWEST:
            try:
                content = await resources.get(policy.source or f"resources/policy.{policy.name}")
            except ResourceNotFound:
                # It is reported elsewhere, or an earlier stage is to train it.
                return None
            return _folder(content, roots)
    return None


def _folder(content: Content, roots: ModelRoots) -> Path | None:
    """Returns the folder of a version, which may have no tokenizer."""
    place = str(_description(content).get("base_model") or _description(content).get("path", ""))
    if not place.startswith(RUNS_PLACE):
        return Path(place) if place else None
    return None if roots.runs is None else roots.runs / place.removeprefix(RUNS_PLACE)


def _vocabulary(folder: Path | None, roots: ModelRoots, project: str) -> dict[str, int] | None:
    """Reads the tokens of a model folder with their ids; None if they are not at hand."""
    if folder is None or roots.problem(folder, project=project):
        return None
    try:
        content = json.loads((folder.expanduser() / TOKENIZER).read_bytes())
        known = content["model"]["vocab"]
        # A list has the tokens with their scores, by id.
        tokens = known if isinstance(known, dict) else {token: index for index, (token, _) in enumerate(known)}
        return {**tokens, **{each["content"]: each["id"] for each in content["added_tokens"]}}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
