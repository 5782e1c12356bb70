"""Low-rank adapters in an engine: several on the same weights, each replaced in place.

All requests of a batch use the same adapter. Adapters are published together, so that tokens of all adapters have the
same policy version.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fulmen_algorithm.engines.embedded.protocol import WeightsRejected
from fulmen_algorithm.engines.embedded.weights import Prepared, replace_tensors
from fulmen_algorithm.weights.tensor_files import TensorFileDamaged, combined_digest, read_folder
from fulmen_algorithm.weights.torch_tensors import tensor_of

FILE_PREFIX = "base_model.model."


def add_adapters(model: Any, adapters: Mapping[str, Path]) -> None:
    """Loads adapters into a transformers model; the last one is active.

    Raises:
        ValueError: if a folder holds no adapter of this model.
        OSError: if it cannot be read.
    """
    if not adapters:
        return
    from peft import LoraConfig  # takes half a second; only engines with adapters need it

    with warnings.catch_warnings():
        # Several adapters are intended.
        warnings.filterwarnings("ignore", message="Already found a `peft_config`", category=UserWarning)
        for name, folder in adapters.items():
            model.add_adapter(LoraConfig.from_pretrained(str(folder)), adapter_name=name)
    try:
        first = prepare_adapters(model, adapters)
    except WeightsRejected as error:
        raise ValueError(str(error)) from error
    replace_tensors(model.state_dict(keep_vars=True), first.tensors)


def use_adapter(model: Any, name: str) -> None:
    """Activates an adapter; empty for the model's own weights. Called in the model thread.

    Args:
        model: Model returned by `add_adapters`.
        name: Name of one of its adapters; empty if it has none.
    """
    if name:
        model.enable_adapters()
        model.set_adapter(name)
    elif getattr(model, "peft_config", None):
        model.disable_adapters()


def prepare_adapters(model: nn.Module, adapters: Mapping[str, Path], sha256: str = "") -> Prepared:
    """Reads adapters and checks them against those of the engine.

    Raises:
        WeightsRejected: if the set of adapters differs, a file is damaged, or names, shapes or the checksum differ.
    """
    present = {name: tensor for name, tensor in model.named_parameters() if ".lora_" in name}
    found: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    size = 0
    for adapter, folder in adapters.items():
        try:
            weights = read_folder(folder)
            digests |= {f"{adapter}/{name}": weights.digest_of(name) for name in weights.tensors}
        except (TensorFileDamaged, OSError) as error:
            raise WeightsRejected(f"The adapter cannot be read: {error}", param="adapters") from error
        for name, raw in weights.tensors.items():
            own = _own_name(name, adapter)
            if own not in present or tuple(present[own].shape) != raw.shape:
                raise WeightsRejected(f"{name!r} does not belong to an adapter of this engine.", param="adapters")
            found[own] = tensor_of(raw, present[own].dtype)
        size += weights.size_bytes
    if missing := sorted(set(present) - set(found)):
        raise WeightsRejected(f"{len(missing)} weights are missing, the first is {missing[0]!r}.", param="adapters")
    if sha256 and combined_digest(digests) != sha256:
        raise WeightsRejected("The checksum of the adapters does not match.", param="sha256")
    return Prepared(tensors=found, served=None, size_bytes=size)


def _own_name(name: str, adapter: str) -> str:
    """Converts a tensor name of an adapter's file to that in the model, which holds several adapters."""
    head, _, tail = name.removeprefix(FILE_PREFIX).rpartition(".")
    return f"{head}.{adapter}.{tail}"
