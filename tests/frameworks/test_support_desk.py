"""examples/support_agent, as it stands: an app on LangGraph in its own environment, from its conversations to a small model."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.cli.commands import fulmen, run_program
from tests.support.frameworks.world import ENVIRONMENTS, QUIET, ROOT
from tests.support.stack import running_stack

pytestmark = pytest.mark.timeout(1800)

LIMIT_S = 1700
# A process with LangGraph takes 150 MB.
SLOTS = 3
ROW = re.compile(r"^\| (\w.*?) *\| +([\d.]+) \| +(\d+) \| +(\d+) \| +(\d+) \| +([\d.]+) \|$", re.M)
SHARE = re.compile(r"^(desk-small|vendor): (\d+) of (\d+) calls", re.M)


async def test_an_app_goes_from_its_conversations_to_a_better_prompt_and_a_small_model_and_back(
    short_tmp_path: Path,
) -> None:
    folder = short_tmp_path / "desk"
    shutil.copytree(ROOT / "examples/support_agent", folder, ignore=shutil.ignore_patterns(".venv", "data"))
    (folder / ".venv").symlink_to(ENVIRONMENTS / "langchain")
    state_dir = short_tmp_path / "s"
    prices = (folder / "prices.json").read_text()

    async with running_stack(state_dir, slots=SLOTS, environment={"FULMEN_LLM_PROXY_PRICES": prices}):
        journey = [sys.executable, str(folder / "journey.py")]
        done = await run_program(journey, {**QUIET, "FULMEN_STATE_DIR": str(state_dir)}, LIMIT_S)
        assert done.status == 0, done.stdout + done.stderr
        route = json.loads(
            (await fulmen("proxy", "route", "show", "support-desk", "-o", "json", "--state-dir", state_dir)).stdout
        )

    # The found prompt answers well, and the small model does nearly as well as what it imitates.
    rows = {label: tuple(map(float, numbers)) for label, *numbers in ROW.findall(done.stdout)}
    accuracy = {label: row[0] for label, row in rows.items()}
    assert list(accuracy) == ["vendor, first prompt", "vendor, found prompt", "small model"]
    assert accuracy["vendor, first prompt"] < 0.5 < 0.9 < accuracy["vendor, found prompt"]
    assert accuracy["small model"] > 0.7
    # What they cost is their tokens at the prices that the proxy was given.
    price = json.loads(prices)
    for label, (_, tasks, prompt, completion, dollars) in rows.items():
        each = price["*desk-small*" if label == "small model" else "vendor/*"]
        cost = (prompt * each["input"] + completion * each["output"]) / 1e6 / tasks * 1000
        assert dollars == pytest.approx(cost, abs=0.002)
    # Two models had their share of the third day, of which the route went back to one.
    *_, small, vendor = SHARE.findall(done.stdout)
    assert (small[0], vendor[0]) == ("desk-small", "vendor")
    assert int(small[1]) + int(vendor[1]) == int(small[2])
    assert [target["backend"] for target in route["targets"]] == ["backends/vendor"]
