"""Router replay on ranks, and a run of a mixture of experts that learns through proxy, store and engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.errors import SettingsInvalid
from fulmen.routed_experts import RoutedExperts
from fulmen.rpc.services import connect
from fulmen_algorithm.training.compute import Ddp, Fsdp2, OneProcess
from fulmen_algorithm.training.rows import row_from_completion
from tests.support.algorithm import parts
from tests.support.algorithm.copies import Case
from tests.support.algorithm.mixture import EXPERTS, LAYERS, TOP_K, mixture_folder
from tests.support.algorithm.small_training import SETTINGS, Watcher
from tests.support.algorithm.training import create_run, publish_training_inputs
from tests.support.exchange.hook_ranks import RankPool
from tests.support.stack import running_stack, stack_targets

AGENT = b"""\
from openai import AsyncOpenAI

client = AsyncOpenAI()


async def solve(task):
    messages, said = [{"role": "user", "content": task["input"]["question"]}], ""
    for _ in range(2):
        completion = await client.chat.completions.create(model="tiny", messages=messages)
        answer = completion.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "1"}]
        said += answer
    return said


def grade(task, outcome):
    return outcome.count("7") / 8
"""
MIXTURE = b"""\
import make_model
import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM


def build(output_dir, seed=0):
    make_model.build(output_dir, seed, hidden=16, layers=1, heads=2, mlp=16)
    tokenizer = AutoTokenizer.from_pretrained(output_dir)
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=128, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(output_dir)
"""
REPLAYED = {
    **SETTINGS,
    "steps": 14,
    "prompts_per_step": 4,
    "group_size": 8,
    "max_staleness": 0,
    "learning_rate": 1e-2,
    "validate_every": 14,
    "checkpoint_every": 14,
    "engine": {"kind": "embedded", "router_replay": True},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    found = RankPool(2, parts.__name__)
    yield found
    found.close()


def replayed_rows() -> list:
    rng = np.random.default_rng(0)
    rows = []
    for index, length in enumerate((9, 5, 7, 12, 6, 8)):
        chosen = np.array([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(length)])
        experts = RoutedExperts(
            layers=LAYERS, top_k=TOP_K, entry_bytes=1, spans=((0, length),), packed=chosen.astype(np.uint8).tobytes()
        )
        row = row_from_completion(
            rollout_id=str(index),
            prompt_ids=rng.integers(6, 25, 2).tolist(),
            completion_ids=rng.integers(6, 25, length - 2).tolist(),
            logprobs=[-1.0] * (length - 2),
            advantage=1.0,
            version=0,
        )
        rows.append(replace(row, routed_experts=experts if index != 2 else None))
    return rows


@pytest.mark.xdist_group("trainers")
@pytest.mark.timeout(300)
def test_ranks_and_parts_of_a_model_replay_as_one_process_does(pool: RankPool, tmp_path: Path) -> None:
    rows = replayed_rows()

    def weights(parallel, rows):
        case = Case(model_dir=folder, rows=rows, parallel=parallel)
        (place := tmp_path / f"{parallel.kind}-{len(list(tmp_path.iterdir()))}").mkdir()
        found = pool.run(place, parallel.ranks, parts.train_and_store, case, 1, place)[0]
        return {name: one for name, one in found.items() if torch.is_tensor(one) and name.endswith("/exp_avg")}

    folder = mixture_folder(tmp_path / "mixture")
    alone = weights(OneProcess(), rows)
    own = weights(OneProcess(), [replace(row, routed_experts=None) for row in rows])
    routers = [name for name in alone if ".gate." in name]
    assert len(routers) == LAYERS
    assert all(not torch.allclose(alone[name], own[name], rtol=1e-2) for name in routers)
    for parallel in (Ddp(ranks=2), Fsdp2(ranks=2)):
        for name, found in weights(parallel, rows).items():
            torch.testing.assert_close(found, alone[name], atol=1e-6, rtol=1e-3, msg=f"{parallel.kind} {name}")


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(420)
async def test_a_mixture_of_experts_learns_with_the_experts_that_its_engine_chose(short_tmp_path, repository_root):
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        inputs = await publish_training_inputs(client, repository_root, builder=MIXTURE, agent=AGENT)
        with pytest.raises(SettingsInvalid, match=r"settings\.engine\.router_replay"):
            await create_run(client, "compiled", inputs, {**REPLAYED, "passes": {"compile": True}})
        watcher = Watcher(stack, client, await create_run(client, "replayed", inputs, REPLAYED))
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        steps = [dict(event.step.values) for event in watcher.events if event.HasField("step") and event.step.step]
        # Two calls per row: all tokens but the last are computed by the engine.
        assert all(0.9 < step["router_replayed_tokens_share"] < 1 for step in steps), steps[0]
        assert all(step["engine_mismatch_logprob_max"] < 1e-4 for step in steps)
        assert all(step["router_mismatch_tokens_share"] < 0.05 for step in steps)
        rewards = [step["reward_mean"] for step in steps]
        assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3, rewards


@pytest.mark.long
@pytest.mark.serial
@pytest.mark.timeout(420)
async def test_a_model_without_experts_fails_the_run_with_a_reason(short_tmp_path, repository_root):
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        inputs = await publish_training_inputs(client, repository_root)
        watcher = Watcher(stack, client, await create_run(client, "dense", inputs, REPLAYED))
        run = await watcher.end()
        assert run.state == pb.TRAINING_RUN_STATE_FAILED
        assert "is not a mixture of experts: remove router_replay" in run.failure_message
