"""Kernels are compiled once, by whoever needs them first; without a compiler the reference takes their place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from fulmen_algorithm.exchange.kernels import KernelsUnavailable, choice, reference
from fulmen_algorithm.exchange.kernels.choice import Choice, Mode, mode_of_environment
from fulmen_algorithm.exchange.kernels.loader import COMPILERS, cache_folder, load
from fulmen_algorithm.exchange.kernels.native import NativeKernels

COMPILER = next((found for name in COMPILERS if (found := shutil.which(name))), None)
NOWHERE = ""
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiles a library, and returns its file."""
    folder = tmp_path_factory.mktemp("kernels")
    load(folder)
    [file] = folder.iterdir()
    return file


def works(folder: Path, *, path: str | None) -> None:
    """Loads the library of a folder and uses it."""
    found = NativeKernels(load(folder, path=path)).threshold_of(torch.tensor([3.0, -4.0, 1.0]), 0.3)
    assert found == 4.0


def compiler(folder: Path, script: str) -> str:
    """Makes a folder with a compiler that is a shell script; returns what PATH would be."""
    folder.mkdir(exist_ok=True)
    file = folder / COMPILERS[0]
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return str(folder)


def choose(tmp_path: Path, mode: Mode, *, path: str = NOWHERE) -> Choice:
    """Makes a choice with a folder of its own."""
    return Choice(mode=lambda: mode, folder=lambda: tmp_path / "cache", path=path)


@needs_compiler
def test_what_was_compiled_is_used_again_without_a_compiler(library: Path) -> None:
    before = library.stat()
    works(library.parent, path=NOWHERE)
    assert library.stat() == before


@needs_compiler
def test_two_processes_may_compile_at_once(tmp_path: Path) -> None:
    # Each compiler waits until the other has begun, too.
    begun = tmp_path / "begun"
    script = f'echo >> "{begun}"; while [ $(wc -l < "{begun}") -lt 2 ]; do sleep 0.01; done; exec {COMPILER} "$@"'
    path = compiler(tmp_path / "bin", script) + os.pathsep + os.environ["PATH"]
    code = (
        "import sys; from pathlib import Path; from fulmen_algorithm.exchange.kernels.loader import load;"
        "load(Path(sys.argv[1])).fulmen_threshold_of"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, env={**os.environ, "PATH": path}) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    assert len(begun.read_text().splitlines()) == 2
    assert [file.suffix for file in (tmp_path / "cache").iterdir()] == [".so"]
    works(tmp_path / "cache", path=NOWHERE)


def test_without_a_compiler_the_reference_is_used_and_that_is_said_once(tmp_path: Path) -> None:
    chosen = choose(tmp_path, Mode.AUTO)
    with capture_logs() as logs, ThreadPoolExecutor(4) as threads:
        found = list(threads.map(chosen.of, ["cpu"] * 8))
    assert all(each is reference for each in found)
    [log] = logs
    assert (log["event"], log["log_level"], log["device"]) == ("kernels_not_compiled", "warning", "cpu")
    assert "apt-get install g++" in log["reason"]


def test_where_native_kernels_must_be_a_missing_compiler_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=r"FULMEN_ALGORITHM_KERNELS is native, but .* install one"):
        choose(tmp_path, Mode.NATIVE).of("cpu")


def test_the_reference_can_be_asked_for(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert choose(tmp_path, Mode.REFERENCE).of("cpu") is reference
    assert not logs
    assert not (tmp_path / "cache").exists()


@needs_compiler
def test_threads_that_begin_together_compile_once(tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", f'echo >> "{tmp_path / "begun"}"; exec {COMPILER} "$@"')
    chosen = choose(tmp_path, Mode.NATIVE, path=path)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(chosen.of, ["cpu"] * 8))
    assert isinstance(found[0], NativeKernels)
    assert all(each is found[0] for each in found)
    assert len((tmp_path / "begun").read_text().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="here triton may be had")
def test_a_device_without_kernels_has_the_reference(tmp_path: Path) -> None:
    with capture_logs() as logs:
        assert choose(tmp_path, Mode.AUTO).of("cuda") is reference
        assert choose(tmp_path, Mode.AUTO).of("mps") is reference
    assert [log["device"] for log in logs] == ["cuda", "mps"]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut off", "writable by others"])
def test_a_library_that_cannot_be_trusted_is_compiled_anew(library: Path, tmp_path: Path, damage: str) -> None:
    copy = tmp_path / library.name
    copy.write_bytes(library.read_bytes() if damage == "writable by others" else b"\x7fELF")
    copy.chmod(0o700 if damage == "cut off" else 0o722)
    with pytest.raises(KernelsUnavailable, match="no C\\+\\+ compiler"):
        load(tmp_path, path=NOWHERE)
    works(tmp_path, path=None)
    assert copy.stat().st_mode & 0o777 == 0o700
    assert copy.stat().st_size == library.stat().st_size


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", "echo 'no such thing as floats' >&2; exit 3")
    with pytest.raises(KernelsUnavailable, match=r"status 3: no such thing as floats"):
        load(tmp_path / "cache", path=path)
    assert not list((tmp_path / "cache").iterdir())


def test_a_compiler_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", "exec sleep 100")
    with pytest.raises(KernelsUnavailable, match="took more than"):
        load(tmp_path / "cache", path=path, deadline_s=0.1)


@needs_compiler
def test_a_compiler_that_does_not_know_the_processor_compiles_for_all(tmp_path: Path) -> None:
    path = compiler(tmp_path / "bin", f'case "$*" in *-march=native*) exit 1;; esac; exec {COMPILER} "$@"')
    works(tmp_path / "cache", path=path)


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = compiler(tmp_path / "bin", "exit 0")
    with pytest.raises(KernelsUnavailable, match="no library can be kept in"):
        load(tmp_path / "file" / "cache", path=path)


def test_libraries_are_kept_where_caches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fulmen" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "fulmen" / "kernels"


def test_the_variable_says_one_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(choice.VARIABLE, raising=False)
    assert mode_of_environment() is Mode.AUTO
    monkeypatch.setenv(choice.VARIABLE, "native")
    assert mode_of_environment() is Mode.NATIVE
    monkeypatch.setenv(choice.VARIABLE, "fast")
    with pytest.raises(ValueError, match=r"is 'fast', and must be one of auto, reference, native"):
        mode_of_environment()


def test_importing_the_kernels_imports_no_torch_and_compiles_nothing(tmp_path: Path) -> None:
    code = "import sys, fulmen_algorithm.exchange.kernels; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60).returncode == 0
    assert not list(tmp_path.iterdir())
