"""Low-rank adapters (arXiv:2106.09685) through peft, next to a model's frozen weights.

There is one adapter, or one for each role. Invariant: whichever adapter is active, all are trainable: the optimiser and
the exchange of gradients see the same parameters at every step. Dropout applies only in passes with a
gradient.

Files are peft's, so other engines can load them: `adapter_config.json`, `adapter_model.safetensors`.
"""

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from fulmen_algorithm.training.rows import UnknownRole
from fulmen_algorithm.training.settings import LoraSettings, WeightsKind
from fulmen_algorithm.weights.publishing import WrittenWeights
from fulmen_algorithm.weights.sources import Source, sources_of, whole
from fulmen_algorithm.weights.tensor_files import Weights, combined_digest, read_folder, write_tensors
from fulmen_algorithm.weights.torch_tensors import published_tensors, raw_tensor, tensor_of
from fulmen_exchange.ranks import Ranks

ADAPTER_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MARKS = (".lora_A.", ".lora_B.")


class TargetsUnknown(Exception):
    """The model has no linear layers of the names that are to get adapters; the text is shown to users."""


class Adapters:
    """The adapters of one model."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings) -> None:
        """Adds fresh adapters to a model, whose own weights are frozen.

        Raises:
            TargetsUnknown: if the model has no module of those that are to get an adapter, or one is not a linear
                layer.
        """
        self._model = model
        self._settings = settings
        linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, nn.Linear)}
        with warnings.catch_warnings():
            # Several adapters are intended.
            warnings.filterwarnings("ignore", message="Already found a `peft_config`", category=UserWarning)
            try:
                for name in settings.adapters:
                    model.add_adapter(_config(settings), adapter_name=name)
            except ValueError as error:
                raise _unknown(settings, linear) from error
        self._layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
        if not all(isinstance(layer.get_base_layer(), nn.Linear) for layer in self._layers):
            raise _unknown(settings, linear)
        self._dropouts = [d for layer in self._layers for d in layer.lora_dropout.values() if isinstance(d, nn.Dropout)]
        self._in_use = ""
        self.use(settings.adapters[0])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return self._settings.adapters

    def of_role(self, role: str) -> str:
        """Returns the adapter that the rows of a role train.

        Raises:
            UnknownRole: if adapters are by role and this role has no adapter.
        """
        if not self._settings.roles:
            return self.names[0]
        if role not in self._settings.roles:
            known = ", ".join(self._settings.roles)
            raise UnknownRole(f"There is no adapter for the role {role!r}; lora.roles has {known}.")
        return role

    def use(self, name: str) -> None:
        """Activates an adapter; all of them stay trainable."""
        if name != self._in_use:
            for layer in self._layers:
                layer.set_adapter([name])
            self._in_use = name
        for parameter in self.parameters().values():
            parameter.requires_grad_(True)

    def drop_out(self, training: bool) -> None:
        """Switches the adapters' dropout."""
        for dropout in self._dropouts:
            dropout.train(training)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the weights of all adapters by their names in the model."""
        return {name: p for name, p in self._model.named_parameters() if any(mark in name for mark in _MARKS)}

    def write(self, folder: Path, copy: Ranks) -> WrittenWeights | None:
        """Writes a folder with a folder for each adapter, in float32.

        All ranks of a copy of the weights call it; only the first one writes and gets a result.

        Args:
            folder: Created.
            copy: The ranks of the copy.
        """
        whole_ones = {name: whole(parameter).float() for name, parameter in self.parameters().items()}
        if not copy.leads:
            return None
        digests: dict[str, str] = {}
        size = full = 0
        for adapter in self.names:
            (folder / adapter).mkdir(parents=True)
            found = {file: raw_tensor(whole_ones[name]) for name, file in self._names(adapter)}
            weights = Weights(tensors=found)
            digests |= {f"{adapter}/{name}": weights.digest_of(name) for name in found}
            size += write_tensors(folder / adapter / ADAPTER_FILE, found, {"format": "pt"})
            full += weights.size_bytes
            self._model.peft_config[adapter].save_pretrained(str(folder / adapter))
        base = sum(p.numel() * p.element_size() for n, p in self._model.named_parameters() if ".lora_" not in n)
        return WrittenWeights(
            kind=WeightsKind.LORA,
            sha256=combined_digest(digests),
            size_bytes=size,
            full_bytes=base,
            changed_share=full / max(base, 1),
            adapters=self.names,
        )

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Reads what `write` wrote, by the names in the model.

        Raises:
            TensorFileDamaged: if a file is missing or damaged.
            KeyError: if the folder is of other adapters.
        """
        found: dict[str, Tensor] = {}
        for adapter in self.names:
            weights = read_folder(folder / adapter)
            for name, file in self._names(adapter):
                found[name] = tensor_of(weights.tensors[file], torch.float32)
        return found

    def merged(self, adapter: str, earlier: Mapping[str, Tensor]) -> dict[str, Source]:
        """Returns the model's weights with an adapter merged, by their names without adapters.

        Args:
            adapter: Its name.
            earlier: Weights of adapters in the place of the present ones, as of `read`; empty for the present ones.
        """
        tensors = {**published_tensors(self._model), **earlier}
        scales = {name: p.scaling[adapter] for name, p in self._model.named_modules() if isinstance(p, LoraLayer)}
        found: dict[str, Source] = {}
        for name, source in sources_of(tensors).items():
            layer, base, _ = name.partition(".base_layer.weight")
            if ".lora_" in name:
                continue
            if base:
                down, up = (tensors[f"{layer}.lora_{side}.{adapter}.weight"] for side in "AB")
                source = replace(source, whole=partial(_merged, tensors[name], down, up, scales[layer]))
            found[name.replace(".base_layer.", ".")] = source
        return found

    def _names(self, adapter: str) -> Iterator[tuple[str, str]]:
        """Yields the names of an adapter's weights, in the model and in a file."""
        for name in self.parameters():
            for mark in _MARKS:
                head, found, tail = name.partition(mark)
                if found and tail.startswith(f"{adapter}."):
                    yield name, f"{_PREFIX}{head}{mark}{tail.removeprefix(f'{adapter}.')}"


def _merged(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    base = whole(weight)
    return base + scale * (whole(up) @ whole(down)).to(base.device)


def _unknown(settings: LoraSettings, linear: Collection[str]) -> TargetsUnknown:
    wanted = settings.targets if isinstance(settings.targets, str) else ", ".join(settings.targets)
    known = ", ".join(sorted(linear))
    return TargetsUnknown(f"lora.targets ({wanted}): adapters are for the model's linear layers, which are {known}.")


def _config(settings: LoraSettings) -> LoraConfig:
    targets = settings.targets if isinstance(settings.targets, str) else list(settings.targets)
    return LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # it is only divided by the rank
        lora_dropout=settings.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
