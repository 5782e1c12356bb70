"""Records what agentlightning 0.3.0 does, for the tests of fulmen.compat.agentlightning. Run by hand where it is installed:

python tests/support/sdk/agentlightning_record.py > tests/unit/sdk/compat/data/agentlightning.json

Random rollouts with the triplets that its adapters make of them, and the parameters of its public functions.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from typing import Any

COUNT = 100
FUNCTIONS = (
    "emit_annotation", "emit_exception", "emit_message", "emit_object", "emit_reward", "find_final_reward", "find_reward_spans",
    "get_message_value", "get_object_value", "get_reward_value", "get_rewards_from_span", "is_reward_span", "llm_rollout",
    "prompt_rollout", "rollout", "LitAgent.rollout", "LitAgent.rollout_async", "LitAgent.training_rollout",
    "LitAgent.validation_rollout", "Trainer.fit", "Trainer.dev", "Trainer.__init__", "TracerTraceToTriplet.__init__",
    "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var", "PromptTemplate.format",
)  # fmt: skip


def attributes_of(draw: random.Random, name: str, number: int) -> dict[str, Any]:
    """Draws what a span of this name carries."""
    held: dict[str, Any] = {}
    if name == "openai.chat.completion":
        if draw.random() < 0.85:
            held["prompt_token_ids"] = [draw.randrange(9) for _ in range(draw.randrange(1, 4))]
            held["response_token_ids"] = [draw.randrange(9) for _ in range(draw.randrange(1, 3))]
        if draw.random() < 0.8:
            held["gen_ai.response.id"] = f"r{draw.randrange(number + 2)}"
        held |= {"gen_ai.request.model": "m", "gen_ai.prompt.0.role": "user", "gen_ai.prompt.0.content": "hi"}
        if draw.random() < 0.2:
            picture = [{"type": "image_url", "image_url": {"url": "u"}}]
            held["gen_ai.prompt.1.content"] = json.dumps(picture)
        held |= {"gen_ai.completion.0.content": "yes", "gen_ai.completion.0.role": "assistant"}
        if draw.random() < 0.3:
            held["logprobs.content"] = json.dumps([{"token": "a", "logprob": -0.5}])
    elif name == "agentlightning.annotation":
        value = draw.choice([0.0, 0.5, 1.0])
        kind = draw.randrange(3)
        if kind == 0:
            held["reward"] = value
        else:
            held |= {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
        if kind == 2:
            held |= {"agentlightning.reward.1.name": "style", "agentlightning.reward.1.value": 0.1}
    elif name == "agentlightning.operation":
        held["agentlightning.operation.name"] = draw.choice(["agentlightning.reward", "plan"])
    elif name == "task":
        held["agentops.task.output"] = json.dumps({"type": "reward", "value": draw.choice([None, 0.25])})
    elif name == "agent":
        key = draw.choice(["agent.name", "recipient_agent_type", "langchain.chain.type", "executor.id"])
        held[key] = draw.choice(["planner", "writer"])
    return held


def rollout_of(draw: random.Random) -> list[dict[str, Any]]:
    """Draws the spans of a rollout: parents that are known, missing or absent, and times that may overlap."""
    names: tuple[str, ...] = ("openai.chat.completion",) * 4 + ("agentlightning.annotation",) * 3
    names += ("agentlightning.operation", "task", "agent", "agent", "other")
    spans: list[dict[str, Any]] = []
    for number in range(draw.randrange(2, 13)):
        name = draw.choice(names)
        parents = [None, None, "lost", *(span["span_id"] for span in spans)]
        start = round(number * 7 + draw.uniform(0, 25), 4)
        spans.append(
            {
                "rollout_id": "ro", "attempt_id": "at", "sequence_id": number, "trace_id": "t", "span_id": f"s{number}",
                "parent_id": draw.choice(parents), "name": name, "status": {"status_code": "OK"},
                "attributes": attributes_of(draw, name, number), "events": [], "links": [], "start_time": start,
                "end_time": round(start + draw.choice([0.01, 5, 40]), 4), "context": None, "parent": None,
                "resource": {"attributes": {}, "schema_url": ""},
            }
        )  # fmt: skip
    return spans


def proxy_rollout_of(draw: random.Random) -> list[dict[str, Any]]:
    """Draws the spans of a rollout behind its LLM proxy."""
    spans = rollout_of(draw)
    for span in spans:
        if span["name"] != "openai.chat.completion":
            continue
        ids = {key: span["attributes"].get(key, []) for key in ("prompt_token_ids", "response_token_ids")}
        span["name"] = draw.choice(["raw_gen_ai_request", "litellm_request"])
        if span["name"] == "litellm_request":
            span["attributes"] |= {key: draw.choice([value, str(value)]) for key, value in ids.items()}
            continue
        span["attributes"] = {"llm.hosted_vllm.prompt_token_ids": str(ids["prompt_token_ids"])}
        answer = ids["response_token_ids"]
        key, value = draw.choice(
            [("response_token_ids", [answer]), ("choices", [{"token_ids": answer}]), ("choices", "broken [")]
        )
        span["attributes"] |= {f"llm.hosted_vllm.{key}": str(value), "llm.hosted_vllm.id": f"v{draw.randrange(6)}"}
    return spans


def short(span: dict[str, Any]) -> dict[str, Any]:
    """Leaves out what no adapter reads."""
    unread = ("status", "events", "links", "context", "parent", "resource", "trace_id", "rollout_id", "attempt_id")
    return {key: value for key, value in span.items() if key not in unread}


def main() -> None:
    """Prints one JSON object."""
    import agentlightning as agl

    draw = random.Random(3)
    cases: list[dict[str, Any]] = []
    while len(cases) < COUNT:
        spans = rollout_of(draw)
        settings = {
            "repair_hierarchy": draw.random() < 0.6,
            "agent_match": draw.choice([None, None, "plan"]),
            "exclude_llm_call_in_reward": draw.random() < 0.7,
            "reward_match": draw.choice(["first_occurrence", "first_sibling"]),
            "_skip_empty_token_spans": draw.random() < 0.3,
        }
        adapter = agl.TracerTraceToTriplet(**settings)
        found = adapter.adapt([agl.Span.model_validate(span) for span in spans])
        cases.append(
            {"settings": settings, "spans": [*map(short, spans)], "triplets": [each.model_dump() for each in found]}
        )
    proxied = []
    for _ in range(COUNT // 3):
        spans = proxy_rollout_of(draw)
        found = agl.LlmProxyTraceToTriplet().adapt([agl.Span.model_validate(span) for span in spans])
        proxied.append({"spans": [*map(short, spans)], "triplets": [each.model_dump() for each in found]})
    parameters = {}
    for name in FUNCTIONS:
        value: Any = agl
        for part in name.split("."):
            value = getattr(value, part)
        parameters[name] = list(inspect.signature(value).parameters)
    names = sorted(name for name in vars(agl) if not name.startswith("_"))
    record = {"version": agl.__version__, "names": names, "parameters": parameters, "traced": cases, "proxied": proxied}
    sys.stdout.write(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
