"""Scores: written and read back as they were, equal bytes for equal scores, every wrong line named."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen import scores as module
from fulmen.scores import (
    GraderIdentity,
    Problem,
    RolloutScore,
    Scores,
    ScoresInvalid,
    ScoresTooLarge,
    Source,
    final_reward,
    read_scores,
    write_scores,
)

texts = st.text(st.characters(codec="utf-8"), max_size=12)
keys = st.tuples(
    texts.filter(bool), st.none() | st.integers(0, 9), st.sampled_from((b"", bytes(range(8)), b"\xff" * 8))
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.dictionaries(keys, numbers, min_size=1, max_size=4)
problems = st.builds(Problem, kind=texts, message=texts)


@st.composite
def scored(draw: st.DrawFn, number: int) -> RolloutScore:
    problem = draw(st.none() | problems)
    return RolloutScore(
        rollout=f"projects/default/rollouts/{number}",
        attempt=f"projects/default/rollouts/{number}/attempts/{draw(st.integers(1, 9))}",
        training_run=draw(texts),
        group=draw(texts),
        mode=draw(st.sampled_from(("train", "validation", "test"))),
        rewards={} if problem else draw(rewards),
        problem=problem,
    )


@st.composite
def all_scores(draw: st.DrawFn) -> Scores:
    count = draw(st.integers(0, 5))
    return Scores(
        grader=GraderIdentity(kind="python", entry=draw(texts), bundle_sha256="ab"),
        source=Source(training_run=draw(texts), filter=draw(texts), states=("succeeded", "failed")),
        rollouts=tuple(draw(scored(number)) for number in range(count)),
    )


GOOD = Scores(
    grader=GraderIdentity(kind="command", entry="python grade.py", bundle_sha256="00"),
    source=Source(),
    rollouts=tuple(
        RolloutScore(
            rollout=f"projects/default/rollouts/{n}",
            attempt=f"projects/default/rollouts/{n}/attempts/1",
            rewards={("reward", None, b""): n},
        )
        for n in range(3)
    ),
)


@given(all_scores(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_what_is_written_is_read_back_and_its_order_makes_no_other_bytes(given: Scores, chance: random.Random) -> None:
    content = write_scores(given)
    shuffled = list(given.rollouts)
    chance.shuffle(shuffled)

    assert read_scores(content) == given
    assert write_scores(Scores(grader=given.grader, source=given.source, rollouts=tuple(shuffled))) == content


def test_every_wrong_line_is_named() -> None:
    name = {
        "rollout": "projects/default/rollouts/7",
        "attempt": "projects/default/rollouts/7/attempts/1",
        "mode": "train",
    }
    reward = {"dimension": "reward", "value": 1}
    lines: list[tuple[Any, str]] = [
        ("{", "not JSON"),
        ([1], "not a JSON object"),
        ({**name, "rollout": ""}, "needs `rollout`"),
        ({**name, "mode": 3, "rewards": [reward]}, "needs `mode`"),
        (
            {**name, "attempt": "projects/default/rollouts/8/attempts/1", "rewards": [reward]},
            "`attempt` is not one of `rollout`",
        ),
        (name, "needs either `rewards`"),
        ({**name, "rewards": []}, "needs either `rewards`"),
        ({**name, "rewards": [reward], "problem": {"kind": "INFRA", "message": ""}}, "needs either `rewards`"),
        ({**name, "rewards": [reward, {"dimension": "x", "value": True}]}, "reward 2 needs"),
        ({**name, "rewards": [{"dimension": "x", "value": float("inf")}]}, "reward 1 needs"),
        ({**name, "rewards": [{**reward, "step": -1}]}, "`step` must be"),
        ({**name, "rewards": [{**reward, "span_id": "00ff"}]}, "`span_id` must be"),
        ({**name, "rewards": [reward, reward]}, "reward 2 occurs twice"),
        (
            {
                "rollout": "projects/default/rollouts/0",
                "attempt": "projects/default/rollouts/0/attempts/1",
                "mode": "train",
                "rewards": [reward],
            },
            "twice",
        ),
    ]
    whole = _lines(write_scores(GOOD))
    content = _packed([*whole, *(line if isinstance(line, str) else json.dumps(line) for line, _ in lines)])

    with pytest.raises(ScoresInvalid) as caught:
        read_scores(content)

    found = dict(caught.value.problems)
    assert sorted(found) == list(range(5, 5 + len(lines)))
    for number, (_, text) in enumerate(lines, start=5):
        assert text in found[number]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "not a file of scores"),
        (b"plain text", "not a file of scores"),
        (zstandard.compress(b"{}\n"), "`format` must be"),
        (zstandard.compress(b'{"format":"fulmen.scores/1"}\n'), "needs `grader`"),
    ],
)
def test_what_is_no_scores_is_told(content: bytes, text: str) -> None:
    with pytest.raises(ScoresInvalid, match=text):
        read_scores(content)


def test_a_cut_file_is_noticed() -> None:
    with pytest.raises(ScoresInvalid, match="counts 3 rollouts, and 2 follow"):
        read_scores(_packed(_lines(write_scores(GOOD))[:-1]))


def test_too_many_scores_are_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CONTENT_BYTES", 100)
    with pytest.raises(ScoresTooLarge, match=r"3 rollouts .* --filter"):
        write_scores(GOOD)


def test_the_final_reward_is_that_of_the_dimension_reward_or_of_the_only_one() -> None:
    step = ("reward", 0, b"")
    assert final_reward({("reward", None, b""): 1.0, ("style", None, b""): 2.0, step: 3.0}) == 1.0
    assert final_reward({("style", None, b""): 2.0, step: 3.0}) == 2.0
    assert final_reward({("style", None, b""): 2.0, ("form", None, b""): 3.0}) is None
    assert final_reward({step: 3.0, ("reward", None, b"\0" * 8): 4.0}) is None


def _lines(content: bytes) -> list[str]:
    return zstandard.decompress(content).decode().splitlines()


def _packed(lines: Sequence[str]) -> bytes:
    return zstandard.compress("".join(f"{line}\n" for line in lines).encode())
