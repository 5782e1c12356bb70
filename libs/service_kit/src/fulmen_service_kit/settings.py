"""Settings of a service: one frozen class, read from the environment. Unknown variables are errors.

A secret may come from a file: `FULMEN_STORE_SIGNING_KEY_FILE` names the file of `FULMEN_STORE_SIGNING_KEY`.
"""

import ipaddress
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, model_validator

from fulmen.errors import SettingsInvalid, Violation
from fulmen.rpc.tls import TlsFiles
from fulmen.watched_file import WatchedFile
from fulmen_service_kit.rpc.message_sizes import MAX_SENT_BYTES
from fulmen_service_kit.security.secret import MIN_KEY_BYTES, Secret, SigningKeys, problem_of, split_keys, text_of


class SettingsConfig(ConfigDict, total=False):
    """Configuration of a settings class; `env_prefix` begins the names of its environment variables."""

    env_prefix: str


class EnvironmentSettings(BaseModel):
    """Settings that may be read from the environment, where dicts and lists are JSON."""

    # Built when it first checks values, which the classes that others extend never do.
    model_config = SettingsConfig(frozen=True, extra="forbid", validate_default=True, defer_build=True)

    @classmethod
    def environment_values(cls) -> dict[str, Any]:
        """Returns what the environment holds, by the names of fields, unchecked."""
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        given = {name.upper(): value for name, value in os.environ.items()}
        texts = {name: given.get(f"{prefix}{name.upper()}") for name in cls.model_fields}
        return {name: cls._decoded(name, text) for name, text in texts.items() if text is not None}

    @classmethod
    def _decoded(cls, name: str, text: str) -> Any:
        if get_origin(cls.model_fields[name].annotation) not in {dict, list}:
            return text
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text  # the check of its type names it together with all other problems


class ServiceSettings(EnvironmentSettings):
    """Settings shared by all services. A subclass sets `env_prefix` with `settings_config(prefix)`."""

    service_name: ClassVar[str]
    max_sent_bytes: ClassVar[int] = MAX_SENT_BYTES
    """Maximum size of a gRPC message that is sent, bytes."""

    host: str = Field(default="127.0.0.1", description="Address to bind to.")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 selects a free one.")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="HTTP port of /metrics; 0 selects a free one.")
    dev_mode: bool = Field(default=False, description="Accept calls without a token; requires a loopback host.")
    otlp_endpoint: str = Field(
        default="",
        description="Collector of the service's traces and metrics, OTLP/gRPC, `http://host:4317`; `https:` for TLS.",
    )
    log_format: str = Field(default="json", pattern="^(json|console)$", description="`json` or `console`.")
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$", description="Minimum log level.")
    drain_grace_s: float = Field(
        default=10.0, ge=0, le=3600, description="Grace period for pending work at shutdown, seconds."
    )
    loop_probe_interval_s: float = Field(
        default=0.2,
        ge=0,
        le=60,
        description="Time between probes of the event loop, seconds; a probe that waits longer than 20 ms is "
        "counted, and what blocks the loop is logged as `loop_blocked`. 0: none.",
    )
    max_message_bytes: int = Field(
        default=20 * 1024 * 1024, ge=4096, description="Maximum size of a gRPC message that is received, bytes."
    )
    ready_file: str = Field(
        default="", description="File to write the bound ports to, as JSON, once the service is serving."
    )
    tls_certificate_file: str = Field(
        default="",
        description="PEM file of the service's certificate chain; enables TLS on all ports but /metrics. Reloaded on change.",
    )
    tls_key_file: str = Field(default="", description="PEM file of the certificate's key.")
    tls_client_ca_file: str = Field(
        default="",
        description="PEM file of the CAs of client certificates; the gRPC port then requires one (mTLS).",
    )
    tls_ca_file: str = Field(
        default="",
        description="PEM file of the CAs of other services, which are then called with TLS, presenting this service's "
        "certificate if it has one.",
    )
    agents_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="A second gRPC port for agents if `tls_client_ca_file` is set: TLS without client certificates, for "
        "attempt keys only. 0: none.",
    )
    tls_own_name: str = Field(
        default="",
        description="Name in the service's certificate that its replicas and processes verify. Empty: their addresses.",
    )
    auth_failures_per_minute: int = Field(
        default=60,
        ge=0,
        le=1_000_000,
        description="Forged tokens accepted per address and minute; more get RESOURCE_EXHAUSTED or 429. 0: no limit.",
    )
    project_calls_per_s: float = Field(
        default=1000.0,
        ge=0,
        le=1e9,
        description="Calls per second of each project in this process. Messages of streams count, and 64 KiB count as one; "
        "more get RESOURCE_EXHAUSTED or 429, and streams are slowed down. Tokens for all projects have no limit. 0: none.",
    )
    project_burst: float = Field(
        default=2000.0, ge=1, le=1e9, description="Burst of calls of a project above `project_calls_per_s`."
    )
    project_max_calls: int = Field(
        default=512,
        ge=0,
        le=1_000_000,
        description="Calls of a project at the same time in this process, without streams. 0: no limit.",
    )
    project_max_streams: int = Field(
        default=4096, ge=0, le=1_000_000, description="Open streams of a project in this process. 0: no limit."
    )
    stream_write_timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=86_400,
        description="Time for which a message of a gRPC stream may wait for its caller to read it, seconds; then the stream "
        "ends with DEADLINE_EXCEEDED. A stream with nothing to send has no limit.",
    )
    audit_file: str = Field(
        default="",
        description="File for the audit log of administrative calls. Empty: standard error.",
    )

    _secret_files: dict[str, WatchedFile] = PrivateAttr(default_factory=dict)
    _secret_variables: dict[str, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.dev_mode and not is_loopback(self.host):
            raise ValueError("dev_mode requires a loopback host: it accepts calls without a token")
        if bool(self.tls_certificate_file) != bool(self.tls_key_file):
            raise ValueError("tls_certificate_file and tls_key_file must be set together")
        if self.tls_client_ca_file and not self.tls_certificate_file:
            raise ValueError("tls_client_ca_file requires tls_certificate_file")
        if self.agents_port and not self.tls_client_ca_file:
            raise ValueError("agents_port requires tls_client_ca_file")
        return self

    @classmethod
    def from_environment(cls) -> Self:
        """Reads the settings from the environment.

        Raises:
            SettingsInvalid: If any is invalid or unknown; lists all problems.
        """
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        files = {f"{prefix}{name.upper()}_FILE": name for name in cls.secret_names()}
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields} | files.keys()
        violations = [
            Violation(field=name, description="no such setting")
            for name in sorted(os.environ)
            if name.startswith(prefix) and name not in known
        ]
        secret_files, values = _read_secrets(cls, files, prefix, violations)
        try:
            settings = cls(**(cls.environment_values() | values))
        except ValidationError as error:
            # Without the input, which may be a secret.
            violations += [
                Violation(field=_variable(prefix, item["loc"]), description=item["msg"])
                for item in error.errors(include_input=False, include_url=False)
            ]
            settings = None
        violations += _unreadable(cls, settings, prefix) if settings is not None else []
        if violations or settings is None:
            raise SettingsInvalid(f"settings of {cls.service_name} are invalid", violations=violations)
        settings._secret_files.update(secret_files)
        secrets = (f"{prefix}{name.upper()}" for name in cls.secret_names())
        settings._secret_variables.update({name: os.environ[name] for name in secrets if name in os.environ})
        return settings

    @classmethod
    def secret_names(cls) -> list[str]:
        """Returns the names of secret settings, which may come from a file."""
        return [
            name
            for name, field in cls.model_fields.items()
            if (field.description or "").endswith("Secret.") or "SecretStr" in str(field.annotation)
        ]

    def secret(self, name: str) -> Secret:
        """Returns a secret setting; one from a file follows the file.

        Args:
            name: Name of a setting of type SecretStr.
        """
        value: SecretStr = getattr(self, name)
        return Secret(value.get_secret_value(), file=self._secret_files.get(name))

    @property
    def secret_variables(self) -> Mapping[str, str]:
        """Secret settings that came from the environment itself, by variable."""
        return self._secret_variables

    @property
    def private_files(self) -> tuple[Path, ...]:
        """Files that no code of a tenant may see: secrets, keys of certificates, the audit log."""
        secrets = (file.path for file in self._secret_files.values())
        return (*secrets, *(Path(name) for name in (self.tls_key_file, self.audit_file) if name))

    def own_tls(self) -> TlsFiles | None:
        """Returns the TLS files of this service's ports; None for no TLS."""
        if not self.tls_certificate_file:
            return None
        return TlsFiles(
            ca_file=self.tls_client_ca_file, certificate_file=self.tls_certificate_file, key_file=self.tls_key_file
        )

    def peer_tls(self) -> TlsFiles | None:
        """Returns the TLS files for calls to other services; None for no TLS."""
        if not self.tls_ca_file:
            return None
        return TlsFiles(
            ca_file=self.tls_ca_file, certificate_file=self.tls_certificate_file, key_file=self.tls_key_file
        )

    def sibling_tls(self) -> TlsFiles | None:
        """Returns the TLS files for calls to the service's own replicas and processes; None for no TLS."""
        peers = self.peer_tls()
        return None if peers is None else replace(peers, server_name=self.tls_own_name)

    def describe(self) -> dict[str, str]:
        """Returns all settings by environment variable, with secrets masked."""
        prefix = str(self.model_config.get("env_prefix", "")).upper()
        found = {f"{prefix}{name.upper()}": str(getattr(self, name)) for name in type(self).model_fields}
        return found | {f"{prefix}{name.upper()}_FILE": str(file.path) for name, file in self._secret_files.items()}


class KeyHolderSettings(ServiceSettings):
    """Settings of a service that holds the deployment's signing keys: the store."""

    signing_key: SecretStr = Field(
        default=SecretStr(""),
        description="Signing keys of the deployment, one per line, at least 32 bytes each: the first signs, all are accepted. "
        "Only for the store. Secret.",
    )

    @model_validator(mode="after")
    def _keyed(self) -> Self:
        keys = split_keys(self.signing_key.get_secret_value())
        if not keys and not self.dev_mode:
            raise ValueError(
                f"signing_key must have at least {MIN_KEY_BYTES} bytes (`fulmen token --new-key` prints a new key), "
                "or set dev_mode=true on a loopback host"
            )
        problem = problem_of(keys)
        if problem is not None:
            raise ValueError(f"signing_key {problem}")
        return self

    def signing_keys(self) -> SigningKeys:
        """Returns the signing keys, which follow their file."""
        return SigningKeys(self.secret("signing_key"))


def settings_config(prefix: str) -> SettingsConfig:
    """Returns the configuration of a settings class with a variable prefix such as `FULMEN_STORE_`."""
    # An error that showed its input would show secrets.
    return SettingsConfig(env_prefix=prefix, hide_input_in_errors=True)


def is_loopback(host: str) -> bool:
    """Returns True if a bind address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _unreadable(settings_class: type[ServiceSettings], settings: ServiceSettings, prefix: str) -> list[Violation]:
    """Returns violations for TLS files that cannot be read."""
    files = {
        name: getattr(settings, name)
        for name in settings_class.model_fields
        if name.startswith("tls_") and name.endswith("_file")
    }
    return [
        Violation(field=f"{prefix}{name.upper()}", description=f"{path} cannot be read")
        for name, path in files.items()
        if path and not os.access(path, os.R_OK)
    ]


def _read_secrets(
    settings_class: type[ServiceSettings], files: dict[str, str], prefix: str, violations: list[Violation]
) -> tuple[dict[str, WatchedFile], dict[str, Any]]:
    """Reads the files of secrets named in the environment; appends problems to the violations."""
    watched: dict[str, WatchedFile] = {}
    values: dict[str, Any] = {}
    for variable, name in files.items():
        path = os.environ.get(variable, "")
        if not path:
            continue
        if os.environ.get(f"{prefix}{name.upper()}"):
            violations.append(
                Violation(field=variable, description=f"conflicts with {prefix}{name.upper()}; set only one")
            )
            continue
        try:
            watched[name] = WatchedFile(path)
            text = text_of(watched[name])
            is_text = settings_class.model_fields[name].annotation is SecretStr
            values[name] = SecretStr(text) if is_text else json.loads(text)
        except OSError as error:
            violations.append(Violation(field=variable, description=f"{path} cannot be read: {error.strerror}"))
        except (ValueError, RecursionError):
            violations.append(Violation(field=variable, description=f"content of {path} is invalid"))
    return watched, values


def _variable(prefix: str, location: tuple[Any, ...]) -> str:
    return f"{prefix}{str(location[0]).upper()}" if location else prefix.rstrip("_")
