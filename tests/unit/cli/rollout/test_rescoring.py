"""What a rescoring keeps while it is under way, and what its summary counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.scores import GraderIdentity, Problem, RolloutScore, Source
from fulmen_cli.exits import CommandFailed
from fulmen_cli.rollout.rescore.partial import Compared, opened, partial_path
from fulmen_cli.rollout.rescore.scores import summary_of


def result(number: int, new: float | None = 1.0, *, old: float | None = 0.5, group: str = "g") -> Compared:
    """Makes a result; None is a rollout that the grader failed on."""
    name = f"projects/default/rollouts/{number}"
    score = RolloutScore(
        rollout=name,
        attempt=f"{name}/attempts/1",
        group=group,
        rewards={} if new is None else {("reward", None, b""): new},
        problem=Problem(kind="TIMEOUT", message="late") if new is None else None,
    )
    return Compared(score=score, old=old)


@pytest.mark.parametrize("torn", [b"", b"0.5", b"0.5\t{", b'0.5\t{"rollout":"x"}\n', b"\n", b"0.5\tnull\n"])
def test_scores_are_found_again_whatever_the_last_line_is_and_failures_are_not(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "a" / "b.jsonl"
    with opened(path) as partial:
        for each in (result(1), result(2, None), result(3, old=None)):
            partial.add(each)
        assert set(partial.done) == {f"projects/default/rollouts/{n}" for n in (1, 2, 3)}
    with path.open("ab") as file:
        file.write(torn)

    with opened(path) as partial:
        assert partial.done == {each.score.rollout: each for each in (result(1), result(3, old=None))}
        partial.add(result(4))
    with opened(path) as partial:
        assert set(partial.done) == {f"projects/default/rollouts/{n}" for n in (1, 3, 4)}
    with opened(path, restart=True) as partial:
        assert not partial.done
    with opened(path) as partial:
        assert not partial.done


def test_the_same_work_is_done_by_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    with opened(path) as partial:
        partial.add(result(1))
        with pytest.raises(CommandFailed, match="running in another process"), opened(path):
            pass
    with opened(path) as partial:
        assert set(partial.done) == {"projects/default/rollouts/1"}


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(CommandFailed, match="cannot be written"), opened(tmp_path / "file" / "b.jsonl"):
        pass


def test_another_grader_selection_or_store_has_a_file_of_its_own(tmp_path: Path) -> None:
    grader, source = GraderIdentity(kind="python", entry="a.py:b", bundle_sha256="00"), Source()
    paths = [
        partial_path(tmp_path, grader, source, "one"),
        partial_path(tmp_path, replace(grader, bundle_sha256="01"), source, "one"),
        partial_path(tmp_path, replace(grader, entry="a.py:c"), source, "one"),
        partial_path(tmp_path, grader, replace(source, filter="priority = 1"), "one"),
        partial_path(tmp_path, grader, replace(source, states=("succeeded", "failed")), "one"),
        partial_path(tmp_path, grader, source, "two"),
    ]

    assert len(set(paths)) == len(paths)
    assert partial_path(tmp_path, grader, source, "one") == paths[0]


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=6), st.floats(0.5, 3), st.floats(-2, 2))
def test_a_grader_that_only_scales_changes_no_order(old: list[float], factor: float, shift: float) -> None:
    values = [round(value, 1) for value in old]
    results = [result(n, factor * value + shift, old=value) for n, value in enumerate(values)]

    summary = summary_of(results)

    assert (summary.moved, summary.groups_moved, summary.groups) == (0, 0, 1)


def test_the_summary_counts_orders_and_failures() -> None:
    results = [
        result(1, 1.0, old=2.0),
        result(2, 2.0, old=1.0),
        result(3, 3.0, old=3.0),
        result(4, 5.0, old=0.0, group="alone"),
        result(5, None),
        result(6, 9.0, old=None),
        result(7, 0.0, old=0.0, group=""),
    ]

    summary = summary_of(results)

    assert (summary.rollouts, summary.scored, summary.failures) == (7, 6, {"TIMEOUT": 1})
    assert (summary.moved, summary.groups_moved, summary.groups) == (2, 1, 1)
    assert summary.old_mean == pytest.approx(6 / 5)
    assert summary.new_mean == pytest.approx(11 / 5)
    assert "2 rollouts in 1 of 1 groups changed their order." in summary.lines()
