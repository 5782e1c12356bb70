# ruff: noqa: N806 (tensor names end with their shape)
"""Per-request sampling within one batched `generate` call.

`generate` runs greedily. The logits processor adds Gumbel noise to the rows that sample, so that the argmax is an exact
draw from softmax(logits / temperature). Each row has its own generator, so that a seeded request gives the same tokens
in any batch. The stopping criteria receive every token immediately; they stream tokens and swap weights.

Invariant: the recorded log-probability is that of the sampled distribution (after temperature and top_p, before the
noise). For a greedy row it is log softmax(logits).

Legend: B requests of the batch, V vocabulary, T tokens so far.

Source: Gumbel-max trick, Maddison et al. (arXiv:1411.0030), section 2.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TopPLogitsWarper

from fulmen.routed_experts import RoutedExperts
from fulmen_algorithm.engines.embedded.protocol import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A sampled token.

    Attributes:
        row: Index in the batch.
        token_id: The token.
        logprob: Natural log-probability of the token.
        version: Version of the weights that computed the logits.
        experts: Experts of the pass that computed them, of its positions; None if they are not recorded.
    """

    row: int
    token_id: int
    logprob: float
    version: int
    experts: RoutedExperts | None = None


class PerRequestSampler(LogitsProcessor):
    """Applies each row's temperature, top_p and noise, and records the log-probabilities."""

    def __init__(
        self,
        samplings: Sequence[Sampling],
        *,
        shared: torch.Generator,
        version: Callable[[], int],
        device: torch.device,
    ) -> None:
        """Prepares the rows.

        Args:
            samplings: B settings, in batch order.
            shared: Generator of the rows without a seed.
            version: Returns the version of the weights in use.
            device: Device of the logits.
        """
        temperatures = [s.temperature or 1.0 for s in samplings]
        self._temperature_B1 = torch.tensor(temperatures, dtype=torch.float32, device=device)[:, None]
        self._samples_B1 = torch.tensor([s.temperature > 0 for s in samplings], device=device)[:, None]
        self._top_p = {row: TopPLogitsWarper(s.top_p) for row, s in enumerate(samplings) if s.top_p < 1.0}
        self._seeded = {
            row: torch.Generator(device).manual_seed(s.seed % 2**63)
            for row, s in enumerate(samplings)
            if s.seed is not None and s.temperature > 0
        }
        self._shared = shared
        self._version = version
        self.logprobs_BV = torch.empty(0)
        self.version_used = version()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Converts logits [B, V] to scores whose argmax is the sample."""
        logits_BV = scores.float() / self._temperature_B1
        for row, warper in self._top_p.items():
            logits_BV[row : row + 1] = warper(input_ids[row : row + 1], logits_BV[row : row + 1])
        self.logprobs_BV = logits_BV.log_softmax(-1)
        # These logits are of the forward pass that just ended; a swap comes only after sampling.
        self.version_used = self._version()
        exponential_BV = torch.empty_like(logits_BV).exponential_(generator=self._shared)
        for row, generator in self._seeded.items():
            exponential_BV[row].exponential_(generator=generator)
        return torch.where(self._samples_B1, self.logprobs_BV - exponential_BV.log(), self.logprobs_BV)


class TokenTap(StoppingCriteria):
    """Forwards every sampled token immediately, and ends the rows that the receiver finishes."""

    def __init__(self, sampler: PerRequestSampler, on_tokens: Callable[[list[SampledToken]], list[bool]]) -> None:
        """Initializes the criteria.

        Args:
            sampler: Processor of the same `generate` call.
            on_tokens: Receives one token per row, and returns one flag per row: true if the row is finished. Called at
                each token boundary, when the weights may be swapped.
        """
        self._sampler = sampler
        self._on_tokens = on_tokens

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Returns which rows are finished; bool [B]."""
        drawn_B = input_ids[:, -1]
        logprobs = self._sampler.logprobs_BV.gather(-1, drawn_B[:, None]).squeeze(-1).tolist()
        version = self._sampler.version_used
        tokens = [
            SampledToken(row=row, token_id=token_id, logprob=logprob, version=version)
            for row, (token_id, logprob) in enumerate(zip(drawn_B.tolist(), logprobs, strict=True))
        ]
        return torch.tensor(self._on_tokens(tokens), device=input_ids.device)
