"""Trains one player on one game: a short imitation, then reinforcement learning."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.train.learning import emit, train
from benchmarks.train.world import load_script
from fulmen.train_toml.agent import AgentConfig
from fulmen.train_toml.train import DataConfig, PolicyConfig, StageConfig, TrainConfig

FOLDER = Path(__file__).resolve().parent
RULES = load_script(FOLDER / "rules.py")
STEPS = 60
DEMONSTRATIONS, TRAIN_TASKS, VALIDATION_TASKS = 3000, 2000, 100
IMITATION = {"steps": 300, "learning_rate": 3e-3, "schedule": "cosine", "warmup_steps": 30}
BEST = 1.0
"""Reward of perfect play, in every game."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training.

    Attributes:
        settings: Settings of reinforcement learning other than the defaults.
        imitation: Those of imitation.
        quiet: Prints no steps.
    """

    game: str
    shape: str
    seed: int
    cache: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    imitation: Mapping[str, Any] = field(default_factory=dict)
    quiet: bool = True


def written(game: str, folder: Path) -> DataConfig:
    """Writes the tasks and demonstrations of a game, the same every time."""
    rules = RULES.GAMES[game]
    chance = random.Random(game)
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": TRAIN_TASKS, "validation": VALIDATION_TASKS}
    for name, count in counts.items():
        setups = [rules.draw(chance) for _ in range(count)]
        tasks = [{"id": f"{name}-{i}", "input": {"game": game, "setup": s}} for i, s in enumerate(setups)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    played = [_demonstration(rules(rules.draw(chance)), chance) for _ in range(DEMONSTRATIONS)]
    (folder / "demonstrations.jsonl").write_text("".join(json.dumps(each) + "\n" for each in played))
    return DataConfig(
        train=folder / "train.jsonl",
        validation=folder / "validation.jsonl",
        demonstrations=folder / "demonstrations.jsonl",
    )


def _demonstration(game: Any, chance: random.Random) -> dict[str, Any]:
    """Renders one play of the teacher, cut off after the turns of the game."""
    parameters = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
    tools = [{"type": "function", "function": {"name": game.tool, "parameters": parameters}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": game.opening}]
    teacher, result = game.teach(chance), None
    for turn in range(game.turns):
        try:
            argument = teacher.send(result)
        except StopIteration as end:
            messages.append({"role": "assistant", "content": end.value})
            break
        function = {"name": game.tool, "arguments": json.dumps({"value": argument}, separators=(",", ":"))}
        call = {"id": f"call_{turn}", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        result = game.use(argument)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    if messages[-1]["role"] == "tool":
        messages.pop()
    return {"messages": messages, "tools": tools}


def played(job: Job) -> dict[str, Any]:
    """Trains once; returns what came of it."""
    torch.set_num_threads(1)
    imitation = {**IMITATION, **job.imitation, "seed": job.seed}
    settings = {"steps": STEPS, **job.settings, "seed": job.seed}
    config = TrainConfig(
        file=FOLDER / "train.toml",
        name=f"{job.game}-{job.shape}",
        policy=PolicyConfig(name="player", build=f"make_model.py:{job.shape}"),
        agent=AgentConfig(python="agent.py:solve", grader="grader.py:grade"),
        data=written(job.game, job.cache / "games" / f"{job.game}-{job.shape}-{job.seed}"),
        stages=(
            StageConfig(algorithm="sft", settings=imitation),
            StageConfig(algorithm="grpo", settings=settings),
        ),
    )
    rewards: dict[str, float] = {}
    notices: list[str] = []

    def report(record: Mapping[str, Any]) -> None:
        if not job.quiet:
            emit({"game": job.game, "shape": job.shape, "seed": job.seed, **record})
        if "reward_mean" in record:
            rewards[str(record["step"])] = float(record["reward_mean"])
        if "notice" in record:
            notices.append(str(record["notice"]))

    trained = asyncio.run(train(config, cache=job.cache, report=report))
    gap = BEST - trained.before
    return {
        "game": job.game,
        "shape": job.shape,
        "seed": job.seed,
        "settings": dict(job.settings),
        "sft_loss": round(trained.sft_loss, 4),
        "before": trained.before,
        "after": trained.after,
        "best": trained.best,
        "closed": round((trained.after - trained.before) / gap, 3) if gap else 1.0,
        "closed_best": round((trained.best - trained.before) / gap, 3) if gap else 1.0,
        "seconds": dict(trained.seconds),
        "cpu_s": trained.cpu_s,
        "calls_per_row": trained.calls_per_row,
        "curve": [(step, accuracy) for step, _, accuracy in trained.curve],
        "rewards": list(rewards.values()),
        "notices": notices,
    }
