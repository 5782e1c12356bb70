"""`fulmen calls` and `fulmen dataset` against a real store."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

from click.testing import Result

from fulmen.store.v1 import call_service_pb2 as pb
from fulmen_cli.exits import Exit
from fulmen_service_kit.security.tokens import Role
from tests.support.store.calls import new_call
from tests.support.store.running import Stubs

Fulmen = Callable[..., Awaitable[Result]]


async def test_an_app_without_calls_is_told_so_and_no_file_is_written(fulmen: Fulmen, tmp_path: Path) -> None:
    assert "No calls." in (await fulmen("calls", "list", role=Role.READER)).stdout
    assert "No conversations." in (await fulmen("calls", "conversations", role=Role.READER)).stdout
    refused = await fulmen("dataset", "create", "x", "--folder", tmp_path, status=Exit.FAILED)
    assert "No rows: 0 conversations and 0 calls" in refused.output
    assert list(tmp_path.iterdir()) == []


async def test_calls_are_listed_shown_rated_and_deleted(fulmen: Fulmen, stubs: Stubs) -> None:
    call = new_call("Hello\x1b[2J", "Hi", "More", conversation="chat-1")
    await stubs.calls.RecordCalls(pb.RecordCallsRequest(calls=[call]))
    uuid = call.call.name.rpartition("/")[2]
    await fulmen("calls", "rate", "chat-1", "--score", "0.25", "--label", "meh")
    listed = (await fulmen("calls", "list", "--filter", "label = meh")).stdout
    assert all(word in listed for word in (uuid, "assistant", "200", "0.25", "chat-1"))
    assert "meh" in (await fulmen("calls", "conversations")).stdout
    shown = (await fulmen("calls", "show", uuid)).stdout
    assert all(word in shown for word in ("user:", "Hello", "More", "assistant:", "yes"))
    assert "\x1b" not in shown  # What somebody wrote moves no cursor.
    as_json = json.loads((await fulmen("calls", "show", uuid, "-o", "json")).stdout)
    assert as_json["answer"] == {"role": "assistant", "content": "yes"}
    assert "Deleted 1 calls." in (await fulmen("calls", "delete", "chat-1", "nobody")).stdout
    await fulmen("calls", "show", uuid, status=Exit.NOT_FOUND)
    await fulmen("calls", "rate", "chat-1", "--score", "1", status=Exit.NOT_FOUND)


async def test_a_data_set_is_two_files_that_train_toml_names(fulmen: Fulmen, stubs: Stubs, tmp_path: Path) -> None:
    made = [new_call(f"Question {number}", answer=f"{number}", conversation=f"c{number}") for number in range(30)]
    await stubs.calls.RecordCalls(pb.RecordCallsRequest(calls=made))
    printed = (await fulmen("dataset", "create", "support", "--validation", "0.5", "--folder", tmp_path)).stdout
    assert f'demonstrations = "{tmp_path.as_posix()}/support.train.jsonl"' in printed
    assert f'validation_demonstrations = "{tmp_path.as_posix()}/support.validation.jsonl"' in printed
    rows = [
        json.loads(line)["messages"][0]["content"]
        for side in ("train", "validation")
        for line in (tmp_path / f"support.{side}.jsonl").read_text().splitlines()
    ]
    assert sorted(rows) == sorted(f"Question {number}" for number in range(30))
    some = await fulmen("dataset", "create", "some", "--as", "tasks", "--limit", "3", "--validation", "0", "--folder",
                        tmp_path, "-o", "json")  # fmt: skip
    told = json.loads(some.stdout)
    assert (told["rows"], told["calls"], list(told["files"])) == ({"train": 3, "validation": 0}, 3, ["train"])


async def test_what_is_wrong_with_a_data_set_is_said_before_a_file_is_written(fulmen: Fulmen, tmp_path: Path) -> None:
    for name in ("../x", "a/b", "", "x" * 101):
        await fulmen("dataset", "create", name, "--folder", tmp_path, status=Exit.USAGE)
    refused = await fulmen("dataset", "create", "x", "--filter", "moon = 1 AND score > bad", status=Exit.USAGE)
    assert "at character 1: `moon`" in refused.output
    assert "at character 22" in refused.output
    assert list(tmp_path.iterdir()) == []


async def test_a_data_set_that_training_would_refuse_for_its_size_is_not_written(
    fulmen: Fulmen, stubs: Stubs, tmp_path: Path
) -> None:
    for start in range(0, 80, 10):
        made = [new_call(f"{number}" + "x" * 240_000) for number in range(start, start + 10)]
        await stubs.calls.RecordCalls(pb.RecordCallsRequest(calls=made))
    refused = await fulmen("dataset", "create", "x", "--folder", tmp_path, status=Exit.FAILED)
    assert "a file for train.toml may have at most 16777216" in refused.output
    assert list(tmp_path.iterdir()) == []
    await fulmen("dataset", "create", "x", "--limit", "40", "--folder", tmp_path)


async def test_a_folder_that_does_not_exist_is_an_error_of_one_line(
    fulmen: Fulmen, stubs: Stubs, tmp_path: Path
) -> None:
    await stubs.calls.RecordCalls(pb.RecordCallsRequest(calls=[new_call("Hello")]))
    refused = await fulmen("dataset", "create", "x", "--folder", tmp_path / "none", status=Exit.FAILED)
    assert "cannot be written: No such file or directory." in refused.output
