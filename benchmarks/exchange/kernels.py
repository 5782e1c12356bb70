"""Benchmark of the exchange's kernels: compiled against torch's operations, `torch.topk` and a copy.

    python -m benchmarks.exchange.kernels [--short] [--device cuda] [--output FOLDER]

writes exchange_kernels.json to the folder, if there is one.
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
from fulmen_exchange import kernels
from fulmen_exchange.kernels import reference
from fulmen_exchange.kernels.selection import Kernels, KernelSelector, Mode

METHOD = """Normal numbers (mean 0, standard deviation 1) in tensors that are there before; what a function returns it allocates
itself, as in use. On a CPU one thread of torch. GB/s are 4 bytes of each element over the CPU time of that thread, so that
neighbours of the machine count less, or on a GPU over the time until it is done; median, least and most of the rounds, which
go through all functions in turn after one that does not count. States are put back between rounds. topk_encode is what the
codec does: sample, threshold, selection with error feedback, at 1 % and 0.1 % of the elements. torch.topk selects from the
magnitudes, and does nothing else. of_copy is the memory traffic per second over that of a copy in the same rounds: bytes that
must be read and written for each element (12 to select with error feedback, 20 with momentum, 5 to quantise to 8 bits)
against the 8 of a copy, which on a CPU reads what it writes as well."""
SIZE = {"cpu": 10_000_000, "cuda": 100_000_000}
SHARES = {"1 %": 0.01, "0.1 %": 0.001}
BLOCK = 512
GOAL = 4.0
GOAL_OF_COPY = 0.7
"""On a GPU."""
MOMENTUM = 0.9
NATIVE, REFERENCE, TORCH = "native", "reference", "torch"
Clock = Callable[[], float]
Figures = dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One function to measure.

    Attributes:
        name: What it does.
        by: Whose it is.
        call: Does it once.
        states: What it changes.
        moved: Bytes of each element that it must read and write; 0 where that depends on what is in them.
    """

    name: str
    by: str
    call: Callable[[], object]
    states: Sequence[Tensor] = ()
    moved: float = 0.0


def sampled(tensor: Tensor, share: float) -> Tensor:
    """Returns the elements from which a threshold is estimated."""
    places = kernels.sample_places(tensor, share, 1)
    return tensor if places is None else tensor[places]


def topk_encode(of: Kernels, gradient: Tensor, residual: Tensor, share: float) -> object:
    """Encodes as the codec `topk` does."""
    threshold = of.threshold_of(sampled(residual, share) + sampled(gradient, share), share)
    return of.feedback_select(gradient, residual, threshold)


def functions(of: Kernels, by: str, gradient: Tensor, states: Sequence[Tensor]) -> list[Timed]:
    """Lists the functions of one implementation."""
    one, other = states
    share = SHARES["1 %"]
    threshold = of.threshold_of(sampled(gradient, share), share)
    sparse = of.feedback_select(gradient, torch.zeros_like(gradient), threshold)
    calls: dict[str, tuple[Callable[[], object], list[Tensor], float]] = {
        **{
            f"topk_encode {name}": (partial(topk_encode, of, gradient, one, each), [one], 12.0)
            for name, each in SHARES.items()
        },
        "threshold_of all": (partial(of.threshold_of, gradient, share), [], 0.0),
        "feedback_select 1 %": (partial(of.feedback_select, gradient, one, threshold), [one], 12.0),
        "dgc_select 1 %": (
            partial(of.dgc_select, gradient, one, other, MOMENTUM, False, threshold),
            [one, other],
            20.0,
        ),
        "correct": (partial(of.correct, gradient, one, MOMENTUM, False, other), [one, other], 16.0),
        "add_sparse 1 %": (partial(of.add_sparse, *sparse, one), [one], 0.0),
    }
    for bits in (8, 4):
        quantise = partial(of.quantise, gradient, bits=bits, block=BLOCK, begin=0, seed=1)
        calls[f"quantise {bits} bits"] = (quantise, [], 4 + bits / 8)
        calls[f"nearest {bits} bits"] = (
            partial(of.nearest, gradient, bits=bits, block=BLOCK),
            [],
            4 + bits / 8,
        )
        calls[f"add_quantised {bits} bits"] = (
            partial(of.add_quantised, *quantise(), one, bits=bits, block=BLOCK),
            [one],
            8 + bits / 8,
        )
    return [
        Timed(name=name, by=by, call=call, states=changed, moved=moved)
        for name, (call, changed, moved) in calls.items()
    ]


def measure(all_of_them: Sequence[Timed], rounds: int, size: int, *, clock: Clock) -> Figures:
    """Returns GB/s of each, by name and by whose it is; the first one is the copy."""
    seconds: dict[tuple[str, str], list[float]] = {(each.name, each.by): [] for each in all_of_them}
    for number in range(rounds + 1):
        for each in all_of_them:
            for state in each.states:
                state.zero_()
            began = clock()
            each.call()
            if number:
                seconds[each.name, each.by].append(clock() - began)
    figures: Figures = {}
    copied = 0.0
    for each in all_of_them:
        rates = [4e-9 * size / max(taken, 1e-9) for taken in seconds[each.name, each.by]]
        median = statistics.median(rates)
        copied = copied or median * each.moved
        found = {"median": round(median, 3), "least": round(min(rates), 3), "most": round(max(rates), 3)}
        if each.moved:
            found["of_copy"] = round(median * each.moved / copied, 3)
        figures.setdefault(each.name, {})[each.by] = found
    return figures


def done_on_gpu() -> float:
    """Waits for the GPU; returns the time in seconds."""
    torch.cuda.synchronize()
    return time.perf_counter()


def run(*, short: bool, device: str) -> tuple[dict[str, object], list[Claim]]:
    """Measures; the short form has fewer rounds."""
    torch.set_num_threads(1)
    size = SIZE[device]
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device)
    states = [torch.zeros_like(gradient), torch.zeros_like(gradient)]
    native = KernelSelector(mode=lambda: Mode.NATIVE).of(device)
    timed = [
        Timed(name="copy", by=TORCH, call=lambda: states[0].copy_(gradient), moved=8.0),
        Timed(name="topk 1 %", by=TORCH, call=lambda: gradient.abs().topk(size // 100, sorted=False)),
        *functions(native, NATIVE, gradient, states),
        *functions(reference, REFERENCE, gradient, states),
    ]
    figures = measure(timed, 3 if short else 11, size, clock=time.thread_time if device == "cpu" else done_on_gpu)
    claims = []
    for name in ("topk_encode 1 %", "topk_encode 0.1 %", "quantise 8 bits"):
        found = figures[name][NATIVE]
        if device == "cpu":
            each = claim(f"{name} on one core", found["median"], "GB/s of float32", goal=GOAL, better="higher")
        else:
            unit = "of the bandwidth of a copy"
            each = claim(f"{name} on a GPU", found["of_copy"], unit, goal=GOAL_OF_COPY, better="higher")
        claims.append(each)
    return {"device": device, "elements": size, "gigabytes_per_second": figures}, claims


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.exchange.kernels", description=__doc__)
    parser.add_argument("--short", action="store_true", help="three rounds")
    parser.add_argument("--output", type=Path, help="folder that exchange_kernels.json is written to")
    parser.add_argument("--device", choices=sorted(SIZE), default="cpu")
    arguments = parser.parse_args()
    raw, claims = run(short=arguments.short, device=arguments.device)
    show(raw, claims)
    if arguments.output:
        save("exchange_kernels", method=METHOD, raw=raw, claims=claims, folder=arguments.output, short=arguments.short)
    if not all(each["met"] for each in claims):
        sys.stdout.write("a goal is missed\n")


if __name__ == "__main__":
    main()
