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
    def wins(board: str) -> bool:
        """Searches all games; knows nothing of the rule."""
        return any(not wins(rules.moved(board, move)) for move in rules.moves(board))

    for limit, left in product(rules.LIMITS, range(1, rules.MOST + 1)):
        board = f"{left} {limit}"
        winning = [move for move in rules.moves(board) if not wins(rules.moved(board, move))]
        assert rules.best(board) == (winning or rules.moves(board))


def test_a_move_takes_at_least_one_and_no_more_than_the_limit_or_what_is_left(rules):
    assert rules.moves("9 3") == ["1", "2", "3"]
    assert rules.moves("2 3") == ["1", "2"]
    assert rules.moves("0 3") == []
    assert [rules.moved("2 3", move) for move in rules.moves("2 3")] == ["1 3", "0 3"]


def test_no_training_game_begins_with_the_board_of_a_test_or_validation_game(rules):
    def boards(use: str) -> list[str]:
        return [json.loads(line)["input"]["board"] for line in (FOLDER / f"tasks/{use}.jsonl").read_text().splitlines()]

    train, validation, test = (set(boards(use)) for use in ("train", "validation", "test"))
    assert train.isdisjoint(validation | test)
    assert validation.isdisjoint(test)
    assert (len(validation), len(test)) == (10, 11)
    for left, limit in map(rules.read, validation | test):
        assert left % (limit + 1), "it can be won"
        assert left > limit, "not by the first move"


def test_each_player_is_scored_by_its_own_result_and_a_fault_is_worse_than_a_lost_game():
    grade = load_script(FOLDER / "grader.py").grade
    assert grade({}, {"winner": "first", "fault": False}) == {"reward": 1.0, "first": 1.0, "second": 0.0}
    assert grade({}, {"winner": "second", "fault": False}) == {"reward": 0.0, "first": 0.0, "second": 1.0}
    assert grade({}, {"winner": "first", "fault": True}) == {"reward": 1.0, "first": 0.5, "second": -1.0}
