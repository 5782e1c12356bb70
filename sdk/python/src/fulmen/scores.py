"""Scores: rewards of stored rollouts from another grader, as the content of a resource of kind `scores`.

Invariant: equal scores are equal bytes, so that an equal result is recognised and published once. The reader either
accepts the whole content or lists every invalid line. The format is in docs/rescoring.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from fulmen.agent import FINAL_DIMENSION, RewardKey
from fulmen.ids import rollout_of
from fulmen.zstd import FrameInvalid, decompress

__all__ = [
    "CONTENT_TYPE",
    "KIND",
    "GraderIdentity",
    "Problem",
    "RolloutScore",
    "Scores",
    "ScoresInvalid",
    "ScoresTooLarge",
    "Source",
    "final_reward",
    "read_scores",
    "score_of_line",
    "score_to_line",
    "write_scores",
]

KIND: Final = "scores"
CONTENT_TYPE: Final = "application/jsonl+zstd"
FORMAT: Final = "fulmen.scores/1"
MAX_CONTENT_BYTES: Final = 16 * 1024 * 1024
"""Limit of ResourceVersion.content."""

MAX_UNPACKED_BYTES: Final = 512 * 1024 * 1024
MAX_MESSAGE_CHARS: Final = 500
SPAN_ID_BYTES: Final = 8
_LEVEL: Final = 10


class ScoresInvalid(ValueError):
    """Raised for invalid content; `problems` are line numbers, from 1, with a description each."""

    def __init__(self, problems: Sequence[tuple[int, str]]) -> None:
        """Stores the problems; line 0 is the whole content."""
        super().__init__("; ".join(f"line {number}: {text}" if number else text for number, text in problems))
        self.problems = tuple(problems)


class ScoresTooLarge(ValueError):
    """Raised if scores do not fit into one resource."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderIdentity:
    """The grader that gave the scores.

    Attributes:
        kind: `python`, `command` or `judge`.
        entry: The target, the command's words, or the judge's settings as JSON.
        bundle_sha256: Digest of its files, hexadecimal; empty for a judge.
    """

    kind: str
    entry: str
    bundle_sha256: str = ""

    @property
    def digest(self) -> str:
        """Digest of the grader's identity, hexadecimal."""
        return hashlib.sha256(_packed(asdict(self))).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The rollouts that were scored.

    Attributes:
        training_run: `projects/{project}/trainingRuns/{id}`; empty for rollouts of any run or none.
        filter: Filter of ListRollouts; empty for all.
        states: Final states, in lower case.
    """

    training_run: str = ""
    filter: str = ""
    states: tuple[str, ...] = ("succeeded",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why a rollout has no score: a failure kind, and a text for a person."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScore:
    """The score of one rollout: either rewards or a problem.

    Attributes:
        rollout: `projects/{project}/rollouts/{uuid}`.
        attempt: The deciding attempt, `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        training_run: `projects/{project}/trainingRuns/{id}`; empty if none.
        group: Id of the group within the run; empty if none.
        mode: `train`, `validation` or `test`.
        rewards: Rewards by dimension, step and span.
        problem: Problem; None if there are rewards.
    """

    rollout: str
    attempt: str
    training_run: str = ""
    group: str = ""
    mode: str = "train"
    rewards: Mapping[RewardKey, float] = field(default_factory=dict)
    problem: Problem | None = None

    @property
    def final(self) -> float | None:
        """The final reward, or None."""
        return final_reward(self.rewards)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """The content of a version: grader, source, and the scores ordered by rollout name."""

    grader: GraderIdentity
    source: Source
    rollouts: tuple[RolloutScore, ...]

    @property
    def failed(self) -> int:
        """Number of rollouts with a problem instead of a score."""
        return sum(each.problem is not None for each in self.rollouts)


def final_reward(rewards: Mapping[RewardKey, float]) -> float | None:
    """Returns the final reward: the dimension `reward`, or the only dimension.

    Ignores rewards of single steps and spans.
    """
    finals = {dimension: value for (dimension, step, span), value in rewards.items() if step is None and not span}
    if FINAL_DIMENSION in finals:
        return finals[FINAL_DIMENSION]
    return next(iter(finals.values())) if len(finals) == 1 else None


def write_scores(scores: Scores) -> bytes:
    """Serialises scores.

    Raises:
        ScoresTooLarge: if they do not fit into one resource.
        ValueError: if a rollout occurs twice.
    """
    import zstandard

    ordered = sorted(scores.rollouts, key=lambda each: each.rollout)
    twice = [name for name, count in Counter(each.rollout for each in ordered).items() if count > 1]
    if twice:
        raise ValueError(f"Rollouts occur twice: {twice}.")
    header = {
        "format": FORMAT,
        "grader": asdict(scores.grader),
        "source": asdict(scores.source),
        "counts": {"rollouts": len(ordered), "failed": scores.failed},
    }
    lines = b"".join([_packed(header) + b"\n", *(score_to_line(each) + b"\n" for each in ordered)])
    content = zstandard.ZstdCompressor(level=_LEVEL).compress(lines)
    for size, limit, what in (
        (len(content), MAX_CONTENT_BYTES, "compressed"),
        (len(lines), MAX_UNPACKED_BYTES, "unpacked"),
    ):
        if size > limit:
            raise ScoresTooLarge(
                f"The scores of {len(ordered)} rollouts have {size} bytes {what}, more than the {limit} of a resource: score "
                "fewer rollouts, such as one training run with --run, or a span of time with --filter."
            )
    return content


def read_scores(content: bytes) -> Scores:
    """Parses scores.

    Raises:
        ScoresInvalid: if any line is invalid; names all of them.
    """
    try:
        unpacked = decompress(content, max_bytes=MAX_UNPACKED_BYTES)
    except FrameInvalid:
        raise ScoresInvalid([(0, "not a file of scores: not compressed with zstd, or too large")]) from None
    first, _, rest = unpacked.partition(b"\n")
    problems: list[tuple[int, str]] = []
    header = _header(first, problems)
    rollouts: list[RolloutScore] = []
    seen: set[str] = set()
    for number, line in enumerate(rest.split(b"\n"), start=2):
        if not line.strip():
            continue
        try:
            score = score_of_line(line)
        except ValueError as error:
            problems.append((number, str(error)))
            continue
        if score.rollout in seen:
            problems.append((number, f"{score.rollout} occurs twice"))
        seen.add(score.rollout)
        rollouts.append(score)
    if header is not None and not problems and header[2] != len(rollouts):
        problems.append((1, f"counts {header[2]} rollouts, and {len(rollouts)} follow"))
    if header is None or problems:
        raise ScoresInvalid(sorted(problems))
    return Scores(grader=header[0], source=header[1], rollouts=tuple(rollouts))


def score_to_line(score: RolloutScore) -> bytes:
    """Serialises the score of one rollout as a line without newline; omits empty fields."""
    named = {
        "rollout": score.rollout,
        "attempt": score.attempt,
        "training_run": score.training_run,
        "group": score.group,
        "mode": score.mode,
    }
    line: dict[str, Any] = {key: value for key, value in named.items() if value}
    if score.problem is None:
        line["rewards"] = [
            {"dimension": dimension, "value": value}
            | ({} if step is None else {"step": step})
            | ({"span_id": span_id.hex()} if span_id else {})
            for (dimension, step, span_id), value in score.rewards.items()
        ]
    else:
        line["problem"] = {"kind": score.problem.kind, "message": score.problem.message[:MAX_MESSAGE_CHARS]}
    return _packed(line)


def score_of_line(line: bytes) -> RolloutScore:
    """Parses one line.

    Raises:
        ValueError: if it is invalid.
    """
    value = _object(line)
    names = {key: value.get(key, "") for key in ("rollout", "attempt", "training_run", "group", "mode")}
    for key, name in names.items():
        if not isinstance(name, str) or (not name and key in ("rollout", "attempt", "mode")):
            raise ValueError(f"needs `{key}`, a text")
    if rollout_of(names["attempt"]) != names["rollout"] or names["attempt"] == names["rollout"]:
        raise ValueError("`attempt` is not one of `rollout`")
    match value:
        case {"problem": {"kind": str(kind), "message": str(message)}} if "rewards" not in value:
            return RolloutScore(**names, problem=Problem(kind=kind, message=message))
        case {"rewards": [_, *_] as rewards} if "problem" not in value:
            return RolloutScore(**names, rewards=_rewards(rewards))
        case _:
            raise ValueError("needs either `rewards`, a list that is not empty, or `problem` with `kind` and `message`")


def _rewards(values: Sequence[Any]) -> dict[RewardKey, float]:
    found: dict[RewardKey, float] = {}
    for number, each in enumerate(values, start=1):
        match each:
            case {"dimension": str(dimension), "value": int() | float() as value} if (
                dimension and not isinstance(value, bool) and abs(value) <= sys.float_info.max
            ):
                key = (dimension, _step(each, number), _span_id(each, number))
            case _:
                raise ValueError(f"reward {number} needs `dimension`, a text, and `value`, a finite number")
        if key in found:
            raise ValueError(f"reward {number} occurs twice")
        found[key] = float(value)
    return found


def _step(reward: Mapping[str, Any], number: int) -> int | None:
    step = reward.get("step")
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise ValueError(f"reward {number}: `step` must be a whole number from 0")
    return step


def _span_id(reward: Mapping[str, Any], number: int) -> bytes:
    text = reward.get("span_id", "")
    try:
        span_id = bytes.fromhex(text)
    except (TypeError, ValueError):
        span_id = b"?"
    if len(span_id) not in (0, SPAN_ID_BYTES):
        raise ValueError(f"reward {number}: `span_id` must be {2 * SPAN_ID_BYTES} hexadecimal digits")
    return span_id


def _header(line: bytes, problems: list[tuple[int, str]]) -> tuple[GraderIdentity, Source, int] | None:
    try:
        value = _object(line)
    except ValueError as error:
        problems.append((1, f"the header is {error}"))
        return None
    if value.get("format") != FORMAT:
        problems.append((1, f"`format` must be {FORMAT!r}, not {value.get('format')!r}"))
        return None
    match value:
        case {
            "grader": {"kind": str(kind), "entry": str(entry), "bundle_sha256": str(sha256)},
            "source": {"training_run": str(run), "filter": str(where), "states": [*states]},
            "counts": {"rollouts": int(count)},
        } if all(isinstance(each, str) for each in states):
            grader = GraderIdentity(kind=kind, entry=entry, bundle_sha256=sha256)
            return grader, Source(training_run=run, filter=where, states=tuple(states)), count
        case _:
            problems.append((1, "the header needs `grader`, `source` and `counts`"))
            return None


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _packed(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(errors="replace")
