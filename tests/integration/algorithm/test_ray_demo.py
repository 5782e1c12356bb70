"""The demo on three nodes of a Ray cluster, in its short form: a node is killed in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.machines import demo

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(900)]


async def test_ranks_and_engines_of_a_lost_node_are_started_elsewhere_and_no_group_is_lost(
    short_tmp_path: Path,
) -> None:
    found = await demo.run(short_tmp_path, short=True)
    assert found.steps > found.killed_at
    assert (found.repeated, found.failed) == (0, 0), found.notices
    assert any("ranks and engines on cluster 'ray'" in notice for notice in found.notices)
