"""Ranks and servers of an exchange are killed, held still and cut off in mid-round; lines between them do harm.

Whatever happens, those who go on hold the same bits, and what ranks were given is in the sums or kept back; where a kill
must lose something, that is counted. `make chaos` makes the last test long, with FULMEN_TEST_SOAK_SEED for others.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.chaos.conftest import SOAK_VARIABLE
from tests.integration.exchange.processes import (
    Answer,
    Nursery,
    Rank,
    RankFailed,
    Server,
    residual_in,
    together,
)

pytestmark = pytest.mark.timeout(600)

ROUNDS = 200 if os.environ.get(SOAK_VARIABLE) else 24
SEED = int(os.environ.get("FULMEN_TEST_SOAK_SEED", "20261122"))
WAIT_LIMIT_S = 120.0
# A second is long for a rank that lives, and short for a test.
QUORUM = {
    "lease_s": 5.0,
    "quorum": 0.5,
    "least_wait_s": 1.0,
    "most_wait_s": 2.0,
    "give_up_s": 60.0,
    "deadline_s": 100.0,
}
SHORT_LEASE = {"lease_s": 4.0, "most_wait_s": 5.0, "give_up_s": 60.0, "deadline_s": 100.0}
PATIENT = {"lease_s": 30.0, "deadline_s": 400.0}
ROWS = 70_000
"""Of the model, so that a payload has several chunks."""


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


def eventually(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def until(server: Server, rank: int, number: int) -> None:
    """Waits until a rank has sent something of a round."""
    eventually(lambda: bool(server.status()["positions"].get(rank, (0, 0))[0] >= number))


def joined(ranks: Sequence[Rank]) -> list[int]:
    return [rank.answer() for rank in ranks]


def assert_alike(told: Sequence[Sequence[Answer]]) -> None:
    """All ranks have the same sums and weights after each round."""
    for answers in zip(*told, strict=True):
        assert len({(answer["number"], answer["sum"], answer["weights"]) for answer in answers}) == 1, answers


def assert_conserved(ranks: Sequence[Rank], folder: Path, *, lost: np.ndarray | float = 0.0) -> None:
    """What ranks were given is in the sums, or kept back by one of them or the shard, but for what was lost."""
    kept = [rank.kept() for rank in ranks]
    given, residual = sum(each.given for each in kept), sum(each.residual for each in kept)
    np.testing.assert_allclose(kept[0].got + residual + residual_in(folder), given - lost, atol=1e-3)


@pytest.mark.parametrize("link", [QUORUM, SHORT_LEASE], ids=["a quorum goes on", "its lease ends"])
def test_a_rank_that_is_killed_in_the_midst_of_its_payload_is_not_waited_for(
    link: dict[str, float], nursery: Nursery
) -> None:
    server = nursery.server()
    line = nursery.line(server)
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=3, rows=ROWS, link=link) for rank in range(2)]
    victim = nursery.rank(2, line.address, of=3, rows=ROWS, link=link)
    joined([*ranks, victim])
    assert_alike(together([*ranks, victim], 1, 2))

    for rank in (*ranks, victim):
        if rank is victim:
            line.held_after = line.carried + 400_000  # less than its payload has
        rank.tell("rounds", first=3, count=1)
    until(server, 2, 3)
    victim.kill()
    third = [rank.answer() for rank in ranks]
    rest = together(ranks, 4, 3)

    assert_alike([before + after for before, after in zip(third, rest, strict=True)])
    assert all(answer["ranks"] == 2 for answers in rest for answer in answers[1:])


def test_a_rank_that_is_held_still_in_the_midst_of_its_payload_is_late_and_loses_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    server = nursery.server(folder=tmp_path)
    line, target = nursery.line(server), f"127.0.0.1:{server.port}"
    link = {**QUORUM, "lease_s": 60.0}
    ranks = [nursery.rank(rank, target, of=3, rows=ROWS, link=link) for rank in range(2)]
    ranks.append(nursery.rank(2, line.address, of=3, rows=ROWS, link=link))
    joined(ranks)
    before = together(ranks, 1, 2)
    begun = line.carried
    line.held_after = begun + 400_000
    for rank in ranks:
        rank.tell("rounds", first=3, count=1)
    eventually(lambda: line.carried > begun + 300_000)
    ranks[2].signal(signal.SIGSTOP)
    eventually(lambda: server.status()["partial_sums"] == 1)
    line.release()
    ranks[2].signal(signal.SIGCONT)
    during = [rank.answer() for rank in ranks]
    after = together(ranks, 4, 2)

    assert [answers[0]["accepted"] for answers in during] == [[True], [True], [False]]
    assert_alike([[*one, *two, *three] for one, two, three in zip(before, during, after, strict=True)])
    assert_conserved(ranks, tmp_path)


def test_a_rank_that_was_held_still_for_longer_than_its_lease_goes_on_or_is_told_that_it_cannot(
    nursery: Nursery,
) -> None:
    server = nursery.server()
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=3, link=SHORT_LEASE) for rank in range(3)]
    joined(ranks)
    together(ranks, 1, 2)
    ranks[2].signal(signal.SIGSTOP)
    rest = together(ranks[:2], 3, 3)
    assert_alike(rest)
    assert rest[0][-1]["ranks"] == 2
    ranks[2].signal(signal.SIGCONT)
    with pytest.raises(RankFailed, match="too far behind"):
        ranks[2].rounds(3)


def test_a_rank_that_joins_with_the_weights_of_another_takes_part_with_the_same_bits(nursery: Nursery) -> None:
    server = nursery.server()
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=2) for rank in range(2)]
    joined(ranks)
    together(ranks, 1, 3)
    newcomer = nursery.rank(2, target, of=2, weights=ranks[0].ask("weights"))
    assert joined([newcomer]) == [4]
    assert_alike(together([*ranks, newcomer], 4, 3))

    # And one takes the place of a rank that was killed.
    ranks[1].kill()
    heir = nursery.rank(1, target, of=2, weights=ranks[0].ask("weights"))
    assert joined([heir]) == [7]
    assert_alike(together([ranks[0], heir, newcomer], 7, 3))


@pytest.mark.parametrize("half", ["before its sum", "after its sum"])
def test_a_server_that_is_killed_in_mid_round_goes_on_from_its_files(
    half: str, nursery: Nursery, tmp_path: Path
) -> None:
    server = nursery.server(folder=tmp_path)
    port = server.port
    ranks = [nursery.rank(rank, f"127.0.0.1:{port}", of=2, rows=ROWS, link=PATIENT) for rank in range(2)]
    joined(ranks)
    before = together(ranks, 1, 3)
    ranks[0].tell("rounds", first=4, count=2)
    until(server, 0, 4)
    if half == "after its sum":
        ranks[1].tell("rounds", first=4, count=1)
        until(server, 1, 4)
        server.kill()
        server = nursery.server(port=port, folder=tmp_path)
        second = [*ranks[1].answer(), *ranks[1].rounds(5)]
    else:
        server.kill()
        server = nursery.server(port=port, folder=tmp_path)
        second = ranks[1].rounds(4, 2)
    during = [ranks[0].answer(), second]

    assert_alike([*map(list.__add__, before, during)])
    assert server.status()["lost_residuals"] == 0
    assert_conserved(ranks, tmp_path)


def test_a_server_that_is_killed_and_has_no_files_is_gone_on_with_and_its_residual_counts_as_lost(
    nursery: Nursery,
) -> None:
    server = nursery.server()
    port = server.port
    ranks = [nursery.rank(rank, f"127.0.0.1:{port}", of=2, link=PATIENT) for rank in range(2)]
    joined(ranks)
    before = together(ranks, 1, 3)
    ranks[0].tell("rounds", first=4, count=1)
    until(server, 0, 4)
    server.kill()
    server = nursery.server(port=port)
    during = [ranks[1].rounds(4), ranks[0].answer()]

    assert_alike([before[0] + during[1], before[1] + during[0]])
    assert server.status()["lost_residuals"] == 1
    kept = [rank.kept() for rank in ranks]
    missing = sum(each.given for each in kept) - kept[0].got - sum(each.residual for each in kept)
    assert np.abs(missing).max() > 0.1  # what the shard had kept back is gone, and nothing else


def test_bytes_that_are_damaged_on_the_way_change_nothing(nursery: Nursery, tmp_path: Path) -> None:
    server = nursery.server(folder=tmp_path)
    line = nursery.line(server, seed=SEED)
    ranks = [
        nursery.rank(0, line.address, of=2, rows=ROWS, link=PATIENT),
        nursery.rank(1, f"127.0.0.1:{server.port}", of=2, rows=ROWS, link=PATIENT),
    ]
    joined(ranks)
    told = together(ranks, 1)
    for number in range(2, 6):
        line.to_damage = {"up": 1, "down": 1}
        told = [*map(list.__add__, told, together(ranks, number))]

    assert line.to_damage == {"up": 0, "down": 0}
    assert_alike(told)
    assert_conserved(ranks, tmp_path)


def test_lines_that_are_late_and_cut_change_nothing(nursery: Nursery, tmp_path: Path) -> None:
    server = nursery.server(folder=tmp_path)
    lines = [nursery.line(server, seed=SEED + rank) for rank in range(2)]
    ranks = [nursery.rank(rank, line.address, of=2, rows=ROWS, link=PATIENT) for rank, line in enumerate(lines)]
    joined(ranks)
    told = together(ranks, 1)
    for line in lines:
        line.delay_s = 0.003
    for number in range(2, 6):
        for rank in ranks:
            rank.tell("rounds", first=number, count=1)
        line, begun = lines[number % 2], lines[number % 2].carried
        eventually(lambda line=line, begun=begun: line.carried > begun + 200_000)  # type: ignore[misc]
        line.cut()
        told = [*map(list.__add__, told, [rank.answer() for rank in ranks])]

    assert_alike(told)
    assert_conserved(ranks, tmp_path)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"codec": "topk_quantised"}, "codec: the run has topk, this rank topk_quantised"),
        ({"version": 99}, "codec_version"),
        ({"ratio": 7.0}, r"codec_settings\.ratio: the run has 100\.0, this rank 7\.0"),
        ({"rows": 64}, r"layout_digest.*segment_sizes\[0\]"),
    ],
    ids=["codec", "version", "settings", "model"],
)
def test_a_rank_of_another_version_or_settings_is_refused_and_the_others_go_on(
    other: dict[str, object], told: str, nursery: Nursery
) -> None:
    server = nursery.server()
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=2) for rank in range(2)]
    joined(ranks)
    before = together(ranks, 1)
    stranger = nursery.rank(2, target, of=2, **other)
    with pytest.raises(RankFailed, match=told):
        stranger.answer()
    assert_alike([*map(list.__add__, before, together(ranks, 2, 2))])


def test_an_exchange_survives_whatever_comes(nursery: Nursery, tmp_path: Path) -> None:
    """Server killed, ranks held still, lines cut, late and damaged, at random points; three ranks, all of whom live."""
    chance = random.Random(SEED)
    server = nursery.server(folder=tmp_path)
    port = server.port
    lines = [nursery.line(server, seed=SEED + rank) for rank in range(3)]
    link = {**PATIENT, "quorum": 0.6, "least_wait_s": 0.5, "most_wait_s": 2.0}
    ranks = [nursery.rank(rank, line.address, of=3, rows=20_000, link=link) for rank, line in enumerate(lines)]
    joined(ranks)
    told: list[list[Answer]] = [[], [], []]
    kills = 0
    for number in range(1, ROUNDS + 1):
        for rank in ranks:
            rank.tell("rounds", first=number, count=1)
        time.sleep(chance.uniform(0.0, 0.02))
        harm = chance.choice(["kill", "stop", "cut", "damage", "late", "nothing"])
        victim = chance.randrange(3)
        if harm == "kill":
            kills += 1
            server.kill()
            server = nursery.server(port=port, folder=tmp_path)
        elif harm == "stop":
            ranks[victim].signal(signal.SIGSTOP)
            time.sleep(chance.uniform(0.0, 1.5))
            ranks[victim].signal(signal.SIGCONT)
        elif harm == "cut":
            lines[victim].cut()
        elif harm == "damage":
            lines[victim].to_damage = {"up": 1, "down": 1}
        elif harm == "late":
            lines[victim].delay_s = chance.choice([0.0, 0.002])
        for before, rank in zip(told, ranks, strict=True):
            before += rank.answer()

    assert kills
    assert_alike(told)
    assert server.status()["lost_residuals"] == 0
    assert_conserved(ranks, tmp_path)
