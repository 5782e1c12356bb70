"""Checks the source of a policy's initial weights: names, folders, bases and versions."""

import re
from typing import Final

from fulmen.errors import ResourceNotFound, Violation
from fulmen.ids import NOT_DOTS
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.runs.ports import BaseModels, ResourceStore
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec

POLICY_NAME: Final = re.compile(rf"{NOT_DOTS}[a-z0-9._-]{{1,63}}")
PINNED: Final = re.compile(rf"resources/{NOT_DOTS}[a-z0-9._-]{{1,128}}/versions/[1-9][0-9]*")
_BUILD: Final = re.compile(r"[^:]+\.py:[A-Za-z_]\w*")


def name_problems(policy: PolicySpec) -> list[Violation]:
    """Checks the policy's name."""
    if POLICY_NAME.fullmatch(policy.name):
        return []
    return [Violation(field="policy.name", description="must be 1 to 63 of [a-z0-9._-]")]


def form_problems(policy: PolicySpec) -> list[Violation]:
    """Checks the form of what names the first weights."""
    match policy.origin:
        case PolicyOrigin.VERSION:
            prefix = f"resources/policy.{policy.name}/versions/"
            if not policy.source.startswith(prefix) or not PINNED.fullmatch(policy.source):
                return [Violation(field="policy.version", description=f"must be {prefix}<number>")]
        case PolicyOrigin.BUILD:
            if not _BUILD.fullmatch(policy.source):
                return [Violation(field="policy.build", description="must be of the form file.py:function")]
        case PolicyOrigin.PATH:
            if not policy.source:
                return [Violation(field="policy.path", description="must be a folder")]
        case PolicyOrigin.NEWEST | PolicyOrigin.BASE:
            pass
    return []


async def place_problems(
    policy: PolicySpec, *, project: str, roots: ModelRoots, models: BaseModels | None
) -> list[Violation]:
    """Checks that a project may read a folder or a base."""
    if policy.origin is PolicyOrigin.PATH and policy.source:
        problem = roots.problem(policy.source, project=project)
        return [Violation(field="policy.path", description=problem)] if problem else []
    if policy.origin is PolicyOrigin.BASE and models is not None:
        problem = await models.problem(policy.source, project=project)
        return [Violation(field="policy.base", description=problem)] if problem else []
    return []


async def version_problems(policy: PolicySpec, resources: ResourceStore) -> list[Violation]:
    """Checks that a version exists; malformed names are reported elsewhere."""
    if policy.origin is PolicyOrigin.VERSION and PINNED.fullmatch(policy.source):
        try:
            await resources.get(policy.source)
        except ResourceNotFound:
            text = f"there is no {policy.source} in the project of the run"
            return [Violation(field="policy.version", description=text)]
    if policy.origin is PolicyOrigin.NEWEST and POLICY_NAME.fullmatch(policy.name):
        try:
            await resources.get(f"resources/policy.{policy.name}")
        except ResourceNotFound:
            text = "has no published version: set the initial weights"
            return [Violation(field="policy", description=text)]
    return []
