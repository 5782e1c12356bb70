"""Settings of services, from the environment: a line names the service, the others are variables."""

from __future__ import annotations

import os
import random

from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.settings import ServiceSettings, SettingsInvalid
from fulmen_store.settings import StoreSettings
from tests.fuzz.mutation import NUMBERS, REALS, TEXTS, mutate_bytes, mutate_json
from tests.fuzz.target import PureTarget

_SERVICES: dict[str, type[ServiceSettings]] = {
    "store": StoreSettings, "llm_proxy": LlmProxySettings, "runner": RunnerSettings, "algorithm": AlgorithmServiceSettings
}  # fmt: skip
_GOOD = {
    "store": {"DATABASE_URL": "postgres:///d", "SIGNING_KEY": "k" * 40},
    "llm_proxy": {
        "ATTEMPT_KEY_SECRET": "k" * 64, "TOKEN": "t", "STORE_TARGET": "127.0.0.1:1",
        "BACKEND_KEYS": '{"a": {"key": "s", "hosts": ["h"]}}', "PRICES": "{}",
    },
    "runner": {"TOKEN": "t", "STORE_TARGET": "127.0.0.1:1", "LABELS": '{"a": "b"}', "PROJECTS": "projects/default"},
    "algorithm": {"TOKEN": "t", "STORE_TARGET": "127.0.0.1:1", "LLM_PROXY_TARGET": "127.0.0.1:2"},
}  # fmt: skip
_SECRET = "very-secret-value-1"
_WORDS = (
    "true",
    "no",
    "[]",
    "{}",
    '{"a":1}',
    "projects/*",
    "::1",
    "0.0.0.0",
    "/etc/passwd",
    "/",
    "info",
    "1e999",
    "[::]:5",
    "a,b,,c",
    _SECRET,
)


def run(data: bytes) -> None:
    """Reads an environment; a refusal never quotes a secret."""
    service, *lines = data.decode("utf-8", "replace").replace("\0", "").split("\n")
    kind = _SERVICES.get(service, StoreSettings)
    prefix = str(kind.model_config["env_prefix"]).upper()
    values = {key: value for key, mark, value in (line.partition("=") for line in lines) if mark and key}
    before = dict(os.environ)
    try:
        os.environ.update({f"{prefix}{key}": value for key, value in values.items()})
        settings = kind.from_environment()
        shown = [value for key, value in values.items() if key.lower() not in kind.secret_names()]
        assert _SECRET not in str(settings.describe()) or any(_SECRET in value for value in shown)
    finally:
        os.environ.clear()
        os.environ.update(before)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes a variable's value or name, or adds another of the service's."""
    if rng.random() < 0.1:
        return mutate_bytes(data, rng)
    service, *lines = data.decode("utf-8", "replace").split("\n")
    kind = _SERVICES.get(service, StoreSettings)
    if rng.random() < 0.5 or not lines:
        name = rng.choice(list(kind.model_fields)).upper() + rng.choice(("", "", "", "_FILE"))
        lines.append(f"{name}={_value(rng)}")
    else:
        place = rng.randrange(len(lines))
        key, _, value = lines[place].partition("=")
        changed = mutate_json(value.encode(), rng).decode("utf-8", "replace") if value[:1] in "[{" else _value(rng)
        lines[place] = f"{key}={changed}"
    return "\n".join([service, *(line.replace("\n", " ") for line in lines)]).encode("utf-8", "replace")


def _value(rng: random.Random) -> str:
    return str(rng.choice((*_WORDS, *_WORDS, *TEXTS, *NUMBERS, *REALS)))


TARGET = PureTarget(
    run=run,
    seeds=[
        "\n".join([service, *(f"{key}={value}" for key, value in good.items())]).encode()
        for service, good in _GOOD.items()
    ],
    mutate=mutate,
    refusals=(SettingsInvalid,),
)
