import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen_algorithm.engines.embedded.chat import ChatRenderer, Completion
from fulmen_algorithm.engines.embedded.protocol import parse_chat_request
from fulmen_algorithm.engines.embedded.sampling import SampledToken
from fulmen_algorithm.engines.embedded.text import TextStream
from fulmen_algorithm.training.rows import sft_row
from tests.support.algorithm.models import EXAMPLES, load_script


@pytest.fixture(scope="module")
def tokenizer():
    return load_script(EXAMPLES / "calculator/make_model.py").build_tokenizer()


@pytest.fixture(scope="module")
def tasks():
    return load_script(EXAMPLES / "calculator/make_tasks.py")


def body(tasks, messages) -> dict:
    return {"model": "policy", "messages": messages, "tools": tasks.TOOLS, "return_token_ids": True}


def answered(renderer: ChatRenderer, request_body: dict, completion_ids: list[int]) -> dict:
    """The engine's answer, had the model sampled these tokens."""
    request = parse_chat_request(request_body)
    completion = Completion(
        request=request,
        prompt_ids=renderer.prompt_ids(request),
        max_tokens=200,
        eos_token_ids=frozenset([renderer.tokenizer.eos_token_id]),
        text=TextStream(renderer.tokenizer.backend_tokenizer, stop=(), expect_tool_calls=True),
        tokenizer=renderer.tokenizer,
    )
    for token_id in completion_ids:
        completion.push(SampledToken(row=0, token_id=token_id, logprob=-1.0, version=0))
    return completion.answer()


LAST_TOKEN = 173
# Everything but padding, unknown, end and the four roles.
SAMPLED = st.lists(st.integers(7, LAST_TOKEN), max_size=30)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=SAMPLED, expression=st.lists(st.integers(9, LAST_TOKEN), min_size=1, max_size=12), calls=st.booleans())
def test_the_second_prompt_begins_with_the_first_prompt_and_completion(tokenizer, tasks, before, expression, calls):
    renderer = ChatRenderer(tokenizer=tokenizer, max_model_tokens=1000)
    opening, closing = (tokenizer.convert_tokens_to_ids(t) for t in (load_open(), load_close()))
    ids = [*before, *([opening, *expression, closing] if calls else []), tokenizer.eos_token_id]
    messages = [{"role": "user", "content": "12*34"}]
    first = answered(renderer, body(tasks, messages), ids)
    echoed = first["choices"][0]["message"]
    if calls and not before:
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        arguments = json.loads(echoed["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"expression": tokenizer.decode(expression)}
    following = [*messages, echoed, {"role": "tool", "tool_call_id": "x", "content": "408"}]
    second = renderer.prompt_ids(parse_chat_request(body(tasks, following)))
    known = first["prompt_token_ids"] + first["choices"][0]["token_ids"]
    assert second[: len(known)] == known


def load_open() -> str:
    return '<tool_call>{"name":"calculator","arguments":{"expression":"'


def load_close() -> str:
    return '"}}</tool_call>'


def test_demonstrations_train_every_call_and_not_the_tool(tokenizer, tasks):
    demonstration = tasks.demonstration("12+34-15", random.Random(0))
    row = sft_row(tokenizer, demonstration["messages"], row_id="a", tools=demonstration["tools"])
    trained = tokenizer.decode([t for t, m in zip(row.token_ids, row.loss_mask, strict=True) if m])
    calls = "".join(f"{load_open()}{asked}{load_close()}<|end|>" for asked in ("12+34", "46-15"))
    assert trained == f"{calls}31<|end|>"
    assert tokenizer.decode(row.token_ids).startswith("<|system|>calculator<|user|>12+34-15<|assistant|>")


def test_every_token_is_sampled_in_the_test_above(tokenizer):
    assert len(tokenizer) == LAST_TOKEN + 1
