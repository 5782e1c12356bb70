"""An exported model is uploaded to a hub: only what a model consists of, and nothing by a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fulmen_cli.exits import Exit
from tests.support.algorithm.hub import Hub, commit_of, running_hub
from tests.support.cli.commands import Done, run_module

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights" * 100,
    "README.md": b"---\nlibrary_name: transformers\n---\n# A model\n",
}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items() | {("notes.py", b"raise SystemExit"), (".env", b"KEY=1")}:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


async def push(hub: Hub, *arguments: str | Path, token: str = "") -> Done:
    environment = {"HF_TOKEN": token or hub.token, "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.url}
    return await run_module("fulmen_cli", "model", "push", *map(str, arguments), environment=environment)


async def test_what_a_model_consists_of_is_uploaded_to_a_private_repository(hub: Hub, folder: Path) -> None:
    done = await push(hub, folder, "acme/solver")
    assert done.status == 0, done.stderr
    assert f"{hub.url}/acme/solver/commit/" in done.stdout
    assert hub.repositories["acme/solver"].commits[commit_of("main")] == FILES
    assert hub.private == {"acme/solver"}

    again = await push(hub, folder, "acme/solver", "--public")
    assert again.status == 0, again.stderr


async def test_a_dry_run_lists_the_files_and_asks_no_hub(hub: Hub, folder: Path) -> None:
    done = await push(hub, folder, "acme/solver", "--dry-run")
    assert [line.split() for line in done.stdout.splitlines()[1:4]] == [
        [name, str(len(FILES[name]))] for name in sorted(FILES)
    ]
    assert "Nothing was uploaded" in done.stdout
    assert hub.asked == []


async def test_a_token_that_may_not_write_is_refused_without_showing_it(hub: Hub, folder: Path) -> None:
    token = "hf_" + "wr0ng" * 7
    done = await push(hub, folder, "acme/solver", token=token)
    assert done.status == Exit.FAILED
    assert "does not let you write to acme/solver" in done.stderr
    assert token not in done.stdout + done.stderr


async def test_what_is_no_exported_model_or_no_repository_is_refused(hub: Hub, folder: Path, tmp_path: Path) -> None:
    none = await push(hub, tmp_path / "checkpoints", "acme/solver")
    assert (none.status, "contains no model" in none.stderr) == (Exit.NOT_FOUND, True)
    named = await push(hub, folder, "acme/solver/x")
    assert (named.status, "is not a repository" in named.stderr) == (Exit.USAGE, True)
    assert hub.asked == []
