"""Measures what the comparison of engine and trainer finds: the table of docs/engines.md, for the defects it is to find.

A model of the arithmetic example's family samples as an engine does, and the trainer scores what was sampled. "Sharp"
models have weights 4 and 8 times as large and prefer some tokens, as trained ones do. Run it with
`python -m benchmarks.engine_mismatch`; it takes seconds, and its metrics depend on the seed (`--seed`) and nothing else.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parents[1]
SCALES = (1, 4, 8)
FIRST_TOKEN = 6
"""Those before are special."""

Scores = Callable[[Tensor], Tensor]


def build_model(folder: Path, *, seed: int, scale: float) -> PreTrainedModel:
    """Builds an untrained model, its matrices so many times as large."""
    spec = importlib.util.spec_from_file_location("make_model", ROOT / "examples/arithmetic/make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(str(folder), seed)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def sample(model: PreTrainedModel, *, count: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Samples answers at temperature 1; returns their ids and what the engine says of them, `[count, tokens]`."""
    ids = torch.randint(FIRST_TOKEN, model.config.vocab_size, (count, 1))
    said = []
    for _ in range(tokens):
        scores = model(ids).logits[:, -1].float().log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1)
        said.append(scores.gather(1, chosen))
        ids = torch.cat([ids, chosen], dim=1)
    return ids, torch.cat(said, dim=1)


def engine_mismatch_kl(said: Tensor, ids: Tensor, model: PreTrainedModel, *, temperature: float = 1.0) -> float:
    """Estimates KL(engine || trainer) per token in nats by k3, as `fulmen_algorithm.training.engine_mismatch` does."""
    scores = (model(ids[:, :-1]).logits.float() / temperature).log_softmax(-1)
    delta = scores.gather(2, ids[:, 1:, None])[..., 0].double() - said.double()
    return float((delta.exp() - delta - 1).mean())


def measure(folder: Path, *, seed: int, scale: float, count: int, tokens: int) -> dict[str, float]:
    """Returns the KL of each case."""
    model = build_model(folder, seed=seed, scale=scale)
    another = build_model(folder, seed=seed + 1, scale=scale)
    torch.manual_seed(seed)
    with torch.no_grad():
        ids, said = sample(model, count=count, tokens=tokens)
        found = {
            "the same weights, float32": engine_mismatch_kl(said, ids, model),
            "samples at temperature 1 where the run says 0.9": engine_mismatch_kl(said, ids, model, temperature=0.9),
            "samples at temperature 1 where the run says 0.7": engine_mismatch_kl(said, ids, model, temperature=0.7),
            "another model of the same shape": engine_mismatch_kl(said, ids, another),
        }
        found["the same weights, bfloat16"] = engine_mismatch_kl(said, ids, model.bfloat16())
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=256, help="Answers of each model.")
    parser.add_argument("--tokens", type=int, default=12, help="Tokens of an answer.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        columns = [
            measure(Path(folder), seed=options.seed, scale=scale, count=options.count, tokens=options.tokens)
            for scale in SCALES
        ]
    print("| engine | fresh | " + " | ".join(f"sharp ({scale})" for scale in SCALES[1:]) + " |")
    print("|---|" + "---|" * len(SCALES))
    for case in columns[0]:
        print(f"| {case} | " + " | ".join(f"{column[case]:.2g}" for column in columns) + " |")


if __name__ == "__main__":
    main()
