"""Every test is run by `make test` or by `make test-long`, none by both, and those of a group one after another."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import is_left_to_the_long_form

pytestmark = pytest.mark.xdist_group("grouped")


def pytest_command(root: Path, *make_arguments: str) -> list[str]:
    """Returns the words of the tools/test.sh that `make ...` runs."""
    dry = ["make", "--dry-run", "--no-print-directory", *make_arguments]
    # A make around the tests would hand its own variables on.
    given = ("MAKE", "ARGS", "SHORT", "SOAK")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    printed = subprocess.run(
        dry, cwd=root, env=environment, capture_output=True, text=True, check=True, timeout=20
    ).stdout
    [line] = [line for line in printed.replace("\\\n", " ").splitlines() if "tools/test.sh" in line]
    words = shlex.split(line)
    return words[words.index("tools/test.sh") + 1 :]


def test_make_test_and_make_test_long_select_complements(repository_root: Path) -> None:
    assert pytest_command(repository_root, "test") == ["-m", "not long"]
    assert pytest_command(repository_root, "test-long") == ["-v", "-m", "long"]
    assert pytest_command(repository_root, "test-long", "SHORT=1") == ["-v", "-m", "long(short=True)"]


def test_both_select_from_every_test_module(repository_root: Path) -> None:
    script = (repository_root / "tools/test.sh").read_text(encoding="utf-8")
    assert re.findall(r"--(?:ignore|deselect)\S* (\S+)", script) == ["tests/frameworks"]
    for conftest in (repository_root / "tests").rglob("conftest.py"):
        assert "collect_ignore" not in conftest.read_text(encoding="utf-8"), conftest


@pytest.mark.parametrize(
    ("marks", "is_left"),
    [
        (["short", "short"], False),
        (["short", "long"], True),
        (["long", "short"], False),
        (["", "long"], True),
        (["long", ""], True),
        (["", ""], False),
        (["", "short long"], True),
    ],
    ids=str,
)
def test_the_closest_mark_says_whether_a_test_is_left_to_the_long_form(
    request: pytest.FixtureRequest, marks: list[str], is_left: bool
) -> None:
    of_kinds = {"short": pytest.mark.long(short=True), "long": pytest.mark.long}
    module = pytest.Module.from_parent(request.session, path=Path(__file__))
    item = pytest.Function.from_parent(module, name="a test", callobj=lambda: None)
    for node, names in zip((module, item), marks, strict=True):
        for name in names.split():
            node.add_marker(of_kinds[name])
    assert is_left_to_the_long_form(item) is is_left


def test_the_scheduler_knows_the_group_of_a_test(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("tests run without groups; `make test` runs them in groups")
    assert request.node.nodeid.endswith("@grouped")


def test_every_serial_test_is_in_a_group(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("tests run without groups; `make test` runs them in groups")
    serial = [item for item in request.session.items if item.get_closest_marker("serial")]
    assert [item.nodeid for item in serial if "@" not in item.nodeid] == []
