"""An independent, naive assembly of calls into rows: lists of (token, sampled, logprob, version), nothing packed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class PlainCall:
    """One model call as plain lists."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    version: int
    agent_name: str = ""
    usable: bool = True
    resend_count: int = 0
    request: str = ""


Token = tuple[int, bool, float, int]


def reference_rows(calls: list[PlainCall]) -> list[tuple[str, list[Token]]]:
    """Returns (agent name, tokens) of each row, by trying every row for every call."""
    dropped = set()
    for index, call in enumerate(calls):
        earlier = [i for i in range(index) if calls[i].request == call.request]
        earlier = [i for i in earlier if calls[i].resend_count < call.resend_count]
        dropped |= set(earlier[len(earlier) - call.resend_count :] if call.resend_count else [])
    rows: list[tuple[str, list[Token]]] = []
    for index, call in enumerate(calls):
        if index in dropped or not call.usable or not call.completion:
            continue
        best = None
        for candidate in rows:
            ids = [token for token, *_ in candidate[1]]
            fits = candidate[0] == call.agent_name and call.prompt[: len(ids)] == ids
            if fits and (best is None or len(ids) > len(best[1])):
                best = candidate
        if best is None:
            best = (call.agent_name, [])
            rows.append(best)
        for token in call.prompt[len(best[1]) :]:
            best[1].append((token, False, 0.0, -1))
        for token, logprob in zip(call.completion, call.logprobs, strict=True):
            best[1].append((token, True, logprob, call.version))
    return rows
