"""Writes the allowed settings of each service to the chart's values.schema.json; `--check` only compares.

Allowed are all settings of the service's class except those that the chart sets itself, those useless in a cluster, and
secrets, which come from files named by `..._FILE`.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.weight_agent.settings import WeightAgentSettings
from fulmen_console.settings import ConsoleSettings
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.settings import ServiceSettings
from fulmen_store.settings import StoreSettings

CHART = Path(__file__).parent.parent / "deploy" / "helm" / "fulmen"
CLASSES: dict[str, type[ServiceSettings]] = {
    "store": StoreSettings,
    "llmProxy": LlmProxySettings,
    "runner": RunnerSettings,
    "algorithm": AlgorithmServiceSettings,
    "console": ConsoleSettings,
    "engines": WeightAgentSettings,
}
NOT_IN_A_CLUSTER = frozenset(
    {
        "DEV_MODE",
        "READY_FILE",
        "WORKERS_DIR",
        "WORKER_INDEX",
        "ENGINE_IN_PROCESS",
        "METRICS_PORT",
        "AGENTS_PORT",
        "ENGINE_ID",
    }
)


def settable(settings_class: type[ServiceSettings]) -> list[str]:
    """Returns the names of the allowed settings, without the service's prefix."""
    prefix = str(settings_class.model_config["env_prefix"])
    templates = "".join(path.read_text(encoding="utf-8") for path in sorted(CHART.glob("templates/**/*.*")))
    owned = set(re.findall(rf"{prefix}([A-Z0-9_]+)", templates)) | NOT_IN_A_CLUSTER
    owned |= set(re.findall(r"[.$]prefix }}([A-Z][A-Z_]+)", templates))
    secrets = {name.upper() for name in settings_class.secret_names()}
    names = {name.upper() for name in settings_class.model_fields} - secrets | {f"{name}_FILE" for name in secrets}
    return sorted(names - owned)


def with_names(schema: str) -> str:
    """Returns the schema with up-to-date lists."""
    for service, settings_class in CLASSES.items():
        listed = json.dumps(settable(settings_class))
        lines = textwrap.fill(listed[1:-1], width=110, break_long_words=False, break_on_hyphens=False)
        indented = textwrap.indent(lines, " " * 8)
        found = re.compile(rf'("{service}Settings": {{.*?"enum": )\[.*?\]', re.DOTALL)
        schema = found.sub(lambda match, text=indented: f"{match[1]}[\n{text}\n      ]", schema, count=1)
    return schema


def main() -> int:
    """Writes or compares; returns the exit status."""
    path = CHART / "values.schema.json"
    before = path.read_text(encoding="utf-8")
    after = with_names(before)
    if "--check" not in sys.argv[1:]:
        path.write_text(after, encoding="utf-8")
    elif before != after:
        sys.stderr.write(f"{path} does not name the settings as they are: run `make helm-settings`\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
