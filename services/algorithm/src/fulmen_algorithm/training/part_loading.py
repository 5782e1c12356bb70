"""A model of which each rank reads its own part: no rank ever holds all weights.

The library builds the model without memory (device "meta"), lets its weights be replaced by distributed tensors, and then
reads from the files what this rank holds of each. Names, converted weights, tied weights and buffers are its business.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from fulmen_exchange.parts import local, placed


def load_part(model_dir: Path | str, mesh: DeviceMesh, *, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Loads this rank's rows of every weight in float32, as distributed tensors; nothing is downloaded.

    Args:
        model_dir: The directory.
        mesh: Ranks over which the weights are spread.
        kind: The library's class of automatic models.
        **options: Further ones of its `from_pretrained`.

    Returns:
        What `from_pretrained` does: the model, with `output_loading_info` and what was found in the files.

    Raises:
        OSError: if the directory holds no model.
        ValueError: if the library has no such model of this architecture.
    """
    spread = partial(replace_parameters, new=lambda parameter: part_of(parameter, mesh))
    return load_placed(model_dir, spread, kind=kind, **options)


def load_placed(model_dir: Path | str, spread: Callable[[Any], None], *, kind: Any, **options: Any) -> Any:
    """Loads what this rank holds of a model after `spread` has replaced its parameters; see `load_part`."""
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    with torch.device("meta"):
        own: Any = type(kind.from_config(config))

    class InParts(own):
        @classmethod
        def maybe_distribute_model(cls, model: Any, *_: object) -> Any:
            """Is called by the library between building and reading."""
            model.__class__ = own
            spread(model)
            return model

    # A configuration of one rank: the library calls the method above and distributes nothing itself.
    alone = DistributedConfig()
    found: Any = InParts.from_pretrained(
        model_dir, dtype=torch.float32, local_files_only=True, distributed_config=alone, **options
    )
    del (found[0] if isinstance(found, tuple) else found).config.distributed_config
    return found


def part_of(parameter: nn.Parameter, mesh: DeviceMesh, *, dim: int = 0) -> nn.Parameter:
    """Returns this rank's rows of a parameter that it has whole, or columns, as a distributed tensor; another part as it is."""
    if isinstance(parameter, DTensor):
        return parameter
    part: Tensor = distribute_tensor(parameter.detach(), mesh, [Shard(dim)], src_data_rank=None)
    if not parameter.is_meta:
        # A copy: a view would keep the whole parameter in memory.
        part = placed(local(part).clone(), part)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns what this rank holds of a whole tensor, on the device and at the places of another one."""
    moved = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return moved
    return distribute_tensor(moved, like.device_mesh, like.placements, src_data_rank=None)


def without_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of the same shape that has no memory."""
    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=parameter.requires_grad)


def replace_parameters(module: nn.Module, new: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replaces each parameter by `new(parameter)`, once: tied ones stay tied."""
    replace_named(module, lambda _, parameter: new(parameter))


def replace_named(module: nn.Module, new: Callable[[str, nn.Parameter], nn.Parameter]) -> None:
    """Replaces each parameter by `new(name, parameter)`, once: tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for place, part in module.named_modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter not in made:
                made[parameter] = new(f"{place}.{name}".lstrip("."), parameter)
            setattr(part, name, made[parameter])
