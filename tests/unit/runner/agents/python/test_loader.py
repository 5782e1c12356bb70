"""Loading callables, and the errors of those that cannot be loaded or that raise."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fulmen_runner.agents.python.loader import describe_error, load_in_place
from fulmen_runner.attempts.errors import AgentFailed


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(
        "import json\n"
        "def parses(task):\n    return json.loads('no')\n"
        "def chains(task):\n"
        "    try:\n        parses(task)\n"
        "    except ValueError as error:\n        raise RuntimeError('outer') from error\n"
    )
    (tmp_path / "helper.py").write_text("import nowhere_to_be_found\n")
    (tmp_path / "lost.py").write_text("import helper\ndef solve(task): return 1\n")
    (tmp_path / "typo.py").write_text("def solve(task) return 1\n")
    return tmp_path


def told_of_load(bundle: Path, target: str) -> str:
    with pytest.raises(AgentFailed) as failed:
        load_in_place(target, bundle)
    return str(failed.value)


def test_a_failed_import_names_the_users_files_only(bundle: Path) -> None:
    assert told_of_load(bundle, "lost.py:solve").splitlines() == [
        "lost.py cannot be imported",
        "Traceback (most recent call last):",
        '  File "lost.py", line 1, in <module>',
        "    import helper",
        '  File "helper.py", line 1, in <module>',
        "    import nowhere_to_be_found",
        "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    ]
    typo = told_of_load(bundle, "typo.py:solve")
    assert 'File "typo.py", line 1' in typo
    assert "Traceback" not in typo
    assert str(bundle) not in typo


def test_a_bundle_is_loaded_whatever_libraries_and_agents_put_among_the_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lazy:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(f"{name} is loaded later")

    class Odd:
        __file__ = 5

    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "agent.py").write_text(f"def solve(task): return {name!r}")
    monkeypatch.setitem(sys.modules, "a_lazy_module", Lazy())  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "an_odd_module", Odd)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "no_module", None)  # type: ignore[arg-type]
    assert [load_in_place("agent.py:solve", tmp_path / name)(None) for name in ("one", "two")] == ["one", "two"]


def test_an_agent_that_removes_itself_from_the_modules_fails_with_its_own_error(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("import sys\ndel sys.modules[__name__]\nraise ValueError('mine')")
    told = told_of_load(tmp_path, "agent.py:solve")
    assert "ValueError: mine" in told
    assert "KeyError" not in told


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("agent.py", "must have the form"),
        ("agent.py:nothing", "has no callable 'nothing'; it has "),
        ("missing.py:solve", "file 'missing.py' of the agent does not exist"),
        ("not_a_module_at_all:solve", "No module named 'not_a_module_at_all'"),
    ],
)
def test_targets_that_are_not_there(bundle: Path, target: str, says: str) -> None:
    assert says in told_of_load(bundle, target)


def test_a_traceback_starts_at_the_agents_first_frame(bundle: Path) -> None:
    with pytest.raises(RuntimeError) as raised:
        load_in_place("agent.py:chains", bundle)({})
    # The test itself called it: that frame stands for whoever calls agents.
    told = describe_error(raised.value)
    assert 'File "agent.py", line 6, in chains' in told
    assert "json.decoder.JSONDecodeError" in told
    assert "The above exception was the direct cause" in told
    assert str(bundle) not in told
