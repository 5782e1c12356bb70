"""Copies of the weights in parts, a copy on each of two nodes: steps with and without a codec between the nodes.

    python -m benchmarks.exchange.copies [--line 100mbit] [--steps 3] [--output FOLDER]

Each node is a network namespace with a shaped line and two ranks, which hold a copy of the model of `model.py` in two parts
(FSDP2, computing in bf16) and sum gradients over the line in float32, as trainers of the algorithm service do. Bytes are those
that leave a node, headers and all, for each of its ranks and steps; the first step of a contender does not count. Needs root, or
user namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import outcome
from benchmarks.exchange import model
from benchmarks.exchange.contenders import AS_SET
from benchmarks.exchange.lines import INTERFACE, LINES, Lines, LinesUnavailable, enter
from benchmarks.exchange.rank import MAX_NORM, MEET_LIMIT_S, own_output, sent_bytes
from benchmarks.exchange.stand import say
from benchmarks.exchange.works import MOMENTUM, SEED, sgd
from fulmen_algorithm.training.compute import Fsdp2
from fulmen_algorithm.training.gradient_norms import clip_gradients
from fulmen_algorithm.training.parallel import AllReduce, GradientReducer, RankGroups, groups_of, shard
from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.ranks import Ranks, StepInfo
from fulmen_exchange.reducer import CodecReducer
from fulmen_exchange.registry import load_codecs

NAME = "exchange_copies"
NODES, PARTS = 2, 2
LIMIT_S = 900.0
GOAL = 10.0
PORT = 29_400
DENSE = "dense"
CONTENDERS: dict[str, dict[str, Any] | None] = {
    DENSE: None,
    "qsgd 8 bits": {"codec": "qsgd", "bits": 8},
    "dgc 100x": {"codec": "dgc", "ratio": 100.0},
}
"""Settings of the exchange by name; None sums gradients as they are."""
Figures = dict[str, list[float]]


def rank_main(rank: int, meeting: str, steps: int) -> None:
    """Takes the steps of all contenders on this rank; prints the figures of each, a list by step, as JSON."""
    answers = own_output()
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    torch.set_num_threads(1)
    limit = timedelta(seconds=MEET_LIMIT_S)
    world = NODES * PARTS
    dist.init_process_group("gloo", init_method=f"tcp://{meeting}", rank=rank, world_size=world, timeout=limit)
    ranks = Ranks(rank=rank, world_size=world, group=dist.group.WORLD)
    answers.write(json.dumps({name: _taken(ranks, given, steps) for name, given in CONTENDERS.items()}) + "\n")
    answers.flush()
    dist.barrier()


def _taken(ranks: Ranks, given: dict[str, Any] | None, steps: int) -> Figures:
    parallel = Fsdp2(ranks=ranks.world_size, shard=PARTS)
    groups, module = groups_of(ranks, parallel), model.made()
    assert groups.mesh is not None
    shard(module, list(module.layers), groups.mesh, parallel, bf16=True)
    reducer, momentum = _reducer(module, groups, given)
    optimizer, parameters = sgd(module, momentum), list(module.parameters())
    found: Figures = {"step_s": [], "exchange_s": [], "cpu_s": [], "node_sent_bytes": []}
    for step in range(steps + 1):
        rows = model.rows_of(ranks.rank, step)
        dist.barrier()
        sent, used_s, began = sent_bytes(INTERFACE), time.process_time(), time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        (module(rows) / ranks.world_size).backward()
        computed = time.perf_counter()
        reducer.reduce(parameters, groups.peers, StepInfo(compute_s=computed - began))
        exchanged = time.perf_counter()
        if reducer.clips_sums:
            clip_gradients(parameters, MAX_NORM)
        optimizer.step()
        reducer.on_step()
        ended, used_s = time.perf_counter(), time.process_time() - used_s
        dist.barrier()
        numbers = (ended - began, exchanged - computed, used_s, sent_bytes(INTERFACE) - sent)
        for values, number in zip(found.values(), numbers, strict=True):
            values.append(float(number))
    return {name: values[1:] for name, values in found.items()}


def _reducer(module: nn.Module, groups: RankGroups, given: dict[str, Any] | None) -> tuple[GradientReducer, float]:
    """Makes what sums gradients over the nodes; also returns the optimiser's momentum."""
    if given is None:
        return AllReduce(), MOMENTUM
    settings = load_codecs()[given["codec"]].settings.model_validate({**given, **AS_SET})
    reducer = CodecReducer.open(
        settings,
        parameters=dict(module.named_parameters()),
        link=TorchLink(groups.peers),
        seed=SEED,
        optimizer="sgd",
        copy=groups.copy,
    )
    return reducer, 0.0 if settings.holds_momentum else MOMENTUM


def measured(line: str, steps: int) -> list[dict[str, Figures]]:
    """Runs all ranks on a line; returns the figures of each rank.

    Raises:
        RuntimeError: if a rank ends badly.
    """
    with ExitStack() as stack:
        lines = stack.enter_context(Lines(LINES[line], NODES))
        lines.shape()
        meeting = f"{lines.address(0)}:{PORT}"
        processes = []
        for rank in range(NODES * PARTS):
            words = (
                "-m",
                "benchmarks.exchange.copies",
                "--rank",
                str(rank),
                "--meeting",
                meeting,
                "--steps",
                str(steps),
            )
            process = subprocess.Popen([*lines.within(rank // PARTS), sys.executable, *words], stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        texts = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
        if any(process.returncode for process in processes):
            raise RuntimeError("a rank ended badly; see above")
        return [json.loads(text) for text in texts]


def summary(of_ranks: Sequence[dict[str, Figures]], mbit: float) -> dict[str, dict[str, float]]:
    """Returns the median step of each contender: seconds of the slowest rank, bytes and CPU seconds for each rank.

    `core_each_s` is computed from these: CPU seconds, and those of a node's bytes at the rate of its line. It is what a step
    would take with a core for each rank, which a small machine does not have.
    """
    found = {}
    for name in CONTENDERS:
        figures = [one[name] for one in of_ranks]
        # All ranks of a node count the same bytes.
        sent = [sum(one["node_sent_bytes"]) for one in figures]
        steps = len(figures[0]["step_s"])
        found[name] = {
            "step_s": median(map(max, zip(*(one["step_s"] for one in figures), strict=True))),
            "exchange_s": median(map(max, zip(*(one["exchange_s"] for one in figures), strict=True))),
            "cpu_s": sum(sum(one["cpu_s"]) for one in figures) / len(figures) / steps,
            "sent_bytes": sum(sent) / len(figures) / PARTS / steps,
        }
        found[name]["core_each_s"] = found[name]["cpu_s"] + found[name]["sent_bytes"] * PARTS * 8e-6 / mbit
    return found


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark, or one rank of it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--line", default="100mbit", choices=[name for name, each in LINES.items() if each.mbit])
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender that count")
    parser.add_argument("--output", type=Path, default=outcome.FOLDER, help=f"folder for {NAME}.json")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        rank_main(given.rank, given.meeting, given.steps)
        return 0
    try:
        enter("benchmarks.exchange.copies", arguments)
    except LinesUnavailable as error:
        say(f"a shaped line {error}")
        return 1
    line = LINES[given.line]
    found = summary(measured(given.line, given.steps), line.mbit or 0.0)
    texts = {"step_s": "measured", "core_each_s": "computed for a core each"}
    claims = [
        outcome.claim(
            f"steps with {name} beside dense, {line.text}, {text}",
            found[DENSE][key] / one[key],
            "x",
            goal=GOAL,
            better="higher",
        )
        for name, one in found.items()
        for key, text in texts.items()
        if name != DENSE
    ]
    raw = {"line": given.line, "parameters": model.size(), "nodes": NODES, "ranks_per_node": PARTS, "contenders": found}
    outcome.save(NAME, method=__doc__ or "", raw=raw, claims=claims, folder=given.output)
    outcome.show(raw, claims)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
