"""Shell blocks of the documentation do what they say, as they stand, on a stack of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fulmen
from tests.docs.accounts import first_line
from tests.docs.scenes import SCENES, Scene
from tests.support.docs.blocks import blocks
from tests.support.folders import short_folder

pytestmark = [pytest.mark.long(short=True), pytest.mark.serial, pytest.mark.timeout(300)]

LIMIT_S = 270


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    """Yields the state directory of a running stack."""
    with short_folder() as folder, fulmen.local(folder):
        yield folder


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_scene_plays_as_it_is_written(scene: Scene, state_dir: Path, tmp_path: Path) -> None:
    scripts = {(block.page, first_line(block)): block.script for block in blocks() if block.script}
    for name, text in scene.files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    # `fulmen status` and the like look for a stack here, where nothing names one.
    (tmp_path / ".fulmen").symlink_to(state_dir)

    for title, script in [
        ("before", scene.before),
        *((place, scripts[place]) for place in scene.blocks),
        ("after", scene.after),
    ]:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**os.environ, **scene.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            input=scene.stdin,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert ran.returncode == 0, f"{title}: {ran.stdout}{ran.stderr}"
