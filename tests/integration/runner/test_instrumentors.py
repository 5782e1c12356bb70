"""Which instrumentors are switched on, when, and what becomes of those that fail; seen from a command's own Python.

The frameworks and instrumentors are packages of a few lines that are really installed, in a folder of their own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fulmen_runner.agents.tracing.command import startup_environment

INSTRUMENTOR = """
class Instrumentor:
    is_instrumented_by_opentelemetry = False
    def _check_dependency_conflicts(self):
        return {conflict!r}
    def instrument(self, **kwargs):
        {body}
"""
SWITCHES_ON = "import {framework}; {framework}.TRACED_BY.append(({name!r}, sorted(kwargs)))"
FAILS = "raise RuntimeError('not with this version')"
PROGRAM = """
import json, sys
imported = [name for name in sys.argv[1:] if __import__(name)]
print(json.dumps({name: sys.modules[name].TRACED_BY for name in imported}))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Returns a folder of packages, with as much of OpenTelemetry's own as is looked for."""
    (tmp_path / "opentelemetry" / "instrumentation").mkdir(parents=True)
    (tmp_path / "opentelemetry" / "instrumentation" / "__init__.py").touch()
    for framework in ("langchain", "crewai", "flask"):
        install(tmp_path, framework, {f"{framework}/__init__.py": "TRACED_BY = []"})
    return tmp_path


def install(site: Path, name: str, files: dict[str, str], metadata: str = "", entry_points: str = "") -> None:
    """Installs a distribution as pip would."""
    info = f"{name.replace('-', '_')}-1.0.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{metadata}",
        f"{info}/entry_points.txt": entry_points,
    }
    for path, content in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(content)
    (site / info / "RECORD").write_text("\n".join(f"{path},," for path in files))


def install_instrumentor(
    site: Path, name: str, framework: str, *, group: str, body: str = SWITCHES_ON, conflict: str = ""
) -> None:
    """Installs an instrumentor of a framework under a distribution name and a group of entry points."""
    module = name.replace("-", "_")
    source = INSTRUMENTOR.format(conflict=conflict, body=body.format(framework=framework, name=name))
    requirement = f"Provides-Extra: instruments\nRequires-Dist: {framework}>=0.1; extra == 'instruments'\n"
    install(site, name, {f"{module}.py": source}, requirement, f"[{group}]\n{framework} = {module}:Instrumentor\n")


def run(site: Path, wanted: str, *imported: str, **environment: str) -> tuple[dict[str, list[list[object]]], str]:
    """Runs a program that imports frameworks; returns what traced each, and its errors."""
    variables = startup_environment(wanted, {"PYTHONPATH": str(site)}) or {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *imported],
        env={**variables, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return json.loads(done.stdout), done.stderr


def test_of_two_instrumentors_of_a_framework_one_is_switched_on(site: Path) -> None:
    install_instrumentor(site, "opentelemetry-langchain", "langchain", group="opentelemetry_instrumentor")
    install_instrumentor(site, "openinference-langchain", "langchain", group="openinference_instrumentor")
    given = ["skip_dep_check", "tracer_provider"]
    traced, errors = run(site, "auto", "langchain")
    assert traced == {"langchain": [["openinference-langchain", given]]}
    named, _ = run(site, "opentelemetry-langchain", "langchain")
    assert named == {"langchain": [["opentelemetry-langchain", given]]}
    assert errors == ""


def test_web_servers_are_instrumented_only_by_name(site: Path) -> None:
    install_instrumentor(site, "opentelemetry-flask", "flask", group="opentelemetry_instrumentor")
    assert run(site, "auto", "flask") == ({"flask": []}, "")
    traced, _ = run(site, "flask", "flask")
    assert [name for name, _ in traced["flask"]] == ["opentelemetry-flask"]


def test_one_that_fails_is_reported_and_stops_neither_the_program_nor_the_others(site: Path) -> None:
    group = "openinference_instrumentor"
    install_instrumentor(site, "one", "langchain", group=group, body=FAILS)
    install_instrumentor(site, "two", "crewai", group=group)
    traced, errors = run(site, "auto", "langchain", "crewai")
    assert traced["langchain"] == []
    assert [name for name, _ in traced["crewai"]] == ["two"]
    assert errors == "fulmen: instrumentor langchain is not enabled: RuntimeError: not with this version\n"
    _, errors = run(site, "missing", "langchain")
    assert errors == "fulmen: instrumentor missing is not enabled: not installed\n"


def test_one_that_does_not_fit_the_frameworks_version_is_left_out(site: Path) -> None:
    install_instrumentor(site, "one", "langchain", group="openinference_instrumentor", conflict="needs langchain 9")
    traced, errors = run(site, "auto", "langchain")
    assert traced == {"langchain": []}
    assert "needs langchain 9" in errors


def test_one_whose_framework_cannot_be_found_by_its_files_is_switched_on_at_once(site: Path) -> None:
    install_instrumentor(site, "one", "langchain", group="openinference_instrumentor")
    (site / "langchain-1.0.dist-info" / "RECORD").write_text("__editable__.langchain-1.0.pth,,")
    traced, errors = run(site, "auto", "langchain")
    assert ([name for name, _ in traced["langchain"]], errors) == (["one"], "")


TRACED_PROGRAM = """
import langchain
tracer = langchain.PROVIDER.get_tracer("")
for _ in range(2):
    tracer.start_span("thought").end()
"""


@pytest.mark.parametrize("sdk_installed", [True, False])
def test_a_program_whose_spans_did_not_arrive_says_so(site: Path, sdk_installed: bool) -> None:
    body = "import langchain; langchain.PROVIDER = kwargs['tracer_provider']"
    install_instrumentor(site, "one", "langchain", group="openinference_instrumentor", body=body)
    if not sdk_installed:
        # Found first, and holds nothing.
        (site / "fulmen").mkdir()
        (site / "fulmen" / "__init__.py").touch()
    rewards = site / "rewards"
    done = subprocess.run(
        [sys.executable, "-c", TRACED_PROGRAM],
        env={
            **startup_environment("auto", {"PYTHONPATH": str(site)}),
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
            "OTEL_EXPORTER_OTLP_TIMEOUT": "1",
            "FULMEN_REWARDS_FILE": str(rewards),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "fulmen: 2 spans of this process did not reach the store." in done.stderr
    assert json.loads(rewards.read_text()) == {"undelivered_spans": 2}


@pytest.mark.parametrize(
    ("wanted", "environment"),
    [
        ("none", {}),
        ("auto", {"FULMEN_INSTRUMENT": "none"}),
        ("auto", {"OTEL_SDK_DISABLED": "true"}),
        ("auto", {"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain"}),
    ],
)
def test_nothing_happens_when_it_is_switched_off(site: Path, wanted: str, environment: dict[str, str]) -> None:
    install_instrumentor(site, "one", "langchain", group="openinference_instrumentor")
    assert run(site, wanted, "langchain", **environment) == ({"langchain": []}, "")


def test_a_sitecustomize_that_is_hidden_runs_too(site: Path) -> None:
    (site / "sitecustomize.py").write_text("import langchain; langchain.TRACED_BY.append('customized')")
    assert run(site, "auto", "langchain") == ({"langchain": ["customized"]}, "")
