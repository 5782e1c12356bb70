"""Whose tokens are whose when a policy changes while an answer is on its way."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked, PolicyChange
from fulmen_llm_proxy.capture.decode import Captured, Flaw, decode_capture, observed_versions


def ranges(captured: Captured, index: int = 0) -> list[tuple[int, int, int]]:
    return [(part.version, part.start, part.end) for part in captured.choices[index].versions]


def whole(**top_level: object) -> bytes:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]},
        "finish_reason": "stop",
        "token_ids": [7, 8],
    }
    return json.dumps(
        {"choices": [choice], "usage": {"completion_tokens": 2}, "prompt_token_ids": [1], **top_level}
    ).encode()


def changed_to(version: int, **pieces: int) -> PolicyChange:
    return PolicyChange(version=version, pieces={int(key[1:]): count for key, count in pieces.items()})


def test_a_stream_has_the_old_version_up_to_the_change_and_the_new_one_after_it() -> None:
    assert [(r.version, r.start, r.end) for r in observed_versions(0, [1, 2, 3], 4, [changed_to(5, c0=2)])] == [
        (4, 0, 3),
        (5, 3, 6),
    ]


def test_a_choice_that_had_not_begun_is_of_the_new_version_alone() -> None:
    assert [(r.version, r.start, r.end) for r in observed_versions(1, [1, 1], 4, [changed_to(5, c0=2)])] == [(5, 0, 2)]


@given(
    lengths=st.lists(st.integers(0, 4), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_the_versions_of_a_stream_cover_every_token_in_order(lengths: list[int], cuts: list[int]) -> None:
    changes = [changed_to(10 + i, c0=min(cut, len(lengths))) for i, cut in enumerate(sorted(cuts))]
    parts = observed_versions(0, lengths, 9, changes)
    reached = 0
    for part in parts:
        assert part.start == reached < part.end
        reached = part.end
    assert reached == sum(lengths)
    assert [part.version for part in parts] == sorted({part.version for part in parts})


def test_a_whole_answer_during_which_the_policy_changed_names_both_versions_and_is_not_trained_on() -> None:
    reader = ChatReader(Asked())
    reader.collected.policy_changes.append(changed_to(5))
    reader.whole(whole())
    captured = decode_capture(reader.collected, default_version=4)
    assert ranges(captured) == [(4, 0, 2), (5, 2, 2)]
    assert captured.flaws == (Flaw.VERSION_CHANGED,)


def test_what_the_backend_says_of_its_versions_has_precedence() -> None:
    reader = ChatReader(Asked())
    reader.collected.policy_changes.append(changed_to(5))
    reported = [{"version": 4, "start": 0, "end": 1}, {"version": 5, "start": 1, "end": 2}]
    reader.whole(whole(weight_versions=reported))
    captured = decode_capture(reader.collected, default_version=4)
    assert ranges(captured) == [(4, 0, 1), (5, 1, 2)]
    assert captured.flaws == ()


@pytest.mark.parametrize(
    ("weight_version", "versions", "flaws"),
    [
        ("4", [(4, 0, 2)], ()),
        ("5", [(4, 0, 2), (5, 2, 2)], (Flaw.VERSION_CHANGED,)),
        ("default", [(4, 0, 2)], ()),
        (None, [(4, 0, 2)], ()),
        (7, [(4, 0, 2)], ()),
    ],
)
def test_a_version_at_the_end_that_is_not_the_one_of_the_begin_marks_the_call(
    weight_version: object, versions: list[tuple[int, int, int]], flaws: tuple[Flaw, ...]
) -> None:
    reader = ChatReader(Asked())
    reader.whole(whole(metadata={"weight_version": weight_version}))
    captured = decode_capture(reader.collected, default_version=4)
    assert ranges(captured) == versions
    assert captured.flaws == flaws


def test_a_version_at_the_end_that_was_promoted_meanwhile_is_named_once() -> None:
    reader = ChatReader(Asked())
    reader.collected.policy_changes.append(changed_to(5))
    reader.whole(whole(metadata={"weight_version": "5"}))
    assert ranges(decode_capture(reader.collected, default_version=4)) == [(4, 0, 2), (5, 2, 2)]
