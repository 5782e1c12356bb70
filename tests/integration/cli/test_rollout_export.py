"""`fulmen rollout export`: what the policy did comes out of the store as rows, triplets or messages, with rewards."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fulmen_cli.exits import Exit
from fulmen_service_kit.security.tokens import Role
from tests.support.sdk.trajectory_cases import FIRST_SPAN, PlainSpan, chunk_of, plain, records_of, span_id
from tests.support.store.running import Runner, StoreHandle, Stubs, create
from tests.support.store.spans import append

RUN = "projects/default/trainingRuns/exported"
QUESTION = {"role": "user", "content": "2+3=é"}
CALLS = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "add"}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "5"}
ANSWER = {"role": "assistant", "content": "5"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def _request(*messages: Any) -> str:
    return json.dumps({"model": "m", "messages": messages, "tools": TOOLS})


def _answer(message: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "message": message}]})


CONVERSATION = [
    plain([1, 2], [3], request=_request(QUESTION), answer=_answer(CALLS), parent=FIRST_SPAN),
    plain([1, 2, 3, 8], [4, 4], request=_request(QUESTION, CALLS, RESULT), answer=_answer(ANSWER), parent=FIRST_SPAN),
    plain([7], [7], request=_request(QUESTION), answer=_answer(ANSWER), agent_name="fulmen.grader"),
]


Export = Callable[..., Awaitable[Result]]


@pytest.fixture
def export(fulmen: Export) -> Export:
    """Returns a function that runs `fulmen rollout export` as a client."""
    return partial(fulmen, "rollout", "export", role=Role.CLIENT)


@pytest.fixture
async def rollouts(store: StoreHandle, stubs: Stubs) -> list[str]:
    """Makes a training run: two rollouts that succeeded, and one that still waits."""
    names = await create(stubs, 2, training_run=RUN)
    runner = await Runner(stubs).open()
    taken = await runner.take(2)
    proxy = await store.stubs(role=Role.SERVICE)
    spans = [PlainSpan(id=FIRST_SPAN, agent="solver")]
    for each in taken:
        await append(proxy, chunk_of(records_of(CONVERSATION, spans), attempt=each.attempt))
    rewards = [{"value": 1.0}, {"value": 0.25, "step": 0}, {"value": 0.5, "step": 9}]
    rewards.append({"value": 0.125, "dimension": "style", "span_id": span_id(2)})
    await runner.complete(taken, rewards=rewards)
    await create(stubs, 1, training_run=RUN)
    return names


async def test_rows_hold_tokens_and_rewards_by_token_range(export: Export, rollouts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"

    result = await export(out, "--run", RUN, "--credit", "per_step")
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert {row["rollout"] for row in rows} == set(rollouts)
    row = rows[0]
    assert (row["agent"], row["attempt"], row["prompt_ids"], row["response_ids"]) == ("solver", 1, [1, 2], [3, 8, 4, 4])
    assert row["loss_mask"] == [True, False, True, True]
    assert row["policy_versions"] == [1, -1, 1, 1]
    assert row["final_rewards"] == {"reward": 1.0}
    assert [(each["value"], each["start"], each["end"]) for each in row["reward_ranges"]] == [
        (0.25, 0, 1),
        (0.125, 2, 4),
    ]
    assert [each["reward"] for each in row["calls"]] == [0.25, 1.0]
    assert row["messages"] == [QUESTION, CALLS, RESULT, ANSWER]
    assert "2 rows of 2 rollouts in" in result.stderr
    assert "2 calls are in no row: grader 2." in result.stderr
    assert "2 rewards score no call: unknown_step 2." in result.stderr
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("view", ["rows", "triplets", "messages"])
async def test_parquet_and_json_lines_say_the_same(
    export: Export, rollouts: list[str], tmp_path: Path, view: str
) -> None:
    import pyarrow.parquet as pq

    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    options = ["--view", view, "--run", RUN]
    await export(lines, *options)
    result = await export(table, *options, "--format", "parquet", "--output", "json")
    assert json.loads(result.stdout)["rollouts"] == 2
    expected = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    found = pq.read_table(table).to_pylist()
    nested = {name for row in expected for name, value in row.items() if isinstance(value, dict)}
    nested |= {"reward_ranges", "calls", "messages", "tools", "prompt"}
    for row in found:
        row |= {name: json.loads(row[name]) for name in nested & row.keys()}
    assert found == expected
    assert len(found) == {"rows": 2, "triplets": 4, "messages": 2}[view]


async def test_triplets_are_single_calls_with_their_credit(export: Export, rollouts: list[str], tmp_path: Path) -> None:
    out = tmp_path / "x.jsonl"
    options = ["--view", "triplets", "--credit", "discounted", "--gamma", "0.5", "--limit", "1"]

    await export(out, *options, "--filter", "state = SUCCEEDED")

    first, second = [json.loads(line) for line in out.read_text().splitlines()]
    assert (first["prompt_ids"], first["response_ids"], first["reward"]) == ([1, 2], [3], 0.75)
    assert (second["prompt_ids"], second["response_ids"], second["reward"]) == ([1, 2, 3, 8], [4, 4], 1.0)
    assert (second["step"], second["prompt"], second["response"]) == (1, [QUESTION, CALLS, RESULT], ANSWER)


async def test_messages_are_the_longest_conversations_of_the_agent_asked_for(
    export: Export, rollouts: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "x.jsonl"
    await export(out, "--view", "messages", "--agent", "solver", "--limit", "1")
    (line,) = out.read_text(encoding="utf-8").splitlines()
    row = json.loads(line)
    assert (row["messages"], row["tools"], row["reward"]) == ([QUESTION, CALLS, RESULT, ANSWER], TOOLS, 1.0)
    await export(out, "--view", "messages", "--agent", "nobody")
    assert out.read_text() == ""


async def test_a_failed_export_leaves_the_old_file_and_says_why(
    export: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "x.jsonl"
    out.write_text("old")

    await export(out, "--filter", "nonsense = 3", status=Exit.USAGE)
    await export(out, "--gamma", "0.5", status=Exit.USAGE)
    await export(out, "--weight", "reward", status=Exit.USAGE)
    await export(f"{tmp_path}/no/x", status=Exit.FAILED)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = await export(out, "--format", "parquet", status=Exit.FAILED)
    assert 'pip install "fulmen[export]"' in result.stderr
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]
