"""The embedded engine scores given tokens, as a teacher."""

import asyncio

import pytest

from fulmen_algorithm.training.policy import PolicyModel
from tests.support.algorithm.embedded_engine import Engine, logprobs_in, teacher_forced

IDS = [4, 7, 9, 3, 11, 2]


def body(**changes):
    return {"model": "policy", "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0, **changes}


async def scored(engine: Engine, **changes) -> tuple[int, dict]:
    async with engine.client.post("/v1/completions", json=body(**changes)) as response:
        return response.status, await response.json()


def values(answer: dict, ids: list[int]) -> list[float]:
    first, *rest = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    return [each[str(token)]["logprob"] for each, token in zip(rest, ids[1:], strict=True)]


async def test_scores_are_those_of_the_trainer(engine, model_dirs):
    status, answer = await scored(engine)
    assert status == 200
    expected = teacher_forced(
        PolicyModel.load(model_dirs[0]), {"prompt_token_ids": IDS[:1], "choices": [{"token_ids": IDS[1:]}]}
    )
    assert values(answer, IDS) == pytest.approx(expected, abs=1e-4)
    assert answer["usage"]["prompt_tokens"] == len(IDS)


async def test_what_the_engine_sampled_it_scores_alike(engine):
    _, chat = await engine.chat(temperature=1.0, seed=3)
    prompt, sampled = chat["prompt_token_ids"], chat["choices"][0]["token_ids"]
    _, answer = await scored(engine, prompt=[*prompt, *sampled])
    assert values(answer, [*prompt, *sampled])[-len(sampled) :] == pytest.approx(logprobs_in(chat), abs=1e-4)


async def test_scores_are_of_the_newest_weights(engine, model_dirs):
    _, before = await scored(engine)
    status, _ = await engine.swap(model_dirs[1], 2)
    assert status == 200
    answers = await asyncio.gather(*(scored(engine) for _ in range(3)))
    expected = teacher_forced(
        PolicyModel.load(model_dirs[1]), {"prompt_token_ids": IDS[:1], "choices": [{"token_ids": IDS[1:]}]}
    )
    assert values(before, IDS) != pytest.approx(expected, abs=1e-3)
    assert all(values(answer, IDS) == pytest.approx(expected, abs=1e-4) for _, answer in answers)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [1] * 10_000}, "prompt"),
        ({"prompt_logprobs": None}, "prompt_logprobs"),
        ({"prompt_logprobs": 5}, "prompt_logprobs"),
        ({"max_tokens": 20}, "max_tokens"),
        ({"stream": True}, "max_tokens"),
    ],
)
async def test_anything_else_is_refused(engine, changes, param):
    status, answer = await scored(engine, **changes)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_a_model_that_is_not_served_is_not_found(engine):
    status, answer = await scored(engine, model="other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
