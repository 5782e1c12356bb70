"""`FULMEN_RUNNER_HOOKS=fulmen_runner.hooks.alerts:Alerts`: sends alerts about agents to a webhook.

Invariants: attempts never wait for the webhook. An alert is sent a bounded number of times; a lost one is logged and
counted. After an alert, the same rule of the same agent is silent for `cooldown_s`.
"""

import asyncio
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx2
import structlog
from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from pydantic import Field, SecretStr, ValidationError, field_validator

from fulmen.hooks import AttemptEnd, AttemptFacts, Hook
from fulmen_runner.hooks.webhook import Message, Webhook
from fulmen_runner.hooks.windows import AgentMetrics, Windows, agent_of
from fulmen_service_kit.settings import EnvironmentSettings, settings_config

PREFIX = "FULMEN_ALERTS_"
MAX_PENDING = 100
MAX_PORT = 65_535
FIRST_PAUSE_S = 1.0
CLOSE_TIMEOUT_S = 4.0

_log = structlog.get_logger()


class AlertSettings(EnvironmentSettings):
    """Settings of alerts; environment prefix `FULMEN_ALERTS_`."""

    model_config = settings_config(PREFIX)

    url: str = Field(pattern=r"^https?://[^/]+", description="URL to which alerts are posted.")
    secret: SecretStr = Field(min_length=16, description="Key of the signature (HMAC-SHA256). Secret.")
    window_s: float = Field(default=300.0, gt=0, le=86_400, description="Time window of the rules, seconds.")
    min_attempts: int = Field(default=20, ge=1, description="Minimum number of attempts in the window for any alert.")
    max_error_rate: float | None = Field(default=0.5, ge=0, le=1, description="Maximum share of failed attempts.")
    max_mean_duration_s: float | None = Field(default=None, gt=0, description="Maximum mean duration, seconds.")
    min_mean_reward: float | None = Field(default=None, description="Minimum mean reward.")
    max_reward_drop: float | None = Field(
        default=None,
        gt=0,
        description="Maximum drop of the mean reward from the first to the second half of the window.",
    )
    cooldown_s: float = Field(default=900.0, ge=0, description="Minimum time between two alerts of a rule, seconds.")
    timeout_s: float = Field(default=10.0, gt=0, le=60, description="Timeout of one request, seconds.")
    tries: int = Field(default=5, ge=1, le=10, description="Maximum number of tries per alert.")

    @field_validator("url")
    @classmethod
    def _is_url(cls, url: str) -> str:
        try:
            parts = httpx2.URL(url)
        except httpx2.InvalidURL:
            parts = httpx2.URL()
        if not parts.host or (parts.port or 0) > MAX_PORT:
            raise ValueError("must be a URL such as https://host/path")
        return url

    @classmethod
    def from_environment(cls) -> "AlertSettings":
        """Reads the settings.

        Raises:
            ValueError: If any is invalid or unknown; names the settings, never their values.
        """
        known = {f"{PREFIX}{name.upper()}" for name in cls.model_fields}
        unknown = sorted(name for name in os.environ if name.upper().startswith(PREFIX) and name.upper() not in known)
        if unknown:
            raise ValueError(f"unknown setting: {', '.join(unknown)}")
        try:
            return cls(**cls.environment_values())
        except ValidationError as error:
            # Without the input: the secret, and often the URL, must not be shown.
            problems = [
                f"{PREFIX}{str(each['loc'][0]).upper()}: {each['msg']}"
                for each in error.errors(include_input=False, include_url=False)
            ]
        raise ValueError("; ".join(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Breach:
    """A violated rule."""

    rule: str
    value: float
    limit: float


def breaches(metrics: AgentMetrics, settings: AlertSettings) -> Iterator[Breach]:
    """Yields the violated rules."""
    if metrics.attempt_count < settings.min_attempts:
        return
    maxima = (
        ("error_rate", metrics.error_rate, settings.max_error_rate),
        ("mean_duration", metrics.mean_duration_s, settings.max_mean_duration_s),
        ("reward_drop", metrics.reward_drop, settings.max_reward_drop),
    )
    for rule, value, limit in maxima:
        if value is not None and limit is not None and value > limit:
            yield Breach(rule=rule, value=value, limit=limit)
    reward, minimum = metrics.mean_reward, settings.min_mean_reward
    if reward is not None and minimum is not None and reward < minimum:
        yield Breach(rule="mean_reward", value=reward, limit=minimum)


class Alerts(Hook):
    """Checks the rules when attempts end, and sends alerts to a webhook."""

    def __init__(
        self,
        settings: AlertSettings | None = None,
        *,
        registry: CollectorRegistry = REGISTRY,
        clock: Callable[[], float] = time.monotonic,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """Initializes the hook; without `settings`, they are read from the environment."""
        self._settings = settings or AlertSettings.from_environment()
        self._clock = clock
        self._first_pause_s = first_pause_s
        self._windows = Windows(window_s=self._settings.window_s)
        self._quiet_until_s: dict[tuple[str, str], float] = {}
        self._webhook = Webhook(
            url=self._settings.url,
            secret=self._settings.secret.get_secret_value(),
            timeout_s=self._settings.timeout_s,
        )
        self._sending: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self._registry = registry
        self._metrics = _AlertMetrics(self)
        registry.register(self._metrics)

    async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        """Checks the rules; alerts are sent in the background."""
        agent, now_s = agent_of(attempt), self._clock()
        window = self._windows.of(agent)
        window.add(end, now_s=now_s)
        if not window.is_due:
            return
        metrics = window.metrics(now_s=now_s)
        for breach in breaches(metrics, self._settings):
            if self._quiet_until_s.get((agent, breach.rule), now_s) > now_s:
                continue
            self._drop_expired(now_s)
            self._quiet_until_s[agent, breach.rule] = now_s + self._settings.cooldown_s
            self._alert(agent, breach, metrics)

    async def close(self) -> None:
        """Waits briefly for pending alerts, then stops."""
        if self._sending:
            await asyncio.wait(set(self._sending), timeout=CLOSE_TIMEOUT_S)
        for task in set(self._sending):
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)
        await self._webhook.close()
        self._registry.unregister(self._metrics)

    def _drop_expired(self, now_s: float) -> None:
        self._quiet_until_s = {key: until_s for key, until_s in self._quiet_until_s.items() if until_s > now_s}

    def _alert(self, agent: str, breach: Breach, metrics: AgentMetrics) -> None:
        if len(self._sending) >= MAX_PENDING:
            self._lost(breach.rule, "too many pending alerts")
            return
        message = Message.of({
            "rule": breach.rule,
            "agent": agent,
            "runner": socket.gethostname(),
            "value": breach.value,
            "limit": breach.limit,
            "window_s": self._settings.window_s,
            "attempt_count": metrics.attempt_count,
            "error_rate": metrics.error_rate,
            "mean_duration_s": metrics.mean_duration_s,
            "mean_reward": metrics.mean_reward,
        })  # fmt: skip
        _log.warning("alert", rule=breach.rule, agent=agent, value=breach.value, limit=breach.limit)
        task = asyncio.create_task(self._send(message, breach.rule), name=f"alert {breach.rule}")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, message: Message, rule: str) -> None:
        problem = ""
        for attempt in range(self._settings.tries):
            if attempt:
                # Jitter: many runners may retry for the same cause.
                await asyncio.sleep(self._first_pause_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0))
            delivery = await self._webhook.send(message)
            if delivery.delivered:
                self.counts["delivered"] += 1
                return
            problem = delivery.problem
            if delivery.final:
                break
        self._lost(rule, problem)

    def _lost(self, rule: str, problem: str) -> None:
        self.counts["lost"] += 1
        _log.error("alert_not_delivered", rule=rule, problem=problem)


class _AlertMetrics(Collector):
    def __init__(self, alerts: Alerts) -> None:
        self._alerts = alerts

    def collect(self) -> Iterator[Metric]:
        counts = CounterMetricFamily("fulmen_agent_alerts", "Alerts by result.", labels=["result"])
        for result in ("delivered", "lost"):
            counts.add_metric([result], self._alerts.counts[result])
        yield counts
