"""Checks requests of trainers: all problems are reported together, and nothing is changed."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, TypeAdapter, ValidationError

from fulmen.errors import ArgumentInvalid, Violation
from fulmen.ids import NOT_DOTS
from fulmen_algorithm.losses.objectives import Loss
from fulmen_algorithm.runs.creation.settings_problems import settings_problems
from fulmen_algorithm.training.rows import NO_VERSION, Row

MAX_SEED: Final = 2**32 - 1
MAX_REQUEST_ID: Final = 128
MAX_REPORTED: Final = 50
MAX_SETTINGS: Final = 64 * 1024
"""Characters of a loss's settings, JSON."""
MAX_WEIGHT: Final = 1e6
MAX_COMPLETIONS: Final = 256
MAX_STOP_IDS: Final = 64
MAX_STOP_TEXTS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_MESSAGES_BYTES: Final = 4 * 2**20
CROSS_ENTROPY: Final = "cross_entropy"
WITHOUT_SAMPLER: Final = frozenset({CROSS_ENTROPY, "reinforce"})
ID: Final = re.compile(rf"{NOT_DOTS}[a-z0-9._-]{{1,63}}")
CHECKPOINT: Final = re.compile(rf"(projects/[a-z0-9-]{{1,63}}/trainers/[a-z0-9-]{{1,63}})/checkpoints/({ID.pattern})")
_LOSS: TypeAdapter[Loss] = TypeAdapter(Loss)
LOSSES: Final = (CROSS_ENTROPY, "cispo", "clip", "dppo", "gspo", "importance", "reinforce", "sapo")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLimits:
    """Limits of one call.

    Attributes:
        max_rows: Rows.
        max_tokens: Tokens of all rows, or of all completions with their prompt.
    """

    max_rows: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRow:
    """A row as it is given; see `TrainingRow`."""

    token_ids: Sequence[int]
    weights: Sequence[float]
    advantages: Sequence[float]
    sampler_logprobs: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenDraw:
    """A request to sample; see `SampleRequest`."""

    prompt_ids: Sequence[int]
    messages_json: str
    count: int
    max_tokens: int
    temperature: float
    top_p: float
    stop_ids: Sequence[int] = ()
    stop_texts: Sequence[str] = ()


def invalid(violations: Sequence[Violation]) -> ArgumentInvalid:
    """Returns the error for a request with problems."""
    shown = list(violations[:MAX_REPORTED])
    if len(violations) > MAX_REPORTED:
        rest = len(violations) - MAX_REPORTED
        shown.append(Violation(field="rows", description=f"{rest} more problems are not listed"))
    return ArgumentInvalid("The request is malformed.", violations=shown)


def problem(field: str, description: str) -> list[Violation]:
    """Returns one problem."""
    return [Violation(field=field, description=description)]


def settings_of(kind: type[BaseModel], given: Mapping[str, object], prefix: str) -> tuple[Any, list[Violation]]:
    """Reads settings; returns them, None if there are problems, and these."""
    try:
        return kind.model_validate(dict(given)), []
    except ValidationError as error:
        return None, settings_problems(error, kind, prefix=prefix)


def loss_of(kind: str, settings_json: str) -> tuple[bytes, list[Violation]]:
    """Reads a loss; returns it as JSON, empty for cross-entropy, and every problem."""
    if kind not in LOSSES:
        return b"", problem("loss", f"{kind!r} is not one of: {', '.join(LOSSES)}")
    settings, found = _object("loss_settings_json", settings_json)
    if found or kind == CROSS_ENTROPY:
        return b"", found or (problem("loss_settings_json", "cross_entropy has no settings") if settings else [])
    if "kind" in settings:
        return b"", problem("loss_settings_json", "the kind is set by `loss`")
    try:
        return _LOSS.validate_python({"kind": kind, **settings}).model_dump_json().encode(), []
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
        fields = [".".join(map(str, each["loc"][1:])) for each in problems]
        return b"", [
            Violation(field=f"loss_settings_json{'.' if field else ''}{field}", description=each["msg"])
            for field, each in zip(fields, problems, strict=True)
        ]


def rows_of(
    given: Sequence[GivenRow], *, loss: str, limits: RowLimits, longest: int, vocabulary: int
) -> tuple[list[Row], list[list[float]]]:
    """Returns rows and the weights of their tokens.

    Args:
        given: Rows as they came.
        loss: Name of the loss, which determines the fields that a row needs.
        limits: Limits of the call.
        longest: Tokens of the longest row that the model takes.
        vocabulary: Number of token ids.

    Raises:
        ArgumentInvalid: with every problem.
    """
    found: list[Violation] = []
    if not 1 <= len(given) <= limits.max_rows:
        found += problem("rows", f"has {len(given)} elements; must have 1 to {limits.max_rows}")
    tokens = sum(len(row.token_ids) for row in given)
    if tokens > limits.max_tokens:
        found += problem("rows", f"has {tokens} tokens in all; a call accepts {limits.max_tokens}: use several calls")
    if found:
        raise invalid(found)
    for index, row in enumerate(given):
        found += _row_problems(row, f"rows[{index}]", loss=loss, longest=longest, vocabulary=vocabulary)
    if found:
        raise invalid(found)
    weights = [_weights(row) for row in given]
    return [_row(row, each, str(index)) for index, (row, each) in enumerate(zip(given, weights, strict=True))], weights


def draw_problems(draw: GivenDraw, *, limits: RowLimits, longest: int, vocabulary: int) -> list[Violation]:
    """Checks a request to sample."""
    found: list[Violation] = []
    if bool(draw.prompt_ids) == bool(draw.messages_json):
        found += problem("prompt_ids", "needs either this or messages_json")
    if draw.messages_json:
        found += messages_problems("messages_json", draw.messages_json)
    found += _id_problems(draw.prompt_ids, "prompt_ids", vocabulary)
    if not 1 <= draw.count <= MAX_COMPLETIONS:
        found += problem("completion_count", f"must be 1 to {MAX_COMPLETIONS}")
    room = longest - len(draw.prompt_ids)
    if not 1 <= draw.max_tokens <= room:
        found += problem(
            "max_tokens", f"must be 1 to {max(room, 1)}: the model accepts {longest} tokens including the prompt"
        )
    elif draw.count * (len(draw.prompt_ids) + draw.max_tokens) > limits.max_tokens:
        found += problem(
            "completion_count", f"a call may use {limits.max_tokens} tokens, prompts included: use several"
        )
    if not (math.isfinite(draw.temperature) and 0 <= draw.temperature <= 100):
        found += problem("temperature", "must be 0 to 100")
    if not 0 < draw.top_p <= 1:
        found += problem("top_p", "must be greater than 0, and at most 1")
    return found + _stop_problems(draw, vocabulary)


def _stop_problems(draw: GivenDraw, vocabulary: int) -> list[Violation]:
    found = _id_problems(draw.stop_ids, "stop_token_ids", vocabulary)
    if len(draw.stop_ids) > MAX_STOP_IDS:
        found += problem("stop_token_ids", f"has more than {MAX_STOP_IDS} elements")
    texts = draw.stop_texts
    if len(texts) > MAX_STOP_TEXTS or not all(1 <= len(each) <= MAX_STOP_CHARACTERS for each in texts):
        found += problem("stop_texts", f"must be at most {MAX_STOP_TEXTS}, of 1 to {MAX_STOP_CHARACTERS} characters")
    return found


def messages_problems(field: str, text: str, *, tools: str = "") -> list[Violation]:
    """Checks chat messages and tools, lists in JSON."""
    found: list[Violation] = []
    for name, content in ((field, text), ("tools_json", tools)):
        if not content and name != field:
            continue
        try:
            parsed = json.loads(content) if len(content) <= MAX_MESSAGES_BYTES else None
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, list) or not parsed or not all(isinstance(each, dict) for each in parsed):
            found += problem(name, f"must be a JSON list of objects, of at most {MAX_MESSAGES_BYTES} bytes")
        elif name == field and not all(isinstance(each.get("role"), str) for each in parsed):
            found += problem(name, "every message needs a role")
    return found


def _object(field: str, text: str) -> tuple[dict[str, Any], list[Violation]]:
    if len(text) > MAX_SETTINGS:
        return {}, problem(field, f"has {len(text)} characters; allowed are {MAX_SETTINGS}")
    try:
        parsed = json.loads(text or "{}")
    except (ValueError, RecursionError):
        parsed = None
    return (parsed, []) if isinstance(parsed, dict) else ({}, problem(field, "must be a JSON object"))


def _row_problems(row: GivenRow, at: str, *, loss: str, longest: int, vocabulary: int) -> list[Violation]:
    length = len(row.token_ids)
    if not 2 <= length <= longest:
        return problem(f"{at}.token_ids", f"has {length} tokens; must have 2 to {longest}")
    found = _id_problems(row.token_ids, f"{at}.token_ids", vocabulary)
    needed = {"advantages": loss != CROSS_ENTROPY, "sampler_logprobs": loss not in WITHOUT_SAMPLER}
    for name in ("weights", "advantages", "sampler_logprobs"):
        values = getattr(row, name)
        if len(values) not in (0, length):
            found += problem(f"{at}.{name}", f"has {len(values)} elements for {length} tokens")
        elif needed.get(name) and not values:
            found += problem(f"{at}.{name}", f"is required by the loss {loss}")
        elif not all(map(math.isfinite, values)):
            found += problem(f"{at}.{name}", "has a number that is not finite")
    if any(not 0 <= weight <= MAX_WEIGHT for weight in row.weights):
        found += problem(f"{at}.weights", f"must be 0 to {MAX_WEIGHT:g}")
    elif row.weights and row.weights[0]:
        found += problem(f"{at}.weights", "must be 0 for the first token, which nothing precedes")
    return found


def _id_problems(ids: Sequence[int], field: str, vocabulary: int) -> list[Violation]:
    if all(0 <= token < vocabulary for token in ids):
        return []
    return problem(field, f"has an id that is not one of the model's, 0 to {vocabulary - 1}")


def _weights(row: GivenRow) -> list[float]:
    return [float(weight) for weight in row.weights] or [0.0, *[1.0] * (len(row.token_ids) - 1)]


def _row(row: GivenRow, weights: Sequence[float], row_id: str) -> Row:
    mask = tuple(weight > 0 for weight in weights)
    length = len(mask)

    def trained(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value if trains else 0.0 for value, trains in zip(values or [0.0] * length, mask, strict=True))

    return Row(
        rollout_id=row_id,
        token_ids=tuple(row.token_ids),
        loss_mask=mask,
        old_logprobs=trained(row.sampler_logprobs),
        advantages=trained(row.advantages),
        policy_versions=tuple(0 if trains else NO_VERSION for trains in mask),
    )
