"""The nim example: its perfect player never loses a game that can be won, and test games begin where no training game does."""

from __future__ import annotations

import json
from functools import cache
from itertools import product

import pytest

from tests.support.algorithm.models import EXAMPLES, load_script

FOLDER = EXAMPLES / "nim"


@pytest.fixture
def rules():
    return load_script(FOLDER / "rules.py")


def test_the_perfect_player_makes_just_the_moves_that_win(rules):
    @cache
    def wins(heaps: tuple[int, ...]) -> bool:
        """Searches all games; knows nothing of the rule."""
        return any(not wins(rules.moved(heaps, move)) for move in rules.moves(heaps))

    for heaps in product(range(9), repeat=2):
        winning = [move for move in rules.moves(heaps) if not wins(rules.moved(heaps, move))]
        assert rules.best(heaps) == (winning or rules.moves(heaps))


def test_a_move_takes_at_least_one_from_one_heap(rules):
    assert rules.moves((2, 1)) == ["a 0", "a 1", "b 0"]
    assert [rules.moved((2, 1), move) for move in rules.moves((2, 1))] == [(0, 1), (1, 1), (2, 0)]
    assert rules.moves((0, 0)) == []


def test_no_training_game_begins_with_the_board_of_a_test_or_validation_game(rules):
    begun = {
        use: {json.loads(line)["input"]["board"] for line in (FOLDER / f"tasks/{use}.jsonl").read_text().splitlines()}
        for use in ("train", "validation", "test")
    }
    assert begun["train"].isdisjoint(begun["validation"] | begun["test"])
    assert begun["validation"].isdisjoint(begun["test"])
    assert (len(begun["validation"]), len(begun["test"])) == (100, 150)
    games = [rules.heaps_of(board) for board in begun["validation"] | begun["test"]]
    assert all(first != second for first, second in games), "games that can be won"


def test_each_player_is_scored_by_its_own_result_and_a_fault_is_worse_than_a_lost_game():
    grade = load_script(FOLDER / "grader.py").grade
    assert grade({}, {"winner": "first", "fault": False}) == {"reward": 1.0, "first": 1.0, "second": 0.0}
    assert grade({}, {"winner": "second", "fault": False}) == {"reward": 0.0, "first": 0.0, "second": 1.0}
    assert grade({}, {"winner": "first", "fault": True}) == {"reward": 1.0, "first": 0.5, "second": -1.0}
