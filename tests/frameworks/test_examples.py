"""The programs of examples/frameworks, unchanged, in a real runner: what was captured of them is what they did.

Each runs inside the runner and as a command, with tools that succeed and with one that fails.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from fulmen.runner.v1.agent_spec_pb2 import ISOLATION_PROCESS
from tests.support.frameworks.traced import FAILED, OWN_PYTHON, Node, Stage, Traced, a_stage, asked
from tests.support.frameworks.world import ROOT
from tests.support.llm_proxy.backend import prompt_ids_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUESTION = "What is 6 times 7, and what is 8 times 9?"
ANSWER = "6 times 7 is 42. 8 times 9 is 72."
HARD_QUESTION = "What is 6 times 700, and what is 8 times 9?"
HALF_AN_ANSWER = "6 times 700 is unknown. 8 times 9 is 72."
REFUSAL = "the calculator takes numbers below 100"

SDK = """
LLM {span}
  CALL chat tiny
LLM {span}
  CALL chat tiny
"""
ONE_CALL = "LLM {span}\n  CALL chat tiny"

LANGCHAIN = """
CHAIN LangGraph
  CHAIN model
    LLM ChatOpenAI
      LLM ChatCompletion
        CALL chat tiny
  CHAIN tools
    TOOL calculator
  CHAIN tools
    TOOL calculator
  CHAIN model
    LLM ChatOpenAI
      LLM ChatCompletion
        CALL chat tiny
"""
LANGCHAIN_FAILS = """
CHAIN LangGraph !
  CHAIN model
    LLM ChatOpenAI
      LLM ChatCompletion
        CALL chat tiny
  CHAIN tools
    TOOL calculator
  CHAIN tools !
    TOOL calculator !
"""
AUTOGEN = """
AGENT assistant.on_messages_stream
  LLM OpenAIChatCompletionClient.create
    CALL chat tiny
  TOOL assistant.calculator
  TOOL assistant.calculator
  LLM OpenAIChatCompletionClient.create
    CALL chat tiny
"""
CREWAI = """
CHAIN Crew_ID.kickoff
  AGENT Calculator._execute_core
    CALL chat tiny
    TOOL calculator.run
    TOOL calculator.run{failed}
    CALL chat tiny
"""
OPENAI_AGENTS = """
AGENT Agent workflow
  CHAIN Agent workflow
    AGENT Calculator
      CHAIN turn
        LLM response
          CALL chat tiny
        TOOL calculator
        TOOL calculator{failed}
      CHAIN turn
        LLM response
          CALL chat tiny
"""
SMOLAGENTS = """
AGENT ToolCallingAgent.run
  CHAIN Step 1{failed}
    LLM OpenAIModel.generate
      CALL chat tiny
    TOOL SimpleTool
    TOOL SimpleTool{failed}
  CHAIN Step 2
    LLM OpenAIModel.generate
      CALL chat tiny
    TOOL FinalAnswerTool
"""
NODE = """
solve{failed}
  ask
    CALL chat tiny
  calculator{failed}
"""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A program and what it is to leave behind.

    Attributes:
        program: its file, without `_agent.py`.
        tree: the outline when all goes well.
        failing_tree: the outline when a tool fails.
        hard_outcome: what it says then; None if it fails itself.
        answer: what it says when all goes well.
        tools_seen: whether its tools have spans: not those of a loop that it writes itself.
        cancels: whether a tool that fails ends the other one, which fails too then if it was not over.
    """

    program: str
    tree: str
    failing_tree: str
    hard_outcome: str | None
    answer: str = ANSWER
    tools_seen: bool = True
    cancels: bool = False


def sdk(program: str, span: str, *, fails: bool) -> Example:
    """Returns what a loop of one's own around a vendor's SDK leaves behind."""
    return Example(
        program=program,
        tree=SDK.format(span=span),
        failing_tree=(ONE_CALL if fails else SDK).format(span=span),
        hard_outcome=None if fails else HALF_AN_ANSWER,
        tools_seen=False,
    )


def framework(program: str, tree: str, failing_tree: str = "") -> Example:
    """Returns what a framework leaves behind that tells the model of a tool's failure."""
    failing = failing_tree or tree.format(failed=" !")
    return Example(program=program, tree=tree.format(failed=""), failing_tree=failing, hard_outcome=HALF_AN_ANSWER)


EXAMPLES = {
    "langchain": [
        sdk("openai", "ChatCompletion", fails=True),
        sdk("anthropic", "messages.create", fails=False),
        Example(program="langchain", tree=LANGCHAIN, failing_tree=LANGCHAIN_FAILS, hard_outcome=None, cancels=True),
    ],
    "autogen": [framework("autogen", AUTOGEN)],
    "crewai": [framework("crewai", CREWAI)],
    "openai_agents": [framework("openai_agents", OPENAI_AGENTS)],
    "litellm": [sdk("litellm", "acompletion", fails=True)],
    "smolagents": [
        Example(
            program="smolagents",
            tree=SMOLAGENTS.format(failed=""),
            failing_tree=SMOLAGENTS.format(failed=" !"),
            hard_outcome=REFUSAL,
            answer="42 72",
        )
    ],
}
"""By the environment in which they run."""

OWN_TELEMETRY = ("create_agent", "invoke_agent", "execute_tool", "anthropic.messages.create")
"""Spans that AutoGen and Anthropic's SDK make by themselves inside of a runner, which has a tracer provider for them."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage() -> AsyncIterator[Stage]:
    """Yields a store, a model and a proxy."""
    async with a_stage() as stage:
        yield stage


@pytest.mark.parametrize("environment", EXAMPLES)
async def test_what_is_captured_is_what_the_program_did(stage: Stage, environment: str) -> None:
    examples = EXAMPLES[environment]
    runs = [(example, spec, question) for example in examples for spec, question in ways_to_run(example.program)]

    async with stage.runner(environment) as runner:
        chosen = await runner.logged("instrumentors_chosen")
        traced = await stage.run(*[(spec, question) for _, spec, question in runs])

    assert all(any(name.startswith(e.program) for name in chosen["instrumentors"]) for e in examples)
    assert [line for line in runner.log if line["event"] in ("attempt_crashed", "instrumentor_failed")] == []
    assert stage.outside.knocks == []
    for (example, _, question), run in zip(runs, traced, strict=True):
        if question == QUESTION:
            check_success(example, run)
        else:
            check_failure(example, run)


def ways_to_run(program: str) -> list[tuple[dict[str, Any], str]]:
    inside: dict[str, Any] = {"python": f"{program}_agent.py:solve"}
    command: dict[str, Any] = {"command": ("python", f"{program}_agent.py")}
    ways = [(dict(inside), QUESTION), (dict(inside), HARD_QUESTION), (dict(command), QUESTION)]
    # Once is enough: a child of the runner is set up as the runner is.
    return [*ways, ({**inside, "isolation": ISOLATION_PROCESS}, QUESTION)] if program == "openai" else ways


def check_success(example: Example, run: Traced) -> None:
    assert run.outcome == example.answer, run.attempt.failure_message
    assert [(reward.dimension, reward.value) for reward in run.attempt.rewards] == [("reward", 1.0)]
    assert outline_of(run) == example.tree.strip()
    tools = {json_of(asked(node)): str(node.attributes["output.value"]) for node in tools_of(run)}
    if example.tools_seen:
        assert tools.keys() == {(6, 7), (8, 9)}
        assert "42" in tools[6, 7]
        assert "72" in tools[8, 9]
    check_calls(run, count=2)


def check_failure(example: Example, run: Traced) -> None:
    found, wanted = outline_of(run), example.failing_tree.strip()
    if example.cancels:
        assert found.count(FAILED) >= wanted.count(FAILED) - 1
        assert found.replace(FAILED, "") in cut_short(wanted.replace(FAILED, ""))
    else:
        assert found == wanted
    if example.hard_outcome is None:
        assert REFUSAL in run.attempt.failure_message
        assert not run.attempt.rewards
    else:
        assert example.hard_outcome in run.outcome
        assert [reward.value for reward in run.attempt.rewards] in ([0.5], [0.0])
    if example.tools_seen:
        called = {json_of(asked(node)) for node in tools_of(run)}
        assert called == {(6, 700), (8, 9)} or (example.cancels and called == {(6, 700)})
        assert any(REFUSAL in str(node.span) or "Error running tool" in str(node.span) for node in tools_of(run))
    check_calls(run, count=1 if example.hard_outcome is None else 2)


def cut_short(outline: str) -> set[str]:
    """Returns an outline, and what is left of it if the other tool was cancelled before its span, or its step's, began."""
    tool = "\n    TOOL calculator"
    step = f"\n  CHAIN tools{tool}"
    head, _, tail = outline.rpartition(tool)
    return {outline, outline.replace(tool, "", 1), head + tail, outline.replace(step, "", 1)}


def check_calls(run: Traced, *, count: int) -> None:
    """Every call is recorded once, fit for training, below the instrumentor's span of it, which counts the same tokens."""
    calls = run.nodes("CALL")
    assert len(calls) == count
    assert [call.record.usable for call in calls if call.record is not None] == [True] * count
    by_id = {node.span.span_id: node for root in run.roots for node in root.walk()}
    for call in calls:
        tokens = (call.attributes["gen_ai.usage.input_tokens"], call.attributes["gen_ai.usage.output_tokens"])
        parent = by_id[call.span.parent_span_id]
        if parent.kind == "LLM" and "llm.token_count.prompt" in parent.attributes:
            names = ("llm.token_count.prompt", "llm.token_count.completion")
            assert tuple(parent.attributes[name] for name in names) == tokens
        assert call.record is not None
        assert len(call.record.completion_token_ids) // 4 == tokens[1]
        assert parent.span.start_time_unix_nano <= call.span.start_time_unix_nano


def outline_of(run: Traced) -> str:
    """Returns the outline without the spans that frameworks make by themselves, their children moved up."""
    return Traced(name=run.name, rollout=run.rollout, roots=_without_own(run.roots)).outline()


def _without_own(nodes: list[Node]) -> list[Node]:
    kept: list[Node] = []
    for node in nodes:
        children = _without_own(node.children)
        if node.span.name.startswith(OWN_TELEMETRY):
            kept += children
        else:
            kept.append(Node(span=node.span, record=node.record, attributes=node.attributes, children=children))
    return kept


def tools_of(run: Traced) -> list[Node]:
    return [node for node in run.nodes("TOOL") if node.attributes.get("tool.name") == "calculator"]


def json_of(given: dict[str, Any]) -> tuple[int, int]:
    """Returns the factors that the calculator was called with; smolagents puts them under `kwargs`."""
    factors = given.get("kwargs", given)
    return factors["a"], factors["b"]


async def test_agents_of_several_frameworks_at_once_in_one_process_are_never_mixed(stage: Stage) -> None:
    targets = ["langchain_agent.py:solve", "langchain_agent.py:solve_blocking", "openai_agent.py:solve"] * 4
    factors = [(10 + n, 20 + n) for n in range(len(targets))]
    questions = [f"What is {a} times {b}?" for a, b in factors]

    async with stage.runner("langchain", slots=len(targets)):
        specs: list[dict[str, Any]] = [{"python": one} for one in targets]
        traced = await stage.run(*zip(specs, questions, strict=True))

    for run, target, (a, b), question in zip(traced, targets, factors, questions, strict=True):
        assert run.outcome == f"{a} times {b} is {a * b}."
        one_tool = LANGCHAIN.replace("  CHAIN tools\n    TOOL calculator\n", "", 1)
        assert run.outline() == (one_tool if "langchain" in target else SDK.format(span="ChatCompletion")).strip()
        assert [json_of(asked(node)) for node in tools_of(run)] == ([(a, b)] if "langchain" in target else [])
        for node in (node for root in run.roots for node in root.walk()):
            others = [text for text in questions if text != question]
            assert not any(other in str(node.attributes.get("input.value", "")) for other in others)
        check_calls(run, count=2)


async def test_agents_in_other_languages_are_traced_by_what_they_send_themselves(stage: Stage) -> None:
    modules = {"NODE_PATH": str(ROOT / "node_modules")}
    node: dict[str, Any] = {"command": ("node", "node_agent.cjs"), "environment": modules}
    shell: dict[str, Any] = {"command": ("bash", "shell_agent.sh")}

    async with stage.runner(OWN_PYTHON):
        well, failing, asking, stranger = await stage.run(
            (dict(node), QUESTION),
            (dict(node), HARD_QUESTION),
            (dict(shell), QUESTION),
            ({**shell, "environment": {"AGENT_MODEL": "unheard-of"}}, QUESTION),
        )

    assert (well.outcome, asking.outcome) == (ANSWER, ANSWER)
    assert well.outline() == ("solve\n  ask\n    CALL chat tiny\n  calculator\n  calculator\n  ask\n    CALL chat tiny")
    assert failing.outline() == NODE.format(failed=" !").strip()
    assert REFUSAL in failing.attempt.failure_message
    assert asking.outline() == "ask\n  CALL chat tiny"
    assert [root.span.name for root in stranger.roots] == ["ask"]
    assert stranger.roots[0].failed
    [call] = asking.nodes("CALL")
    assert call.record is not None
    assert len(call.record.prompt_token_ids) // 4 == len(prompt_ids_of([{"role": "user", "content": QUESTION}]))
    assert {root.span.parent_span_id for root in (*well.roots, *asking.roots)} != {b""}


async def test_nothing_is_instrumented_when_that_is_switched_off(stage: Stage) -> None:
    inside: dict[str, Any] = {"python": "openai_agent.py:solve"}
    command: dict[str, Any] = {"command": ("python", "openai_agent.py")}

    async with stage.runner("langchain", instrument="none") as runner:
        traced = await stage.run((inside, QUESTION), (command, QUESTION))

    assert [line for line in runner.log if line["event"] == "instrumentors_chosen"] == []
    assert [run.outline() for run in traced] == ["CALL chat tiny\nCALL chat tiny"] * 2
