"""Measures the trainer alone: tokens per second, memory and packing, in one process and in groups of ranks.

Every case trains the same random Llama (about 20 M parameters unless told otherwise) on the same rows, whose lengths
vary as those of rollouts do. Ranks of one CPU share its cores, so two of them show what the exchange costs rather than a
gain. Run it with `python -m benchmarks.trainer`; on a GPU, `--device cuda --precision bf16 --hidden 2048 --layers 16`.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp, Fsdp2, Precision
from fulmen_algorithm.training.rows import Row, row_from_completion
from fulmen_algorithm.training.settings import (
    BatchSettings,
    OptimizerSettings,
    PackingMode,
    StepResult,
    StepSettings,
)
from fulmen_exchange.ranks import Ranks

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20


def build_model(folder: Path, options: argparse.Namespace) -> int:
    """Writes a random Llama with the arithmetic example's tokenizer; returns its number of parameters."""
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "examples/arithmetic/make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 8 // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            num_key_value_heads=options.hidden // 64,
            max_position_embeddings=4096,
        )
    )
    model.save_pretrained(folder)
    module.build_tokenizer().save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def make_rows(options: argparse.Namespace) -> list[Row]:
    """Makes rows: short prompts, answers whose lengths vary by a factor of ten."""
    chance = random.Random(0)
    rows = []
    for index in range(options.rows):
        length = min(int(chance.lognormvariate(0, 0.8) * options.answer_tokens), options.answer_tokens * 6)
        answer = [chance.randrange(options.vocabulary) for _ in range(max(length, 4))]
        row = row_from_completion(
            rollout_id=f"rollout-{index}",
            prompt_ids=[chance.randrange(options.vocabulary) for _ in range(chance.randrange(8, 48))],
            completion_ids=answer,
            logprobs=[-9.0 for _ in answer],
            advantage=chance.uniform(-1, 1),
            version=0,
        )
        rows.append(row)
    return rows


def setup_of(folder: Path, options: argparse.Namespace, compute: ComputeSettings) -> TrainerSetup:
    """Returns what every case begins with."""
    return TrainerSetup(model_dir=folder, optimizer=OptimizerSettings(learning_rate=1e-5), seed=0, compute=compute)


def compute_of(options: argparse.Namespace, kind: str, ranks: int) -> ComputeSettings:
    """Returns the settings of a case."""
    parallel = {"ddp": Ddp(ranks=ranks), "fsdp2": Fsdp2(ranks=ranks)}.get(kind)
    settings = ComputeSettings(
        precision=Precision(options.precision), gradient_checkpointing=options.gradient_checkpointing
    )
    return settings if parallel is None else settings.model_copy(update={"parallel": parallel})


def step_settings(options: argparse.Namespace, packing: str) -> StepSettings:
    """Returns the settings of a step."""
    return StepSettings(token_budget=options.token_budget, packing=PackingMode(packing))


def measure_alone(options: argparse.Namespace) -> dict[str, float]:
    """Measures one process: this one."""
    torch.set_num_threads(options.threads)
    folder, packing = Path(options.alone[0]), options.alone[1]
    ranks = Ranks(device=torch.device(options.device))
    trainer = LocalTrainer.open(setup_of(folder, options, compute_of(options, "none", 1)), ranks)
    rows, settings = make_rows(options), step_settings(options, packing)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    results, seconds, cpu_seconds = [], [], []
    for step in range(options.steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        results += trainer.train(rows, settings=settings, batch=BatchSettings(), seed=step, current_version=0)
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
    metrics = _metrics(rows, results, seconds)
    # On a machine that others use as well, this is the metric that says something.
    metrics["tokens_per_cpu_second"] = metrics["tokens"] / statistics.median(cpu_seconds[1:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    metrics |= {"peak_mib": peak / MIB, "step_mib": (peak - before) / MIB}
    if ranks.device.type == "cuda":
        metrics |= {"peak_mib": torch.cuda.max_memory_allocated() / MIB, "step_mib": 0.0}
    return metrics


async def measure_group(options: argparse.Namespace, folder: Path, kind: str, ranks: int) -> dict[str, float]:
    """Measures a group of ranks; memory is that of the largest process, which on a GPU says little."""
    group = GroupOptions(device=options.device, torch_threads=options.threads)
    setup = setup_of(folder, options, compute_of(options, kind, ranks))
    rows, settings = make_rows(options), step_settings(options, "packed")
    trainer = await RankGroupTrainer.open(setup, group)
    try:
        before = max(map(_peak_bytes, trainer.pids))
        results: list[StepResult] = []
        seconds = []
        for step in range(options.steps + 1):
            started = time.perf_counter()
            results += await trainer.train(rows, settings=settings, batch=BatchSettings(), seed=step, current_version=0)
            seconds.append(time.perf_counter() - started)
        peak = max(map(_peak_bytes, trainer.pids))
    finally:
        await trainer.close()
    return _metrics(rows, results, seconds) | {"peak_mib": peak / MIB, "step_mib": (peak - before) / MIB}


def _metrics(rows: Sequence[Row], results: Sequence[StepResult], seconds: Sequence[float]) -> dict[str, float]:
    tokens = sum(len(row.token_ids) for row in rows)
    rates = [tokens / one for one in seconds[1:]]  # the first warms up
    return {
        "tokens": float(tokens),
        "tokens_per_second": statistics.median(rates),
        "spread": max(rates) - min(rates),
        "packing_efficiency": results[-1].packing_efficiency,
        "first_loss": results[0].loss,
        "first_grad_norm": results[0].grad_norm,
    }


def _peak_bytes(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 if found else 0


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trainer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precision", default="auto", choices=[p.value for p in Precision])
    parser.add_argument(
        "--ranks", type=int, nargs="*", default=[2], help="sizes of groups to measure besides 1 process"
    )
    parser.add_argument("--kinds", nargs="*", default=["ddp", "fsdp2"], choices=("ddp", "fsdp2"))
    parser.add_argument("--hidden", type=int, default=384, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--answer-tokens", type=int, default=48, help="median length of an answer")
    parser.add_argument("--token-budget", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2, help="optimiser steps that are measured, after one")
    parser.add_argument("--threads", type=int, default=1, help="threads of a process")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--output", type=Path, help="file for the metrics as JSON")
    parser.add_argument("--alone", nargs=2, metavar=("MODEL", "PACKING"), help=argparse.SUPPRESS)
    return parser.parse_args()


def run(options: argparse.Namespace, arguments_given: Sequence[str]) -> dict[str, object]:
    """Measures every case, each in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = build_model(Path(folder), options)
        cases: dict[str, dict[str, float]] = {}
        for packing in ("padded", "packed"):
            command = [sys.executable, "-m", "benchmarks.trainer", *arguments_given, "--alone", folder, packing]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT)
            cases[f"1 process, {packing}"] = json.loads(done.stdout)
            _show(f"1 process, {packing}", cases[f"1 process, {packing}"])
        for ranks in options.ranks:
            for kind in options.kinds:
                name = f"{kind}, {ranks} ranks"
                cases[name] = asyncio.run(measure_group(options, Path(folder), kind, ranks))
                _show(name, cases[name])
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": options.device,
    }
    if options.device == "cuda":
        machine["device"] = torch.cuda.get_device_name()
    settings = {k: v for k, v in vars(options).items() if k not in ("alone", "output")}
    return {
        "machine": machine,
        "torch": torch.__version__,
        "parameters": parameters,
        "settings": settings,
        "cases": cases,
    }


def _show(name: str, metrics: dict[str, float]) -> None:
    # The processor's time of other processes is not known here.
    by_cpu = metrics.get("tokens_per_cpu_second")
    print(
        f"{name:20} {metrics['tokens_per_second']:9.0f} tokens/s (spread {metrics['spread']:.0f}"
        f"{'' if by_cpu is None else f', {by_cpu:.0f} per CPU second'})"
        f"  {metrics['peak_mib']:7.0f} MiB at most, {metrics['step_mib']:6.0f} MiB of it in steps"
        f"  packing {metrics['packing_efficiency']:.2f}  loss {metrics['first_loss']:.6f}"
        f"  norm {metrics['first_grad_norm']:.5f}",
        flush=True,
    )


def main() -> None:
    """Runs the command line."""
    options = arguments()
    if options.alone:
        print(json.dumps(measure_alone(options)))
        return
    result = run(options, sys.argv[1:])
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
