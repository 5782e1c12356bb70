"""An engine reports which experts computed each token, and the trainer computes the same with them."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from fulmen.routed_experts import read_npy
from fulmen_algorithm.engines.embedded.__main__ import arguments, build
from fulmen_algorithm.engines.embedded.routing import RoutesUnknown
from fulmen_algorithm.training.engine_mismatch import engine_mismatch
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.router_replay import expert_blocks
from fulmen_algorithm.training.rows import row_from_completion
from fulmen_algorithm.training.settings import BatchSettings, StepSettings
from fulmen_algorithm.training.step import train_batch
from tests.support.algorithm.embedded_engine import chat_body, logprobs_in
from tests.support.algorithm.mixture import LAYERS, TOP_K, mixture_folder

QUESTIONS = ("12+34=", "7", "1+2+3+4=", "55+1=")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return mixture_folder(tmp_path_factory.mktemp("mixture"))


@pytest.fixture
def options(folder):
    return arguments(["--model", str(folder), "--router-replay"])


def experts_in(choice):
    return np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))


def row_of(answer, *, recorded=True, index=0):
    choice = answer["choices"][0]
    row = row_from_completion(
        rollout_id=f"rollout-{index}",
        prompt_ids=answer["prompt_token_ids"],
        completion_ids=choice["token_ids"],
        logprobs=logprobs_in(answer),
        advantage=1.0,
        version=0,
    )
    return replace(row, routed_experts=read_npy(base64.b64decode(choice["routed_experts"])) if recorded else None)


async def answers_of(engine, count=24):
    found = []
    for seed in range(count):
        message = [{"role": "user", "content": QUESTIONS[seed % len(QUESTIONS)]}]
        status, answer = await engine.chat(messages=message, seed=seed, max_tokens=12)
        assert status == 200
        found.append(answer)
    return found


def differences(policy, rows):
    """Returns the largest difference of log-probabilities of engine and trainer."""
    computed = logprobs_of(policy, rows, settings=StepSettings(), trained_only=True)
    return engine_mismatch(rows, computed)["engine_mismatch_logprob_max"]


async def test_the_experts_of_prompt_and_answer_are_those_of_one_pass_over_both(engine, folder):
    # Together they are padded to one length.
    import asyncio

    messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
    found = await asyncio.gather(*(engine.chat(messages=each, seed=1, max_tokens=9) for each in messages))
    model = PolicyModel.load(folder).model
    for status, answer in found:
        assert status == 200
        experts = experts_in(answer["choices"][0])
        ids = [*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"]]
        assert experts.dtype == np.uint8
        assert experts.shape == (len(ids) - 1, LAYERS, TOP_K)
        states = model(torch.tensor([ids[:-1]]), output_router_logits=True).router_logits
        expected = torch.stack([each.topk(TOP_K).indices for each in states], dim=1)
        assert (np.sort(experts, -1) == expected.sort(-1).values.numpy()).mean() > 0.99


async def test_a_stream_carries_the_experts_of_the_whole_answer(engine):
    async with engine.client.post("/v1/chat/completions", json=chat_body(stream=True, seed=3)) as response:
        lines = [line.decode().strip().removeprefix("data: ") async for line in response.content]
    chunks = [json.loads(line) for line in lines if line and line != "[DONE]"]
    _, whole = await engine.chat(seed=3)
    (carrying,) = [choice for chunk in chunks for choice in chunk["choices"] if "routed_experts" in choice]
    assert carrying["finish_reason"]
    assert (experts_in(carrying) == experts_in(whole["choices"][0])).all()


async def test_answers_without_token_ids_have_no_experts(engine):
    _, answer = await engine.chat(return_token_ids=False)
    assert "routed_experts" not in answer["choices"][0]


async def test_an_engine_whose_routers_differ_agrees_with_the_trainer_only_when_replayed(engine, folder):
    # What other kernels and number formats do: the engine's routers choose other experts now and then. The weights of
    # the chosen experts are those of the trainer.
    noise = torch.Generator().manual_seed(0)
    for block in expert_blocks(engine.generator.model):
        gate = block.block.gate

        def disturbed(hidden, gate=gate):
            logits = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            shaken = logits + 0.5 * torch.randn(logits.shape, generator=noise)
            indices = shaken.topk(gate.top_k).indices
            shares = logits.softmax(-1).gather(-1, indices)
            return logits, shares / shares.sum(-1, keepdim=True), indices

        gate.forward = disturbed
    answers = await answers_of(engine)
    policy = PolicyModel.load(folder)
    replayed = [row_of(answer, index=index) for index, answer in enumerate(answers)]
    own = [replace(row, routed_experts=None) for row in replayed]
    # Engine and trainer add the same numbers in other orders, over 20 positions in float32.
    assert differences(policy, own) > 0.1
    assert differences(policy, replayed) < 1e-5
    alone = [differences(policy, [row]) for row in replayed]
    assert max(alone) < 1e-5

    from fulmen_algorithm.training.optimizer import OptimizerSettings
    from fulmen_algorithm.training.state import make_state

    batch = BatchSettings(measure_mismatch=True)
    state = make_state(policy, OptimizerSettings(learning_rate=1e-4))
    (result,) = train_batch(state, replayed, settings=StepSettings(), batch=batch, seed=0, current_version=0)
    assert result.metrics["engine_mismatch_logprob_max"] < 1e-5
    assert 0.05 < result.metrics["router_mismatch_choices_share"] < result.metrics["router_mismatch_tokens_share"] < 1
    # All but the last token of each row.
    expected = 1 - len(replayed) / sum(len(row.token_ids) for row in replayed)
    assert result.metrics["router_replayed_tokens_share"] == pytest.approx(expected)


async def test_a_bfloat16_engine_is_nearer_to_the_trainer_when_replayed(engine, folder):
    engine.generator.model.to(torch.bfloat16)
    answers = await answers_of(engine, count=40)
    policy = PolicyModel.load(folder)
    rows = [row_of(answer, index=index) for index, answer in enumerate(answers)]
    means = []
    for these in (rows, [replace(row, routed_experts=None) for row in rows]):
        computed = logprobs_of(policy, these, settings=StepSettings(), trained_only=True)
        means.append(engine_mismatch(these, computed)["engine_mismatch_kl"])
    assert means[0] < means[1]


def test_a_model_without_experts_is_refused(model_dirs):
    with pytest.raises(RoutesUnknown, match="not a mixture of experts"):
        build(arguments(["--model", str(model_dirs[0]), "--router-replay"]), None)
