import asyncio
import json

import pytest

from tests.support.algorithm.embedded_engine import Engine, Hold, chat_body, logprobs_in, teacher_forced


async def events(engine: Engine, **body) -> list[dict]:
    async with engine.client.post("/v1/chat/completions", json=chat_body(stream=True, **body)) as response:
        assert response.status == 200
        lines = [line.decode().strip() async for line in response.content]
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(d) for d in data[:-1]]


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7, 0])
async def test_logprobs_equal_a_teacher_forced_forward_pass(engine, policies, temperature):
    for question in ("12+34=", "7", "1+2+3+4="):
        message = [{"role": "user", "content": question}]
        status, answer = await engine.chat(messages=message, temperature=temperature, max_tokens=20)
        assert status == 200
        expected = teacher_forced(policies[0], answer, temperature or 1.0)
        assert logprobs_in(answer) == pytest.approx(expected, abs=1e-4)


async def test_counts_agree_and_the_sampled_end_of_turn_is_among_the_tokens(engine, policies):
    ended = 0
    for seed in range(40):
        _, answer = await engine.chat(seed=seed, max_tokens=12)
        choice = answer["choices"][0]
        ids = choice["token_ids"]
        assert len(ids) == len(logprobs_in(answer)) == answer["usage"]["completion_tokens"]
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert answer["weight_versions"] == [{"version": 0, "start": 0, "end": len(ids)}]
        eos = policies[0].tokenizer.eos_token_id
        assert (choice["finish_reason"] == "stop") == (ids[-1] == eos)
        assert choice["message"]["content"] == policies[0].tokenizer.decode(ids, skip_special_tokens=True)
        ended += ids[-1] == eos
    assert ended > 0


async def test_a_stream_carries_what_the_whole_answer_carries(engine):
    chunks = await events(engine, seed=3, stream_options={"include_usage": True})
    _, whole = await engine.chat(seed=3)
    *body, last, usage = chunks
    assert body[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert body[0]["choices"][0]["delta"]["role"] == "assistant"
    choice = whole["choices"][0]
    assert [t for c in body for t in c["choices"][0]["token_ids"]] == choice["token_ids"]
    sampled = [e["logprob"] for c in body for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert sampled == pytest.approx(logprobs_in(whole), abs=1e-5)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in (*body, last))
    assert text == choice["message"]["content"]
    assert last["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last["weight_versions"] == whole["weight_versions"]
    assert all(c["choices"][0]["finish_reason"] is None for c in body)
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]


async def test_tokens_are_sent_when_they_are_sampled(engine, greedy_without_end):
    body = chat_body(
        stream=True, temperature=0, max_tokens=60, messages=[{"role": "user", "content": greedy_without_end}]
    )
    # Half of the forward passes are still to come, however late the first line is read.
    hold = Hold(engine, at=30)
    async with engine.client.post("/v1/chat/completions", json=body) as response:
        assert (await response.content.readline()).startswith(b"data: {")
        assert engine.generator.stats.forward_passes < 30
        hold.release()
        assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
    assert engine.generator.stats.forward_passes == 60


async def test_ids_and_logprobs_are_given_only_when_asked_for(engine):
    _, answer = await engine.chat(logprobs=False, return_token_ids=False)
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_a_seed_repeats_the_answer_in_any_batch(engine):
    _, alone = await engine.chat(seed=11)
    crowd = await asyncio.gather(*(engine.chat(seed=11 if i == 7 else i * 100) for i in range(16)))
    assert crowd[7][1]["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


async def test_greedy_and_a_tiny_nucleus_agree(engine):
    _, greedy = await engine.chat(temperature=0)
    _, nucleus = await engine.chat(top_p=1e-6)
    assert greedy["choices"][0]["token_ids"] == nucleus["choices"][0]["token_ids"]
    assert logprobs_in(nucleus) == pytest.approx([0.0] * len(logprobs_in(nucleus)), abs=1e-6)


async def test_a_stop_string_ends_the_text_before_it(engine):
    for seed in range(100):
        ask = {"seed": seed, "max_tokens": 40}
        _, free = await engine.chat(**ask)
        text = free["choices"][0]["message"]["content"]
        if len(text) >= 4:
            break
    stop = text[2:4]
    _, stopped = await engine.chat(**ask, stop=[stop])
    assert stopped["choices"][0]["message"]["content"] == text[: text.index(stop)]
    assert stopped["choices"][0]["finish_reason"] == "stop"
    ids = stopped["choices"][0]["token_ids"]
    assert ids == free["choices"][0]["token_ids"][: len(ids)]
    chunks = await events(engine, **ask, stop=stop)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == text[: text.index(stop)]


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"n": 2}, 400, "n"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 1000}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
        ({"messages": [{"role": "user", "content": "1" * 500}]}, 400, "messages"),
        ({"stop": [""]}, 400, "stop"),
        ({"logit_bias": {"1": 2}}, 400, "logit_bias"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"model": "gpt"}, 404, "model"),
        ({"stream": "yes"}, 400, "stream"),
    ],
)
async def test_what_is_not_supported_is_refused_in_openai_shape(engine, change, status, param):
    got, answer = await engine.chat(**change)
    assert got == status
    assert answer["error"]["param"] == param
    assert set(answer["error"]) == {"message", "type", "param", "code"}


async def test_unknown_parameters_and_neutral_ones_are_accepted(engine):
    status, _ = await engine.chat(n=1, store=True, user="me", frequency_penalty=0, response_format={"type": "text"})
    assert status == 200


async def test_a_body_that_is_not_json_is_refused(engine):
    async with engine.client.post("/v1/chat/completions", data=b"{") as response:
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_models_and_health_are_served(engine):
    async with engine.client.get("/v1/models") as response:
        assert [m["id"] for m in (await response.json())["data"]] == ["policy"]
    async with engine.client.get("/health") as response:
        assert await response.json() == {"status": "ok", "version": 0}


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ([b"host: x"], 200),
        ([], 400),
        ([b"host: x", b"host: y"], 400),
    ],
)
async def test_a_request_names_one_host(engine, lines, status):
    url = engine.client._base_url
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(b"\r\n".join((b"GET /health HTTP/1.1", *lines, b"connection: close", b"", b"")))
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert int(answer.split()[1]) == status
