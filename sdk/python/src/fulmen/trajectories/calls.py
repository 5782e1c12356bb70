"""Selects the calls to train on, with a reason for each dropped call.

Invariant: every call is either kept, or dropped for one reason. A call is dropped as orphaned only if its agent cannot
have seen the answer: its client disconnected, or sent the same request again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.agent import GRADER_AGENT
from fulmen.model_call import RESEND_COUNT_ATTRIBUTE, ModelCall

_REQUEST_MODEL: Final = "gen_ai.request.model"


class DropReason(StrEnum):
    """Why a call is in no row.

    ORPHANED: the agent never saw the answer. UNUSABLE: it was not captured completely. NOT_TRAINABLE: it was answered
    by no policy, or without tokens. GRADER: it was made by the grader, not by the agent's policy. REPEATED: the attempt has
    the same tokens, sampled once in a lost attempt, already.
    """

    ORPHANED = "orphaned"
    UNUSABLE = "unusable"
    NOT_TRAINABLE = "not_trainable"
    GRADER = "grader"
    REPEATED = "repeated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DroppedCall:
    """A call in no row, and the reason."""

    call: ModelCall
    reason: DropReason
    step: int | None = None


def drop_reasons(calls: Sequence[ModelCall], failed: Sequence[Span] = ()) -> list[DropReason | None]:
    """Returns why each call is dropped; None for kept calls.

    Args:
        calls: All calls of one attempt, in order of start.
        failed: Spans of failed calls, which a resend may have replaced.
    """
    orphans = _orphans(calls, failed)
    replayed: set[tuple[str, int]] = set()
    return [_why_dropped(call, orphan=index in orphans, replayed=replayed) for index, call in enumerate(calls)]


def _why_dropped(call: ModelCall, *, orphan: bool, replayed: set[tuple[str, int]]) -> DropReason | None:
    """Returns why a call is dropped; adds the call that sampled its tokens to `replayed` if it is kept."""
    if call.agent_name == GRADER_AGENT:
        return DropReason.GRADER
    if orphan or call.client_gone:
        return DropReason.ORPHANED
    if not call.policy:
        return DropReason.NOT_TRAINABLE
    if not call.usable:
        return DropReason.UNUSABLE
    if not call.completion:
        return DropReason.NOT_TRAINABLE
    if call.replayed:
        if (call.replayed, call.choice) in replayed:
            return DropReason.REPEATED
        replayed.add((call.replayed, call.choice))
    return None


@dataclass(slots=True, kw_only=True, eq=False)
class _Sending:
    """One sending of a request, with the indices of its choices among the calls; none if it failed."""

    start_time_ns: int
    resend_count: int
    calls: list[int]
    gone: bool
    replaced: bool = False


def _orphans(calls: Sequence[ModelCall], failed: Sequence[Span]) -> set[int]:
    """Returns the indices of calls whose answer the agent never saw because its client sent the request again.

    Clients count resends (`http.request.resend_count`): the sending with count n replaces one of the same request with
    count n - 1, or, if that was not recorded, with the next lower count. Of several candidates, one that failed or
    whose client disconnected is replaced, otherwise the latest; none is replaced twice. Equal requests that are not
    resends are separate samples and are kept.
    """
    if not any(call.resend_count for call in calls):
        return set()
    orphans: set[int] = set()
    lost = _lost_sendings(failed)
    sent: dict[tuple[str, bytes], list[_Sending]] = defaultdict(list)
    for request, sending in _sendings(calls):
        before = sent[request]
        others = [*before, *lost.get(request[0], ())]
        # Counts that occur: the agent writes its own, which may be any.
        for count in sorted({each.resend_count for each in others if each.resend_count < sending.resend_count})[::-1]:
            replaced = _replaced(sending, count, others)
            if replaced is None:
                continue
            replaced.replaced = True
            orphans.update(replaced.calls)
            if replaced.calls:
                break  # It has replaced those before it; a failed one is not known to have.
        before.append(sending)
    return orphans


def _replaced(sending: _Sending, count: int, before: Sequence[_Sending]) -> _Sending | None:
    fitting = [
        each
        for each in before
        if each.resend_count == count and not each.replaced and each.start_time_ns <= sending.start_time_ns
    ]
    return max(fitting, key=lambda each: (each.gone, each.start_time_ns), default=None)


def _sendings(calls: Sequence[ModelCall]) -> list[tuple[tuple[str, bytes], _Sending]]:
    """Returns model and request of every sending, in order of start; the choices of one answer are one sending."""
    found: list[tuple[tuple[str, bytes], _Sending]] = []
    last: dict[tuple[str, bytes], _Sending] = {}
    for index, call in enumerate(calls):
        # A record too large for its texts omits them; its prompt identifies the request as well.
        request = call.model, call.request_json or call.prompt
        same = last.get(request)
        if call.choice and same is not None and same.start_time_ns == call.start_time_ns:
            same.calls.append(index)
            continue
        sending = _Sending(
            start_time_ns=call.start_time_ns, resend_count=call.resend_count, calls=[index], gone=call.client_gone
        )
        last[request] = sending
        found.append((request, sending))
    return found


def _lost_sendings(failed: Sequence[Span]) -> dict[str, list[_Sending]]:
    found: dict[str, list[_Sending]] = defaultdict(list)
    for span in failed:
        attributes = {a.key: a.value for a in span.attributes if a.key in (_REQUEST_MODEL, RESEND_COUNT_ATTRIBUTE)}
        model, resend = attributes.get(_REQUEST_MODEL), attributes.get(RESEND_COUNT_ATTRIBUTE)
        sending = _Sending(
            start_time_ns=span.start_time_unix_nano,
            resend_count=resend.int_value if resend is not None else 0,
            calls=[],
            gone=True,
        )
        found[model.string_value if model is not None else ""].append(sending)
    return found
