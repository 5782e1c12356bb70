"""Generates docs/train-toml.md and docs/train.schema.json from the settings of the algorithms and the reader of train.toml.

python tools/train_toml_reference.py            writes them
python tools/train_toml_reference.py --check    exits with 1 if they are not current
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, RunSettings
from fulmen_algorithm.runs.describing import attributes, setting_texts, summary

DOCS = Path(__file__).parents[1] / "docs"
PAGE, SCHEMA = DOCS / "train-toml.md", DOCS / "train.schema.json"
TEXT, TEXTS, NUMBER, WHOLE = ({"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "number"},
                              {"type": "integer"})  # fmt: skip
SIZE = {"type": ["string", "integer"]}
TABLES: Mapping[str, Mapping[str, tuple[Mapping[str, Any], str]]] = {
    "": {"name": (TEXT, "Name of the training; the names of its runs begin with it. Required.")},
    "policy": {
        "name": (TEXT, "Name of the policy that is trained. Without this table no weights are trained."),
        "base": (
            TEXT,
            'First weights: a model on a hub, `"hf:org/name"` or `"hf:org/name@revision"`, or an uploaded one, `"model:NAME"`.',
        ),
        "build": (TEXT, '`"file.py:function"` that builds the first weights.'),
        "path": (TEXT, "Folder of the first weights."),
        "version": (TEXT, "Published version to start from, such as `resources/policy.mine/versions/3`."),
    },
    "agent": {
        "python": (TEXT, 'Python callable, `"file.py:name"` or `"package.module:name"`.'),
        "command": (TEXTS, "Program with its arguments."),
        "container": ({"type": "object"}, "Container of a Docker engine: table `[agent.container]`."),
        "job": (TEXT, "File of a Kubernetes Job."),
        "isolation": ({"enum": ["trusted", "process", "sandbox"]}, "Minimum isolation of agent and grader."),
        "max_output": (SIZE, 'Maximum size of the outcome that is kept, such as `"16KiB"`; not of Python callables.'),
        "limits": ({"type": "object"}, "Limits of one attempt: table `[agent.limits]`."),
        "environment": ({"type": "object"}, "More environment variables."),
        "secrets": (TEXTS, "Secrets of the project that attempts get as environment variables."),
        "include": (TEXTS, "Patterns of files that the bundle includes although they would be left out."),
        "requirements": (
            TEXT,
            "File in the agent's folder that lists its packages; runners install them once.",
        ),
        "venv": (TEXT, "Virtual environment on the runners' machine, absolute or relative to the file."),
        "grader": (TEXT, "Grader that is a Python callable."),
        "grader_command": (TEXTS, "Grader that is a command."),
        "judge": ({"type": "object"}, "Grader that is a language model: table `[agent.judge]`."),
    },
    "agent.container": {
        "image": (TEXT, "Image. Required."),
        "command": (TEXTS, "Command; by default the image's."),
        "network": (TEXT, "Docker network; by default the runner's setting."),
    },
    "agent.limits": {
        "memory": (SIZE, 'Memory of all its processes together, such as `"2GiB"`.'),
        "cpus": (NUMBER, "CPUs, of containers and Jobs."),
        "processes": (WHOLE, "Maximum number of processes and threads."),
    },
    "agent.judge": {
        "model": (TEXT, "Name of a model at the proxy. Required."),
        "prompt": (TEXT, "Prompt of the judge."),
        "prompt_file": (TEXT, "File of the prompt."),
        "dimensions": (TEXTS, "Dimensions, one reward each."),
        "min": (NUMBER, "Lowest score; 0 by default."),
        "max": (NUMBER, "Highest score; 10 by default."),
        "samples": (WHOLE, "Number of judgements; their mean is the reward."),
    },
    "data": {
        "train": (TEXT, "Tasks to train on, JSONL."),
        "validation": (TEXT, "Tasks to validate with, JSONL."),
        "test": (TEXT, "Tasks for a measurement at the end, JSONL."),
        "demonstrations": (TEXT, "Conversations to imitate, JSONL."),
        "validation_demonstrations": (TEXT, "Conversations that are not trained on, JSONL."),
        "preferences": (TEXT, "Pairs of answers to the same prompt, JSONL."),
        "prompt": (TEXT, "The agent's prompt, a text file."),
        "scores": (TEXT, "Published scores, `NAME` or `NAME@VERSION`."),
        "rollouts": (TEXT, "Training run whose stored rollouts are read: its name, id, a part of it, or `latest`."),
    },
}
NOTES: Mapping[str, str] = {
    "agent": "How to run the agent. Leave this table out if no stage runs it, such as with `sft` on demonstrations.",
}
INTRODUCTION = """\
# train.toml

Look up every key of a `train.toml`, and check a file. How to write an agent is in [agents.md](agents.md), what the algorithms do in
[algorithms-rl.md](algorithms-rl.md), and how to control runs in [runs.md](runs.md). Generated by `tools/train_toml_reference.py`; do not
edit.

## Check a file

```sh
fulmen train train.toml --check
```

This reports every mistake in the file, its stages and its data at once, without a stack. For completion and checks in an editor that reads
JSON Schemas of TOML files (Even Better TOML, taplo), put [train.schema.json](train.schema.json) beside the file and begin it with:

```text
#:schema ./train.schema.json
```
"""
STAGES = """
## [[stage]]

A file has 1 to 16 stages. Each is a training run of one algorithm, and starts where the stage before ended; the service starts it without
a client ([runs.md](runs.md#stages)). The key `algorithm` names the algorithm; all other keys are its settings. The Python classes have the
same settings as arguments: `fulmen.GRPO(steps=40)`.

| algorithm | what it does |
|---|---|
"""


NESTED = """
## Tables of settings

These are the settings above whose values are tables. If there are several kinds of a table, `kind` selects one.
"""
HEAD = ("| key | value | default | what it is |", "|---|---|---|---|")
KINDS = ("kind", "codec")
TYPES = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false", "array": "list",
         "object": "table", "any": "any value"}  # fmt: skip


def made() -> dict[Path, str]:
    """Returns the texts of the files."""
    registry = load_registry()
    return {PAGE: _page(registry), SCHEMA: json.dumps(_schema(registry), separators=(",", ":"), sort_keys=True) + "\n"}


def _page(registry: Mapping[str, AlgorithmEntry[Any]]) -> str:
    lines = [INTRODUCTION]
    for table, keys in TABLES.items():
        lines += [
            f"## [{table}]\n" if table else "## The file itself\n",
            *([f"{NOTES[table]}\n"] if table in NOTES else []),
            "| key | value | what it is |",
            "|---|---|---|",
        ]
        lines += [f"| `{key}` | {' or '.join(_types(kind, {}))} | {text} |" for key, (kind, text) in keys.items()]
        lines.append("")
    lines.append(STAGES.strip("\n"))
    lines += [f"| [`{name}`](#{name}) | {summary(registry[name])} |" for name in sorted(registry)]
    shared = _shared(registry)
    for settings, users in shared.items():
        names = ", ".join(f"`{name}`" for name in sorted(users))
        lines += ["", f"### {_title(settings)}", "", f"Of {names}.", "", *_settings(registry[min(users)], settings)]
    for name in sorted(registry):
        entry = registry[name]
        above = ", ".join(f"[{_title(each)}](#{_anchor(_title(each))})" for each in shared if name in shared[each])
        lines += [
            "",
            f"### {name}",
            "",
            f"{summary(entry)}",
            "",
            *_inputs(entry),
            *([f"Also: {above}."] if above else []),
        ]
        if entry.settings not in shared:
            lines += ["", *_settings(entry, entry.settings)]
    lines += ["", NESTED.strip("\n"), *_nested(registry)]
    return "\n".join(lines).rstrip() + "\n"


def _shared(registry: Mapping[str, AlgorithmEntry[Any]]) -> dict[type[RunSettings], set[str]]:
    """Returns the settings that several algorithms have, the most common first, with these algorithms."""
    users: dict[type[RunSettings], set[str]] = {}
    for name, entry in registry.items():
        for base in entry.settings.__mro__:
            if issubclass(base, RunSettings):
                users.setdefault(base, set()).add(name)
    several = {base: names for base, names in users.items() if len(names) > 1}
    return dict(sorted(several.items(), key=lambda item: (len(item[0].__mro__), item[0].__name__)))


@functools.cache
def _schema_of(settings: type[RunSettings]) -> dict[str, Any]:
    """Returns the JSON Schema of a class of settings, made once: each takes a tenth of a second."""
    return settings.model_json_schema()


def _settings(entry: AlgorithmEntry[Any], settings: type[RunSettings]) -> list[str]:
    """Returns the table of the settings that a class defines."""
    own = settings.__annotations__.keys() & settings.model_fields.keys()
    types = _schema_of(settings)
    rows = [
        _row(each.name, types["properties"][each.name], types.get("$defs", {}), each.default_json, each.summary)
        for each in setting_texts(replace(entry, settings=settings))
        if each.name in own
    ]
    return [*HEAD, *rows] if rows else []


def _nested(registry: Mapping[str, AlgorithmEntry[Any]]) -> list[str]:
    """Returns the tables that are values of settings, by the path of the setting."""
    definitions: dict[str, Any] = {}
    texts: dict[str, Mapping[str, str]] = {}
    waiting: dict[str, dict[str, None]] = {}
    for name in sorted(registry):
        schema = _schema_of(registry[name].settings)
        definitions |= schema.get("$defs", {})
        texts |= {each.__name__: _texts(each) for each in _classes(registry[name].settings)}
        for setting, value in schema["properties"].items():
            waiting.setdefault(setting, {}).update(dict.fromkeys(_models(value)))
    lines: list[str] = []
    seen: set[frozenset[str]] = set()
    paths = sorted((path, list(models)) for path, models in waiting.items())
    for path, models in paths:
        if frozenset(models) in seen or not any("properties" in definitions[model] for model in models):
            continue
        seen.add(frozenset(models))
        lines += [
            "",
            f"### {path}",
            *_section([(definitions[model], texts.get(model, {})) for model in models], definitions),
        ]
        inner: dict[str, dict[str, None]] = {}
        for model in models:
            for key, value in definitions[model].get("properties", {}).items():
                inner.setdefault(f"{path}.{key}", {}).update(dict.fromkeys(_models(value)))
        at = paths.index((path, models)) + 1
        paths[at:at] = sorted((key, list(found)) for key, found in inner.items())
    return lines


def _section(models: list[tuple[Mapping[str, Any], Mapping[str, str]]], definitions: Mapping[str, Any]) -> list[str]:
    """Returns the tables that a setting may be; keys that all have stand first, once."""
    rows = [
        [
            _row(
                key, value, definitions, json.dumps(value["default"]) if "default" in value else "", texts.get(key, "")
            )
            for key, value in model.get("properties", {}).items()
            if key not in KINDS
        ]
        for model, texts in models
    ]
    common = [row for row in rows[0] if all(row in others for others in rows)] if len(models) > 1 else []
    lines = ["", "Every kind has", "", *HEAD, *common] if common else []
    for (model, _), own in zip(models, rows, strict=True):
        properties = model.get("properties", {})
        kinds = (
            f"`{key} = {json.dumps(properties[key]['const'])}`: " for key in KINDS if "const" in properties.get(key, {})
        )
        first = " ".join(model.get("description", "").partition("\n\n")[0].split())
        lines += ["", f"{next(kinds, '')}{first}"]
        if left := [row for row in own if row not in common]:
            lines += ["", *HEAD, *left]
    return lines


def _texts(settings: type) -> Mapping[str, str]:
    """Returns the texts of a class's keys, each of the class that describes it last."""
    bases = [inspect.cleandoc(base.__dict__.get("__doc__") or "") for base in reversed(settings.__mro__)]
    return {key: text for base in bases for key, text in attributes(base).items()}


def _classes(annotation: Any) -> Iterator[type]:
    """Yields the classes with settings in a type, and those in theirs."""
    if isinstance(annotation, type) and get_origin(annotation) is None:
        if issubclass(annotation, BaseModel) or is_dataclass(annotation):
            yield annotation
            for inner in get_type_hints(annotation, include_extras=False).values():
                yield from _classes(inner)
        return
    for part in get_args(annotation):
        yield from _classes(part)


def _models(schema: Any) -> list[str]:
    """Returns the names of the definitions that a schema refers to."""
    if isinstance(schema, Mapping):
        own = [schema["$ref"].rpartition("/")[2]] if "$ref" in schema else []
        return own + [name for key, value in schema.items() if key != "discriminator" for name in _models(value)]
    return [name for value in schema for name in _models(value)] if isinstance(schema, list) else []


def _row(name: str, schema: Mapping[str, Any], definitions: Mapping[str, Any], default: str, text: str) -> str:
    # Python's null is a key that is left out.
    text = text.replace("null for", "not set:").replace("null", "not set")
    kind = " or ".join([*(f'`"{word}"`' for word in _words(text)), *_types(schema, definitions)])
    row = f"| `{name}` | {kind} | {_default(default, text)} | {' '.join(text.split())} |"
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("|", "\\|"), row)


def _words(text: str) -> list[str]:
    """Returns the words for a value that TOML cannot express."""
    return [word for word in ("auto", "none") if f'`"{word}"`' in text]


def _default(value: str, text: str) -> str:
    if not value:
        return "needed"
    if value == "null":
        return next((f'`"{word}"`' for word in _words(text)), "not set")
    return f"`{_toml(json.loads(value))}`"


def _toml(value: Any) -> str:
    """Returns a value in TOML's syntax, without entries that are null."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items() if each is not None) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


def _inputs(entry: AlgorithmEntry[Any]) -> list[str]:
    words = {"Needs": entry.needs, "Needs one of": entry.any_of, "May have": entry.optional_inputs}
    return [f"{word}: {', '.join(f'`{use}`' for use in uses)}.\n" for word, uses in words.items() if uses]


def _title(settings: type[RunSettings]) -> str:
    words = re.findall(r"[A-Z][a-z]+", settings.__name__.removesuffix("Settings"))
    return f"Settings of {' '.join(words).lower()}"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _types(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[str]:
    """Returns the types of a value in words; null is no value of TOML."""
    if "$ref" in schema:
        return _types(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return list(dict.fromkeys(word for each in schema[key] for word in _types(each, definitions)))
    if "enum" in schema or "const" in schema:
        return [f"`{json.dumps(each)}`" for each in schema.get("enum", [schema.get("const")])]
    kinds = schema.get("type", "any")
    words = [TYPES[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds) if kind != "null"]
    if kinds == "array" and "items" in schema:
        return [f"list of {' or '.join(_types(schema['items'], definitions))}"]
    return words


def _schema(registry: Mapping[str, AlgorithmEntry[Any]]) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of the file."""
    definitions: dict[str, Any] = {}
    stages = []
    for name in sorted(registry):
        schema = copy.deepcopy(_schema_of(registry[name].settings))
        for model, definition in schema.pop("$defs", {}).items():
            if definitions.setdefault(model, definition) != definition:
                raise ValueError(f"two settings classes are named {model}")
        texts = {each.name: each.summary for each in setting_texts(registry[name])}
        for setting, value in schema["properties"].items():
            if words := _words(texts[setting]):
                schema["properties"][setting] = {"anyOf": [{"enum": words}, value]}
            schema["properties"][setting]["description"] = texts[setting]
        algorithm = {"const": name, "description": summary(registry[name])}
        schema["properties"] = {"algorithm": algorithm, **schema["properties"]}
        schema["required"] = ["algorithm", *schema.get("required", ())]
        definitions[f"stage.{name}"] = schema
        when = {"properties": {"algorithm": {"const": name}}, "required": ["algorithm"]}
        stages.append({"if": when, "then": {"$ref": f"#/$defs/stage.{name}"}})
    known = {"type": "object", "required": ["algorithm"], "properties": {"algorithm": {"enum": sorted(registry)}}}
    tables = {table: _table(keys) for table, keys in TABLES.items()}
    for table in ("container", "limits", "judge"):
        tables["agent"]["properties"][table] = tables[f"agent.{table}"]
    # A deployment may have algorithms of its own; an unknown name is left to it.
    properties = {
        **tables[""]["properties"],
        **{table: tables[table] for table in ("policy", "agent", "data")},
        "stage": {"type": "array", "minItems": 1, "items": {**known, "allOf": stages}},
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "train.toml of Fulmen",
        "type": "object",
        "required": ["name", "data", "stage"],
        "additionalProperties": False,
        "properties": properties,
        "$defs": definitions,
    }


def _table(keys: Mapping[str, tuple[Mapping[str, Any], str]]) -> dict[str, Any]:
    properties = {key: {**kind, "description": text} for key, (kind, text) in keys.items()}
    required = [key for key, (_, text) in keys.items() if text.endswith("Needed.")]
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


def stale(texts: Mapping[Path, str]) -> Iterator[Path]:
    """Yields the files whose text is another."""
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield path


def write_or_check(texts: Mapping[Path, str], tool: str) -> int:
    """Writes files, or checks them with `--check`; returns the exit status."""
    if "--check" not in sys.argv[1:]:
        for path in stale(texts):
            path.write_text(texts[path], encoding="utf-8")
        return 0
    old = [path.name for path in stale(texts)]
    if old:
        sys.stderr.write(f"not as {tool} makes them: {', '.join(old)}\n")
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(write_or_check(made(), "tools/train_toml_reference.py"))
