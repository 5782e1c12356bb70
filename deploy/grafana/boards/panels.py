"""What a dashboard is described with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RATE = "[$__rate_interval]"
# Every replica counts the whole queue: the largest of their answers, not the sum.
WAITING = "max by (project, labels) (fulmen_store_demand_queued)"
SERVICES = 'job=~"store|llm_proxy|algorithm|runner"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        queries: PromQL by its legend, which may name labels: `{{backend}}`.
        unit: unit by Grafana's name.
        kind: `timeseries` or `stat`.
        width: of 24.
        alarm: threshold above which it is red; with `alarm_below`, below.
        stacked: whether series are stacked.
        about: description shown as a tooltip.
    """

    title: str
    queries: Mapping[str, str]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    minimum: float | None = 0
    maximum: float | None = None
    alarm: float | None = None
    alarm_below: bool = False
    stacked: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels that belong together."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """Something to choose by: the values of a label of a metric."""

    name: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard; `span` is the time that it shows at first."""

    name: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[Variable] = ()
    span: str = "1h"


def number(title: str, query: str, **more: object) -> Panel:
    """Returns a panel of one number."""
    return Panel(title=title, queries={"": query}, kind="stat", width=3, minimum=None, **more)  # type: ignore[arg-type]


def percentiles(
    title: str, histogram: str, *, by: str = "", where: str = "", unit: str = "s", about: str = ""
) -> Panel:
    """Returns a panel with half, 95 % and 99 % of a histogram, by labels."""
    labels = f"le, {by}" if by else "le"
    rate = f"sum by ({labels}) (rate({histogram}_bucket{where}[$__rate_interval]))"
    named = f" {{{{{by}}}}}" if by else ""
    shares = {"50 %": 0.5, "95 %": 0.95, "99 %": 0.99}
    queries = {f"{name}{named}": f"histogram_quantile({share}, {rate})" for name, share in shares.items()}
    return Panel(title=title, queries=queries, unit=unit, about=about)


def rate(metric: str, *, by: str, where: str = "") -> str:
    """Returns the rate of a counter by labels."""
    return f"sum by ({by}) (rate({metric}{where}{RATE}))"


def total(metric: str) -> str:
    """Returns the rate of a counter, of all its series together."""
    return f"sum(rate({metric}{RATE}))"


def met(title: str, counter: str, *, missed: str) -> Panel:
    """Returns a panel of the ratio of a counter that does not have the labels `missed`; below 99.9 % it is red."""
    ratio = f"1 - (sum(rate({counter}{missed}{RATE})) or vector(0)) / {total(counter)}"
    return Panel(
        title=title,
        queries={"ratio": ratio},
        unit="percentunit",
        minimum=None,
        maximum=1,
        alarm=0.999,
        alarm_below=True,
    )


def run_metrics(title: str, *names: str, unit: str = "short", minimum: float | None = 0, about: str = "") -> Panel:
    """Returns a panel of metrics of training runs."""
    chosen = f'{{run=~"$run", metric=~"{"|".join(names)}"}}'
    legend = "{{run}}" if len(names) == 1 and names[0].isidentifier() else "{{run}} {{metric}}"
    return Panel(
        title=title, queries={legend: f"fulmen_algorithm_run_metric{chosen}"}, unit=unit, minimum=minimum, about=about
    )
