"""What people import is light: no heavy library comes along, and the memory it takes is bounded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIMIT_S = 60
SDK_BUDGET_MB = 60
NAME_BUDGET_MB = 40
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
# Loads once what runs models. A fork per entry of argv imports it, the first one then all others; prints what the entry
# loaded, and what the others loaded after it.
FORKS = """
import importlib, json, os, sys
import torch, transformers.models.llama.modeling_llama
for entry in sys.argv[1:]:
    if os.fork() == 0:
        importlib.import_module(entry)
        first = set(sys.modules)
        for name in sys.argv[1:] if entry == sys.argv[1] else ():
            importlib.import_module(name)
        print(json.dumps([sorted(first), sorted(set(sys.modules) - first)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, entry
"""
# Counts collections from the import of what runs a service to the moment in which it is imported.
COLLECTIONS = """
import gc, importlib, json, sys
importlib.import_module(sys.argv[1])
began = []
gc.callbacks.append(lambda phase, _: began.append(phase) if phase == "start" else None)
importlib.import_module(sys.argv[1] + ".__main__")
print(json.dumps({"collections": len(began), "enabled_afterwards": gc.isenabled()}))
"""


def probe(*modules: str) -> tuple[set[str], float]:
    """Imports modules in a fresh interpreter; returns what was loaded, and the resident memory in MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    report = json.loads(ran.stdout)
    return set(report["loaded"]), report["resident_mb"]


def test_a_heavy_library_would_be_noticed() -> None:
    loaded, _ = probe("numpy")

    assert loaded & HEAVY == {"numpy"}


def test_the_sdk_brings_nothing_heavy_and_fits_its_budget() -> None:
    loaded, resident_mb = probe("fulmen", "fulmen.client.sync.client", "fulmen.rpc.services")

    assert not loaded & (HEAVY | SERVER_SIDE | COMMAND_LINE)
    assert resident_mb < SDK_BUDGET_MB


def test_the_name_fulmen_alone_costs_next_to_nothing() -> None:
    loaded, resident_mb = probe("fulmen")

    assert not loaded & ({"grpc", "google", "opentelemetry", "asyncio"} | HEAVY | SERVER_SIDE | COMMAND_LINE)
    assert resident_mb < NAME_BUDGET_MB


def test_the_sdk_itself_does_not_even_load_grpc() -> None:
    loaded, _ = probe("fulmen", "fulmen.errors", "fulmen.ids")

    assert not loaded & ({"grpc", "google"} | COMMAND_LINE)


def test_the_command_line_brings_nothing_heavy() -> None:
    loaded, _ = probe("fulmen_cli.main")

    assert not loaded & (HEAVY | SERVER_SIDE)


@pytest.mark.parametrize(
    ("app", "unwanted"),
    [
        # rich formats tracebacks for terminals.
        ("fulmen_store.app", HEAVY | {"aiohttp", "openai", "rich"}),
        ("fulmen_runner.app", HEAVY | {"asyncpg", "uvicorn", "rich"}),
        ("fulmen_llm_proxy.app", HEAVY | {"asyncpg", "openai", "rich"}),
        ("fulmen_algorithm.app", (HEAVY | {"asyncpg", "openai"}) - {"numpy"}),
        # A rank greets the service before it loads torch.
        ("fulmen_algorithm.trainers.rank", (HEAVY | {"grpc", "opentelemetry"}) - {"numpy"}),
    ],
)
def test_a_service_loads_only_what_is_its_own(app: str, unwanted: frozenset[str]) -> None:
    loaded, _ = probe(app)

    assert not loaded & unwanted


def test_what_runs_a_model_loads_only_what_it_needs_to_start_and_is_all_preloaded_for_forks() -> None:
    # What a fresh process of a trainer or an engine would pay for at every start, and needs at most later.
    not_at_start = {"pandas", "pyarrow", "sklearn", "scipy", "datasets", "vllm", "tensorboard", "matplotlib"}
    unwanted = {
        "fulmen_algorithm.preloaded": not_at_start,
        "fulmen_algorithm.engines.embedded.__main__": not_at_start | {"peft", "grpc", "opentelemetry"},
        "fulmen_algorithm.trainers.in_process": not_at_start | {"aiohttp"},
        "fulmen_algorithm.trainers.rank": not_at_start,
        "fulmen_algorithm.__main__": not_at_start,
    }
    command = [sys.executable, "-c", FORKS, *unwanted]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    loaded = dict(zip(unwanted, map(json.loads, ran.stdout.splitlines()), strict=True))

    for entry, names in unwanted.items():
        assert not names & {name.partition(".")[0] for name in loaded[entry][0]}, entry
    _, later = loaded["fulmen_algorithm.preloaded"]
    assert [name for name in later if not name.endswith(".__main__")] == []


@pytest.mark.parametrize("service", ["fulmen_store", "fulmen_llm_proxy", "fulmen_runner"])
def test_a_service_collects_no_garbage_while_it_imports_itself(service: str) -> None:
    # Importing the kit, which each service does first, is left out.
    ran = subprocess.run(
        [sys.executable, "-c", COLLECTIONS, service], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )

    assert json.loads(ran.stdout) == {"collections": 0, "enabled_afterwards": True}
