"""Parts of parameters that are spread over ranks, each of which exchanges the gradients of its own part.

FSDP2 cuts each parameter into blocks of rows, so that a part is a contiguous range of the flat parameter. States are
stored with the places in whole parameters: ranks that hold other parts, or whole parameters, can restore them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fulmen_exchange.residuals import ParameterSlices


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a distributed tensor, in the same memory; other tensors as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed(part: Tensor, like: Tensor) -> Tensor:
    """Returns a part as a distributed tensor if `like` is one, of the same shape and places."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class PartsUnsupported(Exception):
    """A parameter is spread in another way than by rows over one dimension of ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a rank holds of each parameter.

    Attributes:
        index: Number of the part, from 0.
        count: Number of parts; 1 if ranks hold whole parameters.
        ranges: By parameter: the first element held, and the one after the last, in the flat parameter.
    """

    index: int = 0
    count: int = 1
    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, parameters: Mapping[str, nn.Parameter]) -> Part:
        """Finds the part of this rank.

        Raises:
            PartsUnsupported: if a parameter is not spread by rows over one dimension of ranks.
        """
        index, count, ranges = 0, 1, dict[str, tuple[int, int]]()
        for name, parameter in parameters.items():
            begin, size = 0, local(parameter).numel()
            if isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                if mesh.ndim != 1 or parameter.placements != (Shard(0),):
                    raise PartsUnsupported(f"{name} is not spread by rows: {parameter.placements}")
                index, count = mesh.get_local_rank(), mesh.size()
                # As `torch.chunk` cuts: all blocks but the last ones are equal.
                rows = parameter.shape[0]
                begin = min(rows, -(-rows // count) * index) * (parameter.numel() // max(rows, 1))
            ranges[name] = (begin, begin + size)
        return cls(index=index, count=count, ranges=ranges)

    def stored(self, slices: ParameterSlices) -> ParameterSlices:
        """Moves slices of this part to their places in whole parameters."""
        return {name: {**slice_, "begin": slice_["begin"] + self.ranges[name][0]} for name, slice_ in slices.items()}

    def taken(self, slices: ParameterSlices) -> ParameterSlices:
        """Cuts slices of whole parameters to this part; unknown parameters stay as they are."""
        found: ParameterSlices = {}
        for name, slice_ in slices.items():
            tensors, begin = slice_["tensors"], slice_["begin"]
            size = min((tensor.numel() for tensor in tensors.values()), default=0)
            low, high = self.ranges.get(name, (0, begin + size))
            left, right = max(begin, low), min(begin + size, high)
            if self.count == 1:
                found[name] = slice_
            elif left < right:
                cut = {key: tensor[left - begin : right - begin] for key, tensor in tensors.items()}
                found[name] = {"begin": left - low, "tensors": cut}
        return found

    def of_states(self, states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the stored states that this part is restored from: of the same part, or of all if there were other parts."""
        same = [state for state in states if (state.get("part", 0), state.get("parts", 1)) == (self.index, self.count)]
        alike = all(state.get("parts", 1) == self.count for state in states)
        return same if alike else list(states)
