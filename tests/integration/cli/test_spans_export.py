"""Export: what the store has comes out as rows, each span once, in a file that is whole or not there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fulmen.ids import uuid7
from fulmen.store.v1 import span_pb2
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle, Stubs, create
from tests.support.store.spans import append, packed, span

RUN = "projects/default/trainingRuns/exported"


async def fulmen(store: StoreHandle, *arguments: str) -> Any:
    """Runs the command line against the store."""
    command = [*arguments, "--store-target", store.target, "--token", store.token(Role.CLIENT)]
    return await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
async def rollouts(stubs: Stubs) -> list[str]:
    """Makes a training run with spans, one chunk of which was stored twice."""
    names = await create(stubs, 3, training_run=RUN)
    for place, name in enumerate(names):
        chunk = packed(
            f"{name}/attempts/1",
            span(f"chat-{place}", start=10, seconds=2, tokens=7, ok=True),
            span("tool", error=True, text="é"),
        )
        again = span_pb2.SpanChunk()
        again.CopyFrom(chunk)
        again.chunk_id = str(uuid7())
        await append(stubs, chunk, again)
    return names


async def test_a_training_run_becomes_json_lines(store: StoreHandle, rollouts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "spans.jsonl"

    result = await fulmen(store, "spans", "export", "--training-run", RUN, "--out", str(out))

    assert (result.exit_code, result.exception) == (0, None)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6
    assert {row["rollout"] for row in rows} == set(rollouts)
    (chat,) = [row for row in rows if row["name"] == "chat-0"]
    assert chat["attributes"] == {"tokens": 7, "ok": True}
    assert (chat["attempt"], chat["status"], chat["end_time_unix_nano"]) == (1, "unset", 12_000_000_000)
    assert [row["status"] for row in rows if row["name"] == "tool"] == ["error"] * 3
    assert "6 spans in" in result.stderr
    assert list(tmp_path.iterdir()) == [out]


async def test_parquet_has_the_same_rows(store: StoreHandle, rollouts: list[str], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    out = tmp_path / "spans.parquet"
    result = await fulmen(
        store, "spans", "export", "--training-run", RUN, "--format", "parquet", "--out", str(out), "--name", "chat-1"
    )

    assert (result.exit_code, result.exception) == (0, None)
    (row,) = pq.read_table(out).to_pylist()
    assert (row["name"], row["rollout"], row["attempt"]) == ("chat-1", rollouts[1], 1)
    assert json.loads(row["attributes"]) == {"tokens": 7, "ok": True}


async def test_filters_and_single_rollouts_can_be_exported(
    store: StoreHandle, rollouts: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    arguments = ["--rollout", rollouts[2], "--attribute", "tokens=7", "--min-duration-s", "1", "--out", str(out)]

    result = await fulmen(store, "spans", "export", *arguments)

    assert result.exit_code == 0
    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["chat-2"]


async def test_a_failed_export_leaves_the_old_file(store: StoreHandle, tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("old")
    command = ["spans", "export", "--rollout", "projects/default/rollouts/nonsense", "--out", str(out)]

    assert (await fulmen(store, *command)).exit_code == Exit.USAGE
    assert (await fulmen(store, "spans", "export", "--out", str(out))).exit_code == Exit.USAGE
    assert (await fulmen(store, *command[:2], "--training-run", "r", "--out", f"{tmp_path}/no/x")).exit_code == 1
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


async def test_parquet_without_its_library_says_what_to_install(
    store: StoreHandle, rollouts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    out = tmp_path / "x.parquet"

    result = await fulmen(store, "spans", "export", "--training-run", RUN, "--format", "parquet", "--out", str(out))

    assert result.exit_code == Exit.FAILED
    assert 'pip install "fulmen[export]"' in result.stderr
    assert not out.exists()
