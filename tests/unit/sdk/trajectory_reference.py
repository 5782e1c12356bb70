"""An independent, naive assembly of calls into rows: lists of (token, sampled, logprob, version), nothing packed.

Shares no code with `fulmen.trajectories`, and follows docs/trajectories.md by brute force.
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


Token = tuple[int, bool, float, int]


def dropped_calls(calls: list[PlainCall], names: list[str]) -> dict[int, str]:
    """Returns why calls are in no row, by their place."""
    replaced: set[int] = set()
    for index, call in enumerate(calls):
        if call.lost:
            continue
        wanted = call.resend_count - 1
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
                if not calls[chosen].lost:
                    break
    reasons = {}
    for index, call in enumerate(calls):
        if call.lost:
            reasons[index] = "lost"
        elif names[index] == "fulmen.grader":
            reasons[index] = "grader"
        elif index in replaced or call.gone:
            reasons[index] = "orphaned"
        elif call.policy == "":
            reasons[index] = "not_trainable"
        elif not call.usable:
            reasons[index] = "unusable"
        elif call.completion == []:
            reasons[index] = "not_trainable"
    return reasons


def reference_rows(calls: list[PlainCall], names: list[str] | None = None) -> list[tuple[str, list[Token]]]:
    """Returns (agent name, tokens) of each row, by trying every row for every call."""
    names = [call.agent_name for call in calls] if names is None else names
    dropped = dropped_calls(calls, names)
    rows: list[tuple[str, list[Token]]] = []
    for index, call in enumerate(calls):
        if index in dropped:
            continue
        best = None
        for candidate in rows:
            ids = [token for token, *_ in candidate[1]]
            fits = candidate[0] == names[index] and call.prompt[: len(ids)] == ids
            if fits and (best is None or len(ids) > len(best[1])):
                best = candidate
        if best is None:
            best = (names[index], [])
            rows.append(best)
        for token in call.prompt[len(best[1]) :]:
            best[1].append((token, False, 0.0, -1))
        for token, logprob in zip(call.completion, call.logprobs, strict=True):
            best[1].append((token, True, logprob, call.version))
    return rows
