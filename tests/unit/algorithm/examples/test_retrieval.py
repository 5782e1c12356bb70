"""The retrieval example: whatever is searched for has an answer, and answers can be found by reading alone."""

from __future__ import annotations

import json
import random

import pytest

from tests.support.algorithm.models import EXAMPLES, load_script

FOLDER = EXAMPLES / "retrieval"


class Careful(random.Random):
    """Follows no habit."""

    def random(self) -> float:
        return 0.99


@pytest.fixture
def library(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script(FOLDER / "library.py")


@pytest.fixture
def make_tasks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return load_script(FOLDER / "make_tasks.py")


def tasks(use: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / f"tasks/{use}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "words", ["", "   ", '"', "NEAR(", "ada AND", "-", "*", "text:", "\0", "\ud800", "ÿ", "x" * 100_000, "ada " * 5000]
)
def test_whatever_is_searched_for_has_a_short_answer(library, words):
    found = library.search(1, words)
    assert found == library.NOTHING or set(found.split(" . ")) <= set(library.documents(1))


def test_a_number_makes_the_same_library_and_another_number_another(library):
    first = library.documents(1)
    library.facts.cache_clear()
    assert library.documents(1) == first
    assert library.documents(2) != first


def test_questions_of_test_and_validation_are_about_libraries_that_occur_nowhere_else():
    used = [{each["input"]["library"] for each in tasks(use)} for use in ("train", "validation", "test")]
    assert sum(map(len, used)) == len(set.union(*used))
    assert len(tasks("test")) >= 200


def test_a_reader_without_the_habits_finds_every_answer(make_tasks):
    chance = random.Random(7)
    for _ in range(300):
        question = make_tasks.draw(chance, chance.randint(1, 80))
        shown = make_tasks.demonstration(question, Careful())
        assert shown["messages"][-1]["content"] == question.answer
        assert len(shown["messages"]) == 2 + 2 * len(question.kinds)
