"""Settings of a service: one frozen class, read from the environment only, where an unknown key is an error."""

import ipaddress
import os
from typing import Any, ClassVar, Self

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fulmen.errors import SettingsInvalid, Violation

MIN_SIGNING_KEY_BYTES = 32


class ServiceSettings(BaseSettings):
    """The settings that all services share. A subclass sets `env_prefix` by `settings_config(prefix)`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    service_name: ClassVar[str]

    host: str = Field(default="127.0.0.1", description="Address that the service binds to.")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 takes a free one.")
    metrics_port: int = Field(default=0, ge=0, le=65535, description="Port of /metrics over HTTP; 0 takes a free one.")
    signing_key: SecretStr = Field(
        default=SecretStr(""), description="Key of all tokens of the deployment, at least 32 bytes. Secret."
    )
    dev_mode: bool = Field(default=False, description="Accepts calls without a token; needs a loopback host.")
    otlp_endpoint: str = Field(
        default="", description="Where the service's own traces and metrics go by OTLP/gRPC, `http://host:4317`."
    )
    log_format: str = Field(default="json", pattern="^(json|console)$", description="`json` or `console`.")
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$", description="Least level logged.")
    drain_grace_s: float = Field(default=10.0, ge=0, le=3600, description="How long a stop waits for work, seconds.")
    max_message_bytes: int = Field(default=20 * 1024 * 1024, ge=4096, description="Largest gRPC message, bytes.")
    ready_file: str = Field(default="", description="Gets the real ports as JSON once the service is serving.")

    @model_validator(mode="after")
    def _authenticated(self) -> Self:
        if self.dev_mode:
            if not is_loopback(self.host):
                raise ValueError("dev_mode needs a loopback host: it answers calls without a token")
        elif len(self.signing_key.get_secret_value().encode()) < MIN_SIGNING_KEY_BYTES:
            raise ValueError(
                f"signing_key needs at least {MIN_SIGNING_KEY_BYTES} bytes (`fulmen token --new-key` makes one), "
                "or set dev_mode=true on a loopback host"
            )
        return self

    @classmethod
    def from_environment(cls) -> Self:
        """Reads the settings from the environment.

        Raises:
            SettingsInvalid: With every problem at once, unknown variables of the service's prefix included.
        """
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        known = {f"{prefix}{name.upper()}" for name in cls.model_fields}
        violations = [
            Violation(field=name, description="no such setting")
            for name in sorted(os.environ)
            if name.startswith(prefix) and name not in known
        ]
        try:
            settings = cls()
        except ValidationError as error:
            # The input is left out: it may be a secret.
            violations += [
                Violation(field=_variable(prefix, item["loc"]), description=item["msg"])
                for item in error.errors(include_input=False, include_url=False)
            ]
            settings = None
        if violations or settings is None:
            raise SettingsInvalid(f"The settings of {cls.service_name} are not valid.", violations=violations)
        return settings

    def describe(self) -> dict[str, str]:
        """Returns every setting by its environment variable, secrets masked."""
        prefix = str(self.model_config.get("env_prefix", "")).upper()
        return {f"{prefix}{name.upper()}": str(getattr(self, name)) for name in type(self).model_fields}


def settings_config(prefix: str) -> SettingsConfigDict:
    """Returns the configuration of a settings class whose variables begin with `prefix`, such as `FULMEN_STORE_`."""
    return SettingsConfigDict(env_prefix=prefix, frozen=True, extra="forbid")


def is_loopback(host: str) -> bool:
    """Tells whether a bind address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _variable(prefix: str, location: tuple[Any, ...]) -> str:
    return f"{prefix}{str(location[0]).upper()}" if location else prefix.rstrip("_")
