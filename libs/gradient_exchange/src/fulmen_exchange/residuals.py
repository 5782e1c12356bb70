"""Residuals by parameter name, so that another layout or number of ranks can restore them.

A rank's state of a bucket is split at parameter boundaries, and so is a shard's state of a segment, which may begin and end
within a parameter. Slices of several ranks are merged by addition, since residuals are additive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from fulmen_exchange.codecs.codec import State
from fulmen_exchange.layout import ParameterSpan

_log = structlog.get_logger()

ParameterSlices = dict[str, dict[str, Any]]
"""By parameter: `begin`, the first element of the slice, and `tensors` by name, flat, on the CPU."""
ParameterTensors = Mapping[str, Mapping[str, Tensor]]
"""By parameter: flat tensors by name, as long as the parameter."""


class ResidualsInvalid(Exception):
    """A stored state does not match the run."""


def split(places: Sequence[ParameterSpan], tensors: State, *, begin: int = 0) -> ParameterSlices:
    """Copies tensors that cover a bucket from element `begin` on, split by parameter."""
    slices: ParameterSlices = {}
    end = begin + min((tensor.numel() for tensor in tensors.values()), default=0)
    for place in places:
        left, right = max(begin, place.begin), min(end, place.end)
        if left < right:
            copies = {
                name: tensor[left - begin : right - begin]
                .cpu()
                .clone()  # a view would be stored with its whole storage
                for name, tensor in tensors.items()
            }
            slices[place.name] = {"begin": left - place.begin, "tensors": copies}
    return slices


def merge(all_slices: Iterable[ParameterSlices], sizes: Mapping[str, int]) -> ParameterTensors:
    """Merges slices by addition.

    Args:
        all_slices: Slices of several ranks or shards.
        sizes: Elements of each existing parameter.

    Raises:
        ResidualsInvalid: if a slice belongs to an unknown parameter or exceeds it.
    """
    merged: dict[str, dict[str, Tensor]] = {}
    for slices in all_slices:
        for parameter, slice_ in slices.items():
            for name, tensor in slice_["tensors"].items():
                begin, size = slice_["begin"], sizes.get(parameter, 0)
                if begin + tensor.numel() > size:
                    raise ResidualsInvalid(f"stored {name} of {parameter} does not match the parameter")
                whole = merged.setdefault(parameter, {})
                # Adding to minus zero leaves every value's bits unchanged.
                whole.setdefault(name, torch.full((size,), -0.0))[begin : begin + tensor.numel()] += tensor
    return merged


def merge_finite(all_slices: Iterable[ParameterSlices], sizes: Mapping[str, int]) -> ParameterTensors:
    """Merges slices of residuals; elements that are not finite become zeros, since they would stay so for good.

    Raises:
        ResidualsInvalid: see `merge`.
    """
    merged = merge(all_slices, sizes)
    for parameter, tensors in merged.items():
        for name, tensor in tensors.items():
            wrong = ~tensor.isfinite()
            if bool(wrong.any()):
                _log.warning("stored_residual_not_finite", parameter=parameter, state=name, elements=int(wrong.sum()))
                tensor[wrong] = 0.0
    return merged


def assign(places: Sequence[ParameterSpan], merged: ParameterTensors, tensors: State, *, begin: int = 0) -> None:
    """Copies merged tensors into tensors that cover a bucket from element `begin` on.

    Raises:
        ResidualsInvalid: if a tensor has an unknown name.
    """
    end = begin + min((tensor.numel() for tensor in tensors.values()), default=0)
    for place in places:
        left, right = max(begin, place.begin), min(end, place.end)
        for name, whole in merged.get(place.name, {}).items():
            if name not in tensors:
                raise ResidualsInvalid(f"{name} of {place.name} stored by another codec")
            if left < right:
                tensors[name][left - begin : right - begin] = whole[left - place.begin : right - place.begin]


def digest_of(places: Sequence[ParameterSpan]) -> str:
    """Returns a digest of the parameters in a bucket."""
    return hashlib.sha256(repr([(p.name, p.rows, p.columns) for p in places]).encode()).hexdigest()[:16]
