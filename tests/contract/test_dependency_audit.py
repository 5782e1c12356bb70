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
        "audit: one 1.0: PYSEC-1, fixed in 1.1",
        "audit: 2 distributions checked, 1 unknown to PyPI, 1 advisories",
    ]


def test_dependencies_without_advisories_pass(audit: ModuleType) -> None:
    assert audit.verdict([SAFE], strict=True)[0] == 0


@pytest.mark.parametrize("found", [None, [], [UNKNOWN]])
def test_an_audit_that_could_ask_nobody_says_so(audit: ModuleType, found: list[dict[str, object]] | None) -> None:
    for strict in (True, False):
        status, lines = audit.verdict(found, strict=strict)
        assert (status, len(lines)) == (int(strict), 1)
        assert "no advisory" in lines[0]


LISTS = (
    "constraints.txt",
    "tools/vllm-constraints.txt",
    "tools/helm-requirements.txt",
    "tools/litellm.txt",
    "tools/tinker.txt",
    "tools/frameworks/*.txt",
)
PIN = re.compile(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[^ ,;]+( ; .*?)?")
DIGEST = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def test_every_dependency_is_pinned_to_one_version_and_the_digests_of_its_files(repository_root: Path) -> None:
    paths = [path for pattern in LISTS for path in repository_root.glob(pattern)]
    assert len(paths) > len(LISTS)
    for path in paths:
        lines = [line for line in path.read_text().splitlines() if line and not line.lstrip().startswith("#")]
        requirements = "\n".join(lines).replace(" \\\n", " ").splitlines()
        assert requirements
        requirements = [line for line in requirements if not line.startswith("-e ./")]
        for requirement in requirements:
            pin, *digests = re.split(r" +(?=--hash)", requirement)
            assert PIN.fullmatch(pin), (path.name, pin)
            # Which build of torch fits depends on the machine.
            assert pin.startswith("torch==") or digests, (path.name, pin)
            assert all(DIGEST.fullmatch(digest) for digest in digests), (path.name, pin)
