"""A program for Agent Lightning 0.3, as it is written for that: an agent, and its training by reinforcement learning."""

import logging
import sys

import agentlightning as agl
from agentlightning.emitter import emit_reward
from openai import AsyncOpenAI


@agl.rollout
async def add(task: dict, llm: agl.LLM) -> None:
    """Asks the model for a sum; the reward is 1 for the right one, and 0.1 for a number."""
    client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key or "none")
    answer = await client.chat.completions.create(
        model=llm.model, messages=[{"role": "user", "content": task["question"]}], max_tokens=4
    )
    text = (answer.choices[0].message.content or "").strip()
    agl.emit_message(f"said {text!r}", attributes={"right": task["answer"]})
    emit_reward(1.0 if text == task["answer"] else 0.1 * text.isdecimal())


def tasks(count: int) -> list[dict]:
    """Makes sums."""
    return [{"question": f"{n}+{n}=", "answer": str(n + n)} for n in range(1, count + 1)]


CONFIG = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_batch_size": 4, "max_response_length": 4},
    "actor_rollout_ref": {
        "rollout": {"n": 2, "name": "vllm"},
        "actor": {"ppo_mini_batch_size": 4, "optim": {"lr": 1e-4}},
        "model": {"path": sys.argv[1] if len(sys.argv) > 1 else "Qwen/Qwen3-0.6B"},
    },
    "trainer": {"total_training_steps": 2, "test_freq": 2},
}

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    trainer = agl.Trainer(algorithm=agl.VERL(CONFIG), n_runners=8)
    trainer.fit(add, tasks(8), val_dataset=tasks(2))
