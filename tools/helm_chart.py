"""Lints and renders a chart with Helm's SDK, without the `helm` program.

Runs in the environment of tools/helm_toolchain.sh, which contains only the SDK:

    .venv-helm/bin/python tools/helm_chart.py lint deploy/helm/fulmen
    .venv-helm/bin/python tools/helm_chart.py template deploy/helm/fulmen [--values FILE.yaml]... [--name N] [--namespace N]
    .venv-helm/bin/python tools/helm_chart.py install deploy/helm/fulmen ...   # a dry run: hooks, order and notes
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import helm_python as helm

WARNING = 2


def main() -> int:
    """Runs one command; returns the exit status."""
    arguments = _arguments()
    try:
        return arguments.run(arguments)
    except helm.HelmError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    commands.add_parser("version", help="prints the SDK's release").set_defaults(run=_version)
    for name, run in (("lint", _lint), ("template", _template), ("install", _install)):
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        command.add_argument("chart")
        command.add_argument("--values", action="append", default=[], help="YAML file; - for standard input")
        command.add_argument("--name", default="fulmen", help="name of the release")
        command.add_argument("--namespace", default="fulmen")
        command.add_argument("--json", action="store_true", help="prints rendered files by name, as JSON")
    return parser.parse_args()


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"Helm SDK {helm.helm_sdk_version()}\n")
    return 0


def _lint(arguments: argparse.Namespace) -> int:
    report = helm.lint(arguments.chart, _values(arguments), strict=True, namespace=arguments.namespace)
    for message in report["messages"]:
        sys.stdout.write(f"{message['path']}: {message['error']}\n")
    return 1 if report["errors"] or any(each["severity"] >= WARNING for each in report["messages"]) else 0


def _template(arguments: argparse.Namespace) -> int:
    values = _values(arguments)
    with helm.Chart.load(arguments.chart) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=arguments.name, namespace=arguments.namespace)
    if arguments.json:
        sys.stdout.write(json.dumps(files))
        return 0
    for name, text in sorted(files.items()):
        if text.strip() and not name.endswith("NOTES.txt"):
            sys.stdout.write(f"---\n# Source: {name}\n{text.strip()}\n")
    return 0


def _install(arguments: argparse.Namespace) -> int:
    with helm.Config(namespace=arguments.namespace, storage_driver="memory") as configuration:
        release = configuration.install(arguments.chart, arguments.name, _values(arguments), dry_run="client")
    sys.stdout.write(json.dumps({"manifest": release["manifest"], "notes": release["notes"]}))
    return 0


def _values(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the merged values of all files; later files override earlier ones, as with `helm --values`."""
    merged: dict[str, Any] = {}
    for name in arguments.values:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        merged = _over(merged, helm.values_from_yaml(text))
    return merged


def _over(lower: dict[str, Any], upper: dict[str, Any]) -> dict[str, Any]:
    both = {key: _over(lower[key], upper[key]) for key in lower.keys() & upper.keys() if _are_maps(lower, upper, key)}
    return {**lower, **upper, **both}


def _are_maps(lower: dict[str, Any], upper: dict[str, Any], key: str) -> bool:
    return isinstance(lower[key], dict) and isinstance(upper[key], dict)


if __name__ == "__main__":
    sys.exit(main())
