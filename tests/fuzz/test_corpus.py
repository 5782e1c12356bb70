"""Every input that once failed is read or refused, and so are some new ones of each target, the same in every run."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.mutation import MAX_BYTES
from tests.fuzz.target import CORPUS, PureTarget, kept_inputs, live_targets, load, pure_targets
from tests.support import soak

MAX_CORPUS_BYTES = 200_000
INPUTS = 150
LIVE_INPUTS = 1500


@pytest.mark.parametrize("name", pure_targets())
def test_kept_inputs_and_some_new_ones_are_read_or_refused(name: str) -> None:
    target = load(name)
    kept = [*target.seeds, *(path.read_bytes() for path in kept_inputs(name))]
    for data in kept:
        target.try_input(data)
    rng = random.Random(name)
    for _ in range(INPUTS):
        data = rng.choice(kept)
        for _ in range(rng.choice((1, 1, 2, 4))):
            data = target.mutate(data, rng)[:MAX_BYTES]
        target.try_input(data)


@pytest.mark.long(short=True)
@pytest.mark.serial
@pytest.mark.timeout(300)
async def test_no_service_fails_on_inputs_over_its_sockets() -> None:
    from tests.fuzz.live_run import run_live

    for run in await run_live(live_targets(), seed=1, seconds=120, runs=LIVE_INPUTS * soak.SOAK):
        assert not run.findings, run.findings
        assert run.count >= LIVE_INPUTS


def test_what_fails_is_kept_and_reproduced_by_the_command_that_is_printed(tmp_path: Path) -> None:
    bad = tmp_path / "input"
    bad.write_bytes(b"an input that the target refuses")
    command = [sys.executable, "-m", "tests.fuzz", "filters", "--reproduce", str(bad)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "nothing was found" in done.stdout


def test_a_text_with_internals_is_a_finding() -> None:
    def run(data: bytes) -> None:
        raise ValueError(f"'NoneType' object has no attribute {data!r}")

    with pytest.raises(Exception, match="NoneType"):
        PureTarget(run=run, seeds=[b""], refusals=(ValueError,)).try_input(b"x")


def test_the_corpus_is_small_and_holds_nothing_twice() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    contents = [(path.parent.name, path.read_bytes()) for path in files]
    assert sum(len(data) for _, data in contents) <= MAX_CORPUS_BYTES
    assert len(set(contents)) == len(contents)
    assert {name for name, _ in contents} <= {*pure_targets(), *live_targets()}
