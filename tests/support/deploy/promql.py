"""Finds the names of metrics and labels in PromQL, without being a parser of it: promtool is."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Names", "names_in", "without_variables"]

_STRING = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^]]*\]|\boffset\s+\w+")
_SELECTOR = re.compile(r"([A-Za-z_:][\w:]*)?\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_NUMBER = re.compile(r"\b\d[\w.]*")
_WORDS = frozenset({"and", "or", "unless", "bool", "by", "without", "on", "ignoring", "inf", "nan"})
# Grafana puts these in; any values do for a look at the expression.
_VARIABLES = {"$__rate_interval": "5m", "$__interval": "1m", "$__range": "1h"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What an expression uses: the labels of each metric's selectors, and those that results are grouped by."""

    selected: dict[str, set[str]]
    grouped: set[str]


def without_variables(expression: str) -> str:
    """Returns the expression with values in the place of Grafana's variables."""
    for variable, value in _VARIABLES.items():
        expression = expression.replace(variable, value)
    return re.sub(r"\$\{?\w+\}?", ".*", expression)


def names_in(expression: str) -> Names:
    """Finds the names in an expression."""
    names = {}
    for found in re.findall(r'\{\s*__name__=~"([^"]*)"\s*\}', expression):
        names[found.removesuffix("(_total)?")] = set[str]()
        expression = expression.replace(f'{{__name__=~"{found}"}}', "")
    plain = _RANGE.sub("", _STRING.sub('""', without_variables(expression)))
    grouped = {label.strip() for found in _GROUPING.findall(plain) for label in found.split(",") if label.strip()}
    plain = _NUMBER.sub("", _GROUPING.sub("", plain))
    for match in _SELECTOR.finditer(plain):
        name, matchers = match.groups()
        is_function = plain[match.end() :].lstrip().startswith("(")
        if name and name not in _WORDS and not is_function:
            names.setdefault(name, set()).update(_MATCHER.findall(matchers or ""))
    return Names(selected=names, grouped=grouped)
