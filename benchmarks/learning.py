"""Measures how many rollouts the arithmetic example needs: imitation, then GRPO, in one process without any service.

It runs the training code that the algorithm service runs; only generation is plain batched `generate`. Rollouts that
are `--stale` versions old stand for a system that generates while it trains. Prints one JSON object per line: the
settings, then one record per evaluation, then the result; greedy accuracy is on problems that were never trained on.
"""

import argparse
import copy
import importlib.util
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import perf_counter, process_time
from types import ModuleType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from fulmen_algorithm.training.advantages import StdNormalisation, group_advantages
from fulmen_algorithm.training.policy import OptimizerSettings, PolicyModel, Schedule, seed_everything
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.sft import sft_row
from fulmen_algorithm.training.step import (
    BatchSettings,
    StepResult,
    StepSettings,
    TrainingState,
    make_state,
    sft_step,
    train_batch,
)

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "arithmetic"
SFT_WARMUP_STEPS = 100
GRPO_WARMUP_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One experiment; every field is an option of the command line."""

    seed: int = 0
    demonstrations: int = 7707
    sft_steps: int = 1000
    sft_batch: int = 64
    sft_learning_rate: float = 3e-3
    prompts: int = 32
    group_size: int = 8
    steps: int = 40
    minibatches: int = 4
    epochs: int = 1
    learning_rate: float = 3e-4
    schedule: str = "linear"
    std: str = "none"
    temperature: float = 1.0
    max_tokens: int = 4
    stale: int = 1
    evaluate_every: int = 4
    sft_cache: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion: prompt, sampled ids with their log-probabilities, text."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    text: str


def load_example(name: str) -> ModuleType:
    """Imports a script of the example by its file."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLE / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(EXAMPLE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(
    policy: PolicyModel, model: PreTrainedModel, questions: Sequence[str], settings: Settings, *, greedy: bool
) -> list[Answer]:
    """Answers all questions in one batch; they all have the same number of tokens."""
    tokenizer = policy.tokenizer
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False)
        for q in questions
    ]
    inputs = torch.tensor(prompts)
    sampling = {} if greedy else {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=GenerationConfig(
            max_new_tokens=settings.max_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=policy.pad_token_id,
            output_scores=True,
            return_dict_in_generate=True,
            **sampling,
        ),
    )
    completions = output.sequences[:, inputs.shape[1] :]
    logprobs = torch.stack(output.scores, 1).log_softmax(-1).gather(-1, completions[..., None]).squeeze(-1).tolist()
    answers = []
    for prompt, ids, values in zip(prompts, completions.tolist(), logprobs, strict=True):
        end = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
        text = tokenizer.decode(ids[:end], skip_special_tokens=True)
        answers.append(Answer(prompt_ids=prompt, completion_ids=ids[:end], logprobs=values[:end], text=text))
    return answers


def accuracy(policy: PolicyModel, tasks: Sequence[dict[str, Any]], settings: Settings) -> float:
    """Measures greedy exact-match accuracy."""
    answers = generate(policy, policy.model, [t["input"]["question"] for t in tasks], settings, greedy=True)
    return sum(a.text == t["answer"] for a, t in zip(answers, tasks, strict=True)) / len(tasks)


def imitate(policy: PolicyModel, settings: Settings, demonstrations: Sequence[dict[str, Any]]) -> None:
    """Warm-starts the policy on the demonstrations; a cached result of the same settings is taken if there is one."""
    if settings.sft_cache and Path(settings.sft_cache).exists():
        policy.model.load_state_dict(torch.load(settings.sft_cache, weights_only=True))
        return
    rows = [sft_row(policy.tokenizer, d["messages"], row_id=str(i)) for i, d in enumerate(demonstrations)]
    state = make_state(
        policy,
        OptimizerSettings(
            learning_rate=settings.sft_learning_rate,
            schedule=Schedule.COSINE,
            warmup_steps=SFT_WARMUP_STEPS,
            total_steps=settings.sft_steps,
        ),
    )
    for batch in itertools.islice(batches(rows, settings.sft_batch, settings.seed), settings.sft_steps):
        sft_step(state, batch, settings=StepSettings())
    if settings.sft_cache:
        torch.save(policy.model.state_dict(), settings.sft_cache)


def batches(rows: Sequence[Row], size: int, seed: int) -> Iterator[list[Row]]:
    """Gives batches without end: each epoch is a new shuffle, and its rest is dropped."""
    shuffler = random.Random(seed)
    while True:
        order = shuffler.sample(range(len(rows)), len(rows))
        for start in range(0, len(rows) - size + 1, size):
            yield [rows[i] for i in order[start : start + size]]


def rollouts(
    policy: PolicyModel, sampler: PreTrainedModel, tasks: Sequence[dict[str, Any]], settings: Settings, version: int
) -> tuple[list[Row], float, int]:
    """Samples a group per task; gives the rows that carry signal, the mean reward, and the groups without signal."""
    repeated = [task for task in tasks for _ in range(settings.group_size)]
    answers = generate(policy, sampler, [t["input"]["question"] for t in repeated], settings, greedy=False)
    rewards: dict[str, dict[str, float]] = {}
    for index, (answer, task) in enumerate(zip(answers, repeated, strict=True)):
        rewards.setdefault(task["id"], {})[str(index)] = float(answer.text == task["answer"])
    result = group_advantages(rewards, std=StdNormalisation(settings.std))
    flat = set(result.zero_variance_groups)
    rows = [
        row_from_completion(
            rollout_id=str(index),
            prompt_ids=answer.prompt_ids,
            completion_ids=answer.completion_ids,
            logprobs=answer.logprobs,
            advantage=result.advantages[str(index)],
            version=version,
        )
        for index, (answer, task) in enumerate(zip(answers, repeated, strict=True))
        if task["id"] not in flat
    ]
    return rows, result.mean_reward, len(flat)


def reinforce(
    state: TrainingState, settings: Settings, train: Sequence[dict[str, Any]], held_out: Sequence[dict[str, Any]]
) -> None:
    """Runs GRPO and prints its curve."""
    policy = state.policy
    shuffler = random.Random(settings.seed)
    order = itertools.cycle(shuffler.sample(train, len(train)))
    samplers = [copy.deepcopy(policy.model)]
    cpu_started, results = process_time(), list[StepResult]()
    for step in range(settings.steps):
        tasks = list(itertools.islice(order, settings.prompts))
        lag = len(samplers) - 1
        rows, reward, flat = rollouts(policy, samplers[0], tasks, settings, step - lag)
        if rows:
            results = train_batch(
                state,
                rows,
                settings=StepSettings(temperature=settings.temperature),
                batch=BatchSettings(minibatches=settings.minibatches, epochs=settings.epochs),
                seed=settings.seed * 100_003 + step,
                current_version=step,
            )
        samplers = [*samplers, copy.deepcopy(policy.model)][-(settings.stale + 1) :]
        if (step + 1) % settings.evaluate_every == 0 or step + 1 == settings.steps:
            record = {
                "step": step + 1,
                "rollouts": (step + 1) * settings.prompts * settings.group_size,
                "cpu_s": round(process_time() - cpu_started, 1),
                "reward": round(reward, 3),
                "held_out": accuracy(policy, held_out, settings),
                "flat_groups": flat,
            }
            last = {k: round(v, 4) for k, v in results[-1].metrics.items()} if results else {}
            emit({**record, **last})


def emit(record: dict[str, Any]) -> None:
    """Prints one record."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Runs one experiment."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in fields(Settings):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    parser.add_argument("--model", default="{}", help="JSON object of keyword arguments of make_model.build")
    options = vars(parser.parse_args())
    architecture = json.loads(options.pop("model"))
    settings = Settings(**options)
    torch.set_num_threads(1)
    emit({**asdict(settings), "model": architecture})
    with tempfile.TemporaryDirectory() as directory:
        load_example("make_model").build(directory, settings.seed, **architecture)
        load_example("make_tasks").write(Path(directory) / "tasks")
        policy = PolicyModel.load(directory)
        train = read_lines(Path(directory) / "tasks" / "train.jsonl")
        held_out = read_lines(Path(directory) / "tasks" / "validation.jsonl")
        demonstrations = read_lines(Path(directory) / "tasks" / "demonstrations.jsonl")[: settings.demonstrations]
    seed_everything(settings.seed)
    started, cpu_started = perf_counter(), process_time()
    imitate(policy, settings, demonstrations)
    before = accuracy(policy, held_out, settings)
    emit({"imitation_cpu_s": round(process_time() - cpu_started, 1), "held_out": before})
    steps = settings.steps * settings.minibatches * settings.epochs
    state = make_state(
        policy,
        OptimizerSettings(
            learning_rate=settings.learning_rate,
            schedule=Schedule(settings.schedule),
            warmup_steps=GRPO_WARMUP_STEPS,
            total_steps=steps,
        ),
    )
    reinforce(state, settings, train, held_out)
    after = accuracy(policy, held_out, settings)
    emit({"seed": settings.seed, "before": before, "after": after, "wall_s": round(perf_counter() - started, 1)})


if __name__ == "__main__":
    main()
