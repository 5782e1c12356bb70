"""Builds of virtual environments: shared, bounded, evicted, and by either tool."""

from __future__ import annotations

import asyncio
import io
import json
import stat
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from fulmen_runner.agents.specification import VenvSource
from fulmen_runner.agents.venvs import venvs as venvs_module
from fulmen_runner.agents.venvs.venvs import HeldVenv, Venvs
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_service_kit.isolation.levels import Isolation
from tests.support.isolation import sandboxed
from tests.support.runner.wheels import venvs_of, wheel

MIB = 1 << 20
SOURCE = VenvSource(requirements="requirements.txt")
Make = Callable[..., Venvs]


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    """Makes the environments of one more runner; all share a folder of environments and one of packages."""
    async with AsyncExitStack() as ends:

        def made(**options: object) -> Venvs:
            venvs = venvs_of(tmp_path, packages=tmp_path / "packages", **options)  # type: ignore[arg-type]
            ends.push_async_callback(venvs.builder.guardian.close)
            return venvs

        yield made


@pytest.fixture
def bundle(tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that makes a bundle with requirements."""

    def made(requirements: str) -> Path:
        folder = tmp_path / "bundles" / requirements.replace("/", "_").replace("\n", "_")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "requirements.txt").write_text(requirements)
        return folder

    return made


def version_in(held: HeldVenv, name: str) -> str:
    """Returns the version that the environment's own Python finds."""
    code = f"import {name}; print({name}.VERSION)"
    asked = subprocess.run([held.venv.python, "-I", "-c", code], check=True, capture_output=True, text=True)
    return asked.stdout.strip()


BACKEND = """
import json, os, zipfile
from pathlib import Path

def can_read(path):
    try:
        return bool(Path(path).read_text())
    except OSError:
        return False

def build_wheel(directory, config_settings=None, metadata_directory=None):
    found = {"secret": can_read(SECRET), "variable": "FULMEN_SECRET" in os.environ, "mine": os.access("/", os.W_OK)}
    info = "sourced-1.0.dist-info"
    with zipfile.ZipFile(Path(directory, "sourced-1.0-py3-none-any.whl"), "w") as packed:
        packed.writestr("sourced.py", f"VERSION = {json.dumps(found)!r}")
        packed.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: sourced\\nVersion: 1.0\\n")
        packed.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        packed.writestr(f"{info}/RECORD", "")
    return "sourced-1.0-py3-none-any.whl"
"""


def source_of(folder: Path, secret: Path) -> None:
    """Writes a source distribution that is its own build backend, and looks for a secret when it is built."""
    folder.mkdir()
    files = {
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "sourced"\nversion = "1.0"\n',
        "PKG-INFO": "Metadata-Version: 2.1\nName: sourced\nVersion: 1.0\n",
        "backend.py": f"SECRET = {str(secret)!r}\n{BACKEND}",
    }
    with tarfile.open(folder / "sourced-1.0.tar.gz", "w:gz") as tar:
        for file, text in files.items():
            member = tarfile.TarInfo(f"sourced-1.0/{file}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.parametrize(
    ("isolation", "tool"),
    [
        (Isolation.TRUSTED, "uv"),
        pytest.param(Isolation.TRUSTED, "pip", marks=pytest.mark.long),
        pytest.param(Isolation.SANDBOX, "uv", marks=sandboxed),
        pytest.param(Isolation.SANDBOX, "pip", marks=sandboxed),
    ],
)
async def test_either_tool_builds_an_environment_that_nobody_may_write(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path, tool: str, isolation: Isolation
) -> None:
    wheel(tmp_path / "packages", "one", "1.0")
    venvs = make(uv="" if tool == "pip" else None, isolation=isolation)
    assert venvs.builder.tool == tool
    held = await venvs.held(SOURCE, bundle("one==1.0"))
    assert version_in(held, "one") == "1.0"
    assert list(held.venv.folder.glob("lib/*/site-packages/__pycache__/one.*.pyc"))
    modes = [path.stat().st_mode for path in held.venv.folder.rglob("*") if not path.is_symlink()]
    assert not [mode for mode in modes if mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IWUSR)]
    assert [path.name for path in (tmp_path / "venvs").glob("*/*")] != []
    assert not list((tmp_path / "venvs").glob("*/scratch"))
    held.release()


async def test_runners_that_need_the_same_environment_at_once_build_it_once(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    wheel(tmp_path / "packages", "one", "1.0")
    first, second = make(), make()
    # Comments and blanks do not make other requirements.
    written = ("one==1.0", "# ours\none==1.0\n")
    held = await asyncio.gather(*(each.held(SOURCE, bundle(text)) for each in (first, second) for text in written))
    assert len({each.venv.folder for each in held}) == 1
    assert first.counts + second.counts == {"built": 1, "reused": 3}
    for each in held:
        each.release()


async def test_environments_that_were_used_longest_ago_make_room_and_those_in_use_stay(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    for name in ("one", "two", "three"):
        wheel(tmp_path / "packages", name, "1.0", padding_bytes=8 * MIB)
    venvs = make(venvs_bytes=22 * MIB)
    used = await venvs.held(SOURCE, bundle("one"))
    other = await venvs.held(SOURCE, bundle("two"))
    other.release()
    # The oldest is in use: the other one goes.
    third = await venvs.held(SOURCE, bundle("three"))
    assert (used.venv.python.exists(), other.venv.folder.exists(), third.venv.python.exists()) == (True, False, True)
    assert venvs.cache.evicted_count == 1
    assert venvs.cache.size_bytes <= 22 * MIB
    # Nothing can go.
    with pytest.raises(HostUnavailable, match="FULMEN_RUNNER_VENVS_BYTES"):
        await venvs.held(SOURCE, bundle("two"))
    used.release()
    again = await venvs.held(SOURCE, bundle("two"))
    assert (again.venv.python.exists(), used.venv.folder.exists()) == (True, False)
    # Locks go with what they lock.
    names = {path.name for path in (tmp_path / "venvs").iterdir()}
    assert names == {"room.lock"} | {
        f"{e.venv.folder.parent.name}{end}" for e in (third, again) for end in ("", ".lock")
    }


async def test_what_a_killed_build_left_is_deleted_by_the_next(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    wheel(tmp_path / "packages", "one", "1.0")
    left = tmp_path / "venvs" / "left" / "venv" / "bin"
    left.mkdir(parents=True)
    (tmp_path / "venvs").chmod(0o755)
    held = await make().held(SOURCE, bundle("one"))
    assert not left.exists()
    held.release()


@pytest.mark.parametrize("damage", ["removed", "cut short", "added"])
async def test_an_environment_that_lost_files_is_built_again(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path, damage: str
) -> None:
    wheel(tmp_path / "packages", "one", "1.0")
    venvs = make()
    held = await venvs.held(SOURCE, bundle("one"))
    [module] = held.venv.folder.glob("lib/*/site-packages/one.py")
    for path in (module, module.parent):
        path.chmod(0o755)
    if damage == "removed":
        module.unlink()
    elif damage == "cut short":
        module.write_text("")
    else:
        # As the cache of a package that compiles itself.
        (module.parent / "one.cache").write_text("")
    held.release()
    again = await venvs.held(SOURCE, bundle("one"))
    assert version_in(again, "one") == "1.0"
    assert venvs.counts["built"] == (1 if damage == "added" else 2)
    again.release()


@pytest.mark.parametrize("limit", ["venv_bytes", "build_s"])
async def test_a_build_beyond_a_limit_fails_with_its_name_and_leaves_nothing(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path, limit: str
) -> None:
    wheel(tmp_path / "packages", "large", "1.0", padding_bytes=100 * MIB)
    venvs = make(**{limit: 20 * MIB if limit == "venv_bytes" else 0.001})
    setting = {"venv_bytes": "FULMEN_RUNNER_VENV_BYTES", "build_s": "FULMEN_RUNNER_VENV_BUILD_S"}[limit]
    with pytest.raises(AgentFailed, match=setting):
        await venvs.held(SOURCE, bundle("large"))
    assert not [path for path in (tmp_path / "venvs").iterdir() if path.is_dir()]
    assert venvs.counts == {"failed": 1}


async def test_a_failed_build_is_repeated_after_a_while(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    venvs = make()
    for _ in range(3):
        with pytest.raises(AgentFailed, match="cannot be installed"):
            await venvs.held(SOURCE, bundle("one"))
    assert venvs.counts == {"failed": 1}
    wheel(tmp_path / "packages", "one", "1.0")
    monkeypatch.setattr(venvs_module, "FAILURE_KEPT_S", 0.0)
    held = await venvs.held(SOURCE, bundle("one"))
    assert venvs.counts == {"failed": 1, "built": 1}
    held.release()


@pytest.mark.parametrize("tool", ["uv", "pip"])
async def test_no_code_of_a_package_runs_in_a_build_unless_the_operator_allows_it(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path, tool: str
) -> None:
    source_of(tmp_path / "packages", tmp_path / "secret")
    with pytest.raises(AgentFailed, match="FULMEN_RUNNER_PACKAGE_BUILDS"):
        await make(uv="" if tool == "pip" else None).held(SOURCE, bundle("sourced"))


@sandboxed
async def test_code_of_a_package_that_an_operator_allows_is_as_confined_as_an_agent(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("hunter2")
    monkeypatch.setenv("FULMEN_SECRET", "hunter2")
    source_of(tmp_path / "packages", tmp_path / "secret")
    held = await make(allows_builds=True, isolation=Isolation.SANDBOX).held(SOURCE, bundle("sourced"))
    assert json.loads(version_in(held, "sourced")) == {"secret": False, "variable": False, "mine": False}
    held.release()


async def test_a_package_that_replaces_the_configuration_of_its_environment_opens_no_folder(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    # The `data` of a wheel is installed into the environment itself.
    wheel(tmp_path / "packages", "evil", "1.0", data={"pyvenv.cfg": "home = /root/secrets/bin\nversion = 3.11.0\n"})
    venvs = make()
    held = await venvs.held(SOURCE, bundle("evil"))
    assert "/root/secrets" in (held.venv.folder / "pyvenv.cfg").read_text()
    assert held.venv.readable == (held.venv.folder, venvs.modules.sdk.parent)
    held.release()


async def test_a_folder_that_others_may_write_is_not_used(
    make: Make, bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "venvs").mkdir()
    (tmp_path / "venvs").chmod(0o777)
    with pytest.raises(HostUnavailable, match="FULMEN_RUNNER_VENVS_DIR"):
        await make().held(SOURCE, bundle("one"))
    (tmp_path / "venvs").rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o755)
    (tmp_path / "venvs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostUnavailable, match="FULMEN_RUNNER_VENVS_DIR"):
        await make().held(SOURCE, bundle("one"))
