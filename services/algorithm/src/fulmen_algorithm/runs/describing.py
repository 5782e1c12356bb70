"""Descriptions of algorithms and settings, read from docstrings and defaults."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from fulmen_algorithm.runs.algorithm import AlgorithmEntry

_VARIANT = re.compile(r"Settings of `\w+` \((?P<source>[^)]+)\): (?P<text>.+)\.")
_ANYTHING = TypeAdapter(Any)
_ATTRIBUTES = "Attributes:"
_ITEM = re.compile(r"(\w+): (.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingText:
    """One setting: its key, its default as JSON (empty if required), and its description."""

    name: str
    default_json: str
    summary: str


def summary(entry: AlgorithmEntry[Any]) -> str:
    """Returns the summary of an algorithm: from its settings class, its implementation or its module, in this order."""
    settings = _first_paragraph(entry.settings.__dict__.get("__doc__"))
    if variant := _VARIANT.fullmatch(settings):
        text = variant["text"]
        return f"{text[0].upper()}{text[1:]} ({variant['source']})."
    module = inspect.getmodule(entry.settings)
    return (
        _first_paragraph(inspect.getdoc(entry.make)) or settings or _first_paragraph(module.__doc__ if module else None)
    )


def _first_paragraph(text: str | None) -> str:
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())


def setting_texts(entry: AlgorithmEntry[Any]) -> Sequence[SettingText]:
    """Lists the settings, the algorithm's own first; each is described in the class that defines it."""
    texts: dict[str, str] = {}
    for base in reversed(entry.settings.__mro__):
        texts |= attributes(inspect.cleandoc(base.__dict__.get("__doc__") or ""))
    fields = entry.settings.model_fields
    depth = {name: i for i, base in enumerate(entry.settings.__mro__) for name in inspect.get_annotations(base)}
    return [
        SettingText(name=name, default_json=_default(fields[name]), summary=texts.get(name, ""))
        for name in sorted(fields, key=lambda name: depth[name])
    ]


def _default(field: Any) -> str:
    if field.is_required():
        return ""
    return _ANYTHING.dump_json(field.get_default(call_default_factory=True, validated_data={})).decode()


def attributes(text: str) -> dict[str, str]:
    """Reads the section `Attributes:` of a docstring, in Google's style."""
    _, _, section = text.partition(_ATTRIBUTES)
    found: dict[str, str] = {}
    name = ""
    for line in section.splitlines()[1:]:
        if line and not line.startswith(" "):
            break
        match = _ITEM.fullmatch(line.strip())
        if match and not line.startswith(" " * 5):
            name = match[1]
            found[name] = match[2]
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found
