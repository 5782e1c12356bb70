"""The files of a new project: which ones, and what is in each."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from types import MappingProxyType
from typing import Any, Final

__all__ = ["Agent", "Algorithm", "Framework", "agent_of", "project_files"]

TASK_COUNT: Final = 20
ORDERS: Final = range(10, 100)
STATES: Final = ("packed", "shipped", "delivered", "returned")
SEED: Final = 1
# Demonstrations of each order, and how many of them look it up. The others guess, where a model is to learn from rewards that
# this is wrong. Both kinds for each order: a model that knew which order gets which would have nothing to try out.
SHOWN: Final = 2
SHOWN_LOOKING: Final[Mapping[str, int]] = MappingProxyType({"grpo": 1, "sft": SHOWN})
TOOL: Final = "find_order"


class Framework(StrEnum):
    """What the agent is written with."""

    PLAIN = "plain"
    LANGGRAPH = "langgraph"
    OPENAI_AGENTS = "openai-agents"
    COMMAND = "command"
    NODE = "node"


class Algorithm(StrEnum):
    """How the agent is improved."""

    GRPO = "grpo"
    SFT = "sft"
    APO = "apo"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """How a project starts its agent.

    Attributes:
        entry: Its line of `[agent]`.
        comment: Comment of the line.
        model: The model that the agent asks for.
        file: Name of its file.
        source: Name of the template's file; empty for an agent that exists.
    """

    entry: str
    comment: str
    model: str = "assistant"
    file: str = "agent.py"
    source: str = ""


_PYTHON: Final = 'python = "agent.py:solve"'
_PYTHON_COMMENT: Final = "A function of a file: called with each task, returns the outcome"
_COMMAND_COMMENT: Final = "A program: reads a task from standard input, prints the outcome"
AGENTS: Final[Mapping[Framework, Agent]] = MappingProxyType(
    {
        Framework.PLAIN: Agent(entry=_PYTHON, comment=_PYTHON_COMMENT, source="plain.py"),
        Framework.LANGGRAPH: Agent(entry=_PYTHON, comment=_PYTHON_COMMENT, source="langgraph.py"),
        Framework.OPENAI_AGENTS: Agent(entry=_PYTHON, comment=_PYTHON_COMMENT, source="openai_agents.py"),
        Framework.COMMAND: Agent(
            entry='command = ["python", "agent.py"]', comment=_COMMAND_COMMENT, source="command.py"
        ),
        Framework.NODE: Agent(
            entry='command = ["node", "agent.mjs"]', comment=_COMMAND_COMMENT, file="agent.mjs", source="node.mjs"
        ),
    }
)


def agent_of(framework: Framework) -> Agent:
    """Returns the template's agent of a framework."""
    return AGENTS[framework]


def project_files(name: str, agent: Agent, algorithm: Algorithm) -> dict[str, str]:
    """Returns the texts of a project's files by path.

    Args:
        name: Name of the training runs.
        agent: The agent.
        algorithm: How it is improved.
    """
    files = {
        "train.toml": _train_toml(name, agent, algorithm),
        "grader.py": _text("grader.py"),
        ".fulmenignore": _text("fulmenignore"),
        **_tasks(algorithm),
    }
    if agent.source:
        files[agent.file] = _with_searched_prompt(agent, algorithm)
        files["orders.json"] = json.dumps(_orders(), indent=1) + "\n"
        files["prompt.md"] = _text("prompt.md")
    if algorithm is Algorithm.APO:
        files["prompt.md"] = _text("prompt.md")
    else:
        files["make_model.py"] = _text("make_model.py")
    return files


def _text(name: str) -> str:
    return resources.files(__package__).joinpath("files", name).read_text(encoding="utf-8")


# The body of `prompt` in the templates, and what a search of prompts needs instead.
_READS_FILE: Final[Mapping[str, tuple[tuple[str, str], ...]]] = MappingProxyType(
    {
        ".py": (
            ('    return (FOLDER / "prompt.md")', '    return fulmen.prompt((FOLDER / "prompt.md")'),
            (".read_text().strip()\n", ".read_text().strip())\n"),
            ("\nFOLDER = ", "\nimport fulmen\n\nFOLDER = "),
        ),
        ".mjs": (
            (
                '  return read("prompt.md").trim();',
                '  return JSON.parse(process.env.FULMEN_PROMPTS ?? "{}").prompt ?? read("prompt.md").trim();',
            ),
        ),
    }
)


def _with_searched_prompt(agent: Agent, algorithm: Algorithm) -> str:
    """Returns an agent's text; for a search of prompts, with the prompt that the search tries."""
    text = _text(agent.source)
    if algorithm is not Algorithm.APO:
        return text
    for old, new in _READS_FILE[f".{agent.file.rpartition('.')[2]}"]:
        if text.count(old) != 1:
            raise ValueError(f"{agent.source} has {old!r} {text.count(old)} times")
        text = text.replace(old, new)
    return text


def _orders() -> dict[str, str]:
    """Returns the state of each order."""
    rng = random.Random(SEED)
    return {str(order): rng.choice(STATES) for order in ORDERS}


def _tasks(algorithm: Algorithm) -> dict[str, str]:
    """Returns the tasks, and demonstrations of all orders but those that validate."""
    orders = _orders()
    rng = random.Random(SEED)
    shuffled = rng.sample(sorted(orders), len(orders))
    validation, shown = shuffled[:TASK_COUNT], shuffled[TASK_COUNT:]
    files = {
        "tasks/train.jsonl": _lines(_task(order, orders) for order in shown[:TASK_COUNT]),
        "tasks/validation.jsonl": _lines(_task(order, orders) for order in validation),
    }
    if algorithm is not Algorithm.APO:
        looks = SHOWN_LOOKING[algorithm]
        lines = [_demonstration(order, orders[order], looks=each < looks) for order in shown for each in range(SHOWN)]
        rng.shuffle(lines)
        files["tasks/demonstrations.jsonl"] = _lines(lines)
    return files


def _task(order: str, orders: Mapping[str, str]) -> dict[str, Any]:
    return {"id": order, "input": {"question": _question(order)}, "answer": orders[order]}


def _question(order: str) -> str:
    return f"Where is order {order}?"


def _demonstration(order: str, state: str, *, looks: bool) -> dict[str, Any]:
    """Returns a conversation: with a look at the order, or with a guess."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": _text("prompt.md").strip()},
        {"role": "user", "content": _question(order)},
    ]
    if looks:
        function = {"name": TOOL, "arguments": json.dumps({"order": int(order)}, separators=(",", ":"))}
        call = {"id": "call_0", "type": "function", "function": function}
        turns += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "content": state},
        ]
    turns.append({"role": "assistant", "content": state if looks else STATES[1]})
    return {"messages": turns}


def _lines(documents: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(each) + "\n" for each in documents)


def _train_toml(name: str, agent: Agent, algorithm: Algorithm) -> str:
    parts = [_HEAD.format(name=name)]
    if algorithm is not Algorithm.APO:
        parts.append(_POLICY.format(model=agent.model))
    parts += [_AGENT.format(entry=agent.entry, comment=agent.comment), _DATA[algorithm], *_STAGES[algorithm]]
    return "\n".join(parts)


_HEAD: Final = """\
# What is trained, on what, and how. Try the agent alone first, without a model:
#   fulmen agent check train.toml --fake-model
# Then train it on this machine:
#   fulmen up
#   fulmen train train.toml

# Begins the name of each training run: `fulmen run list`.
name = "{name}"
"""
_POLICY: Final = """\
# The model that is trained.
[policy]
# The model name that the agent requests.
name = "{model}"
# Its first weights: here a function that makes a tiny model, which then imitates the demonstrations.
build = "make_model.py:build"
# Or a real model: one of a hub, which is downloaded when the run starts, or a folder. Remove the line above.
# base = "hf:Qwen/Qwen3-0.6B"
# path = "../Qwen3-0.6B"
"""
_AGENT: Final = """\
[agent]
# {comment}.
{entry}
# The packages that it needs, which runners install once; or an environment of this machine: venv = ".venv"
# requirements = "requirements.txt"
# Scores each outcome: a function that is called with the task and the outcome.
grader = "grader.py:grade"
"""
_DATA: Final[Mapping[Algorithm, str]] = MappingProxyType(
    {
        Algorithm.GRPO: """\
[data]
# Tasks, one JSON object a line; agent and grader get the whole object.
train = "tasks/train.jsonl"
# Tasks that are never trained on, by which progress is measured.
validation = "tasks/validation.jsonl"
# Conversations to imitate first. In these, every other answer is a guess: imitation alone is not enough.
demonstrations = "tasks/demonstrations.jsonl"
""",
        Algorithm.SFT: """\
[data]
# Tasks that are never trained on, by which progress is measured, one JSON object a line.
validation = "tasks/validation.jsonl"
# Tasks for `fulmen agent check`, and for reinforcement learning later.
train = "tasks/train.jsonl"
# Conversations to imitate, as a vendor's API takes them.
demonstrations = "tasks/demonstrations.jsonl"
""",
        Algorithm.APO: """\
[data]
# Tasks, one JSON object a line; agent and grader get the whole object.
train = "tasks/train.jsonl"
# Tasks by which prompts are compared at the end.
validation = "tasks/validation.jsonl"
# The prompt that is improved. The agent requests the one to use.
prompt = "prompt.md"
""",
    }
)
_SFT: Final = """\
# {purpose}
[[stage]]
algorithm = "sft"
# Updates of the weights.
steps = 300
# Large, as for a tiny model that knows nothing yet; a real one takes 1e-5 to 2e-4.
learning_rate = 3e-3
# The rate rises over this many steps, then falls along half a cosine.
warmup_steps = 20
schedule = "cosine"
"""
_STAGES: Final[Mapping[Algorithm, tuple[str, ...]]] = MappingProxyType(
    {
        Algorithm.GRPO: (
            _SFT.format(purpose="First the model imitates the demonstrations, so that some answers are right."),
            """\
# Then it learns from rewards: of several answers to one task, those better than the others become more likely.
[[stage]]
algorithm = "grpo"
# Updates of the weights.
steps = 30
# Tasks of a step, and answers to each.
prompts_per_step = 10
group_size = 8
# The step's answers are used in this many parts.
minibatches = 2
# The longest answer of one call, tokens. Some hundred for a real model.
max_tokens = 12
# Tasks whose answers are all right or all wrong teach nothing; 0 does not replace them.
refill_limit = 0
# Steps between two measurements on the validation tasks.
validate_every = 5
""",
        ),
        Algorithm.SFT: (_SFT.format(purpose="The model imitates the demonstrations."),),
        Algorithm.APO: (
            """\
# No [policy]: no weights are trained. The agent's model, `assistant`, and the critic's are routes of the proxy, to a vendor or to
# a server of yours; docs/backends.md explains how to add them.

# Searches for a better prompt: a critic describes what is wrong with answers, and rewrites the prompt.
[[stage]]
algorithm = "apo"
# Rounds of the search.
steps = 3
# The model that criticises and rewrites.
critic = { model = "critic" }
# Prompts kept after each round, and rewritten into how many each.
beam_width = 2
branch_factor = 2
# Answers that the critic sees together.
gradient_tasks = 4
# Prompts are compared on this many tasks; the better half is compared on more.
selection = { kind = "halving", tasks = 4 }
# Ends the search when this many calls of the critic were made.
budget = { calls = 40 }
""",
        ),
    }
)
