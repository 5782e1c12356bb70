"""Prints at the end how the code blocks of the documentation are held."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the account, of what the tests above it have checked."""
    from tests.docs.accounts import account

    for line in account().lines():
        terminalreporter.write_line(line)
