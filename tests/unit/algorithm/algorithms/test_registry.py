"""Algorithms are loaded from files and packages; an error names the file."""

from pathlib import Path

import pytest

from fulmen_algorithm.algorithms.registry import AlgorithmsInvalid, load_registry

MINE = """\
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, AlgorithmSettings


class Mine:
    def __init__(self, settings):
        pass

    async def run(self, ctx):
        pass


ENTRIES = (AlgorithmEntry(name="{name}", settings=AlgorithmSettings, make=Mine),)
"""


def written(folder: Path, content: str) -> Path:
    """Writes a file; each has the same name, as files of different people do."""
    folder.mkdir(exist_ok=True)
    path = folder / "algorithm.py"
    path.write_text(content)
    return path


def test_one_file_is_enough_for_an_algorithm(tmp_path):
    files = [written(tmp_path / name, MINE.format(name=name)) for name in ("mine", "other")]
    found = load_registry(files)
    assert {"grpo", "sft", "mine", "other"} <= found.keys()
    assert found["mine"].make is not found["other"].make


def test_a_package_offers_algorithms_by_an_entry_point(tmp_path, monkeypatch):
    (tmp_path / "offered.py").write_text(MINE.format(name="offered"))
    info = tmp_path / "offered-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offered\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fulmen.algorithms]\noffered = offered\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "offered" in load_registry()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("raise OSError('no disk')", "OSError: no disk"),
        ("def broken(", "SyntaxError"),
        ("ENTRIES = ()", "needs ENTRIES"),
        ("ENTRIES = ('grpo',)", "needs ENTRIES"),
        (MINE.format(name="Grpo 2"), "'Grpo 2' must be"),
        (MINE.format(name="grpo"), "'grpo' is already defined in fulmen_algorithm.algorithms.grpo"),
        (
            MINE.format(name="mine").replace("settings=AlgorithmSettings", "settings=dict"),
            "a class of AlgorithmSettings",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_an_error_that_names_it(tmp_path, content, complaint):
    path = written(tmp_path, content)
    with pytest.raises(AlgorithmsInvalid, match=complaint) as caught:
        load_registry([path])
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(AlgorithmsInvalid, match="no such file"):
        load_registry([tmp_path / "missing.py"])
