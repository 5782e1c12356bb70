"""`train.toml`, whole or the part that one attempt needs, and overrides on the command line (lines after `--set`)."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fulmen.train_toml.agent import agent_config, agent_spec
from fulmen.train_toml.reader import ConfigError
from fulmen.train_toml.train import load_agent_and_data, load_train_config, with_overrides
from tests.fuzz.mutation import mutate_text
from tests.fuzz.target import PureTarget

_EXAMPLES = Path(__file__).parents[3] / "examples"
_MEMORY = Path("/dev/shm")
_FILE = (_MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"fuzz-train-{os.getpid()}.toml"
_WORDS = (
    "[agent]", "[policy]", "[data]", "[[stage]]", "[agent.limits]", "[agent.environment]", "[agent.judge]", "[agent.container]",
    "name = 1", 'python = "a.py:b"', 'command = ["x"]', 'memory = "2GiB"', 'memory = "99999999999999999999TiB"', "steps = -1", "cpus = nan",
    'image = ""', "x = 1979-05-27T07:32:00Z", "x = inf", "x = [1, [2]]", "x = {a = 1}", "processes = 9999999999999999999", "x.y.z = 1",
    'path = "\\u0000"', 'train = "nul\\u0000"', '"\\ud800"', "build = 'x'", "prompt = '/etc'", "train = '..'", 'version = "p@1"',
)  # fmt: skip


def run(data: bytes) -> None:
    """Reads a configuration both ways; what is valid makes a specification and back."""
    text, _, overrides = data.partition(b"\n--set\n")
    _FILE.write_bytes(text)
    try:
        agent, _ = load_agent_and_data(_FILE)
        agent_config(agent_spec(agent, "resources/b/versions/1"))
    except ConfigError:
        pass
    try:
        config = load_train_config(_FILE)
        with_overrides(config, overrides.decode("utf-8", "replace").split("\n"), seed=1)
    finally:
        _FILE.unlink()


def _seeds() -> list[bytes]:
    found = [path.read_bytes() for path in sorted(_EXAMPLES.glob("*/train*.toml"))]
    return [
        *found,
        found[0] + b"\n--set\ngrpo.steps=5\ngrpo.loss.kind=gspo\nsft.x=[1",
        b"[agent]\n[agent.limits]\nmemory = '1GiB'\n",
    ]


TARGET = PureTarget(run=run, seeds=_seeds(), mutate=mutate_text(_WORDS), refusals=(ConfigError,))
