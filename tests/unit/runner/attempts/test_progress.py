"""Reports of progress on their way to the store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fulmen.agent import Progress
from fulmen_runner.attempts.progress import ProgressBoard, ProgressReport
from fulmen_runner.attempts.workspace import Workspaces
from tests.support.runner.assignments import assignment


async def test_a_report_is_news_once_and_again_on_a_new_stream(tmp_path: Path) -> None:
    board, said, workspace = ProgressBoard(), Progress(), Workspaces(tmp_path).of(b"")
    one = replace(assignment(), attempt_key="a-secret-key")
    with board.following(one, said, workspace):
        await board.look()
        assert not board.has_news
        said.fraction, said.text = 0.5, "with a-secret-key\nand more"
        await board.look()
        expected = {one.attempt: ProgressReport(fraction=0.5, text="with [masked] and more")}
        assert board.take() == expected
        await board.look()
        assert not board.has_news
        board.retake()
        assert board.take() == expected
        (await workspace.open()).progress_file.write_text('{"fraction": 7, "text": ["no text"]}')
        await board.look()
        assert board.take() == {one.attempt: ProgressReport(fraction=1.0, text="['no text']")}
    board.retake()
    assert not board.has_news
    await workspace.close()


class Unshowable:
    def __str__(self) -> str:
        raise ValueError


async def test_whatever_an_agent_reports_others_are_heard(tmp_path: Path) -> None:
    board, workspaces = ProgressBoard(), Workspaces(tmp_path)
    hostile, other = workspaces.of(b""), workspaces.of(b"")
    one, another = assignment(), replace(assignment(), attempt=f"{assignment().attempt}0")
    said, fine = Progress(), Progress(fraction=0.5)
    file = (await hostile.open()).progress_file
    with board.following(one, said, hostile), board.following(another, fine, other):
        for number, written in enumerate(
            (
                '{"fraction": 1' + "0" * 400 + "}",
                '{"fraction": -1' + "0" * 4000 + "}",
                '{"fraction": NaN, "text": "\\ud800"}',
                '{"text": ' + "[" * 900 + "]" * 900 + "}",
                "[" * 4096,
                "\xff",
            )
        ):
            file.write_text(written, encoding="latin-1")
            fine.text = str(number)
            await board.look()
            assert board.take()[another.attempt].text == str(number)
        file.unlink()
        said.text = Unshowable()  # type: ignore[assignment]
        fine.text = "last"
        await board.look()
        assert board.take() == {another.attempt: ProgressReport(fraction=0.5, text="last")}
    await hostile.close()
    await other.close()
