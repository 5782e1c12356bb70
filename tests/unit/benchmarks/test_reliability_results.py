"""Results of the crash matrix say when and where they were measured, and nothing of the machine's folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.page import _falls_short
from benchmarks.reliability.results import Results, without_checkout

RESULTS = Path(__file__).parents[3] / "benchmarks/results/crash_matrix.json"


def test_tracebacks_name_files_relative_to_the_checkout(repository_root: Path) -> None:
    text = json.dumps(f'File "{repository_root}/examples/agent.py", line 3')
    assert json.loads(without_checkout(text)) == 'File "examples/agent.py", line 3'


def test_a_page_of_stored_results_has_the_date_commit_and_machine_of_their_measurement() -> None:
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))

    document = Results(RESULTS, resume=False).document()

    assert {name: document[name] for name in ("date", "commit", "machine")} == {
        name: stored[name] for name in ("date", "commit", "machine")
    }


def test_new_results_have_the_date_of_today(tmp_path: Path) -> None:
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**stored, "date": "2001-01-01"}), encoding="utf-8")
    results = Results(path, resume=False)

    results.add(stored["cells"][0], settings={})

    assert results.document()["date"] > "2001-01-01"


def test_published_results_name_no_absolute_python_file() -> None:
    assert 'File \\"/' not in RESULTS.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ({"run_ended": False, "holds": False, "within_limit": True}, "the run did not end"),
        (
            {"run_ended": True, "holds": True, "within_limit": False},
            "work did not continue within 30 s after the fault",
        ),
        (
            {
                "run_ended": True,
                "holds": False,
                "within_limit": True,
                "failed": 2,
                "problems": ["r: failed", "a:\n b\nE: expired"],
            },
            "rollouts that failed: 2; E: expired",
        ),
    ],
)
def test_the_page_says_what_a_cell_falls_short_of(cell: dict[str, Any], said: str) -> None:
    assert (
        _falls_short([{"key": "store/kill", "notes": [], "failed": 0, **cell}], {}).splitlines()[-1]
        == f"- `store/kill`: {said}"
    )
