"""Servers of an exchange die for good, and others at other addresses take their place, in every phase of a round.

Whatever happens, ranks have after every round the bits that were computed without any of it, and no gradient is lost or counted
twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.chaos.test_exchange import (
    PART_BYTES,
    PATIENT,
    ROWS,
    assert_conserved,
    begun,
    by_rank,
    eventually,
    joined,
    nursery,
    until,
)
from tests.support.exchange.processes import Nursery, Rank, Server, together
from tests.support.exchange.reference import Reference
from tests.support.soak import long_but

__all__ = ["nursery"]

pytestmark = pytest.mark.timeout(600)


def at(server: Server) -> str:
    return f"127.0.0.1:{server.port}"


def two_ranks(nursery: Nursery, target: str, spares: Sequence[Server]) -> list[Rank]:
    link = {**PATIENT, "spares": [at(each) for each in spares]}
    ranks = [nursery.rank(rank, target, of=2, rows=ROWS, link=link) for rank in range(2)]
    joined(ranks)
    return ranks


@pytest.mark.parametrize(
    "phase",
    long_but(
        ["while a payload arrives", "after the sum"],
        ["between two rounds", "while a payload arrives", "before the payload of the other", "after the sum"],
    ),
)
def test_a_spare_at_another_address_takes_the_place_of_a_server_that_is_killed(
    phase: str, nursery: Nursery, tmp_path: Path
) -> None:
    server, spare, reference = nursery.server(folder=tmp_path), nursery.server(folder=tmp_path), Reference(rows=ROWS)
    line = nursery.line(server)
    ranks = two_ranks(nursery, line.address, [spare])
    reference.check(by_rank(together(ranks, 1, 3)))

    if phase == "between two rounds":
        server.kill()
        told = together(ranks, 4, 2)
    elif phase == "after the sum":
        told = together(ranks, 4)
        server.kill()
        told = [[*first, *second] for first, second in zip(told, together(ranks, 5), strict=True)]
    else:
        if phase == "while a payload arrives":
            before = line.carried
            line.held_after = before + PART_BYTES
            begun(ranks, 4)
            eventually(lambda: line.carried > before + PART_BYTES // 2)
            server.kill()
        else:
            begun(ranks[:1], 4)
            until(server, 0, 4)
            server.kill()
            begun(ranks[1:], 4)
        line.release()
        told = [rank.answer() for rank in ranks]
        told = [[*first, *second] for first, second in zip(told, together(ranks, 5), strict=True)]

    reference.check(by_rank(told))
    assert spare.status()["sums"] > 0
    assert spare.status()["lost_residuals"] == 0
    assert_conserved(ranks, tmp_path)


def test_a_sum_that_one_rank_has_is_the_one_that_the_other_gets_from_the_spare(
    nursery: Nursery, tmp_path: Path
) -> None:
    server, spare, reference = nursery.server(folder=tmp_path), nursery.server(folder=tmp_path), Reference(rows=ROWS)
    line = nursery.line(server)
    link = {**PATIENT, "spares": [at(spare)]}
    ranks = [
        nursery.rank(rank, target, of=2, rows=ROWS, link=link) for rank, target in enumerate([at(server), line.address])
    ]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 3)))
    line.holds_answers = True
    begun(ranks, 4)
    # The first sum of the round is made, and has come to one rank alone.
    eventually(lambda: server.status()["sums"] >= 7)
    server.kill()
    line.release()

    reference.check(by_rank([rank.answer() for rank in ranks]))
    reference.check(by_rank(together(ranks, 5, 2)))
    assert_conserved(ranks, tmp_path)


@pytest.mark.long
def test_servers_may_take_each_others_place_again_and_again(nursery: Nursery, tmp_path: Path) -> None:
    servers, reference = [nursery.server(folder=tmp_path) for _ in range(2)], Reference(rows=ROWS)
    ports = [server.port for server in servers]
    ranks = two_ranks(nursery, at(servers[0]), [servers[1]])
    reference.check(by_rank(together(ranks, 1)))
    for number, victim in zip(itertools.count(2), [0, 1, 0, 1], strict=False):
        begun(ranks, number)
        until(servers[victim], 0, number)
        servers[victim].kill()
        reference.check(by_rank([rank.answer() for rank in ranks]))
        servers[victim] = nursery.server(port=ports[victim], folder=tmp_path)

    assert_conserved(ranks, tmp_path)


def test_ranks_that_know_the_servers_in_another_order_meet_at_the_one_that_has_the_shard(
    nursery: Nursery, tmp_path: Path
) -> None:
    one, other, reference = nursery.server(folder=tmp_path), nursery.server(folder=tmp_path), Reference()
    ranks = [
        nursery.rank(rank, at(first), of=2, link={**PATIENT, "spares": [at(second)]})
        for rank, (first, second) in enumerate([(one, other), (other, one)])
    ]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 3)))

    assert sorted(server.status()["sums"] for server in (one, other)) == [0, 6]
    assert_conserved(ranks, tmp_path)


def test_a_spare_that_does_not_have_the_sums_is_left_and_makes_none(nursery: Nursery, tmp_path: Path) -> None:
    folder = tmp_path / "ours"
    server, stranger = nursery.server(folder=folder), nursery.server(folder=tmp_path / "others")
    reference, port = Reference(rows=ROWS), server.port
    ranks = two_ranks(nursery, at(server), [stranger])
    reference.check(by_rank(together(ranks, 1, 3)))
    server.kill()
    begun(ranks, 4)
    # A shard without members stays there for a while: it shows that ranks were there and have left.
    eventually(lambda: bool(stranger.status()["epochs"]) and not stranger.status()["members"][0])
    nursery.server(port=port, folder=folder)

    reference.check(by_rank([rank.answer() for rank in ranks]))
    assert stranger.status()["sums"] == 0
    assert_conserved(ranks, folder)


def test_a_server_whose_folder_is_taken_from_it_stores_no_more_and_ranks_go_on(
    nursery: Nursery, tmp_path: Path
) -> None:
    server, reference = nursery.server(folder=tmp_path), Reference(rows=ROWS)
    ranks = two_ranks(nursery, at(server), [])
    reference.check(by_rank(together(ranks, 1, 2)))
    [folder] = tmp_path.glob("*/shard-0.1")
    # As another server does to which the file system has given the lock.
    folder.rename(folder.with_suffix(".2"))
    reference.check(by_rank(together(ranks, 3, 2)))

    assert [path.name for path in tmp_path.glob("*/shard-0.?")] == ["shard-0.3"]
    assert_conserved(ranks, tmp_path)
