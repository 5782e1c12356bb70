"""What people import is light: no heavy library comes along, and the memory it takes is bounded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 60
SDK_BUDGET_MB = 60
HEAVY = frozenset(
    {
        *("torch", "transformers", "tokenizers", "safetensors", "vllm", "numpy", "matplotlib", "pandas"),
        # What exports and blob storage need, and nothing before they are used.
        *("pyarrow", "obstore", "boto3", "botocore"),
    }
)
COMMAND_LINE = frozenset({"fulmen_cli", "rich", "typer"})
SERVER_SIDE = frozenset({"asyncpg", "aiohttp", "uvicorn", "uvloop", "pydantic", "structlog", "fulmen_service_kit"})
# Imports what argv names; prints the loaded top-level modules and the resident memory. The peak that getrusage knows
# is inherited from the parent on Linux, so the current figure is read there.
PROBE = """
import importlib, json, os, resource, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
if sys.platform == "linux":
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
else:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
loaded = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps({"loaded": loaded, "resident_mb": resident / 2**20}))
"""
# Imports the first of argv, then the others; prints the modules that only these loaded.
LATER = """
import importlib, json, sys
first, *others = sys.argv[1:]
importlib.import_module(first)
before = set(sys.modules)
for name in others:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
MODEL_ENTRIES = (
    "fulmen_algorithm.__main__",
    "fulmen_algorithm.engines.embedded.__main__",
    "fulmen_algorithm.trainers.local",
    "fulmen_algorithm.trainers.rank",
)


def probe(*modules: str) -> tuple[set[str], float]:
    """Imports modules in a fresh interpreter; returns what was loaded, and the resident memory in MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    report = json.loads(ran.stdout)
    return set(report["loaded"]), report["resident_mb"]


def test_a_heavy_library_would_be_noticed() -> None:
    loaded, _ = probe("fulmen_store.app", "numpy")

    assert loaded & HEAVY == {"numpy"}


def test_the_sdk_brings_nothing_heavy_and_fits_its_budget() -> None:
    loaded, resident_mb = probe("fulmen", "fulmen.client")

    assert not loaded & (HEAVY | SERVER_SIDE | COMMAND_LINE)
    assert resident_mb < SDK_BUDGET_MB


def test_the_sdk_itself_does_not_even_load_grpc() -> None:
    loaded, _ = probe("fulmen", "fulmen.errors", "fulmen.ids")

    assert not loaded & ({"grpc", "google"} | COMMAND_LINE)


@pytest.mark.parametrize("service", ["fulmen_llm_proxy.app", "fulmen_runner.app", "fulmen_store.app"])
def test_a_service_does_not_load_what_formats_tracebacks_for_terminals(service: str) -> None:
    loaded, _ = probe(service)

    assert "structlog" in loaded
    assert "rich" not in loaded


def test_the_command_line_brings_nothing_heavy() -> None:
    loaded, _ = probe("fulmen_cli.main")

    assert not loaded & (HEAVY | SERVER_SIDE)


@pytest.mark.parametrize(
    ("app", "unwanted"),
    [
        ("fulmen_store.app", HEAVY | {"aiohttp", "openai"}),
        ("fulmen_runner.app", HEAVY | {"asyncpg", "uvicorn"}),
        ("fulmen_llm_proxy.app", HEAVY | {"asyncpg", "openai"}),
        ("fulmen_algorithm.app", (HEAVY | {"asyncpg", "openai"}) - {"numpy"}),
    ],
)
def test_a_service_loads_only_what_is_its_own(app: str, unwanted: frozenset[str]) -> None:
    loaded, _ = probe(app)

    assert not loaded & unwanted


# What a fresh process of a trainer or an engine would pay for at every start, and needs at most later.
NOT_AT_START = frozenset({"pandas", "pyarrow", "sklearn", "scipy", "datasets", "vllm", "tensorboard", "matplotlib"})


@pytest.mark.parametrize(
    ("entry", "unwanted"),
    [
        # A rank greets the service before it loads torch.
        ("fulmen_algorithm.trainers.rank", (HEAVY | {"grpc", "opentelemetry"}) - {"numpy"}),
        ("fulmen_algorithm.engines.embedded.__main__", NOT_AT_START | {"peft", "grpc", "opentelemetry"}),
        ("fulmen_algorithm.trainers.in_process", NOT_AT_START | {"aiohttp"}),
        ("fulmen_algorithm.preloaded", NOT_AT_START),
    ],
)
def test_what_runs_a_model_loads_only_what_it_needs_to_start(entry: str, unwanted: frozenset[str]) -> None:
    loaded, _ = probe(entry)

    assert not loaded & unwanted


def test_all_that_runs_a_model_is_preloaded_for_forks() -> None:
    begun = subprocess.run(
        [sys.executable, "-c", LATER, "fulmen_algorithm.preloaded", *MODEL_ENTRIES],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )

    assert [name for name in json.loads(begun.stdout) if not name.endswith(".__main__")] == []
