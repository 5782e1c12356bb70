"""Completions sampled with the weights of a trainer, by the sampler of the embedded engine."""

import random

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from fulmen_algorithm.engines.embedded.protocol import Sampling
from fulmen_algorithm.engines.embedded.sampling import PerRequestSampler, SampledToken, TokenTap
from fulmen_algorithm.loops.calls import Draw, Drawn
from fulmen_algorithm.training.policy import PolicyModel

MAX_POSITIONS = 131_072
"""Maximum number of positions of a batch: completions times the length of prompt and completion."""
_SEED_BITS = 62


@torch.no_grad()
def completions(policy: PolicyModel, prompt_ids: list[int], draw: Draw) -> list[Drawn]:
    """Samples completions of one prompt; each has its own seed, so batches do not matter."""
    size = max(1, MAX_POSITIONS // (len(prompt_ids) + draw.max_tokens))
    found: list[Drawn] = []
    for start in range(0, draw.count, size):
        found += _batch(policy, prompt_ids, draw, range(start, min(start + size, draw.count)))
    return found


def _batch(policy: PolicyModel, prompt_ids: list[int], draw: Draw, numbers: range) -> list[Drawn]:
    device, ends = policy.device, frozenset(draw.stop_ids) or _end_ids(policy)
    tokens: list[list[SampledToken]] = [[] for _ in numbers]
    ended = [False] * len(numbers)
    stopped = [False] * len(numbers)

    def on_tokens(sampled: list[SampledToken]) -> list[bool]:
        for token in sampled:
            if not ended[token.row]:
                tokens[token.row].append(token)
                found = token.token_id in ends or _has_text(policy, tokens[token.row], draw.stop_texts)
                stopped[token.row] = found
                ended[token.row] = found or len(tokens[token.row]) == draw.max_tokens
        return ended

    samplings = [
        Sampling(
            temperature=draw.temperature,
            top_p=draw.top_p,
            max_tokens=draw.max_tokens,
            stop=(),
            seed=random.Random(f"{draw.seed}/{number}").getrandbits(_SEED_BITS),
        )
        for number in numbers
    ]
    sampler = PerRequestSampler(samplings, shared=torch.Generator(device), version=lambda: 0, device=device)
    if policy.adapters is not None:
        policy.adapters.drop_out(False)
    ids = torch.tensor([prompt_ids] * len(numbers), device=device)
    policy.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=draw.max_tokens,
        # The model's own settings (penalties, top_k) would change the distribution.
        generation_config=GenerationConfig(
            do_sample=False, pad_token_id=policy.pad_token_id, eos_token_id=sorted(ends) or None
        ),
        logits_processor=LogitsProcessorList([sampler]),
        stopping_criteria=StoppingCriteriaList([TokenTap(sampler, on_tokens)]),
    )
    return [_drawn(policy, each, is_stopped) for each, is_stopped in zip(tokens, stopped, strict=True)]


def _has_text(policy: PolicyModel, tokens: list[SampledToken], texts: list[str]) -> bool:
    """Returns whether the last token completes one of the texts; called for each token."""
    if not texts:
        return False
    # A token has a byte or more, and one before the text may share its first token.
    longest = max(len(text.encode()) for text in texts) + 1
    end = str(policy.tokenizer.decode([token.token_id for token in tokens[-longest:]]))
    return any(text in end for text in texts)


def _end_ids(policy: PolicyModel) -> frozenset[int]:
    own = policy.model.generation_config
    eos = None if own is None else own.eos_token_id
    return frozenset({*(eos if isinstance(eos, list) else [eos]), policy.tokenizer.eos_token_id} - {None})


def _drawn(policy: PolicyModel, tokens: list[SampledToken], stopped: bool) -> Drawn:
    ids = [token.token_id for token in tokens]
    return Drawn(
        token_ids=ids,
        logprobs=[token.logprob for token in tokens],
        text=str(policy.tokenizer.decode(ids, skip_special_tokens=True)),
        stopped=stopped,
    )
