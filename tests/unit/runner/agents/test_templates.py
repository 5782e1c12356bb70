"""Placeholders of templates: what they become, and what is said of those that cannot be expanded."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_runner.agents import templates
from fulmen_runner.agents.templates import Placeholders, escaped, expand
from fulmen_runner.attempts.errors import AgentFailed

TASK = {"question": "why {task}?", "n": 3, "flag": True, "none": None, "deep": {"a": {"b": "ü"}, "list": [1, "x"]}}
VALUES = Placeholders(input=json.dumps(TASK).encode(), task=TASK, named={"work_dir": "/w", "outcome": "{work_dir}"})


def one(template: str, values: Placeholders = VALUES) -> str:
    return expand({"argument 1": template}, values)["argument 1"]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", ""),
        ("plain", "plain"),
        ("{work_dir}/out", "/w/out"),
        ("{task}", json.dumps(TASK)),
        ("{task.question}", "why {task}?"),
        ("{outcome}{outcome}", "{work_dir}{work_dir}"),
        ("{task.n}{task.flag}{task.none}", "3truenull"),
        ("{task.deep.a.b}", "ü"),
        ("{task.deep.a}", '{"b": "ü"}'),
        ("{task.deep.list}", '[1, "x"]'),
        ("{{task}}", "{task}"),
        ("{{{task.n}}}", "{3}"),
        ("awk '{{print $1}}'", "awk '{print $1}'"),
        ("{{}}", "{}"),
    ],
)
def test_placeholders_become_what_they_stand_for(template: str, text: str) -> None:
    assert one(template) == text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{task.missing}", "{task.missing} is not a member of the input"),
        ("{task.question.more}", "is not a member"),
        ("{task.deep.list.0}", "is not a member"),
        ("{task.}", "is not a member"),
        ("{task_file}", r"use \{task\}, \{task.name\}, \{work_dir\}, \{outcome\}"),
        ("{}", "is not a placeholder"),
        ("{ task }", "is not a placeholder"),
        ("$(( 1 ))}", "single }; write }}"),
        ("{", "single {; write {{"),
        ("{task", "single {"),
        ("{task{", "single {"),
    ],
)
def test_what_cannot_be_expanded_is_named(template: str, says: str) -> None:
    with pytest.raises(AgentFailed, match=says):
        one(template)


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(AgentFailed) as caught:
        expand({"argument 1": "{a}{task.b}", "argument 2": "fine", "environment C": "}"}, VALUES)
    message = str(caught.value)
    assert [f"{where}: {what}" in message for where, what in (
        ("argument 1", "{a}"), ("argument 1", "{task.b}"), ("environment C", "single }")
    )] == [True, True, True]  # fmt: skip
    assert "argument 2" not in message


@pytest.mark.parametrize("task", ["text", [1], None, 3])
def test_only_an_object_has_members(task: object) -> None:
    with pytest.raises(AgentFailed, match="is not a member"):
        one("{task.a}", Placeholders(input=b"", task=task, named={}))


def test_input_that_is_no_text_is_given_as_well_as_can_be() -> None:
    assert one("{task}", Placeholders(input=b"a\xff", task=b"a\xff", named={})) == "a\ufffd"


def test_templates_cannot_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_EXPANDED_LENGTH", 1000)
    values = Placeholders(input=b"x" * 100, task=None, named={})
    assert len(one("{task}" * 10, values)) == 1000
    with pytest.raises(AgentFailed, match="exceed 1000"):
        expand({"a": "{task}" * 9, "b": "{task}" * 2}, values)


@given(st.text(alphabet=st.sampled_from("{}task.a "), max_size=30))
def test_escaped_text_expands_to_itself(text: str) -> None:
    assert one(escaped(text)) == text


PIECES = st.one_of(
    st.text(max_size=10).map(lambda text: (escaped(text), text)),
    st.sampled_from([("{work_dir}", "/w"), ("{task.n}", "3"), ("{task.question}", "why {task}?")]),
)


@given(st.lists(PIECES, max_size=8))
def test_a_template_is_expanded_piece_by_piece(pieces: list[tuple[str, str]]) -> None:
    assert one("".join(template for template, _ in pieces)) == "".join(text for _, text in pieces)


@given(st.text(alphabet=st.sampled_from("{}task.an_dirwok"), max_size=20))
def test_any_text_is_expanded_or_refused_with_a_reason(template: str) -> None:
    problem = ""
    try:
        one(template)
    except AgentFailed as error:
        problem = str(error)
    if "{" not in template and "}" not in template:
        assert not problem
    if problem:
        assert problem.startswith("templates of the agent do not match its input: argument 1: ")
