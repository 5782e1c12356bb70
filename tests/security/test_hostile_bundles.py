"""No archive writes, links or reads outside the folder into which it is unpacked."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from fulmen.bundles import BundleInvalid, unpack

FOLDER, LINK, HARD, FILE = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.REGTYPE
Member = tuple[bytes, str, str]
"""Type, name, and target or content."""


def packed(members: list[Member]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for kind, name, text in members:
            member = tarfile.TarInfo(name)
            member.type, member.mode = kind, 0o755
            if kind == FILE:
                member.size = len(text)
            else:
                member.linkname = text
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def longer_than_any_path() -> list[Member]:
    """Returns links whose real path is too long to be resolved, and one that leads out behind them (CVE-2025-4517)."""
    long, place, members = "d" * 247, "", []
    for step in "abcdefghijklmnop":
        members += [(FOLDER, f"{place}{long}", ""), (LINK, f"{place}{step}", long)]
        place += f"{step}/"
    last = place + "l" * 254
    return [*members, (LINK, last, "../" * 16), (LINK, "out", f"{last}/../victim")]


OUTSIDE: dict[str, list[Member]] = {
    "behind a long path": [*longer_than_any_path(), (FILE, "out/new", "x")],
    "a hard link behind a long path": [*longer_than_any_path(), (HARD, "h", "out/flag"), (FILE, "h", "changed")],
    "up": [(LINK, "out", "../victim")],
    "up behind a folder": [(FOLDER, "d", ""), (LINK, "d/out", "../../victim")],
    "up in the middle": [(FOLDER, "d", ""), (LINK, "out", "d/../../victim")],
    "up behind a link": [(FOLDER, "d", ""), (LINK, "d/l", ".."), (LINK, "out", "d/l/../victim")],
    "two links": [(LINK, "a", "b"), (LINK, "b", "../victim"), (FILE, "a/new", "x")],
    "a name through a link": [(FOLDER, "d", ""), (LINK, "l", "d"), (FILE, "l/new", "x")],
    "a name with a way up": [(FOLDER, "d", ""), (FILE, "d/../../victim/new", "x")],
    "an absolute link": [(LINK, "out", "/etc")],
    "a hard link to a link": [(FILE, "f", ""), (LINK, "l", "f"), (HARD, "h", "l")],
    "a hard link up": [(HARD, "h", "../victim/flag")],
    "a file over a link": [(FILE, "f", ""), (LINK, "l", "f"), (FILE, "l", "x")],
    "the folder itself": [(LINK, ".", "../victim")],
    "the folder itself, inside": [(LINK, "./", "x")],
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "flag").write_text("as it was")
    return folder


@pytest.mark.parametrize("members", OUTSIDE.values(), ids=OUTSIDE)
def test_an_archive_that_leads_out_is_refused_and_changes_nothing(
    tmp_path: Path, victim: Path, members: list[Member]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(BundleInvalid) as refused:
        unpack(packed(members), folder)
    assert str(tmp_path) not in str(refused.value)
    assert [path.name for path in victim.iterdir()] == ["flag"]
    assert ((victim / "flag").read_text(), (victim / "flag").stat().st_nlink) == ("as it was", 1)
    assert not [path for path in folder.iterdir() if path.is_symlink() and path.resolve().is_relative_to(victim)]


def test_links_inside_are_taken_as_package_managers_make_them(tmp_path: Path) -> None:
    members = [
        (FOLDER, "./modules/.bin", ""),
        (FILE, "./modules/tool/cli.js", "code"),
        (LINK, "./modules/.bin/tool", "../tool/cli.js"),
        (HARD, "./copy.js", "./modules/tool/cli.js"),
        (LINK, "./later", "modules/./later.js"),
    ]
    unpack(packed(members), tmp_path)
    assert (tmp_path / "modules/.bin/tool").read_text() == (tmp_path / "copy.js").read_text() == "code"
    assert (tmp_path / "later").is_symlink()
