"""Modules that a string names are there: neither an import nor the type checker notices that one was renamed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.distributions import DISTRIBUTIONS, ROOT, Distribution

ROOTS = {each.import_root: each.sources for each in DISTRIBUTIONS}
NAME = re.compile(r"(?P<module>(?P<root>fulmen(_[a-z]+)*)(\.[a-z_0-9]+)+)(:(?P<attribute>\w+))?")
LOADERS = frozenset({"import_module", "find_spec", "run_module", "__import__", "_sdk_module"})
OF_THE_SDK = "fulmen"
"""Attributes of spans, metrics and packages of protos begin like its modules: only what is loaded counts."""


def names(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields the strings that name a module, by their root or by what they are given to."""
    nodes = list(ast.walk(tree))
    loaded = {id(each) for node in nodes for each in _loaded(node)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = NAME.fullmatch(node.value)
            if found and found["root"] in ROOTS and (found["root"] != OF_THE_SDK or id(node) in loaded):
                yield node


def _loaded(node: ast.AST) -> Iterator[ast.AST]:
    """Yields what is loaded: the first argument of a loader, and what follows `-m` in a command line."""
    if isinstance(node, ast.Call):
        called = node.func
        if (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in LOADERS:
            yield from node.args[:1]
    if isinstance(node, ast.List | ast.Tuple):
        yield from (
            after
            for each, after in zip(node.elts, node.elts[1:], strict=False)
            if isinstance(each, ast.Constant) and each.value == "-m"
        )


def missing(name: str) -> str:
    """Returns what is not there of `module` or `module:attribute`; empty if all is."""
    found = NAME.fullmatch(name)
    assert found is not None
    path = ROOTS[found["root"]].parent.joinpath(*found["module"].split("."))
    file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
    if file is None:
        return "" if path.is_dir() else f"no module {found['module']}"
    attribute = found["attribute"]
    if attribute is None or attribute in _top_level(file):
        return ""
    return f"no {attribute} in {found['module']}"


def _top_level(file: Path) -> set[str]:
    body = ast.parse(file.read_text(encoding="utf-8")).body
    named = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)}
    assigned = {ast.unparse(target) for node in body if isinstance(node, ast.Assign) for target in node.targets}
    return named | assigned


def test_a_renamed_module_and_an_attribute_that_has_gone_would_be_noticed() -> None:
    code = """import_module("fulmen.of_old")\nlibrary("fulmen_runner.of_old")\nrun([python, "-m", "fulmen.of_old"])
metric("fulmen.of_old")\nopen("fulmen_functions.py")"""
    assert [node.lineno for node in names(ast.parse(code))] == [1, 2, 3]
    assert missing("fulmen.of_old") == "no module fulmen.of_old"
    assert missing("fulmen_algorithm.sinks.mlflow:OfOld") == "no OfOld in fulmen_algorithm.sinks.mlflow"
    assert missing("fulmen_algorithm.sinks.mlflow:MlflowSink") == ""


@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.import_root)
def test_a_string_names_a_module_that_is_there(distribution: Distribution) -> None:
    assert [
        f"{path}:{node.lineno}: {why}"
        for path, tree in distribution.modules()
        for node in names(tree)
        if (why := missing(str(node.value)))
    ] == []


def test_a_string_of_the_benchmarks_and_of_the_tests_help_names_a_module_that_is_there() -> None:
    files = [*ROOT.glob("benchmarks/**/*.py"), *ROOT.glob("tests/support/**/*.py"), *ROOT.glob("tools/*.py")]
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}: {why}"
        for path in files
        # The packages that the benchmarks' peers run from are in a hidden folder.
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        for node in names(ast.parse(path.read_text(encoding="utf-8")))
        if (why := missing(str(node.value)))
    ] == []
