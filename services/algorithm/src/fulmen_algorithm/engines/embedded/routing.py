# ruff: noqa: N806 (tensor names end with their shape)
"""Records which experts compute each token of a batch, for router replay (`training.router_replay`).

Legend: B requests of the batch, P positions of a pass, L layers with experts, E experts, K of them for each token.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fulmen.routed_experts import RoutedExperts, write_npy
from fulmen_algorithm.training.router_replay import ExpertBlock, expert_blocks

_ONE_BYTE = 256
"""Most experts whose ids fit a byte."""


class RoutesUnknown(ValueError):
    """A model has no experts whose choice can be recorded."""


class RoutingTape:
    """Records the choices of a model's forward passes; used in the model thread alone."""

    def __init__(self, model: nn.Module) -> None:
        """Watches the blocks of experts of a model.

        Raises:
            RoutesUnknown: if it has none.
        """
        self._blocks = expert_blocks(model)
        if not self._blocks:
            raise RoutesUnknown("router_replay: the model is not a mixture of experts.")
        self._wide = max(block.count for block in self._blocks) > _ONE_BYTE
        self._chosen: dict[int, Tensor] = {}
        self._pads: Sequence[int] | None = None
        for block in self._blocks:
            block.experts.register_forward_pre_hook(self._watching(block), with_kwargs=True)

    def begin(self, pads: Sequence[int]) -> None:
        """Begins a batch whose first pass has so many padding positions at the left of each of its B rows."""
        self._pads = pads

    def take(self) -> list[RoutedExperts]:
        """Returns the experts of the last pass for each row, of its positions that are not padding, counted from 0.

        Raises:
            RoutesUnknown: if a layer did not call its experts.
        """
        if self._pads is None or len(self._chosen) != len(self._blocks):
            raise RoutesUnknown("router_replay: a layer did not call its experts.")
        rows, pads = len(self._pads), self._pads
        chosen = [
            self._chosen[block.layer].reshape(rows, -1, self._chosen[block.layer].shape[-1]) for block in self._blocks
        ]
        dtype = torch.uint16 if self._wide else torch.uint8
        chosen_BPLK = torch.stack(chosen, dim=2).to(dtype).cpu().numpy()
        self._chosen.clear()
        self._pads = [0] * rows
        return [
            RoutedExperts(
                layers=len(self._blocks),
                top_k=of_row.shape[-1],
                entry_bytes=of_row.itemsize,
                spans=((0, len(of_row) - pad),),
                packed=of_row[pad:].tobytes(),
            )
            for of_row, pad in zip(chosen_BPLK, pads, strict=True)
        ]

    def _watching(self, block: ExpertBlock) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
            self._chosen[block.layer] = next(each for each in given if not each.is_floating_point())

        return note


def answer_experts(parts: Sequence[RoutedExperts | None]) -> str:
    """Returns the experts of an answer's passes, in order, as base64 of a `.npy` file [tokens, L, K]; empty if not all are known."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return ""
    whole = replace(
        known[0],
        spans=((0, sum(part.token_count for part in known)),),
        packed=b"".join(part.packed for part in known),
    )
    return base64.b64encode(write_npy(whole)).decode()
