"""What may be in a folder of weights, and the digest that names it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.models.files import ModelFile, listed_files, manifest_digest, manifest_problems, path_problem, read_manifest

SHA = "a" * 64
GOOD = [
    ModelFile(path="config.json", size_bytes=2, sha256=SHA),
    ModelFile(path="model.safetensors", size_bytes=3, sha256=SHA),
]


def problems(*files: ModelFile) -> list[str]:
    return [f"{each.field} {each.description}" for each in manifest_problems(files)]


def test_the_digest_is_that_of_a_line_for_each_file_ordered_by_path() -> None:
    text = f"{SHA} 2 config.json\n{SHA} 3 model.safetensors\n"
    assert manifest_digest(GOOD[::-1]) == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(
    "path",
    ["", "/config.json", "../config.json", "a/../config.json", "./config.json", "a//b.json", "a/.json", ".hidden.json",
     "a\\b.json", "a:b.json", "ä.json", "a\n.json", "a\0.json", "~/x.json", "CON .json", "x" * 300 + ".json",
     "/".join("abcdefghi") + ".json", "pytorch_model.bin", "modeling.py", "weights.pt", "weights.pickle", "config.json.part",
     "config"],
)  # fmt: skip
def test_a_path_outside_or_of_code_is_refused(path: str) -> None:
    assert path_problem(path)
    assert problems(*GOOD, ModelFile(path=path, size_bytes=1, sha256=SHA))


@given(st.text(max_size=40).map(lambda text: f"{text}.json"))
def test_an_allowed_path_stays_in_its_folder(path: str) -> None:
    if not path_problem(path):
        parts = PurePosixPath(path).parts
        assert "/".join(parts) == path
        assert not any(part.startswith(".") for part in parts)
        assert not path.startswith("/")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ([], "has no config.json"),
        ([*GOOD[:1]], "has no weights"),
        ([*GOOD, GOOD[0]], "occurs twice"),
        ([*GOOD, replace(GOOD[0], path="Config.json")], "differs from config.json in case only"),
        ([*GOOD, replace(GOOD[0], path="config.json/a.json")], "is a folder of other files"),
        ([*GOOD, replace(GOOD[0], path="a.json", size_bytes=-1)], "must not be negative"),
        ([*GOOD, replace(GOOD[0], path="a.json", sha256="A" * 64)], "64 lowercase hexadecimal"),
        ([*GOOD, replace(GOOD[0], path="a.json", size_bytes=0)], "not the digest of an empty file"),
    ],
)
def test_a_manifest_that_is_no_model_is_refused(changed: list[ModelFile], says: str) -> None:
    told = "\n".join(problems(*changed))
    assert says in told or (not changed and "has 0 files" in told)


def test_all_problems_are_told_at_once_and_many_are_counted() -> None:
    wrong = [ModelFile(path=f"{number}.bin", size_bytes=1, sha256=SHA) for number in range(60)]
    told = problems(*wrong)
    assert len(told) == 53
    assert told[50:] == [
        "files 10 more files are not allowed", "files has no config.json", "files has no weights (.safetensors)",
    ]  # fmt: skip


def test_hidden_names_are_no_part_of_a_folder_and_links_only_where_they_are_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"12345")
    model = tmp_path / "model"
    (model / ".cache").mkdir(parents=True)
    (model / ".cache/x.json").touch()
    (model / "config.json").symlink_to("../blob")
    (model / "gone.json").symlink_to("nowhere")
    (model / "folder").symlink_to(tmp_path)
    (model / "code.py").touch()
    assert listed_files(model) == ([], ["code.py", "config.json", "folder", "gone.json"])
    assert listed_files(model, follow_links=True) == (["config.json"], ["code.py", "folder", "gone.json"])
    [file] = read_manifest(model, follow_links=True)
    assert (file.size_bytes, file.sha256) == (5, hashlib.sha256(b"12345").hexdigest())
