"""Tasks come from wherever people keep them, and become the same lines of JSON."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import numpy
import pandas
import pyarrow
import pytest
from pyarrow import parquet

from fulmen.row_files import ExtraMissing
from fulmen.train_toml.train import ConfigError
from fulmen.training.tasks import task_lines

TASKS = [{"id": "1", "input": {"question": "2+3="}}, {"id": "2", "input": {"question": "4+4="}}]


def read(tasks: Any) -> list[Any]:
    return [json.loads(line) for line in task_lines(tasks, "tasks")]


@pytest.mark.parametrize(
    "tasks",
    [TASKS, tuple(TASKS), iter(TASKS), pandas.DataFrame(TASKS)],
    ids=["list", "tuple", "iterator", "pandas"],
)
def test_values_of_every_kind_are_the_same_tasks(tasks: Any) -> None:
    assert read(tasks) == TASKS


def test_a_data_set_of_hugging_face_is_the_same_tasks() -> None:
    from datasets import Dataset  # takes two seconds

    assert read(Dataset.from_list(TASKS)) == TASKS


def test_one_task_needs_no_list() -> None:
    assert read(TASKS[0]) == TASKS[:1]


def test_files_are_read_by_their_ending(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, TASKS)) + "\n\n")
    parquet.write_table(pyarrow.Table.from_pylist(TASKS), tmp_path / "a.parquet")
    (tmp_path / "a.csv").write_text('id,question\n1,"2+3="\n2,"a ""word"", and\na line"\n')

    assert read(tmp_path / "a.jsonl") == TASKS
    assert read(str(tmp_path / "a.parquet")) == TASKS
    assert read(tmp_path / "a.csv") == [
        {"id": "1", "question": "2+3="}, {"id": "2", "question": 'a "word", and\na line'},
    ]  # fmt: skip


def test_values_of_numpy_times_and_missing_ones_become_json() -> None:
    frame = pandas.DataFrame(
        {
            "count": numpy.array([1, 2], dtype=numpy.int64),
            "score": [0.1, float("nan")],
            "at": [pandas.Timestamp("2026-01-02T03:04:05"), pandas.NaT],
            "on": datetime.date(2026, 1, 2),
            "vector": [numpy.array([1.5, 2.5]), numpy.array([3.5])],
        }
    )

    assert read(frame) == [
        {"count": 1, "score": 0.1, "at": "2026-01-02T03:04:05", "on": "2026-01-02", "vector": [1.5, 2.5]},
        {"count": 2, "score": None, "at": None, "on": "2026-01-02", "vector": [3.5]},
    ]


def test_every_task_that_has_no_form_in_json_is_named() -> None:
    with pytest.raises(ConfigError) as raised:
        task_lines([{"a": 1}, {"a": object()}, "text"], "tasks")

    assert raised.value.problems == (
        "tasks[1]: object cannot be converted to JSON",
        "tasks[2]: must be a dict, not str",
    )


@pytest.mark.parametrize(("tasks", "said"), [("tasks.xlsx", ".jsonl"), (3, "int is not a list of tasks")])
def test_what_is_no_data_is_refused_with_what_would_be(tasks: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        task_lines(tasks, "tasks")


def test_without_the_library_of_a_file_the_error_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(ExtraMissing, match=r"fulmen\[export\]"):
        task_lines(tmp_path / "a.parquet", "tasks")
