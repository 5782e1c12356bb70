"""Runs the model-building function of a bundle in a child process.

Invariant: the bundle's code never runs in the service's process and never sees its settings; nothing is unpacked outside
the given folder.
"""

import asyncio
import io
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from fulmen_algorithm.clients.child import Child
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.failure import RunFailed

HIDDEN_PREFIX = "FULMEN_"
OUTPUT_SHOWN_CHARS = 1500
MAX_BUNDLE_BYTES = 256 * 2**20

_CALL = """\
import importlib.util, os, sys
os.dup2(1, 2)
file, name, output, seed = sys.argv[1:]
sys.path.insert(0, ".")
spec = importlib.util.spec_from_file_location("policy_build", file)
module = importlib.util.module_from_spec(spec)
sys.modules["policy_build"] = module
spec.loader.exec_module(module)
getattr(module, name)(output, seed=int(seed))
"""


class ModelBuilder:
    """Builds the first weights of a policy."""

    def __init__(self, *, deadline_s: float, torch_threads: int) -> None:
        self._deadline_s = deadline_s
        self._torch_threads = torch_threads

    async def build(self, bundle: bytes, target: str, files: RunFiles, *, seed: int) -> None:
        """Unpacks a bundle to `files.bundle` and calls `function(files.initial, seed=seed)` of its `file.py:function`.

        Raises:
            RunFailed: if the bundle cannot be unpacked, or the function fails or takes too long; the text ends with the
                end of the process' output.
        """
        await asyncio.to_thread(_unpack, bundle, files.bundle)
        shutil.rmtree(files.initial, ignore_errors=True)
        file, _, name = target.rpartition(":")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(HIDDEN_PREFIX)}
        argv = [sys.executable, "-c", _CALL, file, name, str(files.initial.resolve()), str(seed)]
        environment |= {"OMP_NUM_THREADS": str(self._torch_threads), "TQDM_DISABLE": "1"}
        with tempfile.TemporaryFile() as output:
            child = Child.start(argv, environment=environment, output=output, folder=files.bundle)
            try:
                async with asyncio.timeout(self._deadline_s):
                    status = await child.wait()
            except TimeoutError as error:
                raise RunFailed(f"{target} took longer than {self._deadline_s:.0f} s.") from error
            finally:
                await child.end(grace_s=0)
            if status:
                output.seek(0)
                shown = output.read().decode(errors="replace")[-OUTPUT_SHOWN_CHARS:].strip()
                raise RunFailed(f"{target} ended with status {status}: {shown}")


def _unpack(bundle: bytes, folder: Path) -> None:
    """Unpacks a tar.gz into a new folder.

    Raises:
        RunFailed: if it is not one, is too large unpacked, or a member would leave the folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(bundle), mode="r:gz") as archive:
            if sum(member.size for member in archive.getmembers()) > MAX_BUNDLE_BYTES:
                raise RunFailed("The unpacked bundle is too large.")
            archive.extractall(folder, filter="data")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise RunFailed("The bundle is not a valid tar.gz archive.") from error
