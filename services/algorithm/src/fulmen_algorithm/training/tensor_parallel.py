"""Tensor parallelism: ranks that compute the same rows together, each with a part of the matrices of every layer.

Which matrices are split, and how, says the library's plan for the architecture (`base_model_tp_plan`); torch's own parallel
styles compute with them. Embeddings, head and norms are whole on each rank of a copy that FSDP does not split. Invariant: what is
not split has the same bits on all of these ranks, since its gradients are summed over them.

Source: Megatron-LM (arXiv:1909.08053, section 3); `torch.distributed.tensor.parallel`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from transformers import AutoModelForCausalLM, PreTrainedModel

from fulmen_algorithm.training.part_loading import load_placed, part_of, replace_named
from fulmen_algorithm.training.tensor_plan import COLUMNS, PARTIAL, ROWS
from fulmen_exchange.parts import local
from fulmen_exchange.ranks import Ranks

TENSOR = "tensor"
"""Dimension of the mesh over which matrices are split."""
_STYLES: Mapping[str, type[ParallelStyle]] = {COLUMNS: ColwiseParallel, ROWS: RowwiseParallel}


def load_split(model_dir: Path | str, mesh: DeviceMesh, *, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """Loads a model in float32 of which this rank has its part of each matrix that the plan splits; see `load_part`."""
    found: Any = load_placed(model_dir, partial(_split, mesh=mesh), kind=kind, **options)
    model: PreTrainedModel = found[0] if isinstance(found, tuple) else found
    for name, module in model.named_modules():
        if (style := _STYLES.get(_planned(model, name))) is not None:
            parallelize_module(module, mesh, style(), src_data_rank=None)
    return found


def _split(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    def placed(name: str, parameter: nn.Parameter) -> nn.Parameter:
        module, _, kind = name.rpartition(".")
        style = _planned(model, module)
        if style == COLUMNS:
            return part_of(parameter, mesh)
        if style == ROWS and kind == "weight":
            return part_of(parameter, mesh, dim=1)
        return parameter

    replace_named(model, placed)


def _planned(model: PreTrainedModel, module: str) -> str:
    """Returns the plan's entry for a module; empty if there is none."""
    inner = module.removeprefix(f"{model.base_model_prefix}.")
    plan = model.config.get_text_config().base_model_tp_plan or {}
    return str(plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", inner), ""))


def is_split(tensor: Tensor) -> bool:
    """Returns whether ranks that compute the same rows hold different parts of a tensor."""
    names = tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None
    return TENSOR in (names or ())


def agree_on_gradients(model: PreTrainedModel, ranks: Ranks) -> None:
    """Makes the gradients of what is not split equal on the ranks that compute the same rows, in place.

    Of the norms of heads each has the part of its own heads, and they are summed; all others are the same but for rounding, and
    become their mean.
    """
    if ranks.group is None:
        return
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_split(parameter):
            gradient = ranks.sum(local(parameter.grad))
            if _planned(model, name.rpartition(".")[0]) != PARTIAL:
                gradient.div_(ranks.world_size)


def split_norm(gradients: Iterable[Tensor], copy: Ranks, ranks: Ranks) -> float:
    """Computes the norm of all gradients of a copy, of which some are split over `ranks` and the others on each of them."""
    squares = torch.zeros((), dtype=torch.float64, device=copy.device)
    for gradient in gradients:
        square = torch.linalg.vector_norm(local(gradient)).double().square()
        squares += square if is_split(gradient) else square / ranks.world_size
    return float(copy.sum(squares).sqrt())


def scale_to(gradients: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scales gradients of this norm down to another one, in place."""
    factor = min(1.0, max_norm / (norm + 1e-6)) if norm == norm else norm
    for gradient in gradients:
        local(gradient).mul_(factor)
