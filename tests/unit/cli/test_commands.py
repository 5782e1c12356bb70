"""The command line itself: help of every command, exit codes, errors of one clear line."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from fulmen.errors import (
    ArgumentInvalid,
    EtagMismatch,
    FulmenError,
    ResourceNotFound,
    RolloutExists,
    TokenInvalid,
    Unavailable,
    Violation,
)
from fulmen_cli.exits import CommandFailed, Exit, reported
from fulmen_cli.local.credentials import Credentials
from fulmen_cli.local.record import StackFolder
from fulmen_cli.main import app
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from tests.support.cli.command_runner import CliRunner, built

runner = CliRunner()
ROOT = built(app)


def all_commands() -> Iterator[tuple[str, ...]]:
    def below(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        children = getattr(command, "commands", {})
        if not children:
            yield path
        for name, child in children.items():
            yield from below(child, (*path, name))

    return below(ROOT, ())


# Print no data: a log, a file, a token, or only that something was done.
WITHOUT_DATA = frozenset(
    {
        "up",
        "open",
        "down",
        "init",
        "demo",
        "logs",
        "support-bundle",
        "spans export",
        "proxy route delete",
        "proxy backend delete",
        "proxy import-prices",
        "annotations delete",
        "annotations publish",
        "token revoke",
        "secret set",
        "secret remove",
        "model delete",
        "schedule delete",
    }
)


@pytest.mark.parametrize("command", list(all_commands()), ids=" ".join)
def test_every_command_teaches_by_example_refuses_an_unknown_option_and_prints_its_data_as_json_too(
    command: tuple[str, ...],
) -> None:
    assert runner.invoke(app, [*command, "--nonsense"]).exit_code == Exit.USAGE

    helped = runner.invoke(app, [*command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    name = " ".join(command)
    assert helped.exit_code == 0
    assert "Example" in helped.output
    assert f"fulmen {name}" in helped.output
    assert ("--output" in helped.output) != (name in WITHOUT_DATA or command[0] == "emit"), helped.output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ArgumentInvalid("bad", violations=[Violation(field="f", description="d")]), Exit.USAGE),
        (ResourceNotFound("none"), Exit.NOT_FOUND),
        (RolloutExists("taken"), Exit.CONFLICT),
        (EtagMismatch("moved"), Exit.CONFLICT),
        (TokenInvalid("no token"), Exit.FAILED),
        (Unavailable("away"), Exit.FAILED),
        (CommandFailed("no", exit_code=Exit.NOT_FOUND), Exit.NOT_FOUND),
    ],
)
def test_every_kind_of_error_has_its_exit_status_and_says_what_to_do(
    error: FulmenError | CommandFailed, code: Exit, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as raised, reported():
        raise error

    assert raised.value.exit_code == code
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "command", [["status"], ["queue"], ["rollout", "list"], ["run", "list"], ["resources", "list"], ["proxy", "routes"]]
)
def test_without_a_stack_a_command_says_how_to_start_one(command: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, [*command, "--state-dir", str(tmp_path)])

    assert result.exit_code == Exit.FAILED
    assert "fulmen up" in result.output


def test_down_without_a_stack_changes_nothing(tmp_path: Path) -> None:
    result = runner.invoke(app, ["down", "--state-dir", str(tmp_path / "none")])

    assert result.exit_code == 0
    assert "No stack is running" in result.output
    assert not (tmp_path / "none").exists()


def test_logs_of_an_unknown_service_names_those_that_exist(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    folder.log_file("store").write_text("one\ntwo\n")

    wrong = runner.invoke(app, ["logs", "stroe", "--state-dir", str(tmp_path)])
    right = runner.invoke(app, ["logs", "store", "-n", "1", "--state-dir", str(tmp_path)])

    assert wrong.exit_code == Exit.NOT_FOUND
    assert "store" in wrong.output
    assert right.output == "two\n"


def test_a_token_is_signed_with_the_key_of_the_stack(tmp_path: Path) -> None:
    key = Credentials(tmp_path).signing_key()

    result = runner.invoke(app, ["token", "--role", "runner", "--days", "1", "--state-dir", str(tmp_path)])

    caller = TokenVerifier(key).verify(result.output.strip())
    assert (caller.role, caller.project) == ("runner", "projects/*")


def test_a_local_stack_serves_every_project_with_tokens_that_live_days(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    credentials.renew_client_token()
    files = [credentials.client_token_file, credentials.token_file("service"), credentials.token_file("runner")]

    callers = [TokenVerifier(credentials.signing_key()).verify(file.read_text().strip()) for file in files]

    assert [(caller.role, caller.project) for caller in callers] == [
        ("admin", "projects/*"),
        ("service", "projects/*"),
        ("runner", "projects/*"),
    ]
    assert max(caller.expires_s - caller.issued_s for caller in callers) <= 14 * 86_400
    of_one = credentials.token_file("runner", project="projects/a").read_text().strip()
    assert TokenVerifier(credentials.signing_key()).verify(of_one).project == "projects/a"


def test_the_secret_of_attempt_keys_belongs_to_the_signing_key_and_signs_no_role(tmp_path: Path) -> None:
    key = Credentials(tmp_path).signing_key()

    printed = runner.invoke(app, ["token", "--attempt-key-secret", "--state-dir", str(tmp_path)]).output

    assert printed.strip().encode() in StoreKeys(key).current().attempts
    assert printed == Credentials(tmp_path).attempt_secret_file().read_text()
    with pytest.raises(TokenInvalid):
        TokenVerifier(key).verify(TokenSigner(printed).issue(Role.ADMIN, subject="eve", ttl_s=60))


def test_a_token_without_a_key_is_not_found(tmp_path: Path) -> None:
    assert runner.invoke(app, ["token", "--state-dir", str(tmp_path)]).exit_code == Exit.NOT_FOUND


def test_secrets_are_made_once_and_readable_by_their_owner_only(tmp_path: Path) -> None:
    credentials = Credentials(tmp_path)
    key, engine = credentials.signing_key(), credentials.engine_token()
    credentials.renew_client_token()
    credentials.token_file("runner")
    credentials.attempt_secret_file()

    assert (credentials.signing_key(), credentials.engine_token()) == (key, engine)
    assert len(key) >= 32
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_lock_tells_a_running_stack_from_a_stale_record(tmp_path: Path) -> None:
    folder = StackFolder(tmp_path)
    folder.create()
    folder.record_file.write_text(json.dumps({"record_version": 1, "supervisor_pid": 1}))

    assert not folder.is_running()
    with folder.hold():
        assert folder.is_running()
    assert not folder.is_running()
