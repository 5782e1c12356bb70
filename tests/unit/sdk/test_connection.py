"""The SDK finds the services that are meant, and says what to install or start without them."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fulmen import connection
from fulmen.connection import Deployment, LocalStack, LocalStackMissing, TokenUnreadable, find_local_stack
from fulmen.rpc.services import Targets

TARGETS = Targets(store="host:1", algorithm="host:2", llm_proxy="host:3")
ENVIRONMENT = {"FULMEN_STORE_TARGET": "far:1", "FULMEN_TOKEN": "theirs", "FULMEN_STATE_DIR": "elsewhere"}


def find(state_dir: Path) -> LocalStack | None:
    """Finds a stack on the directory `running` alone."""
    return LocalStack(targets=TARGETS, token_file=state_dir / "token") if state_dir.name == "running" else None


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Returns the state directory of a stack that runs."""
    register(monkeypatch, EntryPoint("stack", f"{__name__}:find", "fulmen.local_stack"))
    folder = tmp_path / "running"
    folder.mkdir()
    (folder / "token").write_text("a secret\n")
    return folder


def register(monkeypatch: pytest.MonkeyPatch, *entry_points: EntryPoint) -> None:
    monkeypatch.setattr(connection, "entry_points", lambda *, group: [e for e in entry_points if e.group == group])


def test_the_running_stack_is_found_by_its_entry_point_and_its_token_is_read_anew(running: Path) -> None:
    stack = find_local_stack(running)

    assert (stack.targets, stack.token()) == (TARGETS, "a secret")
    (running / "token").write_text("renewed")
    assert stack.token() == "renewed"
    assert "renewed" not in repr(stack)


def test_a_directory_without_a_stack_is_an_error_that_names_the_command(running: Path) -> None:
    with pytest.raises(LocalStackMissing, match="fulmen up"):
        find_local_stack(running.parent / "idle")


def test_without_the_distribution_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)

    with pytest.raises(LocalStackMissing, match=r'pip install "fulmen\[local\]"'):
        find_local_stack(Path("running"))


def test_the_command_line_registers_one(tmp_path: Path) -> None:
    with pytest.raises(LocalStackMissing, match="fulmen up"):
        find_local_stack(tmp_path)


def test_the_environment_names_services_and_token() -> None:
    found = Deployment.found({}, None, ENVIRONMENT)

    assert (found.store, found.bearer(), found.state_dir) == ("far:1", "theirs", Path("elsewhere"))


def test_what_is_given_comes_before_the_environment() -> None:
    found = Deployment.found({"store": "near:1", "token": ""}, None, ENVIRONMENT)

    assert (found.store, found.bearer()) == ("near:1", "theirs")


def test_a_state_directory_that_is_given_means_its_stack_whatever_the_environment_names(running: Path) -> None:
    found = Deployment.found({}, running, ENVIRONMENT)

    assert (found.targets(), found.bearer()) == (TARGETS, "a secret")


def test_a_named_service_is_not_sent_the_token_of_the_stack(running: Path) -> None:
    found = Deployment.found({"store": "far:1"}, running, {})

    assert found.bearer() is None
    assert found.targets() == Targets(store="far:1", algorithm="host:2", llm_proxy="host:3")


def test_of_several_proxies_the_first_is_called(running: Path) -> None:
    assert Deployment(llm_proxy=" a:1, b:1", state_dir=running).targets().llm_proxy == "a:1"


def test_a_token_that_cannot_be_read_is_asked_for(running: Path) -> None:
    (running / "token").unlink()

    with pytest.raises(TokenUnreadable, match="FULMEN_TOKEN"):
        Deployment(state_dir=running).bearer()


def test_the_project_is_that_of_the_token_or_the_default_one(running: Path) -> None:
    bound = "e30.eyJwcmoiOiAicHJvamVjdHMvdGVhbS1hIiwgImV4cCI6IDF9.c2ln"  # {"prj": "projects/team-a", "exp": 1}

    assert Deployment(token=bound).project == "projects/team-a"
    assert Deployment(state_dir=running).project == "projects/default"
    assert Deployment(state_dir=running.parent / "idle").project == "projects/default"
