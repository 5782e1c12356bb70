"""Tests that need a sandbox are skipped on machines that have none."""

from __future__ import annotations

import pytest

from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation

NO_SANDBOX = Isolator(Isolation.SANDBOX, setting="FULMEN_RUNNER_ISOLATION").problem
"""Why there is no sandbox; empty if there is one."""

sandboxed = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX[:200])
