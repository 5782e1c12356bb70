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
