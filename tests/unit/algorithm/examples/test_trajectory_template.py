"""Trajectories of agents whose prompts a real chat template renders: what merges, what does not, and why.

The tokenizer is a small byte-pair one: `a` and `b` beside each other are one token when text is tokenised, and two
when a policy samples them one by one, as large models do all the time.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from fulmen.model_call import pack_logprobs, pack_token_ids
from fulmen.store.v1.span_pb2 import SpanBatch, SpanChunk, SpanCodec, SpanRecord
from fulmen.trajectories import BreakReason, Trajectory, conversations, trajectory
from fulmen.type.v1.model_call_pb2 import ModelCallRecord, PolicyVersionRange

ROLES = ["<|user|>", "<|assistant|>", "<|tool|>", "<|think|>", "<|end|>"]
# As the templates of reasoning models do, it leaves the reasoning of earlier turns out.
TEMPLATE = """
{%- for m in messages -%}
<|{{ m.role }}|>{{ m.content or "" }}
{%- for call in m.tool_calls or [] -%}call {{ call.function.arguments }}{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
""".strip()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    letters = [*"abcl 0123456789+=", *ROLES]
    vocabulary = {token: place for place, token in enumerate([*letters, "ab"])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", additional_special_tokens=ROLES)
    fast.chat_template = TEMPLATE
    return fast


class Agent:
    """Talks to a policy whose answers are given: renders, records, and repeats what was said."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.messages: list[dict[str, Any]] = []
        self.records: list[SpanRecord] = []

    def hear(self, text: str, role: str = "user") -> None:
        self.messages.append({"role": role, "content": text})

    def ask(self, sampled: list[str], *, finish: str = "stop", **said: Any) -> dict[str, Any]:
        """Calls the policy, which samples these tokens; remembers and returns its answer."""
        prompt = self.tokenizer.apply_chat_template(self.messages, add_generation_prompt=True, return_dict=False)
        ids = self.tokenizer.convert_tokens_to_ids(sampled)
        text = "".join(token for token in sampled if token != "<|end|>")
        answer = {"role": "assistant", "content": text, **said}
        record = ModelCallRecord(
            model="m",
            policy="p",
            prompt_token_ids=pack_token_ids(prompt),
            completion_token_ids=pack_token_ids(ids),
            completion_logprobs=pack_logprobs([-1.0] * len(ids)),
            policy_versions=[PolicyVersionRange(version=1, start=0, end=len(ids))],
            usable=True,
            finish_reason=finish,
            temperature=1.0,
            request_json=json.dumps({"messages": self.messages}).encode(),
            response_json=json.dumps({"choices": [{"index": 0, "message": answer}]}).encode(),
        )
        number = len(self.records)
        span = Span(span_id=struct.pack(">Q", number + 1), start_time_unix_nano=number)
        self.records.append(SpanRecord(otlp_span=span.SerializeToString(), model_call=record.SerializeToString()))
        self.messages.append(answer)
        return answer

    def trajectory(self) -> Trajectory:
        payload = SpanBatch(spans=self.records).SerializeToString()
        return trajectory([SpanChunk(chunk_id="x", codec=SpanCodec.SPAN_CODEC_IDENTITY, payload=payload)])


@pytest.fixture
def agent(tokenizer: PreTrainedTokenizerFast) -> Agent:
    agent = Agent(tokenizer)
    agent.hear("1+1=")
    return agent


def strip_of(agent: Agent) -> list[str]:
    """Writes the only row as text, what was sampled in brackets."""
    [row] = agent.trajectory().rows
    parts = [(agent.tokenizer.convert_ids_to_tokens(list(row.prompt_ids)), False)]
    for token, sampled in zip(
        agent.tokenizer.convert_ids_to_tokens(list(row.response_ids)), row.loss_mask, strict=True
    ):
        parts.append(([token], sampled))
    return [f"[{''.join(tokens)}]" if sampled else "".join(tokens) for tokens, sampled in parts]


def test_a_loop_of_tool_calls_is_one_row_whose_results_are_masked(agent):
    calls = {"content": None, "tool_calls": [{"function": {"name": "add", "arguments": "1+1"}}]}
    agent.ask([*"call 1+1", "<|end|>"], **calls)
    agent.hear("2", role="tool")
    agent.ask(["2", "<|end|>"])
    shown = "".join(strip_of(agent))
    assert shown == (
        "<|user|>1+1=<|end|><|assistant|>[c][a][l][l][ ][1][+][1][<|end|>]<|tool|>2<|end|><|assistant|>[2][<|end|>]"
    )
    assert [len(each.messages) for each in conversations(agent.trajectory())] == [4]


def test_an_answer_cut_at_its_limit_merges_and_the_end_that_the_template_writes_is_masked(agent):
    agent.ask([*"1 1"], finish="length")
    agent.hear("0")
    agent.ask(["2", "<|end|>"])
    shown = "".join(strip_of(agent))
    assert shown == "<|user|>1+1=<|end|><|assistant|>[1][ ][1]<|end|><|user|>0<|end|><|assistant|>[2][<|end|>]"


def test_an_answer_that_comes_back_as_other_tokens_begins_a_row_and_is_counted(agent):
    agent.ask(["a", "b", "c", "<|end|>"])
    agent.hear("0")
    agent.ask(["2", "<|end|>"])
    found = agent.trajectory()
    assert [len(row.calls) for row in found.rows] == [1, 1]
    assert found.breaks == {BreakReason.RETOKENISATION: 1}
    sampled = [agent.tokenizer.convert_ids_to_tokens(list(row.response_ids)) for row in found.rows]
    assert sampled == [["a", "b", "c", "<|end|>"], ["2", "<|end|>"]]


def test_the_same_text_sampled_as_it_is_tokenised_merges(agent):
    agent.ask(["ab", "c", "<|end|>"])
    agent.hear("0")
    agent.ask(["2", "<|end|>"])
    assert [len(row.calls) for row in agent.trajectory().rows] == [2]


def test_reasoning_that_the_template_leaves_out_begins_a_row_and_is_counted(agent):
    agent.ask(["<|think|>", "1", "<|think|>", "2", "<|end|>"], content="2", reasoning_content="1")
    agent.hear("0")
    agent.ask(["2", "<|end|>"])
    assert agent.trajectory().breaks == {BreakReason.TEMPLATE: 1}


def test_an_agent_that_rewrites_its_past_begins_a_row(agent):
    agent.ask(["2", "<|end|>"])
    agent.messages = [{"role": "user", "content": "1 1"}]
    agent.ask(["2", "<|end|>"])
    assert agent.trajectory().breaks == {BreakReason.OTHER: 1}
