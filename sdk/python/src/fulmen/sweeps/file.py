"""The format of `sweep.toml`: which settings of a `train.toml` are tried, how many, and for how many steps.

Reading is strict, as for `train.toml`: all problems are reported together.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fulmen.train_toml.reader import ConfigError, TableReader, is_file, is_json, parsed_toml

__all__ = ["Sweep", "load_sweep"]

_KEYS: Final = ("name", "train", "trials", "metric", "goal", "seed", "steps", "search")
_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,23}")
_SETTING: Final = re.compile(r"[a-z][a-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+")
METRIC: Final = "validation_accuracy_after"
MAX_TRIALS: Final = 1000
MAX_STEPS: Final = 1_000_000
MAX_SEARCHED: Final = 100
"""Settings that are searched."""
MAX_VALUES: Final = 1000
"""Values of a setting."""
MAX_WHOLE: Final = 2**53
"""Beyond it JSON's numbers are not exact."""
DRAWS_PER_TRIAL: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Numbers from `low` to `high`, evenly or, if `log`, evenly by their logarithm; whole ones if both bounds are."""

    low: float
    high: float
    log: bool = False

    def drawn(self, chance: random.Random) -> float:
        """Draws a number."""
        if isinstance(self.low, int) and isinstance(self.high, int) and not self.log:
            return chance.randint(self.low, self.high)
        if not self.log:
            return self._within(float(f"{chance.uniform(self.low, self.high):.4g}"))
        found = math.exp(chance.uniform(math.log(self.low), math.log(self.high)))
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        return self._within(round(found) if whole else float(f"{found:.4g}"))

    def _within(self, rounded: float) -> float:
        return min(max(rounded, self.low), self.high)


def _combination(lists: Mapping[str, Sequence[Any]], number: int) -> dict[str, Any]:
    """Returns a combination of values by its number."""
    found = {}
    for key, values in lists.items():
        number, place = divmod(number, len(values))
        found[key] = values[place]
    return found


def _text(value: Any) -> str:
    """Returns a value as JSON, which distinguishes `1` from `true`, unlike comparisons."""
    return json.dumps(value, sort_keys=True)


Choices = Range | tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A whole `sweep.toml`.

    Attributes:
        file: The file.
        name: Prefix of the ids of its runs.
        train: The `train.toml`.
        trials: Number of settings that are tried.
        metric: Result by which trials are compared, from the run of the last stage.
        maximise: Whether higher is better.
        seed: Seed of the settings.
        steps_setting: Setting with the number of steps, such as `grpo.steps`.
        min_steps: Steps of every trial in the first rung.
        max_steps: Steps of the trials that are left in the last rung.
        factor: From one rung to the next a trial gets `factor` times the steps, and one of `factor` trials is left.
        search: Values of each searched setting.
    """

    file: Path
    name: str
    train: Path
    trials: int
    metric: str
    maximise: bool
    seed: int
    steps_setting: str
    min_steps: int
    max_steps: int
    factor: int
    search: Mapping[str, Choices]

    @property
    def rungs(self) -> tuple[tuple[int, int], ...]:
        """Trials and steps of each rung: n / factor^k trials with min * factor^k steps, the last with `max_steps`.

        Source: successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943), algorithm 1, with a factor of halving
        as in Hyperband (arXiv:1603.06560).
        """
        count = _rungs(self.min_steps, self.max_steps, self.factor)
        steps = [min(self.min_steps * self.factor**rung, self.max_steps) for rung in range(count)]
        steps[-1] = self.max_steps
        return tuple((self.trials // self.factor**rung, each) for rung, each in enumerate(steps))

    def settings(self) -> list[dict[str, Any]]:
        """Returns the settings of each trial, which depend only on the file; all are different.

        Fewer than `trials` if there are not as many combinations; `load_sweep` refuses such files.
        """
        chance = random.Random(f"{self.seed}/sweep")
        lists = {key: each for key, each in self.search.items() if isinstance(each, tuple)}
        if len(lists) == len(self.search):
            # By number: of all combinations there may be too many for a list.
            total = math.prod(len(each) for each in lists.values())
            if total <= sys.maxsize:
                return [_combination(lists, number) for number in chance.sample(range(total), min(self.trials, total))]
        found: dict[str, dict[str, Any]] = {}
        for _ in range(DRAWS_PER_TRIAL * self.trials):
            drawn = {
                key: chance.choice(each) if isinstance(each, tuple) else each.drawn(chance)
                for key, each in self.search.items()
            }
            found.setdefault(_text(drawn), drawn)
            if len(found) == self.trials:
                break
        return list(found.values())


def load_sweep(path: Path) -> Sweep:
    """Reads and checks a `sweep.toml`; the `train.toml` is not read.

    Raises:
        ConfigError: with every problem.
    """
    data, problems = parsed_toml(path), list[str]()
    table = TableReader(data, "", problems)
    table.known(*_KEYS)
    name, train = table.text("name", required=True), table.text("train", required=True)
    if name and not _NAME.fullmatch(name):
        table.problem("name", "at most 24 characters of a-z, 0-9 and -, beginning with a letter or digit")
    file = (path.parent / train).resolve()
    if train and file == path.resolve():
        table.problem("train", "names the sweep itself; it must be a train.toml")
    elif train and not is_file(file):
        table.problem("train", f"there is no file {file}")
    steps = table.table("steps", required=True)
    steps.known("setting", "min", "max", "factor")
    sweep = Sweep(
        file=path.resolve(),
        name=name,
        train=file,
        trials=table.whole_number("trials", least=2, most=MAX_TRIALS),
        metric=table.text("metric") or METRIC,
        maximise=table.choice("goal", ("max", "min")) == "max",
        seed=table.whole_number("seed", least=0, most=2**31 - 1),
        steps_setting=steps.text("setting", required=True),
        min_steps=steps.whole_number("min", least=1, most=MAX_STEPS),
        max_steps=steps.whole_number("max", least=1, most=MAX_STEPS),
        factor=steps.whole_number("factor", least=2, most=100) or 3,
        search=_search(table.table("search", required=True), data.get("search")),
    )
    _needed(table, steps, data)
    _check(sweep, table, steps)
    if problems:
        raise ConfigError(f"{path} is not valid; nothing was created.", problems)
    return sweep


def _needed(table: TableReader, steps: TableReader, data: Mapping[str, Any]) -> None:
    if "trials" not in data:
        table.problem("trials", "is required: a whole number")
    for key in ("min", "max"):
        if key not in steps:
            steps.problem(key, "is required: a whole number")


def _search(table: TableReader, given: Any) -> dict[str, Choices]:
    found: dict[str, Choices] = {}
    for key, value in (given if isinstance(given, Mapping) else {}).items():
        match value:
            case list() if value and all(map(is_json, value)):
                if len(value) > MAX_VALUES:
                    table.problem(f'"{key}"', f"has {len(value)} values; at most {MAX_VALUES} are possible")
                elif len(set(map(_text, value))) < len(value):
                    table.problem(f'"{key}"', "has a value twice")
                else:
                    found[key] = tuple(value)
            case {"low": low, "high": high, **rest} if _is_number(low) and _is_number(high):
                if rest.keys() - {"log"} or not isinstance(rest.get("log", False), bool):
                    table.problem(f'"{key}"', "has keys other than low, high and log (true or false)")
                elif low >= high:
                    table.problem(f'"{key}"', f"low ({low:g}) must be less than high ({high:g})")
                elif not math.isfinite(float(high) - float(low)):
                    table.problem(f'"{key}"', f"is too wide a range: from {low:g} to {high:g}")
                elif rest.get("log") and low <= 0:
                    table.problem(f'"{key}"', "low must be greater than 0 with log")
                else:
                    found[key] = Range(low=low, high=high, log=bool(rest.get("log", False)))
            case _:
                table.problem(f'"{key}"', "must be a list of values, or { low = 1e-5, high = 1e-3, log = true }")
    return found


def _check(sweep: Sweep, table: TableReader, steps: TableReader) -> None:
    """Adds the problems of values that are valid individually but not together."""
    for key in (*sweep.search, sweep.steps_setting):
        if key and not _SETTING.fullmatch(key):
            table.problem(f'"{key}"', 'write a setting with its algorithm in quotes, such as "grpo.learning_rate"')
    if not sweep.search:
        table.problem("search", "does not name a setting")
    if len(sweep.search) > MAX_SEARCHED:
        table.problem("search", f"has {len(sweep.search)} settings; at most {MAX_SEARCHED} are possible")
        return
    names = [*sweep.search, sweep.steps_setting]
    for one, other in itertools.permutations(names, 2):
        if one and other.startswith(f"{one}."):
            table.problem("search", f'"{other}" is a part of "{one}", which is set as a whole; search one of them')
    if sweep.steps_setting in sweep.search:
        table.problem("search", f'"{sweep.steps_setting}" is the budget of the trials and cannot be searched')
    if sweep.min_steps and sweep.max_steps and sweep.trials:
        _check_sizes(sweep, table, steps)


def _check_sizes(sweep: Sweep, table: TableReader, steps: TableReader) -> None:
    if sweep.min_steps > sweep.max_steps:
        steps.problem("min", f"is {sweep.min_steps}, more than max ({sweep.max_steps})")
        return
    count = _rungs(sweep.min_steps, sweep.max_steps, sweep.factor)
    least = sweep.factor ** (count - 1)
    if sweep.trials < least:
        table.problem(
            "trials",
            f"is {sweep.trials}, but {count} rungs with a factor of {sweep.factor} need {least} or more, so that one is left; "
            "raise steps.min, or lower steps.max",
        )
    if sweep.search and (different := len(sweep.settings())) < sweep.trials:
        table.problem("trials", f"is {sweep.trials}, but [search] has {different} different settings")


def _rungs(low: int, high: int, factor: int) -> int:
    count, steps = 1, low
    while steps * factor <= high:
        count, steps = count + 1, steps * factor
    return count


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MAX_WHOLE
    return isinstance(value, float) and math.isfinite(value)
