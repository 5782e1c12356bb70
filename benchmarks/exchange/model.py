"""The model whose gradients are exchanged: a transformer of 19.1 million parameters, and passes over tokens of chance."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LAYERS, HEADS = 512, 6, 8
VOCABULARY, POSITIONS = 256, 128
SEED = 1


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.projections = nn.Linear(WIDTH, 3 * WIDTH)
        self.joined = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps [rows, tokens, WIDTH] to the same."""
        rows, tokens, _ = inputs.shape
        parts = self.projections(self.norms[0](inputs)).view(rows, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        after = inputs + self.joined(seen.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return after + self.perceptron(self.norms[1](after))


class Transformer(nn.Module):
    """Predicts the next byte; returns its mean loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(POSITIONS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        """Returns the loss of rows of POSITIONS + 1 bytes, int64."""
        given, asked = words[:, :-1], words[:, 1:]
        seen = self.norm(self.layers(self.words(given) + self.places.weight))
        return functional.cross_entropy((seen @ self.words.weight.T).flatten(0, 1), asked.flatten())


def made() -> Transformer:
    """Makes it, the same on every rank."""
    torch.manual_seed(SEED)
    model = Transformer()
    nn.init.normal_(model.words.weight, std=0.02)
    return model


def rows_of(rank: int, step: int) -> Tensor:
    """Returns what a rank learns from in a step: one row."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    return torch.randint(VOCABULARY, (1, POSITIONS + 1), generator=generator)


def size() -> int:
    """Counts the parameters."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer().parameters())
