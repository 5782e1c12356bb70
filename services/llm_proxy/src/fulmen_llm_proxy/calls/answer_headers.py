"""The headers about an answer: backend, policy version, tries, attempt and cost."""

from __future__ import annotations

from fulmen_llm_proxy.apis.usage import token_counts, used
from fulmen_llm_proxy.calls.answer_writer import Header
from fulmen_llm_proxy.calls.running_call import RunningCall

BACKEND = b"x-fulmen-backend"
POLICY_VERSION = b"x-fulmen-policy-version"
TRIES = b"x-fulmen-tries"
ATTEMPT = b"x-fulmen-attempt"
COST = b"x-fulmen-cost-usd"
DROPPED = b"x-fulmen-dropped"


def headers_of_call(call: RunningCall, *, whole: bool = False) -> list[Header]:
    """Returns the headers of an answer, or of an error.

    Args:
        whole: whether the complete answer is at hand. Only then is its cost known.
    """
    found: list[Header] = []
    if call.caller.attempt:
        found.append((ATTEMPT, call.caller.attempt.encode()))
    choice, plan = call.choice, call.plan
    if choice is None or plan is None:
        return found
    found += [(BACKEND, choice.backend.id.encode()), (TRIES, b"%d" % call.tries)]
    if choice.target.policy:
        found.append((POLICY_VERSION, b"%d" % choice.target.policy_version))
    if plan.dropped:
        found.append((DROPPED, ", ".join(plan.dropped).encode("ascii", "replace")))
    if whole and (cost_usd := _cost_usd(call)) is not None:
        found.append((COST, f"{cost_usd:.9f}".encode()))
    return found


def _cost_usd(call: RunningCall) -> float | None:
    """Returns the cost of a complete answer, dollars; None if its model has no price, or its backend reported no usage."""
    choice, plan = call.choice, call.plan
    price = None if choice is None else call.permit.price_of(choice.target)
    if price is None or plan is None:
        return None
    if call.from_cache:
        return 0.0
    collected = plan.reader.collected
    try:
        reported = token_counts(collected.usage)
    except (ValueError, RecursionError):  # the recorder marks the answer as malformed
        return None
    if reported.prompt is None:
        return None
    return price.cost_micros(used(call.request, reported, collected)) / 1e6
