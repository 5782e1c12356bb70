"""Kernels come with the package, or are compiled once, by whoever needs them first; else the reference takes their place."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from fulmen_exchange.kernels import KernelsUnavailable, loader, reference
from fulmen_exchange.kernels.loader import COMPILERS, compile_portable, load
from fulmen_exchange.kernels.native import NativeKernels
from fulmen_exchange.kernels.selection import KernelSelector, Mode
from tests.support.processes import none_holds

COMPILER = next((found for name in COMPILERS if (found := shutil.which(name))), None)
NOWHERE = ""
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles a library, and returns its file."""
    folder = tmp_path_factory.mktemp("kernels")
    load(folder)
    [file] = folder.glob("*.so")
    return file


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles a library for other machines of this kind, and returns its file."""
    return compile_portable(tmp_path_factory.mktemp("portable"))


def works(folder: Path, *, path: str | None, prebuilt: Path = loader.PREBUILT) -> None:
    """Loads the library of a folder and uses it."""
    found = NativeKernels(load(folder, path=path, prebuilt=prebuilt)).threshold_of(torch.tensor([3.0, -4.0, 1.0]), 0.3)
    assert found == 4.0


def compiler(folder: Path, script: str) -> str:
    """Makes a folder with a compiler that is a shell script; returns what PATH would be."""
    folder.mkdir(exist_ok=True)
    file = folder / COMPILERS[0]
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(folder)


def copying(library: Path) -> str:
    """Returns the script of a compiler that copies a library: compiling takes a second of CPU."""
    return f'while [ "$1" != -o ]; do shift; done; cp "{library}" "$2"'


def choose(tmp_path: Path, mode: Mode, *, path: str = NOWHERE) -> KernelSelector:
    """Makes a selector with a folder of its own."""
    return KernelSelector(mode=lambda: mode, folder=lambda: tmp_path / "cache", path=path)


@needs_compiler
def test_what_was_compiled_is_used_again_without_a_compiler(library: Path) -> None:
    before = library.stat()
    works(library.parent, path=NOWHERE)
    assert library.stat() == before


@needs_compiler
def test_of_processes_that_begin_together_one_compiles(library: Path, tmp_path: Path) -> None:
    # The compiler waits until both processes are about to ask for a library.
    begun, ready = tmp_path / "begun", tmp_path / "ready"
    ready.touch()
    wait = f'while [ $(wc -l < "{ready}") -lt 2 ]; do sleep 0.01; done'
    path = compiler(tmp_path / "bin", f'echo >> "{begun}"; {wait}; {copying(library)}')
    code = (
        "import sys; from pathlib import Path; from fulmen_exchange.kernels.loader import load;"
        "open(sys.argv[2], 'a').write('\\n'); load(Path(sys.argv[1])).fulmen_threshold_of"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(ready)]
    environment = {**os.environ, "PATH": path + os.pathsep + os.environ["PATH"]}
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(begun.read_text().splitlines()) == 1
    works(tmp_path / "cache", path=NOWHERE)


def test_a_process_that_never_ends_compiling_is_not_waited_for(tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", "exit 0")
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(KernelsUnavailable, match="timed out waiting for another process"):
            load(tmp_path, path=path, deadline_s=0.1)


def test_without_a_compiler_the_reference_is_used_and_that_is_said_once(tmp_path: Path) -> None:
    chosen = choose(tmp_path, Mode.AUTO)
    with capture_logs() as logs, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(chosen.of, ["cpu"] * 8))
    assert all(each is reference for each in found)
    [log] = logs
    assert (log["event"], log["log_level"]) == ("kernels_not_compiled", "warning")
    assert (log["device"], log["kernels"]) == ("cpu", "reference")
    assert "apt-get install g++" in log["reason"]


def test_where_native_kernels_must_be_a_missing_compiler_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"FULMEN_EXCHANGE_KERNELS is native, but .* install one"):
        choose(tmp_path, Mode.NATIVE).of("cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here triton may be had")
def test_a_device_without_kernels_has_the_reference(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert choose(tmp_path, Mode.AUTO).of("cuda") is reference
        assert choose(tmp_path, Mode.AUTO).of("mps") is reference
    assert [log["device"] for log in logs] == ["cuda", "mps"]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut off", "changed", "writable by others"])
def test_a_library_that_cannot_be_trusted_is_compiled_anew(library: Path, tmp_path: Path, damage: str) -> None:
    bytes_, copy = library.read_bytes(), tmp_path / library.name
    copy.write_bytes({"cut off": bytes_[:5000], "changed": bytes_[:-1] + b"!"}.get(damage, bytes_))
    copy.chmod(0o722 if damage == "writable by others" else 0o700)
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        load(tmp_path, path=NOWHERE)
    works(tmp_path, path=compiler(tmp_path / "bin", copying(library)))
    works(tmp_path, path=NOWHERE)


@needs_compiler
def test_what_the_package_brings_is_used_without_a_compiler_and_nothing_is_kept(portable: Path, tmp_path: Path) -> None:
    works(tmp_path / "cache", path=NOWHERE, prebuilt=portable.parent)
    assert not (tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.parametrize("why", ["damaged", "of another source", "for another processor"])
def test_what_the_package_brings_is_left_alone_where_it_does_not_fit(
    library: Path, portable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    brought = tmp_path / "brought" / portable.name
    brought.parent.mkdir()
    brought.write_bytes(portable.read_bytes() + (b"!" if why == "damaged" else b""))
    if why == "of another source":
        monkeypatch.setattr(loader, "SOURCE", tmp_path / "native.cpp")
        (tmp_path / "native.cpp").write_bytes((Path(loader.__file__).parent / "native.cpp").read_bytes() + b"\n")
    elif why == "for another processor":
        if os.uname().machine not in loader.PORTABLE_FEATURES:
            pytest.skip("nothing is asked of processors of this kind")
        monkeypatch.setattr(loader, "PROCESSOR", tmp_path / "cpuinfo")
        (tmp_path / "cpuinfo").write_text("flags : fpu sse2\n")
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        load(tmp_path / "cache", path=NOWHERE, prebuilt=brought.parent)
    works(tmp_path / "cache", path=compiler(tmp_path / "bin", copying(library)), prebuilt=brought.parent)


def built_wheel(repository_root: Path, folder: Path, *, path: str) -> Path:
    """Builds a wheel of the distribution; returns its file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    environment = {**os.environ, "PATH": path}
    subprocess.run(command, cwd=repository_root / "libs/gradient_exchange", env=environment, check=True, timeout=60)
    [wheel] = folder.glob("*.whl")
    return wheel


@needs_compiler
def test_a_wheel_that_is_built_with_a_compiler_at_hand_brings_the_kernels(
    repository_root: Path, tmp_path: Path
) -> None:
    wheel = built_wheel(repository_root, tmp_path, path=os.environ["PATH"])
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(tmp_path)
    works(tmp_path / "cache", path=NOWHERE, prebuilt=tmp_path / "fulmen_exchange/kernels/prebuilt")


def test_a_wheel_that_is_built_without_a_compiler_is_for_every_machine(repository_root: Path, tmp_path: Path) -> None:
    wheel = built_wheel(repository_root, tmp_path, path=NOWHERE)
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        assert not [name for name in files.namelist() if name.endswith(".so")]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", "echo 'no such thing as floats' >&2; exit 3")
    with pytest.raises(KernelsUnavailable, match=r"status 3: no such thing as floats"):
        load(tmp_path / "cache", path=path)
    assert [file.name for file in (tmp_path / "cache").iterdir()] == ["lock"]


async def test_a_compiler_that_hangs_is_not_waited_for_and_leaves_no_child(tmp_path: Path) -> None:
    # What is named is a driver; another process is what takes so long.
    path = compiler(tmp_path / "bin", f'sh -c "sleep 300; : {tmp_path}" & wait')
    with pytest.raises(KernelsUnavailable, match="timed out"):
        load(tmp_path / "cache", path=path, deadline_s=1.0)
    await none_holds(str(tmp_path))


@needs_compiler
def test_a_compiler_that_does_not_know_the_processor_compiles_for_all(library: Path, tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", f'case "$*" in *-march=native*) exit 1;; esac; {copying(library)}')
    works(tmp_path / "cache", path=path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = compiler(tmp_path / "bin", "exit 0")
    with pytest.raises(KernelsUnavailable, match="cannot store a library in"):
        load(tmp_path / "file" / "cache", path=path)


def test_importing_the_kernels_imports_no_torch_and_compiles_nothing(tmp_path: Path) -> None:
    code = "import sys, fulmen_exchange.kernels; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == 0
    assert not list(tmp_path.iterdir())
