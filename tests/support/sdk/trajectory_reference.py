"""An independent, naive assembly of calls into rows: lists of (token, sampled, logprob, version), nothing packed.

Shares no code with `fulmen.trajectories`, and follows docs/trajectories.md by brute force. Spans have small numbers as
ids: call i is span i + 1.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class PlainCall:
    """One model call as plain lists; `lost` is one of which there is a failed span and no record."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    version: int
    agent_name: str = ""
    usable: bool = True
    resend_count: int = 0
    request: str = ""
    answer: str = ""
    gone: bool = False
    lost: bool = False
    policy: str = "p"
    parent: int = 0
    finish_reason: str = "stop"


@dataclass(kw_only=True)
class PlainSpan:
    """A span that is no model call."""

    id: int
    parent: int = 0
    agent: str = ""
    step: int | None = None


@dataclass(kw_only=True, frozen=True)
class PlainReward:
    """A reward; span 0 is none."""

    value: float
    dimension: str
    step: int | None = None
    span: int = 0


Token = tuple[int, bool, float, int]
World = tuple[list[PlainCall], list[PlainSpan]]


def ancestors(world: World, span: int) -> list[int]:
    """Returns a span and all that it lies in, nearest first."""
    calls, spans = world
    parents = {i + 1: call.parent for i, call in enumerate(calls)} | {each.id: each.parent for each in spans}
    found: list[int] = []
    while span != 0 and span not in found:
        found.append(span)
        span = parents.get(span, 0)
    return found


def names(world: World) -> list[str]:
    """Returns the agent of each call."""
    said = {each.id: each.agent for each in world[1] if each.agent}
    result = []
    for index, call in enumerate(world[0]):
        above = [said[span] for span in ancestors(world, index + 1) if span in said]
        result.append(call.agent_name or (above[0] if above else ""))
    return result


def replaced_calls(calls: list[PlainCall]) -> set[int]:
    """Returns the calls that a client sent again."""
    replaced: set[int] = set()
    for index, call in enumerate(calls):
        wanted = -1 if call.lost else call.resend_count - 1
        while wanted >= 0:
            fitting = [
                place
                for place in range(index)
                if place not in replaced
                and calls[place].resend_count == wanted
                and (calls[place].lost or calls[place].request == call.request)
            ]
            void = [place for place in fitting if calls[place].lost or calls[place].gone]
            wanted -= 1
            if fitting:
                chosen = max(void or fitting)
                replaced.add(chosen)
                wanted = wanted if calls[chosen].lost else -1
    return replaced


def dropped_calls(world: World) -> dict[int, str]:
    """Returns why calls are in no row, by their place."""
    replaced = replaced_calls(world[0])
    reasons = {}
    for index, (call, name) in enumerate(zip(world[0], names(world), strict=True)):
        for reason, holds in (
            ("lost", call.lost),
            ("grader", name == "fulmen.grader"),
            ("orphaned", index in replaced or call.gone),
            ("not_trainable", call.policy == ""),
            ("unusable", not call.usable),
            ("not_trainable", call.completion == []),
        ):
            if holds:
                reasons[index] = reason
                break
    return reasons


def grouped(world: World) -> list[tuple[str, list[int], list[int]]]:
    """Returns the agent, the places of the calls and the token ids of each row, by trying every row for every call."""
    calls, dropped = world[0], dropped_calls(world)
    rows: list[tuple[str, list[int], list[int]]] = []
    for index, name in enumerate(names(world)):
        if index in dropped:
            continue
        call = calls[index]
        fits = [row for row in rows if row[0] == name and call.prompt[: len(row[2])] == row[2]]
        if fits:
            best = max(fits, key=lambda row: len(row[2]))
        else:
            best = (name, [], [])
            rows.append(best)
        best[1].append(index)
        best[2][:] = call.prompt + call.completion
    return rows


def reference_rows(world: World) -> list[tuple[str, list[Token]]]:
    """Returns (agent name, tokens) of each row."""
    found: list[tuple[str, list[Token]]] = []
    for name, members, _ in grouped(world):
        tokens: list[Token] = []
        for index in members:
            call = world[0][index]
            tokens += [(token, False, 0.0, -1) for token in call.prompt[len(tokens) :]]
            for token, logprob in zip(call.completion, call.logprobs, strict=True):
                tokens.append((token, True, logprob, call.version))
        found.append((name, tokens))
    return found


def steps(world: World) -> dict[int, int]:
    """Returns the step of each call that has one; calls that are lost have none."""
    calls, spans = world
    said = {each.id: each.step for each in spans if each.step is not None}
    named = {}
    for index, call in enumerate(calls):
        above = [said[span] for span in ancestors(world, index + 1) if span in said]
        if above and not call.lost:
            named[index] = above[0]
    dropped = dropped_calls(world)
    seen = [index for index in range(len(calls)) if dropped.get(index) in (None, "unusable")]
    if any(index in named for index in seen):
        return named
    return {index: place for place, index in enumerate(seen)}


def scored_calls(world: World, reward: PlainReward) -> list[int] | str:
    """Returns the kept calls that a reward of a span or step scores, or why there are none."""
    calls, spans = world
    recorded = [index for index, call in enumerate(calls) if not call.lost]
    if reward.span:
        known = {each.id for each in spans} | {index + 1 for index in range(len(calls))}
        covered = [index for index in recorded if reward.span in ancestors(world, index + 1)]
        if not covered:
            return "no_call" if reward.span in known else "unknown_span"
    else:
        of = steps(world)
        covered = [index for index in recorded if index in of and of[index] == reward.step]
        if not covered:
            return "unknown_step"
    dropped = dropped_calls(world)
    return [index for index in covered if index not in dropped] or "dropped"


def reference_credit(
    world: World, rewards: list[PlainReward], option: str, gamma: float, weights: dict[str, float]
) -> dict[int, float | None]:
    """Returns the credit of each kept call, each from its own definition, as a sum over all rewards."""
    kept = sorted(index for _, members, _ in grouped(world) for index in members)
    of = steps(world)
    order: list[object] = []
    for index in kept:
        key = of.get(index, ("alone", index))
        if key not in order:
            order.append(key)
    unit = {index: order.index(of.get(index, ("alone", index))) for index in kept}
    finals = [r for r in rewards if r.step is None and not r.span and r.dimension in weights]
    partial = [r for r in rewards if (r.step is not None or r.span) and r.dimension in weights]
    covered = {r: found for r in partial if not isinstance(found := scored_calls(world, r), str)}
    total = sum(weights[r.dimension] * r.value for r in finals) if finals else None
    result: dict[int, float | None] = {}
    for index in kept:
        last = unit[index] == len(order) - 1
        if option == "final":
            result[index] = total
        elif option == "split":
            result[index] = None if total is None else total / len(grouped(world))
        elif option == "last_step":
            result[index] = None if total is None else (total if last else 0.0)
        elif total is None and not covered:
            result[index] = None
        elif option == "per_step":
            own = sum(weights[r.dimension] * r.value for r, found in covered.items() if index in found)
            result[index] = own + (total or 0.0) * last
        else:
            credit = gamma ** (len(order) - 1 - unit[index]) * (total or 0.0)
            for r, found in covered.items():
                distance = max(unit[each] for each in found) - unit[index]
                credit += weights[r.dimension] * r.value * gamma**distance if distance >= 0 else 0.0
            result[index] = credit
    return result
