"""Wheels of tiny packages, virtual environments and the folders of a test that builds them."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.isolation import SETTING, AgentIsolation
from fulmen_runner.agents.venvs.build import OFF, PackageSources, VenvBuilder, find_uv
from fulmen_runner.agents.venvs.cache import VenvCache
from fulmen_runner.agents.venvs.modules import ModulePaths
from fulmen_runner.agents.venvs.venvs import Venvs
from fulmen_service_kit.isolation.launch import Isolator
from fulmen_service_kit.isolation.levels import Isolation


def wheel(
    folder: Path,
    name: str,
    version: str,
    code: str = "",
    *,
    padding_bytes: int = 0,
    data: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Writes a wheel with a module of the package's name, which has its VERSION; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"VERSION = {version!r}\n{code}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files |= {f"{name}-{version}.data/data/{file}": text for file, text in data.items()}
    if padding_bytes:
        files[f"{name}_padding.txt"] = "x" * padding_bytes
    record = [f"{file},sha256={_digest(text)},{len(text)}" for file, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    with zipfile.ZipFile(path, "w") as packed:
        for file, text in files.items():
            packed.writestr(zipfile.ZipInfo(file, date_time=(2024, 1, 1, 0, 0, 0)), text)
    return path


class ClosedIndex:
    """An index of packages that has none; `asked` has the path and the credentials of each request."""

    def __init__(self) -> None:
        asked = self.asked = list[tuple[str, str]]()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # The name that http.server calls.
                asked.append((self.path, self.headers.get("authorization", "")))
                self.send_error(404)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # The name of the parameter there.
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


def other_pythons() -> list[str]:
    """Returns the interpreters of this machine that are newer than that of the tests; there may be none."""
    names = [f"python3.{minor}" for minor in range(sys.version_info.minor + 1, 20)]
    places = [*Path.home().glob(".pyenv/versions/*/bin"), *Path.home().glob(".local/share/uv/python/*/bin")]
    found = [shutil.which(name, path=place) for name in names for place in (None, *map(str, places))]
    return [path for path in found if path and not _fails(path)]


def _fails(python: str) -> bool:
    return bool(subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode)


def sha256_hex(path: Path) -> str:
    """Returns the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def venvs_of(
    parent: Path,
    *,
    packages: Path | None = None,
    uv: str | None = None,
    allows_builds: bool = False,
    isolation: Isolation = Isolation.TRUSTED,
    **limits: float,
) -> Venvs:
    """Returns the virtual environments of a runner without a store, whose packages come from a folder; close its guardian."""
    builder = VenvBuilder(
        guardian=Guardian(),
        isolation=AgentIsolation(isolator=Isolator(isolation, setting=SETTING)),
        inherited={"PATH": "/usr/bin:/bin"},
        sources=PackageSources(
            index_url=OFF, folders=(str(packages),) if packages else (), allows_builds=allows_builds
        ),
        build_s=limits.get("build_s", 60.0),
        venv_bytes=int(limits.get("venv_bytes", 1 << 30)),
        uv=find_uv() if uv is None else uv,
    )
    cache = VenvCache(
        folder=parent / "venvs", limit_bytes=int(limits.get("venvs_bytes", 1 << 30)), wait_s=limits.get("wait_s", 60.0)
    )
    return Venvs(
        builder=builder, cache=cache, allowed=None, modules=ModulePaths.made(Path(tempfile.mkdtemp(dir=parent)))
    )


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")
