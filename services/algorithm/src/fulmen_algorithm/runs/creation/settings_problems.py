"""Describes problems of settings: a path of fields and the problem, with similar names."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from fulmen.errors import Violation
from fulmen.train_toml.reader import hint

_FOLLOWS = "default_factory_not_called"
"""Pydantic's error type for a computed default whose inputs are invalid."""
_CHOICE = re.compile(r"\^\(([a-z0-9_|]+)\)\$")
MAX_REPORTED = 100
MAX_FIELD, MAX_TEXT = 256, 2000
"""Characters of one problem, which may quote a key or a kind."""
_KINDS = ("kind", "codec")
"""Discriminator fields of unions of settings."""


def settings_problems(
    error: ValidationError, settings: type[BaseModel], *, prefix: str = "settings"
) -> list[Violation]:
    """Returns the problems with their field paths, such as `settings.loss.clip.low`, and suggests similar names.

    Of more than `MAX_REPORTED` the others are counted: looking for similar names takes a millisecond each.
    """
    found = []
    problems = [each for each in error.errors(include_url=False, include_input=False) if each["type"] != _FOLLOWS]
    for item in problems[:MAX_REPORTED]:
        field = ".".join([prefix, *(str(part) for part in item["loc"])])
        text = _text(
            item["type"], item["msg"], item.get("ctx", {}), _models_at(settings, item["loc"][:-1]), item["loc"]
        )
        found.append(Violation(field=field[:MAX_FIELD], description=text[:MAX_TEXT]))
    if len(problems) > MAX_REPORTED:
        text = f"{len(problems) - MAX_REPORTED} more problems are not listed"
        found.append(Violation(field=prefix, description=text))
    return found


def _text(
    kind: str, message: str, context: dict[str, Any], around: Sequence[type[BaseModel]], place: tuple[int | str, ...]
) -> str:
    match kind:
        case "extra_forbidden":
            known = sorted({name for model in around for name in model.model_fields})
            return f"no such setting{hint(str(place[-1]), known, list_all=False)}"
        case "union_tag_invalid":
            kinds = re.findall(r"'([^']+)'", context["expected_tags"])
            near = hint(context["tag"], kinds, list_all=False)
            return f"{_key(context)} {context['tag']!r} is not one of: {', '.join(kinds)}{near}"
        case "union_tag_not_found":
            within = {name: model for each in around for name, model in _fields(each)}
            kinds = [name for model in _models(within.get(str(place[-1]))) for name in _kinds(model)]
            return f"needs a {_key(context)}: {', '.join(kinds)}"
        case "string_pattern_mismatch" if choice := _CHOICE.fullmatch(context["pattern"]):
            return f"should be one of: {', '.join(choice[1].split('|'))}"
        case _:
            return message.removeprefix("Value error, ").removeprefix("Input ")


def _key(context: dict[str, Any]) -> str:
    return str(context["discriminator"]).strip("'")


def _models_at(settings: type[BaseModel], place: Sequence[int | str]) -> list[type[BaseModel]]:
    """Returns the settings classes at a path of field names and kinds."""
    models = [settings]
    for part in place:
        nested = [each for model in models for name, kind in _fields(model) if name == part for each in _models(kind)]
        models = nested or [model for model in models if part in _kinds(model)] or models
    return models


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    return ((name, field.annotation) for name, field in model.model_fields.items())


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Finds the settings in a type, such as those of a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in _models(part)]


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    fields = model.model_fields
    return tuple(name for key in _KINDS if key in fields for name in get_args(fields[key].annotation))
