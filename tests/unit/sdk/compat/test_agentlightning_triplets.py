"""Triplets of exported spans are those that agentlightning 0.3.0 makes of them; data/agentlightning.json was recorded with it."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import fulmen.compat.agentlightning as agl
from fulmen.compat.agentlightning.adapter import training_rows
from fulmen.compat.agentlightning.exported_spans import SpansInvalid, read_spans

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


def test_names_of_many_digits_are_names() -> None:
    name = "gen_ai.request." + "9" * 5000
    [triplet] = agl.TracerTraceToTriplet().adapt([a_span("1", **{name: 1, "gen_ai.request.²": 2})])
    assert triplet.metadata["request"] == {"9" * 5000: 1, "²": 2}
