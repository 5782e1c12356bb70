"""JSONL files: every malformed line of every file is reported at once, with its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulmen.train_toml.train import ConfigError, DataConfig
from fulmen.training.task_files import read_datasets


def test_every_malformed_line_of_every_file_is_reported_with_its_number(tmp_path: Path) -> None:
    train, validation, demonstrations = (tmp_path / f"{name}.jsonl" for name in ("train", "validation", "demos"))
    train.write_bytes(b'{"a": 1}\n{"a": \n\n[1]\n\xff\xfe\n{"a": NaN}\n{"a": 1e999}\n')
    validation.write_bytes(b"")
    demonstrations.write_text('{"messages": []}\n{"messages": [{"role": "user", "content": "?"}]}\n')

    with pytest.raises(ConfigError) as raised:
        read_datasets(DataConfig(train=train, validation=validation, demonstrations=demonstrations))

    assert [problem.replace(str(tmp_path) + "/", "") for problem in raised.value.problems] == [
        "train.jsonl:2: not JSON: Expecting value (column 6)",
        "train.jsonl:4: must be a JSON object, not a list",
        "train.jsonl:5: not UTF-8 (byte 1 of the line)",
        "train.jsonl:6: not JSON: NaN is not a JSON number",
        "train.jsonl:7: not JSON: number 1e999 is out of range",
        "validation.jsonl: empty",
        'demos.jsonl:1: a demonstration needs "messages", a list that is not empty',
        "demos.jsonl:2: no message has the role assistant, so there is nothing to learn",
    ]


def test_blank_lines_and_windows_line_ends_do_not_change_the_content(tmp_path: Path) -> None:
    plain, windows = tmp_path / "plain.jsonl", tmp_path / "windows.jsonl"
    plain.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    windows.write_bytes(b'{"a": 1}\r\n\r\n{"a": 2}')

    first = read_datasets(DataConfig(train=plain))["train_tasks"]
    second = read_datasets(DataConfig(train=windows))["train_tasks"]

    assert first.count == second.count == 2
    assert first.sha256 == second.sha256


def test_a_task_larger_than_a_rollouts_input_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": "' + "x" * (256 * 1024) + '"}\n')

    with pytest.raises(ConfigError, match="maximum 262144"):
        read_datasets(DataConfig(train=path))


def test_every_malformed_preference_is_reported_with_its_number(tmp_path: Path) -> None:
    prompt, good, bad = (
        [{"role": role, "content": text}] for role, text in (("user", "1+1="), ("assistant", "2"), ("user", "3"))
    )
    lines = [
        {"prompt": prompt, "chosen": good},
        {"prompt": prompt, "chosen": bad, "rejected": good},
        {"prompt": [{"role": "nobody"}], "chosen": good, "rejected": good},
        {"prompt": prompt, "chosen": good, "rejected": good},
        {"prompt": prompt, "chosen": good, "rejected": [{"role": "assistant", "content": "3"}]},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError) as caught:
        read_datasets(DataConfig(preferences=path))
    found = [problem.partition("pairs.jsonl:")[2] for problem in caught.value.problems]
    assert [problem.partition(":")[0] for problem in found] == ["1", "2", "3", "4"]
    assert 'needs "rejected"' in found[0]
    assert "no message of chosen has the role assistant" in found[1]
    assert "prompt[0].role must be one of" in found[2]
    assert '"chosen" and "rejected" are the same' in found[3]
