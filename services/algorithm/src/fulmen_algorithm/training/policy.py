# ruff: noqa: N806 (tensor names end with their shape)
"""The policy: a causal language model, its tokenizer, and its log-probabilities for training.

Invariant: weights are float32, logits are normalised in float32, and log-probabilities are those of the distribution at
the sampling temperature, for any precision of the passes and any number of ranks.

Legend: B lines, T positions, V vocabulary.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fulmen_algorithm.training.compute import Balance, ComputeSettings, Fsdp2
from fulmen_algorithm.training.context_parallel import inner_name, split_of, split_positions
from fulmen_algorithm.training.offloading import offloaded
from fulmen_algorithm.training.packing import MicroBatch
from fulmen_algorithm.training.parallel import (
    RankGroups,
    RankSpeeds,
    autocast,
    groups_of,
    shard,
    spread_again,
    wants_bf16,
)
from fulmen_algorithm.training.part_loading import load_part
from fulmen_algorithm.training.passes import Attention
from fulmen_algorithm.training.router_replay import RouterReplay
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.scorer import TokenScorer, TokenScores, checkpoint_layers, compile_layers, layers_of
from fulmen_algorithm.training.settings import LoraSettings, PackingMode, WeightsKind
from fulmen_algorithm.training.tensor_parallel import load_split
from fulmen_algorithm.weights.folder_writer import ToWrite, write_folder
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_algorithm.weights.sources import FirstRankFailed, Source, copies_of, sources_of
from fulmen_algorithm.weights.tensor_files import TensorFileDamaged, read_layout
from fulmen_algorithm.weights.torch_tensors import published_tensors
from fulmen_algorithm.weights.weight_writer import WeightWriter
from fulmen_exchange.ranks import Ranks

if TYPE_CHECKING:
    from fulmen_algorithm.weights.lora import Adapters


class AttentionUnsupported(ValueError):
    """A model does not have the requested implementation of attention."""


class SplitUnsupported(ValueError):
    """The matrices of a model cannot be split over ranks."""


class PolicyModel:
    """A model and its tokenizer, on one device or spread over ranks."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lora: LoraSettings | None = None,
        by_name: bool = False,
    ) -> None:
        """Wraps a loaded model; dropout is off, because the sampler knows none. With `lora` it gets fresh adapters.

        Args:
            model: The model. One of which this rank has only a part can do nothing before `prepare`.
            tokenizer: Its tokenizer.
            lora: Adapters.
            by_name: Whether files are known to name tensors as the model in memory does.
        """
        in_parts = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        self.adapters = _adapters(model, lora) if lora is not None else None
        self.model = model.eval()
        # Who writes is decided by `Ranks.leads`: the library's rank 0 may be lost.
        self.model.should_save_on_this_rank = bool
        self.tokenizer = tokenizer
        self.ranks = Ranks(device=model.device)
        self.groups = RankGroups(copy=self.ranks, peers=self.ranks)
        self.speeds: RankSpeeds | None = None
        self._scorer = TokenScorer(model)
        self._routes: RouterReplay | None = None
        self._bf16 = False
        self._offloads = False
        # Whether files name tensors as the model in memory does. Merged weights are written under the names in memory.
        self.by_name = by_name or lora is not None
        self._writer = WeightWriter(by_name=self.by_name)
        if not in_parts:
            self._scorer.try_out()

    @classmethod
    def load(
        cls,
        model_dir: Path | str,
        *,
        device: str = "cpu",
        lora: LoraSettings | None = None,
        mesh: DeviceMesh | None = None,
        tensor_mesh: DeviceMesh | None = None,
    ) -> "PolicyModel":
        """Loads a model directory in float32; nothing is downloaded.

        Args:
            model_dir: The directory.
            device: Where the model is to be.
            lora: Adapters.
            mesh: Ranks over which the weights are spread, of which each reads its part; None to read all of them.
            tensor_mesh: Ranks over which matrices are split, of which each reads its part whatever `mesh` is.

        Raises:
            OSError: if the directory holds no model or no tokenizer.
            TargetsUnknown: if the model has none of the modules that are to get adapters, or one is not a linear
                layer.
        """
        model = load_split(model_dir, tensor_mesh) if tensor_mesh is not None else _load(model_dir, mesh)
        if mesh is None or tensor_mesh is not None:
            model.to(device)  # type: ignore[arg-type]  # the library's wrapper hides the signature
        tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        by_name = has_names_of(Path(model_dir), model)
        if tensor_mesh is not None and not by_name:
            raise SplitUnsupported(
                "Files whose tensor names differ from the model's cannot be read with split matrices."
            )
        return cls(model, tokenizer, lora=lora, by_name=by_name)

    def prepare(self, compute: ComputeSettings, ranks: Ranks) -> None:
        """Prepares the model for training by some ranks; called once by each, before an optimiser is built.

        Weights that are to be spread over the ranks may be whole on each, or in parts already.

        Raises:
            AttentionUnsupported: if the model has no such attention.
            ContextUnsupported: if its rows cannot be split by positions.
        """
        self.ranks, self.groups = ranks, groups_of(ranks, compute.parallel)
        if compute.parallel.balance is Balance.SPEED:
            self.speeds = RankSpeeds(ranks_per_copy=self.groups.copy.world_size)
        self._bf16 = wants_bf16(compute, ranks.device)
        self._offloads = compute.passes.offload
        if compute.passes.attention is not Attention.AUTO:
            self._attend_by(compute.passes.attention)
        if compute.gradient_checkpointing:
            checkpoint_layers(self.model)
        if compute.passes.compile:
            compile_layers(self.model)
        if self.groups.context.group is not None:
            split_positions(self.model)
        if isinstance(compute.parallel, Fsdp2) and self.groups.mesh is not None:
            shard(self._scorer, layers_of(self.model), self.groups.mesh, compute.parallel, bf16=self._bf16)
        if self.groups.copy.group is not None or self.sharded:
            with torch.no_grad():
                self._scorer.try_out()
            spread_again(self._scorer)
        if self.groups.context.group is not None:
            self._scorer.try_out_split(self.groups.context, bf16=self._bf16 and self.sharded)
            spread_again(self._scorer)

    def _attend_by(self, attention: Attention) -> None:
        model: Any = getattr(self.model, "get_base_model", lambda: self.model)()
        try:
            model.set_attn_implementation(attention.value)
        except (ValueError, ImportError) as error:
            raise AttentionUnsupported(f"The model cannot be computed with attention {attention}: {error}") from error
        if self.attention != attention.value:
            raise AttentionUnsupported(
                f"The model cannot be computed with attention {attention}: it has {self.attention}."
            )
        if not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            # Whether rows of a line attend to each other depends on it.
            self._scorer.try_out()

    @property
    def attention(self) -> str:
        """Implementation of attention that passes use."""
        return inner_name(str(getattr(self.model.config, "_attn_implementation", "")))

    def save(
        self, model_dir: Path | str, *, tokenizer: bool = True, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        """Writes the trained weights, a model folder or a folder of adapters; complete when this returns.

        All ranks call it, and rank 0 writes.

        Args:
            model_dir: The folder.
            tokenizer: Whether the tokenizer is written, too.
            weights: Copies of `published_tensors` to write instead of the present weights.
        """
        if not self._in_first_copy:
            return
        folder = Path(model_dir)
        if self.adapters is None:
            present = published_tensors(self.model) if weights is None else weights
            tensors = ToWrite(sources=sources_of(present), copy=self.groups.copy)
            with suppress(FirstRankFailed):
                write_folder(tensors, self, folder, by_name=self.by_name)
        else:
            self.adapters.write(folder, self.groups.copy)
        if tokenizer and self.ranks.leads:
            self.tokenizer.save_pretrained(folder)

    def read_converted(self, model_dir: Path) -> None:
        """Reads weights from files that name tensors otherwise than the model does, as `load` does; all ranks call it.

        Raises:
            ValueError, RuntimeError: if they are of another architecture.
        """
        loaded = _load(model_dir, self.groups.mesh)
        with torch.no_grad():
            for parameter, found in zip(self.model.parameters(), loaded.parameters(), strict=True):
                parameter.copy_(found)

    def publish(self, folder: Path, order: WeightsOrder) -> WrittenWeights | None:
        """Writes the present weights for engines: complete, as a delta, or as adapters.

        All ranks call it; only rank 0 writes and gets a result.
        """
        if not self._in_first_copy:
            return None
        copy = self.groups.copy
        if self.adapters is None:
            sources = sources_of(published_tensors(self.model))
        elif order.merged:
            earlier = self.adapters.read(Path(order.adapters)) if order.adapters else {}
            sources = self.adapters.merged(self.adapters.names[0], earlier)
        else:
            return self.adapters.write(folder, copy)
        return self._published(sources, order, folder)

    def copy_to_publish(self, order: WeightsOrder) -> Callable[[Path], WrittenWeights]:
        """Copies the present weights, all of which are on this rank, in the type of the order.

        Returns:
            What writes them to a folder, once, in any thread, while the model trains on; see `publish`.
        """
        copies = copies_of(published_tensors(self.model), getattr(torch, order.dtype))

        def write(folder: Path) -> WrittenWeights:
            written = self._published(sources_of(copies, are_copies=True), order, folder)
            copies.clear()
            assert written is not None  # a rank without others leads
            return written

        return write

    def _published(self, sources: Mapping[str, Source], order: WeightsOrder, folder: Path) -> WrittenWeights | None:
        written = self._writer.write(sources, self, folder, order, self.groups.copy)
        if written is not None and written.kind is WeightsKind.FULL:
            self.tokenizer.save_pretrained(folder)
        return written

    @property
    def _in_first_copy(self) -> bool:
        """Whether this rank is one of those that hold the first copy of the weights; the others need not write."""
        return self.ranks.rank == self.groups.copy.rank

    def save_all_but_weights(self, folder: Path) -> None:
        """Creates a model folder with the configuration; see `folder_writer.ModelFolder`."""
        if self.adapters is None:
            # The library writes an empty file of weights, too, in whose place they are written.
            self.model.save_pretrained(folder, state_dict={})
        else:
            # The library would write the adapters.
            folder.mkdir(parents=True)
            self.model.config.save_pretrained(folder)
            if self.model.generation_config is not None:
                self.model.generation_config.save_pretrained(folder)

    def save_tensors(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Creates a model folder with the configuration and these tensors; see `folder_writer.ModelFolder`."""
        self.model.save_pretrained(folder, state_dict=dict(tensors))

    def adapter_of(self, row: Row) -> str:
        """Returns the adapter that a row trains; empty if the weights themselves train.

        Raises:
            UnknownRole: if adapters are by role and the row's role has no adapter.
        """
        return "" if self.adapters is None else self.adapters.of_role(row.role)

    def use_adapter(self, name: str) -> None:
        """Activates an adapter; empty if the weights themselves train."""
        if self.adapters is not None:
            self.adapters.use(name)

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return self.ranks.device

    @property
    def sharded(self) -> bool:
        """Whether the weights are in parts, so that every pass involves all ranks of a copy."""
        return self.groups.mesh is not None

    def packing(self, wanted: PackingMode) -> PackingMode:
        """Returns the packing mode: as wanted, unless the model would mix rows of a line."""
        return wanted if self._scorer.traits.packs else PackingMode.PADDED

    @property
    def pad_token_id(self) -> int:
        """Id for padding; the end-of-sequence id where the tokenizer has no padding token.

        Raises:
            ValueError: if the tokenizer has neither.
        """
        for candidate in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if candidate is not None:
                return int(candidate)
        raise ValueError("The tokenizer has neither a padding nor an end-of-sequence token.")

    @property
    def routes(self) -> RouterReplay:
        """What replays recorded experts; the model is prepared for it at the first use.

        Raises:
            ReplayUnsupported: if the model has no experts.
        """
        if self._routes is None:
            self._routes = RouterReplay(self.model)
        return self._routes

    def token_logprobs(self, batch: MicroBatch, *, temperature: float = 1.0, trained_only: bool = False) -> Tensor:
        """Computes the log-probability of every token given those before it in its row.

        Args:
            batch: Padded or packed micro-batch.
            temperature: Sampling temperature, > 0; logits are divided by it.
            trained_only: Whether to compute only the trained tokens; others are 0.0 and need no logits.

        Returns:
            float32 [B, T]; position t holds log p(token t | tokens before t); the first of a row is meaningless, and
            0.0 at t = 0.
        """
        return self.token_scores(batch, temperature=temperature, trained_only=trained_only).logprobs_BT

    def token_scores(
        self, batch: MicroBatch, *, temperature: float = 1.0, trained_only: bool = False, entropy: bool = False
    ) -> TokenScores:
        """Computes what `token_logprobs` does, and with `entropy` the entropies of the distributions of the tokens."""
        ids_BT = batch.input_ids_BT.to(self.device)
        asked_BT = batch.loss_mask_BT.to(self.device) if trained_only else torch.ones_like(ids_BT, dtype=torch.bool)
        position_ids_BT = batch.position_ids_BT.to(self.device)
        attention = None if batch.attention_mask_BT is None else batch.attention_mask_BT.to(self.device)
        split = split_of(self.groups.context, position_ids_BT, attention)
        if self.adapters is not None:
            self.adapters.drop_out(torch.is_grad_enabled())
        if self._routes is not None or batch.routed_BTLK is not None:
            # Until the next call: layers may be recomputed in the backward pass.
            self.routes.use(batch.routed_BTLK, self.device)
        moved = offloaded() if self._offloads and torch.is_grad_enabled() else nullcontext()
        with autocast(self.device, bf16=self._bf16 and not self.sharded), moved:
            scores: TokenScores = self._scorer(
                ids_BT, position_ids_BT, attention, asked_BT, temperature, entropy, split
            )
        if self.sharded and not torch.is_grad_enabled():
            # The root keeps its weights gathered for a backward pass, but there is no backward pass here.
            spread_again(self._scorer)
        if not torch.is_grad_enabled():
            self.forget_routes()
        return scores

    def forget_routes(self) -> None:
        """Forgets the recorded experts of the last pass, which only its backward pass still needs."""
        if self._routes is not None:
            self._routes.use(None, self.device)


def _load(model_dir: Path | str, mesh: DeviceMesh | None) -> PreTrainedModel:
    model: PreTrainedModel
    if mesh is not None:
        model = load_part(model_dir, mesh)
        return model
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    return model


def _adapters(model: PreTrainedModel, settings: LoraSettings) -> "Adapters":
    # Imported late: peft takes half a second to import, on every rank.
    from fulmen_algorithm.weights.lora import Adapters

    return Adapters(model, settings)


def has_names_of(folder: Path, model: PreTrainedModel) -> bool:
    """Returns whether the files of a folder name all tensors as the model in memory does, and so the library's own will."""
    try:
        in_files = read_layout(folder)
    except TensorFileDamaged:
        return False
    tensors = published_tensors(model).items()
    return all(name in in_files and in_files[name][1] == tuple(tensor.shape) for name, tensor in tensors)
