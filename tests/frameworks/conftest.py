"""What all tests of this folder have: asserts in what they share tell their values, and time for programs that load slowly."""

from pathlib import Path

import pytest

pytest.register_assert_rewrite("tests.support.frameworks.checks", "tests.support.frameworks.world")

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives tests without a limit of their own 300 s instead of 120."""
    for item in items:
        if FOLDER in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))
