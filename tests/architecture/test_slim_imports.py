"""What people import is light: no heavy library comes along, and the memory it takes is bounded."""

from __future__ import annotations

import json
import subprocess
import sys
from uuid import UUID

import pytest

from fulmen_service_kit.security.tokens import Role, TokenSigner

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
# What a service needs for some settings, tokens or calls alone, or not at all; each takes megabytes.
SELDOM = frozenset(
    {
        "cryptography",  # for the first token of a role, the first secret
        "regex",  # for a route with patterns
        *("pydantic_settings", "dotenv"),  # the kit reads the environment itself
        *("google.protobuf.descriptor_pb2", "google.protobuf.json_format"),  # for exports over OTLP
        # Of commands such as `migrate` not even the metrics are wanted.
        *("opentelemetry.sdk", "opentelemetry.exporter"),
    }
)
SERVER_SIDE = frozenset({"asyncpg", "aiohttp", "uvicorn", "uvloop", "pydantic", "structlog", "fulmen_service_kit"})
# Imports what argv names; prints the loaded modules and the resident memory. The peak that getrusage knows
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
print(json.dumps({"loaded": sorted(sys.modules), "resident_mb": resident / 2**20}))
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
# Verifies the key of an attempt, then a token of a role; prints after each whether what checks signatures is loaded.
TOKENS = """
import json, sys
from fulmen_service_kit.security.keys import PublishedKeys, StoreKeys, attempt_secrets
from fulmen_service_kit.security.tokens import TokenVerifier
lines, attempt_key, role_token, public = sys.argv[1:]
keys = PublishedKeys(attempt_secrets(lines))
keys.replace([bytes.fromhex(public)])
verifier, loaded = TokenVerifier(keys), []
for token in (attempt_key, role_token):
    role = verifier.verify(token).role
    loaded.append([role, "cryptography" in sys.modules])
print(json.dumps(loaded))
"""
# Counts collections from the import of what runs a service to the moment in which all of it is imported: what builds the
# proxy is imported when it is asked to.
COLLECTIONS = """
import gc, importlib, json, sys
importlib.import_module(sys.argv[1])
began = []
gc.callbacks.append(lambda phase, _: began.append(phase) if phase == "start" else None)
command = importlib.import_module(sys.argv[1] + ".__main__")
if sys.argv[1] + ".app" not in sys.modules:
    try:
        command.build(None, None).send(None)
    except TypeError:
        assert sys.argv[1] + ".app" in sys.modules
print(json.dumps({"collections": len(began), "enabled_afterwards": gc.isenabled()}))
"""


def probe(*modules: str) -> tuple[set[str], float]:
    """Imports modules in a fresh interpreter; returns what was loaded, and the resident memory in MiB."""
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, *modules], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    report = json.loads(ran.stdout)
    return set(report["loaded"]), report["resident_mb"]


@pytest.mark.parametrize(
    ("module", "noticed"), [("numpy", {"numpy"}), ("opentelemetry.sdk", {"opentelemetry.sdk"})], ids=str
)
def test_a_heavy_library_would_be_noticed(module: str, noticed: set[str]) -> None:
    loaded, _ = probe(module)

    assert loaded & (HEAVY | SELDOM) == noticed


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
        ("fulmen_store.app", HEAVY | SELDOM | {"aiohttp", "openai", "rich"}),
        # It traces agents, which takes the SDK.
        (
            "fulmen_runner.app",
            (HEAVY | SELDOM | {"asyncpg", "uvicorn", "rich"}) - {"opentelemetry.sdk", "opentelemetry.exporter"},
        ),
        ("fulmen_llm_proxy.app", HEAVY | SELDOM | {"asyncpg", "openai", "rich"}),
        # It supervises workers, which are proxies.
        ("fulmen_llm_proxy.__main__", {"fulmen_llm_proxy.app", "aiohttp"}),
        ("fulmen_algorithm.app", (HEAVY | SELDOM | {"asyncpg", "openai"}) - {"numpy"}),
        # A rank greets the service before it loads torch.
        ("fulmen_algorithm.trainers.rank", (HEAVY | {"grpc", "opentelemetry"}) - {"numpy"}),
    ],
)
def test_a_service_loads_only_what_is_its_own(app: str, unwanted: frozenset[str]) -> None:
    loaded, _ = probe(app)

    assert not loaded & unwanted


def test_telemetry_loads_what_sends_to_a_collector_only_for_one() -> None:
    loaded, _ = probe("fulmen_service_kit.observability.telemetry")

    assert not loaded & {"opentelemetry.sdk.trace", "opentelemetry.exporter.otlp"}


def test_signatures_are_checked_with_a_library_that_attempt_keys_do_not_load() -> None:
    lines = "a signing key of tests, 32 bytes or more"
    signer = TokenSigner(lines)
    attempt_key = signer.attempt_key(
        f"projects/p/rollouts/{UUID(int=7)}/attempts/1",
        project="projects/p", lease_id="l", epoch=1, mode="train", ttl_s=3600,
    )  # fmt: skip
    role_token = signer.issue(Role.CLIENT, subject="me", ttl_s=3600)
    command = [sys.executable, "-c", TOKENS, lines, attempt_key, role_token, signer.keys.published()[0].hex()]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)

    assert json.loads(ran.stdout) == [["attempt", False], ["client", True]]


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
