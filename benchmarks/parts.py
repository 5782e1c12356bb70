"""What a model in parts costs a rank: memory while it loads, stores and publishes, and how long a checkpoint takes.

A Llama of random weights, stored in bfloat16, is opened by one process and by groups of `fsdp2`. Memory is the anonymous memory
of the largest rank, read every few milliseconds, above what it had after the same with a tiny model; files that are mapped do not
count. The C library gives freed blocks back at once. Everything is on this machine, on CPUs.

    python -m benchmarks.parts --hidden 1024 --layers 16
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVERY_S = 0.003
MIB = 2**20
M_MMAP_THRESHOLD = -3


def anonymous_bytes() -> int:
    """Returns the memory of this process that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


@dataclass(kw_only=True)
class Phases:
    """The most memory, above that at the beginning, and the seconds of each phase."""

    base: int = field(default_factory=anonymous_bytes)
    found: dict[str, tuple[float, float]] = field(default_factory=dict)

    def run(self, name: str, work: Callable[[], Any]) -> Any:
        """Does something, and measures it."""
        most, ended = [0], threading.Event()

        def watch() -> None:
            while not ended.wait(EVERY_S):
                most[0] = max(most[0], anonymous_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        begun = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begun
        ended.set()
        watcher.join()
        self.found[name] = ((max(most[0], anonymous_bytes()) - self.base) / MIB, seconds)
        return result


def rank(index: int, ranks: int, folder: Path, results: Any) -> None:
    """Does the work of a rank: first with the tiny model, then with the large one."""
    import torch
    import torch.distributed as dist

    from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2, OneProcess
    from fulmen_exchange.ranks import Ranks

    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**17)
    torch.set_num_threads(1)
    mine = Ranks()
    if ranks > 1:
        meeting = f"file://{folder}/meeting-{ranks}"
        dist.init_process_group("gloo", init_method=meeting, rank=index, world_size=ranks)
        mine = Ranks(rank=index, world_size=ranks, group=dist.group.WORLD)
    compute = ComputeSettings(parallel=Fsdp2(ranks=ranks) if ranks > 1 else OneProcess())
    _work(folder / "tiny", folder / f"tiny-{ranks}", mine, compute, Phases())
    phases = Phases()
    _work(folder / "large", folder / f"large-{ranks}", mine, compute, phases)
    results.put(phases.found)


def _work(model: Path, folder: Path, mine: Any, compute: Any, phases: Phases) -> None:
    from fulmen_algorithm.policy.trainer import TrainerSetup
    from fulmen_algorithm.trainers.local import LocalTrainer
    from fulmen_algorithm.training.rows import row_from_completion
    from fulmen_algorithm.training.settings import OptimizerSettings, StepSettings
    from fulmen_algorithm.weights.publishing import WeightsOrder

    tokens = [5, 6, 7, 8] * 7
    row = row_from_completion(
        rollout_id="row", prompt_ids=[5], completion_ids=tokens, logprobs=[0.0] * len(tokens), advantage=0.0, version=0
    )
    setup = TrainerSetup(model_dir=model, optimizer=OptimizerSettings(learning_rate=1e-6), seed=0, compute=compute)
    trainer = phases.run("load", lambda: LocalTrainer.open(setup, mine))
    phases.run("step", lambda: trainer.train_supervised([row] * 4, settings=StepSettings(token_budget=256)))
    folder.mkdir(parents=True, exist_ok=True)
    phases.base, trained = anonymous_bytes(), phases.base
    phases.run("checkpoint", lambda: trainer.write_state(folder))
    phases.run("publish", lambda: trainer.write_weights(folder / "full", WeightsOrder(dtype="bfloat16")))
    phases.base = trained


def main() -> None:
    """Prints the measurements as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    options = parser.parse_args()
    import torch
    import torch.multiprocessing as mp
    from tokenizers import Regex, pre_tokenizers
    from transformers import AutoModelForCausalLM

    from fulmen_algorithm.tiny_model import ModelSize, make_tokenizer, save_model

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = make_tokenizer("0123456789", pre_tokenizers.Split(Regex("."), behavior="isolated"))
        large = ModelSize(hidden=options.hidden, layers=options.layers, mlp=4 * options.hidden)
        for model, size in (("tiny", ModelSize()), ("large", large)):
            save_model(tokenizer, str(folder / model), 0, size)
            loaded = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.bfloat16)
            loaded.save_pretrained(folder / model)
        parameters = sum(parameter.numel() for parameter in loaded.parameters())
        del loaded
        for ranks in options.ranks:
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(rank, (ranks, folder, results), nprocs=ranks)
            found = [results.get() for _ in range(ranks)]
            most = {phase: max(each[phase][0] for each in found) for phase in found[0]}
            seconds = {phase: max(each[phase][1] for each in found) for phase in found[0]}
            outcome = {"parameters": parameters, "ranks": ranks, "whole_mib": 4 * parameters / MIB}
            json.dump(outcome | {"most_mib": most, "seconds": seconds}, sys.stdout)
            print(flush=True)


if __name__ == "__main__":
    main()
