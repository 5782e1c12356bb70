"""Results of the crash matrix say nothing of the machine's folders."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.reliability.page import _falls_short
from benchmarks.reliability.results import without_checkout

RESULTS = Path(__file__).parents[3] / "benchmarks/results/crash_matrix.json"


def test_tracebacks_name_files_relative_to_the_checkout(repository_root: Path) -> None:
    text = json.dumps(f'File "{repository_root}/examples/agent.py", line 3')
    assert json.loads(without_checkout(text)) == 'File "examples/agent.py", line 3'


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
