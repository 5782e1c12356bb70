"""Export: what the store has comes out as rows, each span once, in a file that is whole or not there."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result

from fulmen.ids import uuid7
from fulmen.store.v1 import span_pb2
from fulmen_cli.exits import Exit
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import Stubs, create
from tests.support.store.spans import append, packed, span

RUN = "projects/default/trainingRuns/exported"
Export = Callable[..., Awaitable[Result]]


@pytest.fixture
def export(fulmen: Export) -> Export:
    """Returns a function that runs `fulmen spans export` as a client."""
    return partial(fulmen, "spans", "export", role=Role.CLIENT)


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


async def test_a_training_run_becomes_json_lines(export: Export, rollouts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "spans.jsonl"

    result = await export("--training-run", RUN, "--out", out)

    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 6
    assert {row["rollout"] for row in rows} == set(rollouts)
    (chat,) = [row for row in rows if row["name"] == "chat-0"]
    assert chat["attributes"] == {"tokens": 7, "ok": True}
    assert (chat["attempt"], chat["status"], chat["end_time_unix_nano"]) == (1, "unset", 12_000_000_000)
    assert [row["status"] for row in rows if row["name"] == "tool"] == ["error"] * 3
    assert "6 spans in" in result.stderr
    assert list(tmp_path.iterdir()) == [out]


async def test_parquet_has_the_same_rows(export: Export, rollouts: list[str], tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    out = tmp_path / "spans.parquet"
    await export("--training-run", RUN, "--format", "parquet", "--out", out, "--name", "chat-1")

    (row,) = pq.read_table(out).to_pylist()
    assert (row["name"], row["rollout"], row["attempt"]) == ("chat-1", rollouts[1], 1)
    assert json.loads(row["attributes"]) == {"tokens": 7, "ok": True}


async def test_filters_and_single_rollouts_can_be_exported(export: Export, rollouts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"

    await export("--rollout", rollouts[2], "--attribute", "tokens=7", "--min-duration-s", "1", "--out", out)

    assert [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["chat-2"]


async def test_a_failed_export_leaves_the_old_file(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("old")

    await export("--rollout", "projects/default/rollouts/nonsense", "--out", out, status=Exit.USAGE)
    await export("--out", out, status=Exit.USAGE)
    await export("--training-run", "r", "--out", f"{tmp_path}/no/x", status=Exit.FAILED)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = await export("--training-run", RUN, "--format", "parquet", "--out", out, status=Exit.FAILED)
    assert 'pip install "fulmen[export]"' in result.stderr
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]
