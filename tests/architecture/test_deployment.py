"""What the images and the Compose file set is what the services read, and secrets are never given a default."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from fulmen.ids import ALL_PROJECTS
from fulmen.secret_names import VENDORS
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenVerifier
from fulmen_service_kit.settings import ServiceSettings
from tests.support.distributions import ROOT, SERVICES, Distribution

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "deploy/docker-compose.yml").read_text(encoding="utf-8"))
SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|_PASS|DATABASE_URL")
REFERENCE = re.compile(r"\$\{(\w+)(:?[-?][^}]*)?\}")
COMPOSE_FILES = (ROOT / "deploy/docker-compose.yml", ROOT / "deploy/docker-compose.gpu.yml")
EXAMPLE = re.compile(r"^(# )?(FULMEN_\w+)=(\S*)", re.M)
LIMIT_S = 30


def composed(service: Distribution) -> dict[str, Any]:
    """Returns the containers of a service by their names: `store_1`, `store_2`."""
    name = service.folder.name
    return {key: value for key, value in COMPOSE["services"].items() if re.fullmatch(rf"{name}(_\d)?", key)}


def settings_class(service: Distribution) -> type[ServiceSettings]:
    """Returns the settings class of a service."""
    module = importlib.import_module(f"{service.import_root}.settings")
    found = [
        value
        for value in vars(module).values()
        # Parts of the settings, such as those of containers, name no service.
        if isinstance(value, type)
        and issubclass(value, ServiceSettings)
        and "service_name" in vars(value)
        and value.__module__ == module.__name__
    ]
    assert len(found) == 1
    return found[0]


def variables(service: Distribution) -> set[str]:
    """Returns every environment variable that a service reads as a setting."""
    cls = settings_class(service)
    prefix = str(cls.model_config["env_prefix"])
    return {f"{prefix}{name}".upper() for name in cls.model_fields}


STAGES = dict(
    re.findall(
        r"^FROM (\S+(?: AS \w+)?)\n(.*?)(?=^FROM |\Z)",
        (ROOT / "deploy/docker/Dockerfile").read_text(encoding="utf-8"),
        re.M | re.S,
    )
)


def dockerfile(service: Distribution) -> str:
    """Returns the instructions of the image of a service: those of all services, then its own."""
    return STAGES["${PYTHON_IMAGE} AS base"] + STAGES[f"base AS {service.folder.name}"] + STAGES["${SERVICE}"]


def image_environment(service: Distribution) -> dict[str, str]:
    """Returns the settings that an image is built with."""
    return dict(re.findall(r"\b(FULMEN_\w+)=(\S+)", dockerfile(service)))


@pytest.fixture(scope="module")
def make_env() -> ModuleType:
    """Returns the script that makes the secrets, as a module."""
    spec = importlib.util.spec_from_file_location("make_env", ROOT / "deploy/make_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


USUAL = {
    "llm_proxy": {each.variable for each in VENDORS.values()},
    "algorithm": {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"},
}
"""Variables of vendors and hubs that a service reads under their usual names."""


@pytest.mark.parametrize("service", SERVICES, ids=lambda s: s.folder.name)
def test_images_and_compose_set_only_settings_that_exist(service: Distribution) -> None:
    containers = composed(service)
    overrides = yaml.safe_load(COMPOSE_FILES[1].read_text(encoding="utf-8"))["services"]
    given = [
        each["environment"].keys()
        for each in (*containers.values(), *(overrides[n] for n in containers if n in overrides))
    ]

    assert containers
    known = variables(service)
    usual = USUAL.get(service.folder.name, set())
    assert set(image_environment(service)).union(*given) <= known | {f"{name}_FILE" for name in known} | usual


@pytest.mark.parametrize("service", SERVICES, ids=lambda s: s.folder.name)
def test_images_run_without_privileges_and_tell_their_health(service: Distribution) -> None:
    text = dockerfile(service)
    names = [f"FULMEN_{service.folder.name.upper()}_{kind}_PORT" for kind in ("METRICS", "HTTP")]
    port = next(value for name in names if (value := image_environment(service).get(name)))

    assert re.search(r"^USER 10001:10001$", text, re.M)
    assert f'"/opt/fulmen/probe.py", "127.0.0.1:{port}/readyz"' in text
    # What ends a service that hangs, so that the container is restarted.
    assert f'ENTRYPOINT ["python", "-m", "fulmen_service_kit.heartbeat", "{service.project["name"]}"]' in text
    assert service.project["name"] in service.project["scripts"]


@pytest.mark.parametrize("service", SERVICES, ids=lambda s: s.folder.name)
def test_what_compose_lets_a_service_keep_is_in_a_volume_that_its_user_may_write(service: Distribution) -> None:
    for container in composed(service).values():
        kept = [value for name, value in container["environment"].items() if name.endswith("_DIR")]
        mounts = dict(volume.split(":") for volume in container.get("volumes", []))

        assert mounts.keys() <= COMPOSE["volumes"].keys()
        for folder in kept:
            [mount] = [mount for mount in mounts.values() if Path(folder).is_relative_to(mount)]
            # An empty volume takes over the owner of the image's folder that it is mounted on.
            assert f"COPY --from=build --chown=10001:10001 /state {mount}\n" in dockerfile(service)


@pytest.mark.parametrize("service", SERVICES, ids=lambda s: s.folder.name)
def test_images_say_what_they_are_and_are_built_on_what_is_named(service: Distribution) -> None:
    text = dockerfile(service)

    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in text
    # Compilers and installers stay in the build stage.
    assert not re.search(r"^RUN|install\.sh|apt-get|\bpip\b", text, re.M)


@pytest.mark.parametrize("service", ["store", "llm_proxy"])
def test_replicas_differ_in_their_ports_alone_and_share_a_name(service: str) -> None:
    first, second = ({**COMPOSE["services"][f"{service}_{number}"]} for number in (1, 2))

    assert len({*first.pop("ports"), *second.pop("ports")}) == 6
    # One of the services of an image builds it.
    first.pop("build", None)
    assert first == second
    for network in ("control", "agents"):
        assert first["networks"][network]["aliases"] == [service]


def test_every_image_of_ours_is_built_by_one_service() -> None:
    used = {each["image"] for each in COMPOSE["services"].values() if each["image"].startswith("fulmen-")}
    built = [each["image"] for each in COMPOSE["services"].values() if "build" in each]

    assert sorted(built) == sorted(used)
    assert len(used) == len(SERVICES)


def test_runners_ask_whichever_proxy_answers() -> None:
    targets = COMPOSE["services"]["runner"]["environment"]["FULMEN_RUNNER_LLM_PROXY_TARGETS"]
    assert targets == "dns:///llm_proxy:7201"


def test_the_schema_is_brought_up_to_date_once_before_any_store_serves() -> None:
    services = COMPOSE["services"]

    assert (services["migrate"]["command"], services["migrate"]["restart"]) == (["migrate"], "no")
    for name in ("store_1", "store_2"):
        assert services[name]["environment"]["FULMEN_STORE_AUTO_MIGRATE"] == "false"
        assert services[name]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}


def test_the_example_of_an_environment_has_every_variable_with_its_default() -> None:
    asked: dict[str, str | None] = {}
    for path in COMPOSE_FILES:
        text = path.read_text(encoding="utf-8")
        for name, rest in REFERENCE.findall(text):
            asked[name] = rest.removeprefix(":-") if rest.startswith(":-") else asked.get(name)
        # Passed on if they are set.
        asked |= dict.fromkeys(re.findall(r"^ +(FULMEN_\w+):$", text, re.M))
    example = (ROOT / "deploy/.env.example").read_text(encoding="utf-8")

    found = {name: None if comment else value for comment, name, value in EXAMPLE.findall(example)}
    assert found == asked


def test_compose_publishes_on_loopback_only() -> None:
    published = [port for service in COMPOSE["services"].values() for port in service.get("ports", [])]

    assert published
    assert all(str(port).startswith("127.0.0.1:") for port in published)


def test_compose_passes_secrets_as_files_alone() -> None:
    for name, container in COMPOSE["services"].items():
        environment = container.get("environment", {})
        mounted = {f"/run/secrets/{secret}" for secret in container.get("secrets", [])}
        files = {key: value for key, value in environment.items() if str(value).startswith("/run/secrets/")}

        assert set(files.values()) == mounted, name
        assert all(key.endswith("_FILE") for key in files), name
        # Usual variables are passed on only if the operator puts them into deploy/.env.
        own = environment.keys() - files.keys() - set().union(*USUAL.values())
        assert not [key for key in own if SECRET.search(key)], name


def test_every_secret_that_compose_mounts_is_made(make_env: ModuleType) -> None:
    assert COMPOSE["secrets"].keys() == make_env.secret_files("k" * 32, days=1).keys()
    files = {name: secret["file"].rpartition("}")[2] for name, secret in COMPOSE["secrets"].items()}
    assert files == {name: f"/{name}" for name in COMPOSE["secrets"]}


@pytest.mark.parametrize("name", [name for name, each in COMPOSE["services"].items() if "profiles" not in each])
def test_containers_are_read_only_unprivileged_and_bounded(name: str) -> None:
    container = COMPOSE["services"][name]

    assert container["read_only"]
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert container["pids_limit"]
    assert container["mem_limit"]


def test_agents_reach_stores_and_proxies_and_nothing_else() -> None:
    members = {
        network: {
            name.rstrip("_12").removesuffix("_more")
            for name, each in COMPOSE["services"].items()
            if network in each["networks"]
        }
        for network in COMPOSE["networks"]
    }

    # Prometheus asks runners, and runners tell the collector, where there is monitoring.
    assert members["agents"] == {"runner", "store", "llm_proxy", "prometheus", "collector"}
    assert members["data"] == {"postgres", "migrate", "store", "postgres_exporter"}
    assert COMPOSE["networks"]["data"]["internal"]


def test_the_tokens_of_a_deployment_are_accepted_by_its_services(make_env: ModuleType) -> None:
    key = "k" * 32
    made = make_env.secret_files(key, days=1)
    verifier = TokenVerifier(key)
    assert made["attempt_key_secret"] == attempt_secrets(key)

    tokens = {role: made[f"{role}_token"] for role in ("service", "runner")}
    tokens["admin"] = make_env.sign_token(key, "admin", days=1)
    callers = {role: verifier.verify(token) for role, token in tokens.items()}

    assert {role: (caller.role, caller.project) for role, caller in callers.items()} == {
        "service": (Role.SERVICE, ALL_PROJECTS),
        "runner": (Role.RUNNER, ALL_PROJECTS),
        "admin": (Role.ADMIN, ALL_PROJECTS),
    }


def test_keys_that_exist_are_never_overwritten(tmp_path: Path) -> None:
    target = tmp_path / ".env"
    folder = tmp_path / "secrets"
    command = [sys.executable, ROOT / "deploy/make_env.py", "--output", target, "--secrets-dir", folder]
    subprocess.run(command, check=True, timeout=LIMIT_S, capture_output=True)
    made = target.read_text(encoding="utf-8")
    key = (folder / "signing_key").read_text(encoding="utf-8")

    again = subprocess.run(command, check=False, timeout=LIMIT_S, capture_output=True, text=True)

    assert again.returncode == 1
    assert again.stderr == f"error: {target} exists; remove it to make new keys\n"
    assert target.read_text(encoding="utf-8") == made
    assert (folder / "signing_key").read_text(encoding="utf-8") == key
    assert target.stat().st_mode & 0o077 == 0
    # Containers' users read the files; on the host only the folder's owner reaches them.
    assert folder.stat().st_mode & 0o077 == 0
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o444}
