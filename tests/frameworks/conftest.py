"""Asserts in what the tests share tell their values too."""

import pytest

pytest.register_assert_rewrite("tests.support.frameworks.checks", "tests.support.frameworks.world")
