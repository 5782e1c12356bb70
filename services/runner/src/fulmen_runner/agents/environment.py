"""Environment variables of agents: the same for all kinds of agents and in `Context.environment`."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

from fulmen.agent import PROMPTS_VARIABLE, WORK_DIR_VARIABLE
from fulmen.attempt_files import PROGRESS_FILE_VARIABLE, REWARDS_FILE_VARIABLE
from fulmen.ids import span_id_of, trace_id_of
from fulmen_runner.agents.templates import Placeholders, expand
from fulmen_runner.agents.tracing.instrumentation import NONE
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.workspace import Files, Workspace

PLACEHOLDER_KEY = "fulmen-attempt-key"
"""API key in the environment of in-process agents; `model_access` replaces it with the attempt's key in requests."""

_BEARER = "Bearer%20"

MAX_TASK_VARIABLE_BYTES = 100_000
"""Largest task in FULMEN_TASK; Linux allows 128 KiB per variable. Larger ones are on stdin and in the task file only."""

INHERITED = (
    "ALL_PROXY", "CURL_CA_BUNDLE", "HOME", "HTTPS_PROXY", "HTTP_PROXY", "LANG", "LC_ALL", "LC_CTYPE", "LOGNAME", "NODE_EXTRA_CA_CERTS", "NO_PROXY",
    "PATH", "REQUESTS_CA_BUNDLE", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE", "SYSTEMROOT", "TERM", "TMPDIR", "TZ",
    "USER", "VIRTUAL_ENV", "all_proxy", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
"""Variables of the runner that commands inherit; they must not see any other, in particular not its token."""

QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_TRACKING": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}
"""Disables the telemetry of frameworks, which would send the attempt's key along. Agents and runners may override it."""

CA_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "OTEL_EXPORTER_OTLP_CERTIFICATE")
"""Variables that name a CA file for OpenSSL and httpx, requests, Node, and OpenTelemetry's SDKs."""

_PROXIES = ("ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "all_proxy", "http_proxy", "https_proxy")
_NO_PROXIES = ("NO_PROXY", "no_proxy")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Addresses for agents' model calls and spans.

    Attributes:
        llm_proxy_url: Model proxy, such as `http://proxy:7200`; empty if there is none.
        otlp_url: OTLP over gRPC, such as `http://store:7101`; empty if there is none.
        otlp_http_url: OTLP over HTTP, such as `http://store:7103`; empty if there is none.
        instrument: Instrumentors to enable in Python agents; see `instrumentation`.
        ca_file: PEM file of trusted CAs, as a path visible to agents; empty for the default ones.
    """

    llm_proxy_url: str
    otlp_url: str
    otlp_http_url: str = ""
    instrument: str = NONE
    ca_file: str = ""

    def environment(self, key: str) -> dict[str, str]:
        """Returns the variables for the endpoints with an API key."""
        variables: dict[str, str] = {}
        if self.llm_proxy_url:
            base = self.llm_proxy_url.rstrip("/")
            variables |= {
                "OPENAI_BASE_URL": f"{base}/v1",
                "OPENAI_API_KEY": key,
                "ANTHROPIC_BASE_URL": base,
                "ANTHROPIC_API_KEY": key,
            }
        if self.otlp_url:
            # OpenTelemetry's SDKs would send metrics and logs as well; the store accepts only spans.
            variables |= {
                "OTEL_EXPORTER_OTLP_ENDPOINT": self.otlp_url,
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
                "OTEL_METRICS_EXPORTER": "none",
                "OTEL_LOGS_EXPORTER": "none",
            }
        if self.otlp_http_url:
            variables["FULMEN_TRACES_URL"] = f"{self.otlp_http_url.rstrip('/')}/v1/traces"
        if self.ca_file:
            variables |= dict.fromkeys(CA_VARIABLES, self.ca_file)
        return variables

    def attempt_environment(self, assignment: Assignment) -> dict[str, str]:
        """Returns the variables of an attempt, including its secrets and its key."""
        variables = {**assignment.secrets, **self.environment(assignment.attempt_key)}
        if self.otlp_url:
            # Values are percent-encoded (OpenTelemetry Protocol Exporter specification).
            variables["OTEL_EXPORTER_OTLP_HEADERS"] = f"authorization={_BEARER}{quote(assignment.attempt_key)}"
        variables |= {
            "TRACEPARENT": traceparent(assignment.attempt),
            "FULMEN_ROLLOUT": assignment.rollout,
            "FULMEN_ATTEMPT": str(assignment.number),
        }
        if assignment.prompts:
            variables[PROMPTS_VARIABLE] = prompts_text(assignment.prompts)
        if len(assignment.input) <= MAX_TASK_VARIABLE_BYTES and b"\0" not in assignment.input:
            variables["FULMEN_TASK"] = assignment.input.decode(errors="replace")
        return variables


def prompts_text(prompts: Mapping[str, str]) -> str:
    """Returns prompts as the value of FULMEN_PROMPTS."""
    return json.dumps(dict(prompts), ensure_ascii=False)


async def expanded_environment(
    templates: Mapping[str, str], assignment: Assignment, task: object, workspace: Workspace
) -> dict[str, str]:
    """Expands the variables of an agent's specification. Opens the workspace only if a template refers to a file.

    Raises:
        AgentFailed: If a template is invalid; lists all problems.
    """
    if not any(brace in template for template in templates.values() for brace in "{}"):
        return dict(templates)
    named = {}
    if any(f"{{{name}}}" in template for template in templates.values() for name in ("work_dir", "task_file")):
        named = named_files(await workspace.open())
    values = Placeholders(input=assignment.input, task=task, named=named)
    labels = {f"environment {name}": template for name, template in templates.items()}
    return dict(zip(templates, expand(labels, values).values(), strict=True))


def named_files(files: Files) -> dict[str, str]:
    """Returns the placeholders for an attempt's files."""
    return {"task_file": str(files.task_file), "work_dir": str(files.work_dir)}


def files_environment(files: Files, rewards_file: Path) -> dict[str, str]:
    """Returns the variables for an attempt's files."""
    return {
        WORK_DIR_VARIABLE: str(files.work_dir),
        "TMPDIR": str(files.temporary_dir),
        REWARDS_FILE_VARIABLE: str(rewards_file),
        PROGRESS_FILE_VARIABLE: str(files.progress_file),
    }


def traceparent(attempt: str) -> str:
    """Returns an attempt's W3C trace context; the trace id is the rollout's id."""
    return f"00-{trace_id_of(attempt)}-{span_id_of(attempt)}-01"


def network_environment(endpoints: Endpoints, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns NO_PROXY with the hosts of the endpoints if an HTTP proxy is configured, otherwise nothing."""
    if not any(environ.get(name) for name in _PROXIES):
        return {}
    known = [host.strip() for name in _NO_PROXIES for host in environ.get(name, "").split(",")]
    if "*" in known:
        return {}
    urls = (endpoints.llm_proxy_url, endpoints.otlp_url, endpoints.otlp_http_url)
    hosts = [*known, *(urlsplit(url).hostname or "" for url in urls)]
    value = ",".join(dict.fromkeys(filter(None, hosts)))
    return dict.fromkeys(_NO_PROXIES, value) if value else {}


def inherited_environment(extra: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the runner's variables that commands inherit, and those that disable frameworks' telemetry.

    The directory of the runner's Python is first on PATH, so that `python` has the packages installed here.

    Args:
        extra: Names of further variables to inherit.
        environ: The runner's environment.
    """
    variables = QUIET | {name: environ[name] for name in (*INHERITED, *QUIET, *extra) if name in environ}
    path = [str(Path(sys.executable).parent), *variables.get("PATH", os.defpath).split(os.pathsep)]
    return variables | {"PATH": os.pathsep.join(dict.fromkeys(path))}
