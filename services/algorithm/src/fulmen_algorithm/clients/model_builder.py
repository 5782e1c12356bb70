"""Runs the model-building function of a bundle in a child process, and takes its files as data.

Invariant: the bundle's code never runs in the service's process and never sees its settings; what it wrote is copied into
the run's folder only if no reader of it runs code.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import structlog

from fulmen.bundles import BundleInvalid, protect, unpack
from fulmen_algorithm.clients.built_files import check_written, take
from fulmen_algorithm.clients.child import Child
from fulmen_algorithm.clients.forked_child import ModuleProcess, ModuleStarter
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_service_kit.isolation.cgroups import Cgroup
from fulmen_service_kit.isolation.launch import Bounds, Files, Isolator, Launch, supervised
from fulmen_service_kit.isolation.levels import Isolation, IsolationUnavailable
from fulmen_service_kit.isolation.trees import delete_tree

# Not imported here: a fork of this process would run a module that it has imported, which Python warns of.
CALL_FILE = Path(__file__).with_name("call_builder.py")
CALL = f"{__package__}.{CALL_FILE.stem}"
HIDDEN_PREFIX = "FULMEN_"
OUTPUT_SHOWN_CHARS = 1500
MAX_OUTPUT_BYTES = 64 * 2**20
MAX_PROCESSES = 4096
END_GRACE_S = 5.0
LOOK_INTERVAL_S = 1.0
"""Pause between two looks at how much a function has written, in seconds."""

_INHERITED = (
    "ALL_PROXY", "CUDA_VISIBLE_DEVICES", "CURL_CA_BUNDLE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "HTTP_PROXY", "LANG",
    "LC_ALL", "LD_LIBRARY_PATH", "NO_PROXY", "PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TZ",
    "all_proxy", "http_proxy", "https_proxy", "no_proxy",
)  # fmt: skip
_ENTERED_BY_ALL = 0o711
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLimits:
    """Limits of one call: seconds, bytes of memory and of files, threads of one torch operation."""

    deadline_s: float
    memory_bytes: int
    disk_bytes: int
    torch_threads: int


class ModelBuilder:
    """Builds the first weights of a policy."""

    def __init__(
        self,
        isolator: Isolator,
        limits: BuildLimits,
        *,
        folder: Path | None = None,
        modules: ModuleStarter | None = None,
    ) -> None:
        """Initializes the builder.

        Args:
            isolator: Isolates the function.
            limits: Limits of each call.
            folder: Parent of its files; None for the system's temporary folder.
            modules: Forks a trusted function's process, with torch in place; None for fresh processes.
        """
        self._isolator = isolator
        self._modules = modules
        self._limits = limits
        self._folder = folder

    async def build(self, bundle: bytes, target: str, files: RunFiles, *, seed: int) -> None:
        """Calls `function(folder, seed=seed)` of `file.py:function` in a bundle; its files become `files.initial`.

        Raises:
            RunFailed: if the bundle cannot be unpacked, this machine cannot isolate its code, the function fails or
                exceeds a limit, or a file that it wrote is not data; the text ends with the end of the process' output.
        """
        async with self._place() as root:
            await asyncio.to_thread(_prepare, bundle, root)
            file, _, name = target.rpartition(":")
            words = [file, name, str(root / "initial"), str(seed)]
            launch = await asyncio.to_thread(self._launch, words, target, root)
            try:
                await self._watch(await self._started(launch, words, root), target, root, launch.cgroup)
            finally:
                if launch.cgroup is not None:
                    launch.cgroup.remove()
            await asyncio.to_thread(take, root / "initial", files.initial, self._limits.disk_bytes)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[Path]:
        """Makes a folder for one call; deletes it with whatever the function left in it."""
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        root = Path(tempfile.mkdtemp(prefix="fulmen-build-", dir=self._folder))
        try:
            yield root
        finally:
            try:
                await asyncio.to_thread(delete_tree, root)
            except OSError as error:
                _log.warning("build_files_not_deleted", path=str(root), error=error.strerror)

    async def _started(self, launch: Launch, words: Sequence[str], root: Path) -> ModuleProcess:
        """Starts a call; at the level that isolates nothing, as a fork that has loaded what most functions import."""
        environment, folder = self._environment(root / "home"), root / "bundle"
        if self._isolator.floor is Isolation.TRUSTED and self._modules is not None:
            arguments = [*words, json.dumps(dict(launch.confinement))]
            return await self._modules.start(CALL, arguments, environment=environment, folder=folder)
        return Child.start(supervised(launch), environment=environment, output=subprocess.PIPE, folder=folder)

    def _launch(self, words: Sequence[str], target: str, root: Path) -> Launch:
        argv = [sys.executable, "-P", "-c", CALL_FILE.read_text(encoding="utf-8"), *words]
        written = (root / "initial", root / "home")
        limits = self._limits
        try:
            launch = self._isolator.launch(
                argv,
                self._isolator.floor,
                Files(readable=(root / "bundle",), writable=written, folder=root / "bundle"),
                Bounds(
                    memory_bytes=limits.memory_bytes,
                    process_count=MAX_PROCESSES,
                    file_bytes=limits.disk_bytes,
                    is_measured=False,
                ),
            )
        except IsolationUnavailable as error:
            raise RunFailed(f"{target} is not run on this service: {error}.") from error
        if launch.uid is not None:
            for folder in written:
                os.chown(folder, launch.uid, launch.uid)
        return launch

    async def _watch(self, child: ModuleProcess, target: str, root: Path, cgroup: Cgroup | None) -> None:
        """Waits for the end of a call, within its limits."""
        output = asyncio.create_task(child.last_output(OUTPUT_SHOWN_CHARS, allowed_bytes=MAX_OUTPUT_BYTES))
        outgrown = asyncio.create_task(self._outgrown(root))
        try:
            async with asyncio.timeout(self._limits.deadline_s):
                await asyncio.wait((output, outgrown), return_when=asyncio.FIRST_COMPLETED)
                if outgrown.done():
                    outgrown.result()
                shown = await output
                status = await child.wait()
        except TimeoutError as error:
            raise RunFailed(f"{target} took longer than {self._limits.deadline_s:.0f} s.") from error
        finally:
            output.cancel()
            outgrown.cancel()
            await child.end(grace_s=END_GRACE_S)
        if shown is None:
            raise RunFailed(f"{target} printed more than {MAX_OUTPUT_BYTES} bytes.")
        if cgroup is not None and cgroup.has_killed:
            raise RunFailed(
                f"{target} exceeded the memory limit of {self._limits.memory_bytes} bytes (FULMEN_ALGORITHM_BUILD_MEMORY_BYTES)."
            )
        if status:
            raise RunFailed(f"{target} ended with status {status}: {shown.decode(errors='replace').strip()}")

    async def _outgrown(self, root: Path) -> NoReturn:
        """Raises RunFailed when the function has written more than it may, its temporary files included."""
        while True:
            await asyncio.to_thread(check_written, (root / "initial", root / "home"), self._limits.disk_bytes)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def _environment(self, home: Path) -> dict[str, str]:
        if self._isolator.floor is Isolation.TRUSTED:
            environment = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN_PREFIX)}
        else:
            environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            environment |= {"HOME": str(home), "TMPDIR": str(home)}
        return environment | {"OMP_NUM_THREADS": str(self._limits.torch_threads), "TQDM_DISABLE": "1"}


def _prepare(bundle: bytes, root: Path) -> None:
    """Unpacks a bundle into a new folder beside those for the function's files.

    Raises:
        RunFailed: if it cannot be unpacked.
    """
    # The function may have a user of its own, which can enter its folders in it.
    root.chmod(_ENTERED_BY_ALL)
    for name in ("bundle", "initial", "home"):
        (root / name).mkdir()
    try:
        unpack(bundle, root / "bundle")
    except BundleInvalid as error:
        raise RunFailed(f"The bundle of the policy cannot be unpacked: {error}.") from error
    protect(root / "bundle")
