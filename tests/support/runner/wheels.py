"""Wheels of tiny packages, virtual environments and the folders of a test that builds them."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.isolation import AgentIsolation
from fulmen_runner.agents.venvs.build import OFF, PackageSources, VenvBuilder
from fulmen_runner.agents.venvs.cache import VenvCache
from fulmen_runner.agents.venvs.modules import ModulePaths
from fulmen_runner.agents.venvs.venvs import Venvs


def wheel(folder: Path, name: str, version: str, code: str = "", *, padding_bytes: int = 0) -> Path:
    """Writes a wheel with a module of the package's name, which has its VERSION; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n{code}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if padding_bytes:
        files[f"{name}_padding.txt"] = "x" * padding_bytes
    record = [f"{file},sha256={_digest(text)},{len(text)}" for file, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(path, "w") as packed:
        for file, text in files.items():
            packed.writestr(zipfile.ZipInfo(file, date_time=(2024, 1, 1, 0, 0, 0)), text)
    return path


def sha256_hex(path: Path) -> str:
    """Returns the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def venvs_of(
    parent: Path, *, packages: Path | None = None, isolation: AgentIsolation | None = None, **limits: float
) -> Venvs:
    """Returns the virtual environments of a runner without a store; packages come from a folder."""
    builder = VenvBuilder(
        guardian=Guardian(),
        isolation=isolation or AgentIsolation(),
        inherited={"PATH": "/usr/bin:/bin"},
        sources=PackageSources(index_url=OFF, folders=(str(packages),) if packages else ()),
        build_s=limits.get("build_s", 60.0),
        venv_bytes=int(limits.get("venv_bytes", 1 << 30)),
    )
    cache = VenvCache(
        folder=parent / "venvs", limit_bytes=int(limits.get("venvs_bytes", 1 << 30)), wait_s=limits.get("wait_s", 60.0)
    )
    return Venvs(builder=builder, cache=cache, allowed=None, modules=ModulePaths.made(parent))


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
