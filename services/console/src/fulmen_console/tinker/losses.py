"""Tinker's losses as calls of `ForwardBackward`: rows, loss and settings, and how its answer becomes Tinker's.

Every loss is a sum over tokens; there is no mean. With pi of the policy now, q of the sampler (`logprobs`), A (`advantages`)
and r = pi / q, its terms are

| `cross_entropy` | -weight log pi |
| `importance_sampling` | -r A |
| `ppo` | -min(r A, clip(r, low, high) A) |
| `cispo` | -stop_gradient(clip(r, low, high)) A log pi |
| `dro` | -(A log pi - beta / 2 (log pi - log q)^2) |

Source: Tinker's documentation, "Loss functions" (https://tinker-docs.thinkingmachines.ai/losses).

A datum has the input x[0..N) and the target t[i] of each position, which is x[i + 1] in all data of next tokens. A row is x and
the last target, so t[i] is token i + 1 of it. Elsewhere a target may be anything where it has no weight and no advantage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import ArgumentInvalid, Violation
from fulmen_console.tinker.wire import Datum, Pass

__all__ = ["LOSSES", "Plan", "plan_of"]

CROSS_ENTROPY: Final = "cross_entropy"
DRO: Final = "dro"
LOSSES: Final = (CROSS_ENTROPY, "importance_sampling", "ppo", "cispo", DRO)
_CLIP_LOW, _CLIP_HIGH = 0.8, 1.2
MAX_REPORTED: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a pass is carried out.

    Attributes:
        rows: One for each datum, of N + 1 tokens.
        loss: Loss of `TrainerService`.
        settings: Its settings.
        beta: Of `dro`; None for the other losses.
    """

    rows: Sequence[pb.TrainingRow]
    loss: str
    settings: Mapping[str, float]
    beta: float | None = None

    def request(self, *, trainer: str, sequence: int, forward_only: bool) -> pb.ForwardBackwardRequest:
        """Returns the call."""
        return pb.ForwardBackwardRequest(
            name=trainer,
            sequence=sequence,
            rows=self.rows,
            loss=self.loss,
            loss_settings_json=json.dumps(self.settings) if self.settings else "",
            forward_only=forward_only,
        )

    def linearized(self, logprobs: Sequence[Sequence[float]]) -> tuple[Plan, float]:
        """Returns a pass with the gradient of `dro` at the present weights, and the loss.

        The gradient of the loss by log pi is -(A - beta (log pi - log q)), which is the gradient of `reinforce` with this
        advantage.

        Args:
            logprobs: log pi of each row's tokens, at the same weights.
        """
        assert self.beta is not None
        rows, loss = [], 0.0
        for row, row_logprobs in zip(self.rows, logprobs, strict=True):
            moved = [lp - q for lp, q in zip(row_logprobs, row.sampler_logprobs, strict=True)]
            loss -= math.fsum(
                weight * (advantage * lp - self.beta / 2 * d * d)
                for weight, advantage, lp, d in zip(row.weights, row.advantages, row_logprobs, moved, strict=True)
            )
            advantages = [a - self.beta * d for a, d in zip(row.advantages, moved, strict=True)]
            rows.append(pb.TrainingRow(token_ids=row.token_ids, weights=row.weights, advantages=advantages))
        return Plan(rows=rows, loss="reinforce", settings={}), loss


def plan_of(call: Pass) -> Plan:
    """Plans a pass.

    Raises:
        ArgumentInvalid: with every problem of its data.
    """
    if call.loss not in LOSSES:
        text = f"{call.loss[:64]!r} is not supported; supported are: {', '.join(LOSSES)}"
        raise _invalid([Violation(field="loss_fn", description=text)])
    settings, found = _settings(call.loss, call.config)
    if not call.data:
        found.append(Violation(field="data", description="is empty"))
    rows = []
    for index, datum in enumerate(call.data):
        row, problems = _row(datum, f"data[{index}]", call.loss)
        rows.append(row)
        found += problems
    if found:
        raise _invalid(found)
    if call.loss == DRO:
        # `importance` is computed for its log-probabilities alone.
        return Plan(rows=rows, loss="importance", settings={}, beta=settings["beta"])
    # With weights as advantages: a weight may be negative, and log-probabilities of tokens without weight are wanted, too.
    name = {CROSS_ENTROPY: "reinforce", "importance_sampling": "importance", "ppo": "clip", "cispo": "cispo"}[call.loss]
    return Plan(rows=rows, loss=name, settings=settings)


def _invalid(found: Sequence[Violation]) -> ArgumentInvalid:
    shown = list(found[:MAX_REPORTED])
    if len(found) > MAX_REPORTED:
        shown.append(Violation(field="data", description=f"{len(found) - MAX_REPORTED} more problems are not listed"))
    return ArgumentInvalid("The request is malformed.", violations=shown)


def _settings(loss: str, config: Mapping[str, float | str]) -> tuple[dict[str, float], list[Violation]]:
    known = {"ppo": ("clip_low_threshold", "clip_high_threshold"), DRO: ("beta",)}
    known["cispo"] = known["ppo"]
    found = [
        Violation(field=f"loss_fn_config.{name[:64]}", description=f"is not a setting of {loss}")
        for name in config
        if name not in known.get(loss, ())
    ]
    numbers = {name: value for name, value in config.items() if not isinstance(value, str) and math.isfinite(value)}
    found += [
        Violation(field=f"loss_fn_config.{name[:64]}", description="must be a finite number")
        for name in config
        if name not in numbers
    ]
    if loss == DRO:
        if "beta" not in config:
            found.append(Violation(field="loss_fn_config.beta", description="is required by dro"))
        elif numbers.get("beta", 0.0) < 0:
            found.append(Violation(field="loss_fn_config.beta", description="must be 0 or more"))
        return ({} if found else {"beta": numbers["beta"]}), found
    if loss not in known:
        return {}, found
    low, high = numbers.get("clip_low_threshold", _CLIP_LOW), numbers.get("clip_high_threshold", _CLIP_HIGH)
    if not (0 <= low < 1 and (low > 0 or loss == "cispo")):
        text = f"must be {'0 or more' if loss == 'cispo' else 'greater than 0'}, and less than 1"
        found.append(Violation(field="loss_fn_config.clip_low_threshold", description=text))
    if not 1 < high <= 11:
        text = "must be greater than 1, and at most 11"
        found.append(Violation(field="loss_fn_config.clip_high_threshold", description=text))
    if loss == "ppo":
        return {"low": 1.0 - low, "high": high - 1.0}, found
    return {"ratio_min": low, "ratio_max": high}, found


def _row(datum: Datum, at: str, loss: str) -> tuple[pb.TrainingRow, list[Violation]]:
    """Makes a row; it is of no use if there are problems."""
    found = [*datum.problems, *_input_problems(datum, at, loss)]
    if found:
        return pb.TrainingRow(), found
    size = len(datum.tokens)
    targets = [int(target) for target in datum.inputs["target_tokens"][0]]
    all_ones: tuple[Sequence[float], tuple[int, ...]] = ([1.0] * size, (size,))
    factors = datum.inputs.get("weights" if loss == CROSS_ENTROPY else "advantages", all_ones)[0]
    is_next = [*(target == token for target, token in zip(targets, datum.tokens[1:], strict=False)), True]
    for index, (matches, factor) in enumerate(zip(is_next, factors, strict=True)):
        if not matches and factor:
            text = "must be the next token of the input where it has a weight or an advantage"
            return pb.TrainingRow(), [Violation(field=f"{at}.loss_fn_inputs.target_tokens[{index}]", description=text)]

    def of_targets(values: Sequence[float]) -> list[float]:
        return [0.0, *(value if matches else 0.0 for value, matches in zip(values, is_next, strict=True))]

    row = pb.TrainingRow(
        token_ids=[*datum.tokens, targets[-1]],
        weights=of_targets([1.0] * size),
        advantages=of_targets(factors),
        sampler_logprobs=() if loss == CROSS_ENTROPY else of_targets(datum.inputs["logprobs"][0]),
    )
    return row, []


def _input_problems(datum: Datum, at: str, loss: str) -> list[Violation]:
    size = len(datum.tokens)
    found = [] if size else [Violation(field=f"{at}.model_input", description="is empty")]
    names = ("target_tokens", "weights") if loss == CROSS_ENTROPY else ("target_tokens", "logprobs", "advantages")
    found += [
        Violation(field=f"{at}.loss_fn_inputs.{name[:64]}", description=f"is not an input of {loss}")
        for name in datum.inputs
        if name not in names
    ]
    unread = {problem.field for problem in datum.problems}
    for name in names:
        field = f"{at}.loss_fn_inputs.{name}"
        if name not in datum.inputs:
            if name != "weights" and field not in unread:
                found.append(Violation(field=field, description=f"is required by {loss}"))
            continue
        values, shape = datum.inputs[name]
        if len(values) != size or len(shape) > 1:
            text = f"has the shape {list(shape) or [len(values)]}; must be [{size}], one for each token of the input"
            found.append(Violation(field=field, description=text))
        elif not all(map(math.isfinite, values)):
            found.append(Violation(field=field, description="has a number that is not finite"))
        elif name == "target_tokens" and not all(0 <= target < 2**31 for target in values):
            found.append(Violation(field=field, description="has an id that is not one of the model's"))
    return found
