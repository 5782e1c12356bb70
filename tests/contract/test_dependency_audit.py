"""`make audit` says what is vulnerable, and never takes silence for safety; everything that is installed is pinned."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

VULNERABLE = {"name": "one", "version": "1.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
SAFE = {"name": "two", "version": "2.0", "vulns": []}
UNKNOWN = {"name": "three", "skip_reason": "not on PyPI"}


@pytest.fixture(scope="module")
def audit(repository_root: Path) -> ModuleType:
    """Returns the program behind `make audit`."""
    spec = importlib.util.spec_from_file_location("fulmen_audit", repository_root / "tools/audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_known_vulnerability_fails_and_is_named_with_what_mends_it(audit: ModuleType) -> None:
    status, lines = audit.verdict([VULNERABLE, SAFE, UNKNOWN], strict=False)
    assert status == 1
    assert lines == [
        "audit: one 1.0: PYSEC-1, mended in 1.1",
        "audit: 2 distributions asked for, 1 of which nothing is known, 1 advisories",
    ]


def test_dependencies_without_advisories_pass(audit: ModuleType) -> None:
    assert audit.verdict([SAFE], strict=True)[0] == 0


@pytest.mark.parametrize("found", [None, [], [UNKNOWN]])
def test_an_audit_that_could_ask_nobody_says_so(audit: ModuleType, found: list[dict[str, object]] | None) -> None:
    for strict in (True, False):
        status, lines = audit.verdict(found, strict=strict)
        assert (status, len(lines)) == (int(strict), 1)
        assert "no advisory" in lines[0]


def test_every_dependency_is_pinned_to_one_version(repository_root: Path) -> None:
    lines = (repository_root / "constraints.txt").read_text().splitlines()
    assert lines
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9._-]+(\[[a-z,]+\])?==[^ ,;]+( ;.*)?", line)] == []
