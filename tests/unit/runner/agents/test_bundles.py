"""Bundles are unpacked whole, once, and never outside of their directory."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from fulmen_runner.agents.bundles import unpack_bundle
from fulmen_runner.agents.python.loader import load_callable
from fulmen_runner.attempts.errors import AgentFailed
from tests.support.runner.bundles import archive, file


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member, b""


def test_files_are_unpacked_once(tmp_path: Path) -> None:
    data = archive(file("agent.py", b"1"), file("lib/helper.py", b"2"))
    directory = unpack_bundle(data, "abc", tmp_path)
    assert (directory / "lib" / "helper.py").read_bytes() == b"2"
    assert unpack_bundle(b"not even looked at", "abc", tmp_path) == directory
    assert [path.name for path in tmp_path.iterdir()] == ["bundle-abc"]


@pytest.mark.parametrize(
    "data",
    [
        archive(file("../escape")),
        archive(file("/tmp/absolute/../../escape")),
        archive(link("out", "/etc/passwd")),
        archive(link("up", ".."), file("up/escape")),
        b"no archive",
        archive(file("agent.py", b"x" * 1000))[:-20],
        archive(link("agent.py", "nowhere.py", tarfile.LNKTYPE)),
        archive(file("d/" * 3000 + "agent.py")),
    ],
    # Named: an archive holds the time of its making, and every worker must collect the same names.
    ids=[
        "parent",
        "absolute",
        "link to a file",
        "link to the parent",
        "no archive",
        "cut short",
        "link to nothing",
        "nested folders",
    ],
)
def test_unsafe_or_broken_archives_leave_nothing(tmp_path: Path, data: bytes) -> None:
    inside = tmp_path / "work"
    inside.mkdir()
    try:
        unpack_bundle(data, "abc", inside)
    except AgentFailed:
        assert list(inside.iterdir()) == []
    # An absolute name is made relative by the filter: it stays inside.
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


def test_attempts_cannot_write_to_the_bundle_that_they_share(tmp_path: Path) -> None:
    directory = unpack_bundle(archive(file("agent.py", b"1"), file("lib/helper.py", b"2")), "abc", tmp_path)
    assert [path.stat().st_mode & 0o222 for path in (directory, *directory.rglob("*"))] == [0, 0, 0, 0]


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulmen.bundles.MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(AgentFailed, match="1000 bytes"):
        unpack_bundle(archive(file("zeros", b"\0" * 1001)), "abc", tmp_path)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("agent.py", "must have the form"),
        ("other.py:solve", "file 'other.py' of the agent does not exist"),
        ("broken.py:solve", "ZeroDivisionError"),
        ("agent.py:value", "no callable 'value'"),
        ("no_such_package.module:solve", "No module named"),
    ],
)
def test_what_cannot_be_loaded_says_why(tmp_path: Path, target: str, says: str) -> None:
    (tmp_path / "agent.py").write_text("value = 1\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(AgentFailed, match=says):
        load_callable(target, tmp_path)


def test_installed_callables_need_no_bundle() -> None:
    assert load_callable("os.path:join", None)("a", "b") == "a/b"
