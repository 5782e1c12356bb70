"""Each in-process agent sees its own attempt's environment."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from os import environ

import pytest

from fulmen_runner.agents.python.environment_view import show_attempts_environments, viewing
from fulmen_runner.agents.python.threads import carry_context_into_threads

TELL = (sys.executable, "-c", "import os; print(os.environ['WHO'], os.environ.get('SHARED'))")


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    show_attempts_environments()
    carry_context_into_threads()
    os.environ["WHO"], os.environ["SHARED"] = "process", "all"
    yield
    del os.environ["WHO"], os.environ["SHARED"]


async def look(name: str) -> list[str | None]:
    with viewing({"WHO": name}):
        await asyncio.sleep(0)
        seen = [os.environ["WHO"], os.getenv("WHO"), environ.get("WHO"), dict(os.environ)["WHO"], os.environ["SHARED"]]
        with ThreadPoolExecutor(1) as pool:
            seen.append(pool.submit(os.getenv, "WHO").result())
        seen.append(await asyncio.to_thread(os.getenv, "WHO"))
        seen.append(subprocess.run(TELL, capture_output=True, text=True, check=True).stdout.strip())
        child = await asyncio.create_subprocess_exec(*TELL, stdout=subprocess.PIPE)
        seen.append((await child.communicate())[0].decode().strip())
        return seen


async def test_attempts_side_by_side_see_their_own() -> None:
    seen = await asyncio.gather(look("a"), look("b"))
    for name, one in zip("ab", seen, strict=True):
        assert one == [name] * 4 + ["all"] + [name] * 2 + [f"{name} all"] * 2
    assert os.environ["WHO"] == "process"
    assert os.environb[b"WHO"] == b"process"


def test_a_change_of_an_attempts_variable_is_the_attempts_own() -> None:
    with viewing({"WHO": "a", "NEW": "1"}):
        os.environ["WHO"] = "changed"
        del os.environ["NEW"]
        assert os.environ["WHO"] == "changed"
        assert "NEW" not in os.environ
        assert "NEW" not in list(os.environ)
        assert len(os.environ) == len(list(os.environ)) == len(os.environ.copy())
        with pytest.raises(KeyError):
            del os.environ["NEW"]
        with pytest.raises(TypeError):
            os.environ["WHO"] = 1
        os.environ["SHARED"] = "for all"
    assert (os.environ["WHO"], os.environ["SHARED"]) == ("process", "for all")
    with viewing({"WHO": "b"}):
        assert os.environ["WHO"] == "b"


def test_a_child_process_with_an_environment_of_its_own_gets_no_other() -> None:
    with viewing({"WHO": "a"}):
        ran = subprocess.run(TELL, capture_output=True, text=True, check=True, env={"WHO": "explicit"})
    assert ran.stdout.strip() == "explicit None"
