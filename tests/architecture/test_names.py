"""Names say what a thing is for, states are values of an enum, and SQL lives in its own files."""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulmen.store.v1 import rollout_pb2
from tests.support.distributions import DISTRIBUTIONS, SERVICES, Distribution

VAGUE = frozenset({"common", "config", "helpers", "misc", "shared", "util", "utils"})
# A transport is named by its protocol; the codecs of gradients are `fulmen_exchange.codecs`, as everyone calls them.
NAMED_BY_PROTOCOL = frozenset({"codecs", "http"})
STATE_PREFIX = "ROLLOUT_STATE_"
ROLLOUT_STATES = frozenset(
    name.removeprefix(STATE_PREFIX)
    for name in rollout_pb2.RolloutState.keys()  # noqa: SIM118  (not a mapping)
    if not name.endswith("UNSPECIFIED")
) - {"CANCELLED"}  # a canonical code of gRPC has the same name
# The migrator keeps its ledger before any file has run.
WITH_SQL = frozenset({"database/migrations.py"})
SQL = re.compile(r"^\s*(SELECT\b.*\bFROM|INSERT\s+INTO|UPDATE\b.*\bSET|DELETE\s+FROM|CREATE\s+TABLE)\b", re.I | re.S)


@functools.cache
def strings_of(distribution: Distribution) -> list[tuple[Path, ast.Constant]]:
    """Returns the string constants of all modules outside docstrings and enum definitions."""
    found = []
    for path, tree in distribution.modules():
        nodes = list(ast.walk(tree))
        left_out = {id(value) for node in nodes for value in _exempt(node)}
        found += [
            (path, node)
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out
        ]
    return found


def _exempt(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in node.bases):
        yield from ast.walk(node)
    elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first.value


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.import_root)
def test_no_module_is_named_vaguely_or_like_the_standard_library(distribution: Distribution) -> None:
    paths = [path for path in distribution.sources.rglob("*.py") if "_pb2" not in path.name]
    names = {path.parent.name if path.stem == "__init__" else path.stem for path in paths}
    taken = (names & (VAGUE | sys.stdlib_module_names)) - NAMED_BY_PROTOCOL - {"__main__"}

    assert not taken


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.import_root)
def test_rollout_states_are_never_bare_strings(distribution: Distribution) -> None:
    quoted = [
        f"{path}:{constant.lineno}: {constant.value!r}"
        for path, constant in strings_of(distribution)
        if str(constant.value).removeprefix(STATE_PREFIX) in ROLLOUT_STATES
    ]

    assert not quoted


@pytest.mark.parametrize("distribution", SERVICES, ids=lambda d: d.import_root)
def test_sql_lives_in_sql_files(distribution: Distribution) -> None:
    embedded = [
        f"{path}:{constant.lineno}"
        for path, constant in strings_of(distribution)
        if not path.as_posix().endswith(tuple(WITH_SQL)) and SQL.match(str(constant.value))
    ]

    assert not embedded
