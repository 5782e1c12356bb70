"""The SDK finds the local stack by an entry point, and says what to install without it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fulmen import client
from fulmen.client import LocalStack, LocalStackMissing, Targets, find_local_stack

STACK = LocalStack(targets=Targets(store="host:1", algorithm="host:2", llm_proxy="host:3"), token="a secret")


def find(state_dir: Path) -> LocalStack | None:
    """Finds a stack on the directory `running` alone."""
    return STACK if state_dir.name == "running" else None


def register(monkeypatch: pytest.MonkeyPatch, *entry_points: EntryPoint) -> None:
    monkeypatch.setattr(client, "entry_points", lambda *, group: [e for e in entry_points if e.group == group])


def test_the_running_stack_is_found_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, EntryPoint("stack", f"{__name__}:find", "fulmen.local_stack"))

    assert find_local_stack(Path("running")) == STACK
    assert "a secret" not in repr(STACK)


def test_a_directory_without_a_stack_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, EntryPoint("stack", f"{__name__}:find", "fulmen.local_stack"))

    with pytest.raises(LocalStackMissing, match="fulmen up"):
        find_local_stack(Path("idle"))


def test_without_the_distribution_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)

    with pytest.raises(LocalStackMissing, match=r'pip install "fulmen\[local\]"'):
        find_local_stack(Path("running"))


def test_the_command_line_registers_one(tmp_path: Path) -> None:
    with pytest.raises(LocalStackMissing, match="fulmen up"):
        find_local_stack(tmp_path)
