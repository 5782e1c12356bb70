"""Benchmark of the exchange's kernels: compiled against torch's operations, `torch.topk` and a copy, on one thread.

    python -m benchmarks.exchange.kernels [--short] [--output FOLDER]

writes kernels.json to the folder, if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.outcome import Claim, claim, save, show
from fulmen_algorithm.exchange import kernels
from fulmen_algorithm.exchange.kernels import reference
from fulmen_algorithm.exchange.kernels.choice import Choice, Kernels, Mode

METHOD = """Normal numbers (mean 0, standard deviation 1) in tensors that are there before; what a function returns it allocates
itself, as in use. One thread of torch. GB/s are 4 bytes of each element over the CPU time of that thread, so that
neighbours of the machine count less; median, least and most of the rounds, which go through all functions in turn after one
that does not count. States are put back between rounds. topk_encode is what the codec does: sample, threshold, selection
with error feedback, at 1 % and 0.1 % of the elements. torch.topk selects from the magnitudes, and does nothing else."""
SIZE = 10_000_000
SHARES = {"1 %": 0.01, "0.1 %": 0.001}
BLOCK = 512
GOAL = 4.0
MOMENTUM = 0.9
NATIVE, REFERENCE, TORCH = "native", "reference", "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One function to measure.

    Attributes:
        name: What it does.
        by: Whose it is.
        call: Does it once.
        states: What it changes.
    """

    name: str
    by: str
    call: Callable[[], object]
    states: Sequence[Tensor] = ()


def topk_encode(of: Kernels, gradient: Tensor, residual: Tensor, share: float) -> object:
    """Encodes as the codec `topk` does."""
    threshold = of.threshold_of(kernels.sampled(residual) + kernels.sampled(gradient), share)
    return of.feedback_select(gradient, residual, threshold)


def functions(of: Kernels, by: str, gradient: Tensor, states: Sequence[Tensor]) -> list[Timed]:
    """Lists the functions of one implementation."""
    one, other = states
    share = SHARES["1 %"]
    threshold = of.threshold_of(kernels.sampled(gradient), share)
    sparse = of.feedback_select(gradient, torch.zeros_like(gradient), threshold)
    calls: dict[str, tuple[Callable[[], object], list[Tensor]]] = {
        **{
            f"topk_encode {name}": (partial(topk_encode, of, gradient, one, each), [one])
            for name, each in SHARES.items()
        },
        "threshold_of all": (partial(of.threshold_of, gradient, share), []),
        "feedback_select 1 %": (partial(of.feedback_select, gradient, one, threshold), [one]),
        "dgc_select 1 %": (partial(of.dgc_select, gradient, one, other, MOMENTUM, False, threshold), [one, other]),
        "add_sparse 1 %": (partial(of.add_sparse, *sparse, one), [one]),
    }
    for bits in (8, 4):
        quantise = partial(of.quantise, gradient, bits=bits, block=BLOCK, begin=0, seed=1)
        calls[f"quantise {bits} bits"] = (quantise, [])
        calls[f"add_quantised {bits} bits"] = (
            partial(of.add_quantised, *quantise(), one, bits=bits, block=BLOCK),
            [one],
        )
    return [Timed(name=name, by=by, call=call, states=changed) for name, (call, changed) in calls.items()]


def measure(all_of_them: Sequence[Timed], rounds: int, size: int) -> dict[str, dict[str, dict[str, float]]]:
    """Returns GB/s of each, by name and by whose it is."""
    seconds: dict[tuple[str, str], list[float]] = {(each.name, each.by): [] for each in all_of_them}
    for number in range(rounds + 1):
        for each in all_of_them:
            for state in each.states:
                state.zero_()
            began = time.thread_time()
            each.call()
            if number:
                seconds[each.name, each.by].append(time.thread_time() - began)
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for (name, by), found in seconds.items():
        rates = [4e-9 * size / max(each, 1e-9) for each in found]
        figures.setdefault(name, {})[by] = {
            "median": round(statistics.median(rates), 3),
            "least": round(min(rates), 3),
            "most": round(max(rates), 3),
        }
    return figures


def run(*, short: bool) -> tuple[dict[str, object], list[Claim]]:
    """Measures; the short form has fewer rounds."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(1)
    gradient = torch.randn(SIZE, generator=generator)
    states = [torch.zeros(SIZE), torch.zeros(SIZE)]
    native = Choice(mode=lambda: Mode.NATIVE).of("cpu")
    timed = [
        Timed(name="copy", by=TORCH, call=lambda: states[0].copy_(gradient)),
        Timed(name="topk 1 %", by=TORCH, call=lambda: gradient.abs().topk(SIZE // 100, sorted=False)),
        *functions(native, NATIVE, gradient, states),
        *functions(reference, REFERENCE, gradient, states),
    ]
    figures = measure(timed, 3 if short else 11, SIZE)
    claims = [
        claim(f"{name} on one core", figures[name][NATIVE]["median"], "GB/s of float32", goal=GOAL, better="higher")
        for name in ("topk_encode 1 %", "topk_encode 0.1 %", "quantise 8 bits")
    ]
    return {"elements": SIZE, "gigabytes_per_second": figures}, claims


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.exchange.kernels", description=__doc__)
    parser.add_argument("--short", action="store_true", help="three rounds")
    parser.add_argument("--output", type=Path, help="folder that kernels.json is written to")
    arguments = parser.parse_args()
    raw, claims = run(short=arguments.short)
    show(raw, claims)
    if arguments.output:
        save("kernels", method=METHOD, raw=raw, claims=claims, folder=arguments.output, short=arguments.short)
    if not all(each["met"] for each in claims):
        sys.stdout.write("a goal is missed\n")


if __name__ == "__main__":
    main()
