"""A watched file follows its file, and outlives what is done to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulmen.rpc.tls import TlsFiles, TlsWatch
from fulmen.watched_file import LOOK_S, WatchedFile
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_change_is_seen_at_the_next_look(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "secret"
    path.write_text("old")
    file = WatchedFile(path, clock=clock)
    path.write_text("newer")
    assert (file.content(), file.version) == (b"old", 0)
    clock.now_s += LOOK_S
    assert (file.content(), file.version) == (b"newer", 1)


def test_a_file_that_is_replaced_by_a_link_to_another_is_followed(tmp_path: Path, clock: Clock) -> None:
    """As Kubernetes does with the files of a Secret: the link is changed, and the name stays."""
    for name in ("first", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "key").write_text(name)
    link = tmp_path / "current"
    link.symlink_to(tmp_path / "first")
    file = WatchedFile(link / "key", clock=clock)
    replacement = tmp_path / "new"
    replacement.symlink_to(tmp_path / "other")
    replacement.replace(link)
    clock.now_s += LOOK_S
    assert file.content() == b"other"


def test_a_file_that_goes_leaves_what_it_held_and_one_that_comes_back_counts(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "secret"
    path.write_text("kept")
    file = WatchedFile(path, clock=clock)
    path.unlink()
    for _ in range(3):
        clock.now_s += LOOK_S
        assert file.content() == b"kept"
    assert len(caplog.records) == 1, "it is told once"
    assert "kept" not in caplog.text
    path.write_text("back")
    clock.now_s += LOOK_S
    assert file.content() == b"back"


def test_a_file_that_is_touched_without_a_change_is_no_new_version(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "secret"
    path.write_text("same")
    file = WatchedFile(path, clock=clock)
    path.unlink()
    path.write_text("same")
    clock.now_s += LOOK_S
    assert (file.content(), file.version) == (b"same", 0)


def test_a_file_that_is_not_there_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        WatchedFile(tmp_path / "nowhere")


def test_the_files_of_tls_are_one_thing_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulmen.watched_file.LOOK_S", 0.0)
    for name in ("ca", "certificate", "key"):
        (tmp_path / name).write_text(name)
    paths = {f"{name}_file": str(tmp_path / name) for name in ("ca", "certificate", "key")}
    watch = TlsWatch(TlsFiles(**paths))
    first = watch.material()
    assert watch.material() is first
    (tmp_path / "key").write_text("another key")
    assert watch.material() is not first
    assert watch.material() == (b"ca", b"certificate", b"another key")


def test_the_environment_says_with_what_a_tool_calls() -> None:
    assert TlsFiles.from_environment({}) is None
    assert TlsFiles.from_environment({"FULMEN_TLS_CERTIFICATE_FILE": "c"}) is None, "nobody is trusted: no TLS"
    variables = {
        "FULMEN_TLS_CA_FILE": "ca",
        "FULMEN_TLS_CERTIFICATE_FILE": "c",
        "FULMEN_TLS_KEY_FILE": "k",
        "FULMEN_TLS_SERVER_NAME": "store",
    }
    assert TlsFiles.from_environment(variables) == TlsFiles(
        ca_file="ca", certificate_file="c", key_file="k", server_name="store"
    )
