"""Triplets of exported spans are those that agentlightning 0.3.0 makes of them; data/agentlightning.json was recorded with it."""

from __future__ import annotations

import inspect
import json
import math
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import fulmen.compat.agentlightning as agl
from fulmen.compat.agentlightning.adapter import training_rows
from fulmen.compat.agentlightning.exported_spans import ExportedSpan, SpanNode, SpansInvalid, read_spans, span_tree

RECORD = json.loads(Path(__file__).with_name("data").joinpath("agentlightning.json").read_text(encoding="utf-8"))


def test_triplets_of_a_tracers_spans_are_theirs() -> None:
    for case in RECORD["traced"]:
        found = agl.TracerTraceToTriplet(**case["settings"]).adapt(case["spans"])
        assert [asdict(each) for each in found] == case["triplets"], case

    assert len(RECORD["traced"]) == 100
    assert sum(each["reward"] is not None for case in RECORD["traced"] for each in case["triplets"]) > 20


def test_triplets_of_the_proxys_spans_are_theirs() -> None:
    for case in RECORD["proxied"]:
        assert [asdict(each) for each in agl.LlmProxyTraceToTriplet().adapt(case["spans"])] == case["triplets"], case

    assert sum(each["reward"] is not None for case in RECORD["proxied"] for each in case["triplets"]) > 20


def test_spans_are_read_from_a_file_of_lines(tmp_path: Path) -> None:
    case = RECORD["traced"][0]
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(json.dumps(span) + "\n" for span in case["spans"]), encoding="utf-8")

    assert agl.TracerTraceToTriplet(**case["settings"]).adapt(file) == agl.TracerTraceToTriplet(
        **case["settings"]
    ).adapt(case["spans"])


def test_malformed_spans_are_refused_with_every_problem() -> None:
    with pytest.raises(SpansInvalid, match=r"span 1: KeyError.*\n.*span 2: ") as error:
        read_spans([{"span_id": "a"}, "text"])
    assert len(str(error.value).splitlines()) == 3
    with pytest.raises(SpansInvalid, match="no spans"):
        agl.TracerTraceToTriplet().adapt([])


def test_triplets_become_rows_of_a_trainer() -> None:
    one = agl.Triplet(prompt={"token_ids": [1, 2]}, response={"token_ids": [3], "logprobs": [{"logprob": -0.5}]})
    other = agl.Triplet(prompt={"token_ids": [1]}, response={"token_ids": [3, 4]})

    first, second = training_rows([one, other], [0.5, -1])

    assert (first.token_ids, first.weights, first.advantages) == ([1, 2, 3], [0, 0, 1], [0, 0, 0.5])
    assert first.sampler_logprobs == [0, 0, -0.5]
    assert (second.advantages, second.sampler_logprobs) == ([0, -1, -1], ())


@pytest.mark.parametrize("name", RECORD["parameters"])
def test_functions_take_the_same_parameters(name: str) -> None:
    ours: Any = agl
    for part in name.split("."):
        ours = getattr(ours, part)

    parameters = inspect.signature(ours).parameters
    theirs = set(RECORD["parameters"][name])

    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert takes_all or set(parameters) == theirs


def test_every_name_is_one_of_theirs() -> None:
    ours = {"FunctionalLitAgent", "NotPorted", "RewardMatchPolicy"}

    assert {name for name in agl.__all__ if name not in RECORD["names"]} <= ours


def a_span(span_id: str, parent_id: str | None = None, **attributes: object) -> dict[str, Any]:
    times = {"start_time": 0.0, "end_time": 1.0, "name": "openai.chat.completion"}
    return {"span_id": span_id, "parent_id": parent_id, "attributes": attributes, **times}


@pytest.mark.parametrize(
    "attributes",
    [
        {"agentlightning.reward.0.name": "x", "agentlightning.reward.0.value": "much"},
        {"agentlightning.reward.0": "x"},
        {"logprobs.content": "{"},
        {"logprobs.content": "[" * 100_000},
        {"gen_ai.request." + ".".join(["a"] * 5000): 1},
    ],
)
def test_attributes_of_another_form_are_refused_by_one_kind_of_error(attributes: dict[str, object]) -> None:
    with pytest.raises(SpansInvalid, match="An attribute of a span has another form"):
        agl.TracerTraceToTriplet().adapt([a_span("1", **attributes)])


def test_a_chain_of_spans_may_be_of_any_length() -> None:
    spans = [a_span(str(number), str(number - 1) if number else None) for number in range(5000)]
    assert len(agl.TracerTraceToTriplet().adapt(spans)) == 1


def test_spans_that_form_no_tree_and_files_of_no_spans_are_refused_with_a_few_problems(tmp_path: Path) -> None:
    with pytest.raises(SpansInvalid, match="occurs twice, below different spans"):
        agl.TracerTraceToTriplet().adapt([a_span("1"), a_span("1", "1")])
    (tmp_path / "spans.jsonl").write_bytes(b'{"a":\n\xff\n' + b"[" * 100_000 + b"\n1\n" * 1000)
    with pytest.raises(SpansInvalid) as refused:
        read_spans(tmp_path / "spans.jsonl")
    told = str(refused.value).splitlines()
    assert told[-1].endswith("more are not listed")
    assert len(told) == 52


def test_a_span_that_is_exported_twice_is_refused_though_its_own_child_encloses_it() -> None:
    twice = a_span("1") | {"start_time": 1.0, "end_time": 2.0}
    with pytest.raises(SpansInvalid, match="The span 1 occurs twice"):
        span_tree(read_spans([twice, twice, a_span("2", "1") | {"end_time": 9.0}]))


def test_nested_spans_that_are_each_exported_twice_are_refused_at_once() -> None:
    # 2**3000 ways lead to the last one.
    spans = [a_span(str(number), str(number - 1) if number else None) for number in range(3000) for _ in "ab"]
    with pytest.raises(SpansInvalid) as refused:
        agl.TracerTraceToTriplet().adapt(spans)
    told = str(refused.value).splitlines()
    assert told[1:3] == ["The span 0 occurs twice.", "The span 1 occurs twice."]
    assert told[-1] == "2950 more are not listed"


def test_spans_below_themselves_are_refused_by_name_with_all_below_them() -> None:
    spans = [a_span("root"), a_span("1", "3"), a_span("2", "1"), a_span("3", "2"), a_span("4", "3"), a_span("5", "5")]
    with pytest.raises(SpansInvalid) as refused:
        agl.TracerTraceToTriplet().adapt(spans)
    told = [f"The span {each} is below itself, or below one that is." for each in "12345"]
    assert str(refused.value).splitlines() == ["These spans form no tree:", *told]
    with pytest.raises(SpansInvalid, match="The span 1 is below itself"):
        span_tree(read_spans([a_span("1", "1")]))


def a_node(span_id: str, *children: SpanNode) -> SpanNode:
    return SpanNode(span_id=span_id, name=span_id, start_s=0, end_s=1, children=[*children])


def test_a_tree_that_is_built_by_hand_is_walked_and_repaired_to_an_end_whatever_is_below_what() -> None:
    chain, fork = a_node("chain", a_node("inner")), a_node("fork", a_node("leaf"), a_node("inner"))
    chain.children[0].children.append(chain)
    fork.children[1].children.append(fork)
    leaf = a_node("shared")
    for tree, named in ((chain, "chain"), (fork, "fork"), (a_node("top", leaf, leaf), "shared")):
        before = shape([tree, *tree.children])
        for way in (lambda tree=tree: [*tree.walk()], tree.repair):
            with pytest.raises(SpansInvalid, match=f"The span {named} is below itself, or below two spans"):
                way()
        assert shape([tree, *tree.children]) == before


def test_a_span_that_its_own_child_encloses_stays_with_all_below_it() -> None:
    parents = {"0": None, "1": "0", "2": "1", "3": "0"}
    spans = [a_span(each, parent, **{"gen_ai.response.id": each}) for each, parent in parents.items()]
    spans[2]["end_time"] = 9.0
    found = agl.TracerTraceToTriplet().adapt(spans)
    assert sorted(each.metadata["response_id"] for each in found) == ["0", "1", "2", "3"]


def test_every_span_that_occurs_twice_is_named_once() -> None:
    spans = [a_span("1"), a_span("2", "1"), a_span("2", "1"), a_span("2", "1"), a_span("3", "1"), a_span("3", "2")]
    with pytest.raises(SpansInvalid) as refused:
        span_tree(read_spans(spans))
    assert str(refused.value).splitlines()[1:] == [
        "The span 2 occurs twice.",
        "The span 3 occurs twice, below different spans.",
    ]


def test_names_of_many_digits_are_names() -> None:
    name = "gen_ai.request." + "9" * 5000
    [triplet] = agl.TracerTraceToTriplet().adapt([a_span("1", **{name: 1, "gen_ai.request.²": 2})])
    assert triplet.metadata["request"] == {"9" * 5000: 1, "²": 2}


def a_tree(draw: random.Random) -> list[dict[str, Any]]:
    """Draws spans, most of them below one, at times of which many are equal, or nearly so, or no numbers."""
    kind, count, spans = draw.randrange(4), draw.randrange(2, 30), []
    odd = [0.0, 1.0, 2.0, 1e-9, 1e16, 1e308, -1e308, math.inf, -math.inf, math.nan]
    for number in range(count):
        parent = None if not number else draw.choice(["0", "0", str(draw.randrange(number))])
        start, end = (
            (begin := float(draw.randrange(8)), begin + draw.randrange(8)),
            (begin := round(draw.uniform(0, 100), 4), round(begin + draw.choice([0.01, 5, 40]), 4)),
            (begin := 1.7e9 + draw.uniform(0, 20), begin + draw.uniform(0, 20)),
            (draw.choice(odd), draw.choice(odd)),
        )[kind]
        spans.append(a_span(str(number), parent) | {"start_time": start, "end_time": end})
    return spans


def repaired_by_definition(top: SpanNode) -> None:
    """Looks at all spans for each span at the top."""
    while len(top.children) == 1:
        top = top.children[0]
    for child in list(top.children):
        if len(top.children) == 1:
            return
        found, least = None, math.inf
        for node in top.walk():
            if node is top or node is child or not (node.start_s <= child.start_s and node.end_s >= child.end_s):
                continue
            if 0 < (longer := node.end_s - child.end_s + child.start_s - node.start_s) < least:
                found, least = node, longer
        if found is not None and all(node is not found for node in child.walk()):
            top.children = [each for each in top.children if each is not child]
            found.children.append(child)


def shape(nodes: list[SpanNode]) -> dict[str, list[str]]:
    return {node.span_id: [child.span_id for child in node.children] for node in nodes}


def test_spans_move_below_the_first_of_the_closest_that_enclose_them() -> None:
    draw = random.Random(7)
    moved = 0
    for _ in range(1500):
        spans = read_spans(a_tree(draw))
        given, expected = span_tree(spans), span_tree(spans)
        before = shape([*given.walk()])
        given.repair()
        repaired_by_definition(expected)
        after = shape([*given.walk()])
        assert after == shape([*expected.walk()])
        assert after.keys() == before.keys()
        moved += after != before
    assert moved > 1000


def test_a_tree_of_many_roots_is_repaired_without_a_look_at_all_for_each() -> None:
    # 900,000,000 looks, which would take hours.
    count = 30_000
    spans = [
        a_span(str(number)) | {"start_time": 3.0 * number, "end_time": 3.0 * number + 2} for number in range(count)
    ]
    spans += [
        a_span(f"call {number}") | {"start_time": 3.0 * number + 0.5, "end_time": 3.0 * number + 1}
        for number in range(0, count, 100)
    ]
    tree = span_tree(read_spans(spans))
    tree.repair()
    assert [node.span_id for node in tree.children] == [str(number) for number in range(count)]
    assert [each.span_id for each in tree.children[500].children] == ["call 500"]


def rewards_by_definition(tree: SpanNode, policy: agl.RewardMatchPolicy) -> dict[str, float]:
    """Looks at all calls before each reward."""
    nodes = [*tree.walk()]
    groups = [node.children for node in nodes]
    if policy is agl.RewardMatchPolicy.FIRST_OCCURRENCE:
        groups = [sorted(nodes, key=lambda node: node.start_s)]
    rewards: dict[str, float] = {}
    for group in groups:
        for place, node in enumerate(group):
            if "reward" not in node.name:
                continue
            for call in reversed(group[: place + 1]):
                if "call" in call.name and call.end_s <= node.start_s and call.span_id not in rewards:
                    rewards[call.span_id] = node.attributes["agentlightning.reward.0.value"]
                    break
    return rewards


@pytest.mark.parametrize("policy", agl.RewardMatchPolicy)
def test_each_reward_is_that_of_the_last_free_call_that_ended_before_it(policy: agl.RewardMatchPolicy) -> None:
    draw = random.Random(11)
    matched = 0
    for _ in range(1000):
        spans = a_tree(draw)
        for number, span in enumerate(spans):
            span["name"] = draw.choice(["call", "call", "reward", "reward", "call with a reward", "other"])
            span["attributes"]["gen_ai.response.id"] = span["span_id"]
            if "reward" in span["name"]:
                value = {"agentlightning.reward.0.name": "r", "agentlightning.reward.0.value": float(number)}
                span["attributes"] |= value
        found = agl.TracerTraceToTriplet(
            repair_hierarchy=False, llm_call_match="call", exclude_llm_call_in_reward=False, reward_match=policy
        ).adapt(spans)
        rewards = {each.metadata["response_id"]: each.reward for each in found if each.reward is not None}
        assert rewards == rewards_by_definition(span_tree(read_spans(spans)), policy)
        matched += len(rewards)
    assert matched > 1000


class WatchedTime(float):
    """A time that counts how often one like it is compared."""

    looks = 0

    def __le__(self, other: float) -> bool:
        WatchedTime.looks += 1
        return super().__le__(other)

    def __lt__(self, other: float) -> bool:
        WatchedTime.looks += 1
        return super().__lt__(other)

    def __eq__(self, other: object) -> bool:
        WatchedTime.looks += 1
        return super().__eq__(other)

    __hash__ = float.__hash__


@pytest.mark.parametrize("policy", agl.RewardMatchPolicy)
def test_rewards_after_all_calls_are_matched_without_a_look_at_all_calls_for_each(
    policy: agl.RewardMatchPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchedTime, "looks", 0)
    count = 2000
    [top, *calls] = read_spans([a_span("top"), *(a_span(f"{number}", "top") for number in range(count))])
    calls = [replace(each, name="call", end_s=WatchedTime(1)) for each in calls]
    rewards = [
        replace(each, span_id=f"reward of {each.span_id}", name="agentlightning.annotation", start_s=2.0)
        for each in calls
    ]
    rewards = [replace(each, attributes={"reward": number}) for number, each in enumerate(rewards)]
    adapter = agl.TracerTraceToTriplet(repair_hierarchy=False, llm_call_match="call", reward_match=policy)

    found = adapter.adapt([replace(top, name="agent"), *calls, *rewards])

    assert [each.reward for each in found] == [*reversed(range(count))]
    assert 0 < WatchedTime.looks < 100 * count


class WatchedPlace(int):
    """A place in a rollout that counts how often one like it is compared."""

    looks = 0

    def __lt__(self, other: int) -> bool:
        WatchedPlace.looks += 1
        return super().__lt__(other)


def proxied(draw: random.Random, count: int, *, places: int) -> list[ExportedSpan]:
    """Draws calls, rewards, and calls with a reward, many at the same place; some ids occur twice."""
    reward = {"agentlightning.reward.0.name": "r", "agentlightning.reward.0.value": 0.0}
    tokens = {"prompt_token_ids": [1], "response_token_ids": [2]}
    [plain] = read_spans([a_span("plain")])
    spans = []
    for number in range(count):
        attributes = draw.choice([tokens, reward, tokens | reward])
        if "agentlightning.reward.0.value" in attributes:
            attributes = attributes | {"agentlightning.reward.0.value": float(number)}
        spans.append(
            replace(
                plain,
                span_id=str(draw.randrange(count)),
                name="litellm_request",
                sequence_id=draw.randrange(places),
                start_s=float(draw.randrange(4)),
                attributes=attributes,
            )
        )
    return spans


def test_each_reward_behind_the_proxy_is_that_of_the_last_free_call_at_an_earlier_place() -> None:
    draw = random.Random(13)
    matched = 0
    for _ in range(1000):
        spans = proxied(draw, draw.randrange(2, 30), places=draw.choice([2, 8, 100]))
        ordered = sorted(spans, key=lambda span: (span.sequence_id, span.start_s))
        calls = [span for span in ordered if "prompt_token_ids" in span.attributes]
        expected: dict[str, float] = {}
        for span in ordered:
            value = span.attributes.get("agentlightning.reward.0.value")
            earlier = [call.span_id for call in calls if call.sequence_id < span.sequence_id]
            free = [each for each in earlier if each not in expected]
            if value is not None and free:
                expected[free[-1]] = value
        found = agl.LlmProxyTraceToTriplet().adapt(spans)
        assert [each.reward for each in found] == [expected.get(call.span_id) for call in calls]
        matched += len(expected)
    assert matched > 1000


def test_rewards_behind_all_calls_of_a_proxy_are_matched_without_a_look_at_all_calls_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WatchedPlace, "looks", 0)
    count = 2000
    spans = proxied(random.Random(0), 2 * count, places=1)
    tokens = {"prompt_token_ids": [1], "response_token_ids": [2]}
    calls = [
        replace(each, span_id=str(number), sequence_id=WatchedPlace(number), attributes=tokens)
        for number, each in enumerate(spans[:count])
    ]
    rewards = [
        replace(each, name="agentlightning.annotation", sequence_id=count, start_s=0.0, attributes={"reward": number})
        for number, each in enumerate(spans[count:])
    ]

    found = agl.LlmProxyTraceToTriplet().adapt([*calls, *rewards])

    assert [each.reward for each in found] == [*reversed(range(count))]
    assert 0 < WatchedPlace.looks < 100 * count
