"""Candidates of a prompt search: identity, validity and selection; pure.

Source: Pryzant et al. 2023, "Automatic Prompt Optimization with Gradient Descent and Beam Search" (arXiv:2305.03495).
"""

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter

_PLACEHOLDER = re.compile(r"\{\{\s*[A-Za-z_][\w.]*\s*\}\}|\{[A-Za-z_][\w.]*\}")

Measure = Callable[[Sequence[str], int], Awaitable[Mapping[str, Sequence[float]]]]
"""Takes ids of candidates and the number of a minibatch; returns the rewards of their rollouts on it, by id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One prompt.

    Attributes:
        id: `c0` is the one that the search began with.
        text: The template.
        version: The resource version that rollouts get: `resources/{id}/versions/{n}`.
        parent: The candidate that it was edited from; empty for the first.
        gradient: The critic's criticism of the parent.
        round: When it was made; 0 for the first.
        rewards: Of its rollouts on training tasks.
        validation: Mean reward on the validation tasks; None if it was not validated.
    """

    id: str
    text: str = field(repr=False)
    version: str
    parent: str = ""
    gradient: str = field(default="", repr=False)
    round: int = 0
    rewards: tuple[float, ...] = ()
    validation: float | None = None

    @property
    def mean(self) -> float:
        """Mean reward on training tasks; minus infinity before the first."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else -math.inf


def placeholders(template: str) -> frozenset[str]:
    """Returns the placeholders of a template, `{name}` or `{{name}}`, without blanks."""
    return frozenset(re.sub(r"\s", "", found) for found in _PLACEHOLDER.findall(template))


def flaw(text: str, *, first: str, others: Mapping[str, str], max_chars: int) -> str:
    """Returns the reason why an edited prompt is invalid; empty if it is valid.

    Args:
        text: The edited prompt.
        first: The prompt that the search began with, whose placeholders must survive.
        others: Prompts that are candidates already, by id.
        max_chars: Longest prompt.
    """
    wanted, found = placeholders(first), placeholders(text)
    if not text.strip():
        return "the editor returned no prompt"
    if len(text) > max_chars:
        return f"it has {len(text)} characters, more than max_prompt_chars ({max_chars})"
    if missing := wanted - found:
        return f"the placeholder {', '.join(sorted(missing))} is missing"
    if new := found - wanted:
        return f"unknown placeholder {', '.join(sorted(new))}"
    if wanted and _formats(first) and not _formats(text):
        return "a brace in it is neither a placeholder nor doubled"
    if same := [other for other, known in others.items() if known == text]:
        return f"it is the same as {same[0]}"
    return ""


def _formats(template: str) -> bool:
    """Returns whether `str.format` can parse a template."""
    try:
        list(Formatter().parse(template))
    except ValueError:
        return False
    return True


async def halve(ids: Sequence[str], *, width: int, measure: Measure) -> dict[str, list[float]]:
    """Measures all on the same minibatch, drops the worse half, and again, until `width` are left.

    Source: successive halving (Karnin et al. 2013), as in section 3.3 of the paper above.

    Returns:
        The rewards of every candidate; those that survive, the best first, come before the others.
    """
    rewards: dict[str, list[float]] = {name: [] for name in ids}
    left, dropped, rung = list(ids), list[str](), 0
    while True:
        for name, more in (await measure(left, rung)).items():
            rewards[name] += more
        left = ranked(left, rewards)
        if len(left) <= width:
            return {name: rewards[name] for name in (*left, *reversed(dropped))}
        keep = max(width, math.ceil(len(left) / 2))
        dropped += reversed(left[keep:])
        left, rung = left[:keep], rung + 1


async def upper_confidence(
    ids: Sequence[str], *, pulls: int, exploration: float, measure: Measure
) -> dict[str, list[float]]:
    """Measures each once, then again and again the one whose mean might be the best.

    Source: UCB1 (Auer et al. 2002), with the factor c of algorithm 3 of the paper above: mean + c * sqrt(ln t / n).

    Args:
        ids: Candidates.
        pulls: Minibatches in all; each candidate gets one at least.
        exploration: c, in units of reward.
        measure: Measures some.

    Returns:
        The rewards of every candidate, the best first.
    """
    rewards = {name: list(found) for name, found in (await measure(ids, 0)).items()}
    counts = dict.fromkeys(ids, 1)
    for pull in range(len(ids), pulls):

        def bound(name: str, t: int = pull) -> float:
            return _mean(rewards[name]) + exploration * math.sqrt(math.log(t) / counts[name])

        chosen = max(ids, key=lambda name: (bound(name), -ids.index(name)))
        rewards[chosen] += (await measure([chosen], counts[chosen]))[chosen]
        counts[chosen] += 1
    return {name: rewards[name] for name in ranked(list(ids), rewards)}


def ranked(ids: Sequence[str], rewards: Mapping[str, Sequence[float]]) -> list[str]:
    """Sorts candidates by mean reward, the best first; of equal ones the earlier."""
    return sorted(ids, key=lambda name: (-_mean(rewards[name]), ids.index(name)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else -math.inf
