"""Makes the classes of algorithms of the Python API, such as `fulmen.GRPO`, of the algorithm service's settings.

Types, texts and inheritance are those of the service; defaults stay there, so that a setting that is not given has the
default of the service that runs it. `--check` changes nothing, and exits with 1 if a file is not what would be made.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, RunSettings
from fulmen_algorithm.runs.describing import summary

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "sdk/python/src/fulmen/training"
CLASSES, SETTINGS = FOLDER / "algorithms.py", FOLDER / "algorithm_settings.py"
ACRONYMS = frozenset({"apo", "cispo", "dapo", "dpo", "gepa", "grpo", "gspo", "kto", "pp", "ppo", "rloo", "sft"})
TYPES = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None"}
CLASSES_HEAD = '''"""The built-in algorithms. Made by tools/algorithm_classes.py of those of the algorithm service."""

from __future__ import annotations

from typing import Unpack

from fulmen.training import algorithm_settings
from fulmen.training.algorithm import Algorithm

__all__ = [{names}]


'''
SETTINGS_HEAD = '''"""Settings of the built-in algorithms. Made by tools/algorithm_classes.py of those of the algorithm service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


'''


def made() -> dict[Path, str]:
    """Returns the texts of the modules by file."""
    registry = load_registry()
    parts: dict[type, str] = {}
    for entry in registry.values():
        _add_settings(entry.settings, parts)
    names = ", ".join(f'"{class_name(name)}"' for name in sorted(registry))
    classes = [_algorithm(registry[name]) for name in sorted(registry)]
    return {
        CLASSES: _formatted(CLASSES, CLASSES_HEAD.format(names=names) + "\n\n".join(classes)),
        SETTINGS: _formatted(SETTINGS, SETTINGS_HEAD + "\n\n".join(parts.values())),
    }


def _formatted(path: Path, text: str) -> str:
    for arguments in (["check", "--select", "I,F401", "--fix"], ["format"]):
        command = [
            str(Path(sys.executable).with_name("ruff")),
            *arguments,
            "--quiet",
            "--stdin-filename",
            str(path),
            "-",
        ]
        text = subprocess.run(command, input=text, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return text


def class_name(algorithm: str) -> str:
    """Returns the name of the class of an algorithm: `DrGRPO` of `dr_grpo`."""
    return "".join(word.upper() if word in ACRONYMS else word.capitalize() for word in algorithm.split("_"))


def _add_settings(settings: type[RunSettings], parts: dict[type, str]) -> None:
    """Adds the typed dictionary of a settings class, after those of its bases."""
    bases = [base for base in settings.__bases__ if issubclass(base, RunSettings)]
    for base in bases:
        _add_settings(base, parts)
    if settings in parts:
        return
    schema = settings.model_json_schema()
    inherited = {name for base in bases for name in base.model_fields}
    own = [name for name in settings.model_fields if name not in inherited]
    lines = [f"class {settings.__name__}({', '.join(base.__name__ for base in bases) or 'TypedDict'}, total=False):"]
    lines += [
        _docstring(inspect.cleandoc(settings.__dict__.get("__doc__") or f"Settings of {settings.__name__}."), 4),
        "",
    ]
    lines += [f"    {name}: {_type(schema['properties'][name], schema.get('$defs', {}))}" for name in own]
    parts[settings] = "\n".join(lines) + "\n"


def _algorithm(entry: AlgorithmEntry[Any]) -> str:
    text = summary(entry)
    return "\n".join(
        [
            f"class {class_name(entry.name)}(Algorithm):",
            _docstring(
                f"{text}\n\nIts settings are those of `{entry.settings.__name__}`; see docs/algorithms-rl.md.", 4
            ),
            "",
            f"    def __init__(self, **settings: Unpack[algorithm_settings.{entry.settings.__name__}]) -> None:",
            '        """Keeps the settings that differ from the defaults of the service."""',
            f'        super().__init__("{entry.name}", **settings)',
            "",
        ]
    )


def _docstring(text: str, indent: int) -> str:
    margin = " " * indent
    body = "\n".join(f"{margin}{line}" if line else "" for line in text.split("\n")).strip()
    return f'{margin}"""{body}' + (f"\n{margin}" if "\n" in text else "") + '"""'


def _type(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Returns the Python type of a value; tables are mappings, whose keys the service checks."""
    if "$ref" in schema:
        return _type(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " | ".join(dict.fromkeys(_type(each, definitions) for each in schema[key]))
    match schema.get("type"):
        case "array":
            return f"Sequence[{_type(schema.get('items', {}), definitions)}]"
        case "object":
            return "Mapping[str, Any]"
        case str() as word:
            return TYPES[word]
        case _:
            return "Any"


def main() -> int:
    """Writes or checks the files; returns the exit status."""
    stale = {
        path: text for path, text in made().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    if "--check" not in sys.argv[1:]:
        for path, text in stale.items():
            path.write_text(text, encoding="utf-8")
        return 0
    if stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.stderr.write(f"not as tools/algorithm_classes.py makes them: {names}\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
