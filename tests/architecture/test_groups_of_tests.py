"""Tests that are to run one after another do, when the suite runs in several processes."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.xdist_group("grouped")


def test_tests_of_a_group_are_known_as_such_to_the_scheduler(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not run as tools/test.sh runs it, in groups")
    assert request.node.nodeid.endswith("@grouped")


def test_every_test_that_is_marked_serial_is_in_a_group_that_the_scheduler_knows(
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("loadgroup", default=False):
        pytest.skip("not run as tools/test.sh runs it, in groups")
    marked = [item for item in request.session.items if item.get_closest_marker("serial")]
    assert [item.nodeid for item in marked if "@" not in item.nodeid] == []
