"""The virtual environment of an agent: built once for its requirements, or found at the place in its
specification."""

import asyncio
import hashlib
import json
import platform
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fulmen.requirements_file import RequirementsInvalid, read_requirements
from fulmen_runner.agents.specification import VenvSource
from fulmen_runner.agents.venvs.build import VENV, VenvBuilder
from fulmen_runner.agents.venvs.cache import HeldFolder, VenvCache
from fulmen_runner.agents.venvs.modules import ModulePaths
from fulmen_runner.agents.venvs.own_python import Venv, allowed_venv, built_venv
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable

FAILURE_KEPT_S: Final = 60.0
"""Time for which a failed build is not tried again."""

_FAILURES_KEPT: Final = 256
_CONCURRENT_BUILDS: Final = 2
_LAYOUT: Final = 1
"""Changes whenever environments are built in another way, so that older ones are not used."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVenv:
    """An environment, with what keeps it: None if it is not the runner's."""

    venv: Venv
    held: HeldFolder | None

    def release(self) -> None:
        """Ends its use."""
        if self.held is not None:
            self.held.release()


@dataclass(slots=True, kw_only=True)
class Venvs:
    """The environments of a runner's agents.

    Attributes:
        builder: Builds them.
        cache: Keeps them.
        allowed: Folders below which agents may name one; None for any.
        modules: What the runner gives to them.
        counts: Environments by how they were had: `built`, `failed` or `reused`.
    """

    builder: VenvBuilder
    cache: VenvCache
    allowed: Sequence[Path] | None
    modules: ModulePaths
    counts: "Counter[str]" = field(default_factory=Counter)
    _failures: "OrderedDict[str, tuple[float, str]]" = field(default_factory=OrderedDict)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CONCURRENT_BUILDS))

    async def held(self, source: VenvSource, bundle: Path | None) -> HeldVenv:
        """Returns the environment of an agent; the caller has to release it.

        Args:
            source: What the agent asks for.
            bundle: Its unpacked bundle; None if it has none.

        Raises:
            AgentFailed: If its requirements are not allowed or cannot be installed, or the environment does not
                exist.
            HostUnavailable: If the runner cannot build it.
        """
        if source.folder:
            venv = await asyncio.to_thread(allowed_venv, source.folder, self.allowed, self.modules)
            return HeldVenv(venv=venv, held=None)
        if not self.cache.limit_bytes:
            raise AgentFailed(
                "agent has requirements, but this runner does not install any (FULMEN_RUNNER_VENVS_BYTES=0). Require a label of "
                "runners that do, or use a container"
            )
        requirements = await asyncio.to_thread(requirements_of, source.requirements, bundle)
        held = await self._held(self._name(requirements), requirements)
        return HeldVenv(venv=built_venv(held.folder / VENV, self.modules), held=held)

    async def _held(self, name: str, requirements: tuple[str, ...]) -> HeldFolder:
        built: list[Path] = []

        async def build(folder: Path) -> None:
            self._raise_kept_failure(name)
            async with self._turns:
                started_s = time.monotonic()
                _log.info("venv_build_started", venv=name, tool=self.builder.tool, requirements=len(requirements))
                try:
                    await self.builder.build(folder, requirements)
                except (AgentFailed, HostUnavailable) as error:
                    self.counts["failed"] += 1
                    if isinstance(error, AgentFailed):
                        self._keep_failure(name, str(error))
                    raise
                _log.info("venv_built", venv=name, seconds=round(time.monotonic() - started_s, 3))
            self.counts["built"] += 1
            built.append(folder)

        held = await self.cache.held(name, build)
        if not built:
            self.counts["reused"] += 1
            _log.info("venv_reused", venv=name)
        return held

    def _raise_kept_failure(self, name: str) -> None:
        failed_at_s, message = self._failures.get(name, (0.0, ""))
        if message and time.monotonic() - failed_at_s < FAILURE_KEPT_S:
            raise AgentFailed(message)

    def _keep_failure(self, name: str, message: str) -> None:
        self._failures[name] = (time.monotonic(), message)
        self._failures.move_to_end(name)
        while len(self._failures) > _FAILURES_KEPT:
            self._failures.popitem(last=False)

    def _name(self, requirements: tuple[str, ...]) -> str:
        """Returns the name of the environment of requirements: a digest of all that decides what is installed."""
        sources = self.builder.sources
        parts = [
            _LAYOUT,
            requirements,
            [sys.version, sys.base_prefix, platform.platform()],
            [self.builder.tool, sources.index_url, sources.extra_index_urls, sources.folders, sources.allows_builds],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


class VenvMetrics(Collector):
    """Metrics of the environments."""

    def __init__(self, venvs: Venvs) -> None:
        self._venvs = venvs

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        had = CounterMetricFamily(
            "fulmen_runner_venvs", "Virtual environments of requirements, by how they were obtained.", labels=["how"]
        )
        for how in ("built", "failed", "reused"):
            had.add_metric([how], self._venvs.counts[how])
        yield had
        cache = self._venvs.cache
        yield CounterMetricFamily(
            "fulmen_runner_venvs_evicted",
            "Virtual environments deleted to make space for others.",
            value=cache.evicted_count,
        )
        yield GaugeMetricFamily(
            "fulmen_runner_venvs_bytes", "Size of the virtual environments at the last build.", value=cache.size_bytes
        )


def requirements_of(file: str, bundle: Path | None) -> tuple[str, ...]:
    """Returns the requirements in a file of a bundle. Blocks.

    Raises:
        AgentFailed: If it does not exist, or has lines that are not allowed; lists all of them.
    """
    if bundle is None:
        raise AgentFailed("agent has requirements, but no bundle with the file")
    path = bundle / file
    try:
        if not path.resolve().is_relative_to(bundle.resolve()):
            raise AgentFailed(f"requirements file {file!r} is not in the agent's bundle")
        return read_requirements(path.read_bytes())
    except RequirementsInvalid as error:
        problems = "\n".join(f"{file} {problem}" for problem in error.problems)
        raise AgentFailed(f"requirements of the agent are refused:\n{problems}") from None
    except (OSError, ValueError):
        raise AgentFailed(f"requirements file {file!r} is not in the agent's bundle") from None
