"""What ranks keep back, by the names of parameters: so another layout, and any number of ranks, can go on from it.

What a rank keeps of a bucket is cut at its parameters' ends, and so is what a shard keeps of a segment, which may begin
and end within a parameter. ParameterSlices of several ranks are joined by adding them up: gradient that was kept back is additive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fulmen_exchange.codecs.codec import State
from fulmen_exchange.layout import ParameterSpan

ParameterSlices = dict[str, dict[str, Any]]
"""By parameter: `begin`, its first element that is in the piece, and `tensors` by name, flat, on the CPU."""
ParameterTensors = Mapping[str, Mapping[str, Tensor]]
"""By parameter: tensors by name, flat, as long as the parameter."""


class ResidualsInvalid(Exception):
    """A state does not fit the run; the text says what does not."""


def cut(places: Sequence[ParameterSpan], tensors: State, *, begin: int = 0) -> ParameterSlices:
    """Copies tensors that cover a bucket, from an element on, piece by piece."""
    pieces: ParameterSlices = {}
    end = begin + min((tensor.numel() for tensor in tensors.values()), default=0)
    for place in places:
        left, right = max(begin, place.begin), min(end, place.end)
        if left < right:
            copies = {
                name: tensor[left - begin : right - begin].cpu().clone()  # of a view, storage and all would be stored
                for name, tensor in tensors.items()
            }
            pieces[place.name] = {"begin": left - place.begin, "tensors": copies}
    return pieces


def joined(all_pieces: Iterable[ParameterSlices], sizes: Mapping[str, int]) -> ParameterTensors:
    """Adds pieces up.

    Args:
        all_pieces: Of several ranks, or shards.
        sizes: Elements of each parameter that there is.

    Raises:
        ResidualsInvalid: if one is of a parameter that is not there, or beyond its end.
    """
    wholes: dict[str, dict[str, Tensor]] = {}
    for pieces in all_pieces:
        for parameter, piece in pieces.items():
            for name, tensor in piece["tensors"].items():
                begin, size = piece["begin"], sizes.get(parameter, 0)
                if begin + tensor.numel() > size:
                    raise ResidualsInvalid(f"{parameter} is not what it was when {name} of it was stored")
                whole = wholes.setdefault(parameter, {})
                # Minus zero, to which anything can be added without another bit.
                whole.setdefault(name, torch.full((size,), -0.0))[begin : begin + tensor.numel()] += tensor
    return wholes


def lay(places: Sequence[ParameterSpan], wholes: ParameterTensors, tensors: State, *, begin: int = 0) -> None:
    """Writes what `joined` has made into tensors that cover a bucket, from an element on.

    Raises:
        ResidualsInvalid: if there is a tensor of another name.
    """
    end = begin + min((tensor.numel() for tensor in tensors.values()), default=0)
    for place in places:
        left, right = max(begin, place.begin), min(end, place.end)
        for name, whole in wholes.get(place.name, {}).items():
            if name not in tensors:
                raise ResidualsInvalid(f"{name} of {place.name} was stored by another codec")
            if left < right:
                tensors[name][left - begin : right - begin] = whole[left - place.begin : right - place.begin]


def digest_of(places: Sequence[ParameterSpan]) -> str:
    """Names a bucket by what lies in it."""
    return hashlib.sha256(repr([(p.name, p.rows, p.columns) for p in places]).encode()).hexdigest()[:16]
