"""Secrets from the command line, against a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result

from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.screens import check_screen
from tests.support.store.running import StoreHandle

Fulmen = Callable[..., Awaitable[Result]]
VALUE = "sunny-and-warm"


async def test_secrets_are_set_listed_and_removed_and_no_screen_shows_a_value(
    fulmen: Fulmen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "value").write_text(VALUE + "\n")
    monkeypatch.setenv("OPENAI_API_KEY", VALUE)
    monkeypatch.setenv("MAIL_PASSWORD", VALUE)
    screens = [
        await fulmen("secret", "list"),
        await fulmen("secret", "set", "WEATHER_KEY", "--from-file", tmp_path / "value"),
        await fulmen("secret", "set", "MAIL_PASSWORD", "--from-env"),
        await fulmen("secret", "set", "openai", "--from-env"),
        await fulmen(
            "secret", "set", "own", "--from-file", tmp_path / "value", "--host", "a.test", "--host", "*.b.test"
        ),
        await fulmen("secret", "list"),
        await fulmen("secret", "remove", "MAIL_PASSWORD"),
    ]
    check_screen("secret", "".join(each.stdout for each in screens))
    listed = await fulmen("secret", "list", "-o", "json")
    assert [each["name"] for each in json.loads(listed.stdout)] == ["WEATHER_KEY", "openai", "own"]
    assert not any(VALUE in each.output for each in (*screens, listed))


async def test_a_value_is_read_from_standard_input(fulmen: Fulmen, store: StoreHandle) -> None:
    environment = {"FULMEN_STORE_TARGET": store.target, "FULMEN_TOKEN": store.token(Role.CLIENT)}
    words = ["secret", "set", "WEATHER_KEY"]
    done = await asyncio.to_thread(CliRunner().invoke, app, words, env=environment, input=VALUE + "\n")
    assert (done.exit_code, VALUE in done.output) == (0, False)
    assert "WEATHER_KEY" in (await fulmen("secret", "list")).stdout


async def test_wrong_secrets_are_refused_with_the_rule(fulmen: Fulmen, tmp_path: Path) -> None:
    (tmp_path / "value").write_text(VALUE)
    (tmp_path / "short").write_text("1234567")
    source = ("--from-file", tmp_path / "value")
    errors = [
        await fulmen("secret", "set", "OPENAI_API_KEY", *source, status=Exit.USAGE),
        await fulmen("secret", "set", "FULMEN_X", *source, status=Exit.USAGE),
        await fulmen("secret", "set", "Mixed-Case", *source, status=Exit.USAGE),
        await fulmen("secret", "set", "own", *source, status=Exit.USAGE),
        await fulmen("secret", "set", "A_KEY", *source, "--host", "a.test", status=Exit.USAGE),
        await fulmen("secret", "set", "A_KEY", *source, "--from-env", status=Exit.USAGE),
        await fulmen("secret", "set", "UNSET_VARIABLE_OF_TESTS", "--from-env", status=Exit.NOT_FOUND),
        await fulmen("secret", "set", "own", "--host", "a.test", "--from-env", status=Exit.USAGE),
        await fulmen("secret", "set", "A_KEY", "--from-file", tmp_path / "short", status=Exit.USAGE),
        await fulmen("secret", "remove", "NOTHING", status=Exit.NOT_FOUND),
        await fulmen("secret", "set", "openai", *source, role=Role.CLIENT, status=Exit.FAILED),
    ]
    check_screen("secret-errors", "".join(each.output for each in errors))
