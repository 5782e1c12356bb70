"""Builds a virtual environment from requirements, with uv, or with venv and pip where uv is not installed.

Invariant: a build runs as confined as the runner's agents do, with the network, and with no variable of the runner but those
listed here. Unless the operator allows it, no code of a package runs in it: only wheels are installed. The addresses of
indexes, which may hold a password, are known only to the step that installs, and are masked in what it prints.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final
from urllib.parse import unquote, urlsplit

import structlog

from fulmen.bundles import protect
from fulmen.requirements_file import has_hashes
from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.limits import Allowance
from fulmen_runner.agents.command.process import ProcessLimits, ProcessResult, run_process
from fulmen_runner.agents.isolation import AgentIsolation, give
from fulmen_runner.agents.venvs.cache import FOLDER_MODE, extent_of
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.masking import masked_bytes
from fulmen_service_kit.isolation.launch import Files
from fulmen_service_kit.isolation.trees import delete_tree

VENV: Final = "venv"
OUTPUT_KEPT_BYTES: Final = 4096
_OUTPUT_ALLOWED_BYTES: Final = 64 * 1024 * 1024
_SCRATCH: Final = "scratch"
_INHERITED: Final = (
    "ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "LANG", "LC_ALL", "NO_PROXY", "PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR",
    "SSL_CERT_FILE", "TZ", "all_proxy", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageSources:
    """Sources of packages; the operator's choice.

    Attributes:
        index_url: The index; empty for the tool's default, `off` for none. Secret.
        extra_index_urls: Further indexes. Secret.
        folders: Folders and pages with packages.
        allows_builds: Whether packages may be built from source, which runs their code.
    """

    index_url: str = field(default="", repr=False)
    extra_index_urls: tuple[str, ...] = field(default=(), repr=False)
    folders: tuple[str, ...] = ()
    allows_builds: bool = False

    @property
    def secrets(self) -> tuple[str, ...]:
        """What output must not show."""
        urls = [urlsplit(url) for url in (self.index_url, *self.extra_index_urls, *self.folders) if "@" in url]
        parts = [part for url in urls for part in (url.netloc.rpartition("@")[0], url.password, url.username) if part]
        return tuple(dict.fromkeys(form for part in parts for form in (part, unquote(part))))

    def variables(self, *, uv: bool) -> dict[str, str]:
        """Returns the variables of uv or pip."""
        known = {
            "UV_DEFAULT_INDEX" if uv else "PIP_INDEX_URL": "" if self.index_url == OFF else self.index_url,
            "UV_INDEX" if uv else "PIP_EXTRA_INDEX_URL": " ".join(self.extra_index_urls),
            "UV_FIND_LINKS" if uv else "PIP_FIND_LINKS": ("," if uv else " ").join(self.folders),
        }
        return {name: value for name, value in known.items() if value}


OFF: Final = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class VenvBuilder:
    """Builds environments for a runner.

    Attributes:
        guardian: Starts the processes.
        isolation: Isolates them.
        inherited: Variables inherited from the runner.
        sources: Sources of packages.
        build_s: Timeout of a build, in seconds.
        venv_bytes: Most that an environment takes.
        memory_bytes: Memory limit; 0 for none.
        process_count: Limit of processes and threads; 0 for none.
        uv: Path of uv; empty to use venv and pip.
    """

    guardian: Guardian
    isolation: AgentIsolation
    inherited: Mapping[str, str]
    sources: PackageSources
    build_s: float
    venv_bytes: int
    memory_bytes: int = 0
    process_count: int = 0
    uv: str = field(default_factory=lambda: find_uv())

    @property
    def tool(self) -> str:
        """Name of the tool."""
        return "uv" if self.uv else "pip"

    async def build(self, folder: Path, requirements: tuple[str, ...]) -> None:
        """Makes the environment `venv` in a folder.

        Raises:
            AgentFailed: If a requirement cannot be installed, or a limit is exceeded.
            HostUnavailable: If this machine cannot build it.
        """
        scratch = folder / _SCRATCH
        await asyncio.to_thread(_prepare, scratch, requirements)
        try:
            async with asyncio.timeout(self.build_s):
                await self._make(folder)
                await self._install(folder, has_hashes(requirements))
                # By the runner's Python: the environment's would run its packages. Files that are not a Python of this
                # version are left as they are.
                await self._run(
                    (sys.executable, "-I", "-S", "-m", "compileall", "-q", str(folder / VENV / "lib")), folder
                )
        except TimeoutError:
            raise AgentFailed(
                f"requirements were not installed within {self.build_s:g} s (FULMEN_RUNNER_VENV_BUILD_S)"
            ) from None
        await asyncio.to_thread(delete_tree, scratch)
        if (await asyncio.to_thread(extent_of, folder)).size_bytes > self.venv_bytes:
            raise self._too_large()
        await give(folder, os.geteuid())
        await asyncio.to_thread(_protected, folder)

    async def _make(self, folder: Path) -> None:
        place = str(folder / VENV)
        argv = (
            (self.uv, "venv", "--no-config", "--no-project", "--quiet", "--python", sys.executable, place)
            if self.uv
            else (sys.executable, "-I", "-m", "venv", place)
        )
        made = await self._run(argv, folder)
        if made.failure:
            raise HostUnavailable(f"virtual environment cannot be made by {self.tool}: {made.failure}")

    async def _install(self, folder: Path, hashed: bool) -> None:
        python = str(folder / VENV / "bin" / "python")
        argv = (
            [self.uv, "pip", "install", "--no-config", "--no-progress", "--python", python]
            if self.uv
            else [python, "-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]
        )
        argv += ["--require-hashes"] if hashed else []
        argv += ["--no-index"] if self.sources.index_url == OFF else []
        argv += [] if self.sources.allows_builds else ["--only-binary", ":all:"]
        argv += ["--requirement", str(folder / _SCRATCH / "requirements.txt")]
        done = await self._run(argv, folder, self.sources.variables(uv=bool(self.uv)))
        if not done.failure:
            return
        _log.warning("venv_build_failed", tool=self.tool, exit_code=done.exit_code, breach=done.breach)
        if done.exit_code == -signal.SIGXFSZ:
            raise self._too_large()
        note = ""
        if done.exit_code > 0 and not self.sources.allows_builds:
            note = " Only wheels are installed; sources are not built on this runner (FULMEN_RUNNER_PACKAGE_BUILDS)."
        raise AgentFailed(f"requirements of the agent cannot be installed.{note} {self.tool} {done.failure}")

    def _too_large(self) -> AgentFailed:
        return AgentFailed(
            f"requirements of the agent need more than {self.venv_bytes} bytes (FULMEN_RUNNER_VENV_BYTES)"
        )

    async def _run(
        self, argv: Sequence[str], folder: Path, variables: Mapping[str, str] = MappingProxyType({})
    ) -> ProcessResult:
        scratch = str(folder / _SCRATCH)
        allowed = Allowance(
            memory_bytes=self.memory_bytes,
            memory_source="FULMEN_RUNNER_ATTEMPT_MEMORY_BYTES",
            process_count=self.process_count,
            process_source="FULMEN_RUNNER_ATTEMPT_PROCESSES",
            disk_bytes=self.venv_bytes,
            disk_source="FULMEN_RUNNER_VENV_BYTES",
        )
        launch = await self.isolation.launch(
            argv,
            self.isolation.level(None, "an environment of requirements"),
            files=Files(readable=self._readable, writable=(folder,), folder=folder),
            allowance=allowed,
            owned=folder,
        )
        environment = {name: self.inherited[name] for name in _INHERITED if name in self.inherited}
        environment |= {
            **variables,
            "HOME": scratch,
            "TMPDIR": scratch,
            "NO_COLOR": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "UV_CACHE_DIR": f"{scratch}/cache",
            "UV_PYTHON_DOWNLOADS": "never",
        }
        limits = ProcessLimits(
            stdout_kept_bytes=OUTPUT_KEPT_BYTES,
            stderr_kept_bytes=OUTPUT_KEPT_BYTES,
            output_allowed_bytes=_OUTPUT_ALLOWED_BYTES,
            allowance=allowed,
        )
        try:
            result = await run_process(
                launch,
                cwd=folder,
                folders=(folder,),
                environment=environment,
                stdin=b"",
                limits=limits,
                guardian=self.guardian,
            )
        except OSError as error:
            raise HostUnavailable(f"{argv[0]} cannot be started: {error.strerror}") from None
        return replace(result, stderr=masked_bytes(result.stderr, self.sources.secrets))

    @property
    def _readable(self) -> tuple[Path, ...]:
        local = (Path(each.removeprefix("file://")) for each in self.sources.folders)
        return tuple(path for path in (*([Path(self.uv)] if self.uv else []), *local) if path.is_absolute())


def find_uv() -> str:
    """Returns the path of uv, beside the runner's Python or on PATH; empty if it is not installed."""
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("uv") or ""


def _prepare(scratch: Path, requirements: tuple[str, ...]) -> None:
    scratch.mkdir()
    # Written from what was read, so that the tool sees no line that was not checked.
    (scratch / "requirements.txt").write_text("\n".join([*requirements, ""]), "ascii")


def _protected(folder: Path) -> None:
    folder.chmod(FOLDER_MODE)
    protect(folder / VENV)
