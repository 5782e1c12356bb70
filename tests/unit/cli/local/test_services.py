"""The environment of each service: its own settings and nothing else of Fulmen's."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from fulmen_cli.local.errors import StackError
from fulmen_cli.local.in_process import DEBUGGING
from fulmen_cli.local.ports import choose_ports
from fulmen_cli.local.services import WARM_START_VARIABLE, ServiceSpec, StackPlan, plan_services, port_names
from fulmen_runner.settings import RunnerSettings

PLAN = StackPlan(
    folder=Path("/state"),
    ports=choose_ports(port_names(2), {}, {}, rng=random.Random()),
    runners=2,
    slots=8,
    database_url="postgresql:///postgres",
    signing_key_file=Path("state/signing.key"),
    engine_token="engine",
    attempt_secret_file=Path("state/attempt.key"),
    token_files={"service": Path("state/service.token"), "runner": Path("state/runner.token")},
)


def planned(environment: dict[str, str]) -> dict[str, ServiceSpec]:
    return {service.name: service for service in plan_services(PLAN, environment)}


def test_services_start_in_the_order_of_their_needs() -> None:
    assert list(planned({})) == ["store", "llm_proxy", "algorithm", "console", "runner-1", "runner-2"]


def test_vendors_usual_variables_reach_the_proxy_and_runners_whose_agents_inherit_them_alone() -> None:
    services = planned({"OPENAI_API_KEY": "sk-1", "GROQ_API_KEY": "gsk-2", "OTHER": "x"})
    assert [name for name, each in services.items() if "OPENAI_API_KEY" in each.environment] == ["llm_proxy"]
    assert all(each.environment["OTHER"] == "x" for each in services.values())
    inherited = {"GROQ_API_KEY": "gsk-2", "FULMEN_RUNNER_INHERIT_ENVIRONMENT": "A, GROQ_API_KEY"}
    found = [name for name, each in planned(inherited).items() if "GROQ_API_KEY" in each.environment]
    assert found == ["llm_proxy", "runner-1", "runner-2"]


def test_a_service_gets_only_its_own_settings() -> None:
    inherited = {"PATH": "/bin", "FULMEN_STORE_TARGET": "x", "FULMEN_TOKEN": "y", "FULMEN_RUNNER_LABELS": "gpu=none"}
    inherited["FULMEN_ALERTS_URL"] = "https://alerts.example"
    services = planned(inherited)

    for service in services.values():
        prefix = (f"FULMEN_{service.kind.upper()}_", *(["FULMEN_ALERTS_"] if service.kind == "runner" else []))
        assert service.environment["PATH"] == "/bin"
        assert all(name.startswith(prefix) for name in service.environment if name.startswith("FULMEN_"))
    assert services["runner-2"].environment["FULMEN_RUNNER_LABELS"] == "gpu=none"
    assert [name for name, each in services.items() if "FULMEN_ALERTS_URL" in each.environment] == [
        "runner-1",
        "runner-2",
    ]
    assert "FULMEN_STORE_TARGET" not in services["store"].environment


def test_settings_for_debugging_are_those_of_services_and_no_breakpoint_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    services = planned(dict(DEBUGGING))
    got = {name: value for each in services.values() for name, value in each.environment.items()}
    assert got.items() >= DEBUGGING.items()
    for name in [name for name in os.environ if name.startswith("FULMEN_")]:
        monkeypatch.delenv(name)
    for name, value in services["runner-1"].environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("FULMEN_RUNNER_TOKEN_FILE")
    monkeypatch.setenv("FULMEN_RUNNER_DEV_MODE", "true")
    assert RunnerSettings.from_environment().loop_blocked_limit_s == 0


def test_services_may_keep_bytecode_whatever_the_image_says() -> None:
    services = planned({"PYTHONDONTWRITEBYTECODE": "1"}).values()

    assert not [service.name for service in services if "PYTHONDONTWRITEBYTECODE" in service.environment]


def test_only_the_algorithm_service_is_forked_unless_its_setting_says_no() -> None:
    assert [name for name, each in planned({}).items() if each.is_forkable] == ["algorithm"]
    assert not [name for name, each in planned({WARM_START_VARIABLE: "False"}).items() if each.is_forkable]


def test_the_stack_of_one_person_trusts_its_code_unless_the_environment_says_otherwise() -> None:
    services = planned({"FULMEN_RUNNER_ISOLATION": "sandbox"})
    assert services["algorithm"].environment["FULMEN_ALGORITHM_ISOLATION"] == "trusted"
    assert services["runner-1"].environment["FULMEN_RUNNER_ISOLATION"] == "sandbox"
    assert planned({})["runner-2"].environment["FULMEN_RUNNER_ISOLATION"] == "trusted"


def test_setting_what_the_stack_decides_is_an_error() -> None:
    with pytest.raises(StackError, match="FULMEN_STORE_PORT"):
        planned({"FULMEN_STORE_PORT": "1"})


def test_every_service_has_its_own_ports_and_ready_file() -> None:
    services = planned({}).values()
    ports = [port for service in services for port in service.ports.values()]
    files = [service.environment[f"FULMEN_{service.kind.upper()}_READY_FILE"] for service in services]

    assert len(set(ports)) == len(ports) == 15
    assert len(set(files)) == len(files)


def test_the_proxy_keeps_captures_in_the_folder_of_the_stack() -> None:
    assert planned({})["llm_proxy"].environment["FULMEN_LLM_PROXY_SPOOL_DIR"] == "/state/llm_proxy/spool"


def test_secrets_are_not_shown() -> None:
    assert not any(secret in repr(PLAN) for secret in ("postgresql:",))
    assert "postgresql:" not in repr(planned({})["store"])


def test_only_the_store_gets_the_signing_key_and_only_the_proxy_the_secret_of_attempt_keys() -> None:
    holders = {
        (name, value)
        for name, service in planned({}).items()
        for value in service.environment.values()
        if value.endswith(".key")
    }
    assert holders == {("store", "state/signing.key"), ("llm_proxy", "state/attempt.key")}
