"""Scores given tokens: the part of OpenAI's completions that a teacher needs, in the form of vLLM's `prompt_logprobs`.

Nothing is sampled. Log-probabilities are of temperature 1, as vLLM's are by default.

Legend: T tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from fulmen_algorithm.engines.embedded.protocol import InvalidRequest

MAX_TOKENS = 1
"""vLLM samples at least one token; a request that works with both engines requests no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A checked request to score tokens.

    Attributes:
        model: Requested model name.
        token_ids: T token ids, at least one.
    """

    model: str
    token_ids: tuple[int, ...]


def parse_score_request(body: object, *, max_model_tokens: int, vocabulary: int) -> ScoreRequest:
    """Checks a decoded JSON body.

    Args:
        body: The body.
        max_model_tokens: Tokens that the model takes.
        vocabulary: Number of token ids.

    Raises:
        InvalidRequest: if it asks for anything but the scores of one list of token ids, or the model cannot take them.
    """
    if not isinstance(body, Mapping):
        raise InvalidRequest("The body must be a JSON object.")
    model, ids = body.get("model"), body.get("prompt")
    if not isinstance(model, str) or not model:
        raise InvalidRequest("model must be a non-empty string.", param="model")
    if body.get("prompt_logprobs") not in (0, 1) or isinstance(body.get("prompt_logprobs"), bool):
        raise InvalidRequest("This engine supports completions only for scoring: prompt_logprobs must be 0 or 1.",
                             param="prompt_logprobs")  # fmt: skip
    if body.get("max_tokens") != MAX_TOKENS or body.get("stream") or body.get("echo"):
        raise InvalidRequest("max_tokens must be 1, without stream and echo: nothing is sampled.", param="max_tokens")
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise InvalidRequest("prompt must be a non-empty list of token ids.", param="prompt")
    if len(ids) + MAX_TOKENS > max_model_tokens:
        raise InvalidRequest(
            f"The model accepts {max_model_tokens} tokens; the prompt has {len(ids)} and {MAX_TOKENS} more was requested.",
            param="prompt",
            code="context_length_exceeded",
        )
    if not all(0 <= i < vocabulary for i in ids):
        raise InvalidRequest(f"The token ids of this model are 0 to {vocabulary - 1}.", param="prompt")
    return ScoreRequest(model=model, token_ids=tuple(ids))


@torch.inference_mode()
def scores_of(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """Computes log p(token | tokens before it) of each token but the first; T - 1 numbers. For the model's thread."""
    ids = torch.tensor([token_ids], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    picked = logits.gather(-1, ids[0, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
    found: list[float] = picked.tolist()
    return found


def score_answer(request: ScoreRequest, logprobs: Sequence[float], *, answer_id: str, created: int) -> dict[str, Any]:
    """Returns the answer: OpenAI's text completion with vLLM's `prompt_logprobs`."""
    tokens = zip(request.token_ids[1:], logprobs, strict=True)
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "length",
        "prompt_logprobs": [None, *({str(token): {"logprob": logprob}} for token, logprob in tokens)],
    }
    count = len(request.token_ids)
    return {
        "id": answer_id,
        "object": "text_completion",
        "created": created,
        "model": request.model,
        "choices": [choice],
        "usage": {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count},
    }
