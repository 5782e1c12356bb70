"""A rank that dies at a given place of a given optimiser step, or loses a collective there.

Run like `fulmen_algorithm.trainers.rank`; `MORTAL` holds JSON, by rank the place and the number of the step, from 1.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fulmen_algorithm.trainers import rank
from fulmen_algorithm.trainers.service_link import ServiceLink
from fulmen_algorithm.training import step
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.scorer import TokenScores
from fulmen_algorithm.weights.weight_writer import WeightWriter
from fulmen_exchange.ranks import Ranks

MODULE = "tests.support.algorithm.mortal_rank"
VARIABLE = "MORTAL"
Place = Callable[..., Any]


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: Any, name: str) -> Callable[[Callable[[], bool]], None]:
    """Returns what makes a function deadly when it is called."""
    return _deadly(owner, name, first=True)


def after(owner: Any, name: str) -> Callable[[Callable[[], bool]], None]:
    """Returns what makes a function deadly when it is done."""
    return _deadly(owner, name, first=False)


def _deadly(owner: Any, name: str, *, first: bool) -> Callable[[Callable[[], bool]], None]:
    def arrange(is_time: Callable[[], bool]) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if first and is_time():
                die()
            result = inner(*args, **kwargs)
            if is_time():
                die()
            return result

        setattr(owner, name, outer)

    return arrange


def in_the_backward_pass(is_time: Callable[[], bool]) -> None:
    inner = PolicyModel.token_scores

    def outer(*args: Any, **kwargs: Any) -> TokenScores:
        found = inner(*args, **kwargs)
        if is_time() and found.logprobs_BT.requires_grad:
            found.logprobs_BT.register_hook(die)
        return found

    PolicyModel.token_scores = outer  # type: ignore[method-assign]


def between_the_sum_and_the_step(is_time: Callable[[], bool]) -> None:
    # Some codecs clip before the sum.
    for name in ("clip_gradients", "gradient_norm"):
        before(step, name)(is_time)


def without_the_decision(is_time: Callable[[], bool]) -> None:
    """The rank takes part in the gather that decides, and its connections break before it has the result."""
    inner = dist.all_gather_object

    def outer(*args: Any, **kwargs: Any) -> None:
        inner(*args, **kwargs)
        if is_time():
            raise RuntimeError("Connection reset by peer")

    dist.all_gather_object = outer


PLACES: dict[str, Callable[[Callable[[], bool]], None]] = {
    "before the forward pass": before(PolicyModel, "token_scores"),
    "in the backward pass": in_the_backward_pass,
    "in the sum": after(Ranks, "run"),
    "between the sum and the step": between_the_sum_and_the_step,
    "after the decision": after(Ranks, "gather"),
    "without the decision": without_the_decision,
    "before the answer": before(ServiceLink, "send"),
    "in a checkpoint": before(torch, "save"),
    "in a publication": after(WeightWriter, "write"),
}


def main() -> None:
    mine = json.loads(os.environ[VARIABLE]).get(os.environ["RANK"])
    if mine is not None:
        place, number = mine
        begun = 0
        optimise = step._optimise

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal begun
            begun += 1
            return optimise(*args, **kwargs)

        step._optimise = counted
        PLACES[place](lambda: begun == number)
    rank.main()


if __name__ == "__main__":
    main()
