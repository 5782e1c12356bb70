"""The example of the library's README trains with plain PyTorch, without any service."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

STANDS_ALONE = """
import sys
assert not {name.partition(".")[0] for name in sys.modules} & {"fulmen_algorithm", "fulmen_service_kit"}
"""


@pytest.mark.long
def test_its_example_learns_with_fewer_bytes_and_imports_no_service(repository_root: Path, tmp_path: Path) -> None:
    page = (repository_root / "libs/gradient_exchange/README.md").read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(example + STANDS_ALONE, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert ended.returncode == 0, ended.stderr
    said = re.search(r"loss (\S+), (\d+) times fewer bytes", ended.stdout)
    assert said is not None
    assert float(said[1]) < 0.05
    assert int(said[2]) >= 10
