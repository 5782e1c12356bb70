"""Models of a hub that runs begin with: which may be used, and downloading them.

The hub itself, its token and its cache are the operator's (HF_ENDPOINT, HF_TOKEN, HF_HOME): a run names a model only.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from fulmen.models.base_names import HubName
from fulmen_algorithm.clients.child import Child
from fulmen_algorithm.clients.hub_process import Order
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify

SETTING: Final = "the service's setting FULMEN_ALGORITHM_HUB_MODELS (docs/models.md)"
LOOK_UPS: Final = 4
"""Models that are looked up at a time."""
LOOK_UP_DEADLINE_S: Final = 45.0
FIRST_WAIT_S: Final = 1.0
LONGEST_WAIT_S: Final = 60.0
END_GRACE_S: Final = 2.0
TOLD_SHARE: Final = 0.1
"""Share of a download after which progress is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLimits:
    """Limits of one model: bytes, and seconds of downloading."""

    max_bytes: int
    deadline_s: float


class HubModels:
    """The models of the hub that the operator allows."""

    def __init__(
        self,
        allowed: str,
        limits: HubLimits,
        *,
        variables: Mapping[str, str] | None = None,
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        """Reads the setting `allowed`: patterns of `organisation/name`, separated by commas; empty for none.

        `variables` of huggingface_hub replace those of the service, unless they are empty.
        """
        self._variables = {name: value for name, value in (variables or {}).items() if value}
        self._allowed = tuple(part.strip().lower() for part in allowed.split(",") if part.strip())
        self._limits = limits
        self._first_wait_s = first_wait_s
        self._look_ups = asyncio.Semaphore(LOOK_UPS)

    async def problem(self, source: str) -> str:
        """Returns why no run can begin with a model; empty if one may, or if the hub does not answer."""
        try:
            name = HubName.parse(source)
        except ValueError as error:
            return str(error)
        if problem := self._not_allowed(name):
            return problem
        order = Order(name=str(name), max_bytes=self._limits.max_bytes, fetches=False)
        try:
            async with asyncio.timeout(LOOK_UP_DEADLINE_S), self._look_ups:
                answer = await self._last(order)
        except TimeoutError:
            return ""
        # The run waits for a hub that does not answer, or takes what is cached.
        return "" if answer.get("passes") else str(answer.get("problem", ""))

    async def fetched(self, source: str, notify: Notify) -> Path:
        """Returns the folder of a model in the cache, downloaded if need be; it is named after the commit.

        A hub that cannot be reached is tried again until the deadline; finished files are kept.

        Raises:
            RunFailed: if the model does not exist, may not be read, or is none that may be loaded.
        """
        name = HubName.parse(source)
        if problem := self._not_allowed(name):
            raise RunFailed(f"Weights cannot be loaded: {problem}.")
        wait_s, was_told = self._first_wait_s, False
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                while True:
                    answer = await self._attempt(name, notify)
                    if "folder" in answer:
                        return Path(str(answer["folder"]))
                    text = f"{name} cannot be downloaded: {answer.get('problem', 'the process has ended')}."
                    if not answer.get("passes", True):
                        raise RunFailed(text)
                    if not was_told:
                        notify("warning", f"{text} It is retried.")
                        was_told = True
                    await asyncio.sleep(wait_s)
                    wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        except TimeoutError as error:
            raise RunFailed(
                f"{name} could not be downloaded within {self._limits.deadline_s:.0f} s (FULMEN_ALGORITHM_HUB_DEADLINE_S)."
            ) from error

    async def _attempt(self, name: HubName, notify: Notify) -> dict[str, Any]:
        order, answer, next_told = Order(name=str(name), max_bytes=self._limits.max_bytes, fetches=True), {}, 0.0
        async with aclosing(self._lines(order)) as lines:
            async for answer in lines:
                if "received" in answer and answer["received"] >= next_told * answer["total"]:
                    share = answer["received"] / answer["total"]
                    notify(
                        "info", f"Downloading {name}: {answer['received']} of {answer['total']} bytes ({share:.0%})."
                    )
                    next_told = share // TOLD_SHARE * TOLD_SHARE + TOLD_SHARE
        return answer

    def _not_allowed(self, name: HubName) -> str:
        if any(fnmatchcase(name.repository.lower(), pattern) for pattern in self._allowed):
            return ""
        allowed = f"it allows {', '.join(self._allowed)}" if self._allowed else "it allows none"
        return f"{name.repository} is not allowed by {SETTING}: {allowed}"

    async def _last(self, order: Order) -> dict[str, Any]:
        async with aclosing(self._lines(order)) as lines:
            answers = [answer async for answer in lines]
        return answers[-1] if answers else {}

    async def _lines(self, order: Order) -> AsyncGenerator[dict[str, Any], None]:
        """Yields what the process of an order prints; ends the process when it is closed."""
        # It has the operator's variables for the hub, and none of the service's secrets.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FULMEN_")}
        environment |= self._variables
        # By plain HTTP: the hub alone is called, and what it redirects to.
        environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_VERBOSITY": "error"}
        argv = [sys.executable, "-P", "-m", "fulmen_algorithm.clients.hub_process", order.as_argument()]
        child = Child.start(argv, environment=environment, output=subprocess.PIPE)
        try:
            async for line in child.lines():
                yield json.loads(line)
        finally:
            await child.end(grace_s=END_GRACE_S)
