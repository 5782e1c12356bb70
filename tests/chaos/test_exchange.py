"""Ranks and servers of an exchange are killed, held still and cut off in mid-round; lines between them do harm.

Whatever happens, those who go on have after every round the bits that were computed without any of it; where a kill must
lose something, that is counted. FULMEN_TEST_SOAK=10 makes the last test long, with FULMEN_TEST_SEED for others.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.exchange.line import Line
from tests.support.exchange.processes import Nursery, Rank, RankFailed, Response, Server, residual_in, together
from tests.support.exchange.reference import Reference
from tests.support.soak import SOAK, seed

pytestmark = pytest.mark.timeout(600)

ROUNDS = 200 if SOAK > 1 else 24
SEED = seed(20261122)
WAIT_LIMIT_S = 120.0
# A second is long for a rank that lives, and short for a test.
SHORT_LEASE = {"lease_s": 4.0, "straggler_timeout_s": 3600.0, "deadline_s": 4000.0}
QUORUM = {**SHORT_LEASE, "lease_s": 8.0, "quorum": 0.5, "min_wait_s": 1.0, "max_wait_s": 2.0}
PATIENT = {"lease_s": 30.0, "deadline_s": 400.0}
ROWS = 80_000
"""Of the model, so that a payload has two chunks."""
PART_BYTES = 1_150_000
"""Of a payload of this model: more than its first chunk, and less than all."""


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


def until(server: Server, rank: int, number: int, *, call: int = 0) -> None:
    """Waits until a rank has sent something of a round, or of one of its sums: the second is that of the codec."""
    eventually(lambda: bool(server.status()["positions"].get(rank, (0, 0)) >= (number, call)))


def joined(ranks: Sequence[Rank]) -> list[int]:
    return [rank.answer() for rank in ranks]


def begun(ranks: Sequence[Rank], number: int) -> None:
    """Has ranks begin a round."""
    for rank in ranks:
        rank.tell("rounds", first=number, count=1)


def by_rank(told: Sequence[list[Response]]) -> dict[int, list[Response]]:
    return dict(enumerate(told))


def assert_conserved(ranks: Sequence[Rank], folder: Path) -> None:
    """What ranks were given is in the sums, or kept back by one of them or the shard."""
    kept = [rank.kept() for rank in ranks]
    given, residual = sum(each.given for each in kept), sum(each.residual for each in kept)
    np.testing.assert_allclose(kept[0].got + residual + residual_in(folder), given, atol=1e-3)


@pytest.mark.parametrize(
    ("link", "members"), [(QUORUM, 3), (SHORT_LEASE, 2)], ids=["a quorum goes on", "its lease ends"]
)
def test_a_rank_that_is_killed_in_the_midst_of_its_payload_is_not_waited_for(
    link: dict[str, float], members: int, nursery: Nursery
) -> None:
    server, reference = nursery.server(), Reference(rows=ROWS)
    line, target = nursery.line(server), f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=3, rows=ROWS, link=link) for rank in range(2)]
    victim = nursery.rank(2, line.address, of=3, rows=ROWS, link=link)
    joined([*ranks, victim])
    reference.check(by_rank(together([*ranks, victim], 1, 2)))

    begun(ranks, 3)
    line.held_after = line.carried + PART_BYTES
    begun([victim], 3)
    until(server, 2, 3, call=1)
    victim.kill()
    third = [rank.answer() for rank in ranks]
    rest = together(ranks, 4, 3)

    assert [answers[0]["ranks"] for answers in third] == [members] * 2
    reference.check(by_rank(third))
    reference.check(by_rank(rest))
    assert all(answer["ranks"] == 2 for answers in rest for answer in answers)


def test_a_rank_that_is_held_still_in_the_midst_of_its_payload_is_late_and_loses_nothing(
    nursery: Nursery, tmp_path: Path
) -> None:
    server, reference = nursery.server(folder=tmp_path), Reference(rows=ROWS)
    line, target = nursery.line(server), f"127.0.0.1:{server.port}"
    link = {**QUORUM, "lease_s": 60.0}
    ranks = [nursery.rank(rank, target, of=3, rows=ROWS, link=link) for rank in range(2)]
    ranks.append(nursery.rank(2, line.address, of=3, rows=ROWS, link=link))
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 2)))
    before = line.carried
    line.held_after = before + PART_BYTES
    begun(ranks, 3)
    eventually(lambda: line.carried > before + PART_BYTES // 2)
    ranks[2].signal(signal.SIGSTOP)
    eventually(lambda: server.status()["partial_sums"] == 1)
    line.release()
    ranks[2].signal(signal.SIGCONT)
    during = [rank.answer() for rank in ranks]

    assert [answers[0]["accepted"] for answers in during] == [[True], [True], [False]]
    reference.check(by_rank(during))
    reference.check(by_rank(together(ranks, 4, 2)))
    assert_conserved(ranks, tmp_path)


def test_a_rank_that_was_held_still_for_longer_than_its_lease_is_told_that_it_cannot_go_on(nursery: Nursery) -> None:
    server, reference = nursery.server(), Reference()
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=3, link=SHORT_LEASE) for rank in range(3)]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 2)))
    ranks[2].signal(signal.SIGSTOP)
    rest = together(ranks[:2], 3, 3)
    reference.check(by_rank(rest))
    assert rest[0][-1]["ranks"] == 2
    ranks[2].signal(signal.SIGCONT)
    with pytest.raises(RankFailed, match="too far behind"):
        ranks[2].rounds(3)


def test_a_rank_that_joins_with_the_weights_of_another_takes_part_with_the_same_bits(nursery: Nursery) -> None:
    server, reference = nursery.server(), Reference()
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=2) for rank in range(2)]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 3)))
    [epoch] = server.status()["epochs"]
    newcomer = nursery.rank(2, target, of=2)
    assert joined([newcomer]) == [4]
    newcomer.ask("take_over", weights=ranks[0].ask("weights"))
    assert server.status()["epochs"] == [epoch + 1]
    reference.check(by_rank(together([*ranks, newcomer], 4, 3)))

    # And one takes the place of a rank that was killed.
    ranks[1].kill()
    reference.forget_rank(1)
    heir = nursery.rank(1, target, of=2)
    assert joined([heir]) == [7]
    heir.ask("take_over", weights=ranks[0].ask("weights"))
    assert server.status()["epochs"] == [epoch + 2]
    reference.check(by_rank(together([ranks[0], heir, newcomer], 7, 3)))


@pytest.mark.parametrize("half", ["before its sum", "after its sum"])
def test_a_server_that_is_killed_in_mid_round_goes_on_from_its_files(
    half: str, nursery: Nursery, tmp_path: Path
) -> None:
    server, reference = nursery.server(folder=tmp_path), Reference(rows=ROWS)
    port = server.port
    ranks = [nursery.rank(rank, f"127.0.0.1:{port}", of=2, rows=ROWS, link=PATIENT) for rank in range(2)]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 3)))
    ranks[0].tell("rounds", first=4, count=2)
    until(server, 0, 4)
    if half == "after its sum":
        begun(ranks[1:], 4)
        until(server, 1, 4)
        server.kill()
        server = nursery.server(port=port, folder=tmp_path)
        second = [*ranks[1].answer(), *ranks[1].rounds(5)]
    else:
        server.kill()
        server = nursery.server(port=port, folder=tmp_path)
        second = ranks[1].rounds(4, 2)

    reference.check({0: ranks[0].answer(), 1: second})
    assert server.status()["lost_residuals"] == 0
    assert_conserved(ranks, tmp_path)


def test_a_server_that_is_killed_and_has_no_files_is_gone_on_with_and_its_residual_counts_as_lost(
    nursery: Nursery,
) -> None:
    server, reference = nursery.server(), Reference()
    port = server.port
    ranks = [nursery.rank(rank, f"127.0.0.1:{port}", of=2, link=PATIENT) for rank in range(2)]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 3)))
    begun(ranks[:1], 4)
    until(server, 0, 4)
    server.kill()
    server = nursery.server(port=port)
    second = ranks[1].rounds(4)

    reference.forget_shard()
    reference.check({0: ranks[0].answer(), 1: second})
    assert server.status()["lost_residuals"] == 1


def test_a_sum_that_one_rank_has_is_not_made_anew_by_a_server_that_was_killed_and_has_no_files(
    nursery: Nursery,
) -> None:
    server, reference = nursery.server(), Reference()
    port = server.port
    line = nursery.line(server)
    ranks = [
        nursery.rank(rank, at, of=2, link=SHORT_LEASE) for rank, at in enumerate([f"127.0.0.1:{port}", line.address])
    ]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1, 3)))
    line.holds_answers = True
    begun(ranks, 4)
    reference.check({0: ranks[0].answer()})
    server.kill()
    reference.forget_shard()
    server = nursery.server(port=port)
    begun(ranks[:1], 5)
    until(server, 0, 5)
    line.release()

    with pytest.raises(RankFailed, match="too far behind"):
        ranks[1].answer()
    ranks[1].kill()
    reference.check({0: ranks[0].answer()})


def test_bytes_that_are_damaged_on_the_way_change_nothing(nursery: Nursery, tmp_path: Path) -> None:
    server, reference = nursery.server(folder=tmp_path), Reference(rows=ROWS)
    line = nursery.line(server, seed=SEED)
    ranks = [
        nursery.rank(0, line.address, of=2, rows=ROWS, link=PATIENT),
        nursery.rank(1, f"127.0.0.1:{server.port}", of=2, rows=ROWS, link=PATIENT),
    ]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1)))
    for number in range(2, 6):
        line.to_damage = {"up": 1, "down": 1}
        reference.check(by_rank(together(ranks, number)))

    assert line.to_damage == {"up": 0, "down": 0}
    assert server.status()["bad_checksums"] > 0
    assert_conserved(ranks, tmp_path)


def test_lines_that_are_late_and_cut_change_nothing(nursery: Nursery, tmp_path: Path) -> None:
    server, reference = nursery.server(folder=tmp_path), Reference(rows=ROWS)
    lines = [nursery.line(server, seed=SEED + rank) for rank in range(2)]
    ranks = [nursery.rank(rank, line.address, of=2, rows=ROWS, link=PATIENT) for rank, line in enumerate(lines)]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1)))
    for line in lines:
        line.delay_s = 0.003
    for number in range(2, 6):
        line = lines[number % 2]
        before = line.carried
        begun(ranks, number)
        eventually(lambda line=line, before=before: line.carried > before + PART_BYTES // 2)  # type: ignore[misc]
        line.cut()
        reference.check(by_rank([rank.answer() for rank in ranks]))

    assert_conserved(ranks, tmp_path)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"version": 99}, "codec_version: the run has 1, this rank 99"),
        ({"rows": 64}, r"layout_digest.*\n.*segment_sizes\[0\]"),
    ],
    ids=["version", "model"],
)
def test_a_rank_of_another_version_or_model_is_refused_and_the_others_go_on(
    other: dict[str, int], told: str, nursery: Nursery
) -> None:
    server, reference = nursery.server(), Reference()
    target = f"127.0.0.1:{server.port}"
    ranks = [nursery.rank(rank, target, of=2) for rank in range(2)]
    joined(ranks)
    reference.check(by_rank(together(ranks, 1)))
    stranger = nursery.rank(2, target, of=2, **other)
    with pytest.raises(RankFailed, match=told):
        stranger.answer()
    reference.check(by_rank(together(ranks, 2, 2)))


class Soak:
    """Three ranks, each on a line of its own, a server, and somebody who does harm to them."""

    ROWS = 20_000

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.chance = random.Random(SEED)
        self.done: dict[str, int] = {}
        self._nursery, self._folder = nursery, folder
        self.server = nursery.server(folder=folder)
        self._port = self.server.port
        self._lines: list[Line] = [nursery.line(self.server, seed=SEED + rank) for rank in range(3)]
        self._ranks = [self._started(rank) for rank in range(3)]
        self._reference = Reference(rows=self.ROWS)
        joined(self._ranks)

    def _started(self, rank: int) -> Rank:
        link = {**PATIENT, "quorum": 0.6, "min_wait_s": 0.5, "max_wait_s": 2.0}
        return self._nursery.rank(rank, self._lines[rank].address, of=3, rows=self.ROWS, link=link)

    def round(self, number: int) -> None:
        """Takes a round, in which something happens."""
        begun(self._ranks, number)
        time.sleep(self.chance.uniform(0.0, 0.02))
        harm = self.chance.choice([self.kill_server, self.kill_rank, self.stop, self.cut, self.damage, self.delay])
        self.done[harm.__name__] = self.done.get(harm.__name__, 0) + 1
        dead = harm(self.chance.randrange(3), number)
        told = {rank: process.answer() for rank, process in enumerate(self._ranks) if rank != dead}
        self._reference.check(told, dead=dead)
        if dead is not None:
            self._reference.forget_rank(dead)
            self._ranks[dead].ask("take_over", weights=self._ranks[dead - 1].ask("weights"))

    def kill_server(self, victim: int, number: int) -> None:
        self.server.kill()
        self.server = self._nursery.server(port=self._port, folder=self._folder)

    def kill_rank(self, victim: int, number: int) -> int:
        """Kills a rank; another process takes its place from the next round on."""
        until(self.server, victim, number)
        self._ranks[victim].kill()
        self._ranks[victim] = self._started(victim)
        assert joined([self._ranks[victim]]) == [number + 1]
        return victim

    def stop(self, victim: int, number: int) -> None:
        self._ranks[victim].signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0.0, 1.5))
        self._ranks[victim].signal(signal.SIGCONT)

    def cut(self, victim: int, number: int) -> None:
        self._lines[victim].cut()

    def damage(self, victim: int, number: int) -> None:
        self._lines[victim].to_damage = {"up": 1, "down": 1}

    def delay(self, victim: int, number: int) -> None:
        self._lines[victim].delay_s = self.chance.choice([0.0, 0.002])


@pytest.mark.long(short=True)
def test_an_exchange_survives_whatever_comes(nursery: Nursery, tmp_path: Path) -> None:
    soak = Soak(nursery, tmp_path)
    for number in range(1, ROUNDS + 1):
        soak.round(number)

    assert {"kill_server", "kill_rank"} <= soak.done.keys()
    assert soak.server.status()["lost_residuals"] == 0
