"""The parts of a shard's rounds: deadlines, payloads put together, terms, members, and sums that are kept in files."""

from __future__ import annotations

import statistics
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen_exchange import wire
from fulmen_exchange.aggregator.effects import (
    PayloadStatus,
    RankBehind,
    RankReplaced,
    Response,
    ResumePoint,
    SumDue,
)
from fulmen_exchange.aggregator.membership import Member, Membership
from fulmen_exchange.aggregator.rounds import MAX_OPEN, RoundMachine
from fulmen_exchange.aggregator.shard_sum import PayloadsRefused, ShardSum, TermsRefused, sum_payload
from fulmen_exchange.aggregator.staging import StagedPayload, Staging
from fulmen_exchange.aggregator.terms import (
    CHUNK_BYTES,
    MAX_RANKS,
    ArrivalTimes,
    StragglerPolicy,
)
from fulmen_exchange.codecs.codec import Payload, Round
from fulmen_exchange.codecs.topk import ENTRIES as TOPK
from tests.support.exchange.aggregators import CODED, PLAIN, SIZE, SUMMED, TERMS, contributors, kept, started

# Deadlines.


@given(st.lists(st.floats(0, 20), max_size=40))
def test_a_deadline_is_the_median_and_four_deviations_of_the_last_32_arrivals(offsets_s: list[float]) -> None:
    arrivals = ArrivalTimes(min_s=0.5, max_s=8.0)
    for offset_s in offsets_s:
        arrivals.note(offset_s)

    last = offsets_s[-32:]
    if not last:
        assert arrivals.deadline_s() == 8.0
        return
    middle = statistics.median(last)
    spread = float(np.median(np.abs(np.array(last) - middle)))
    assert arrivals.deadline_s() == pytest.approx(float(np.clip(middle + 4 * spread, 0.5, 8.0)))


def test_a_sum_without_a_straggler_needs_the_deadline_and_the_quorum() -> None:
    machine = started(0, 1, 2, 3)
    for rank in (0, 1):
        assert contributors(machine, rank, (1, 0)) == []
    assert machine.tick(8.0) == []  # half of them, where three quarters are needed
    [due] = contributors(machine, 2, (1, 0), 8.1)
    assert isinstance(due, SumDue)
    assert sorted(due.payloads) == [0, 1, 2]

    effects = machine.summed((1, 0), SUMMED, 8.2)
    assert {effect.rank for effect in effects if isinstance(effect, Response)} == {0, 1, 2}
    [late] = contributors(machine, 3, (1, 0), 8.3)
    assert isinstance(late, Response)
    assert late.status is PayloadStatus.LATE
    assert late.done is not None
    assert late.done.reply == SUMMED


def test_what_is_not_compressed_waits_for_all_until_one_is_given_up() -> None:
    machine = started(0, 1)
    contributors(machine, 0, (1, 0), terms=PLAIN)
    for now_s in range(1, 60):
        machine.join(1, "1", float(now_s))  # its lease goes on
        machine.join(0, "0", float(now_s))
        assert machine.tick(float(now_s)) == []

    [stale] = machine.tick(60.0)
    assert isinstance(stale, Response)
    assert (stale.rank, stale.status) == (0, PayloadStatus.STALE_EPOCH)
    assert machine.members.ranks == [0]
    [due] = contributors(machine, 0, (1, 0), 60.0, terms=PLAIN)
    assert isinstance(due, SumDue)


def test_a_rank_that_asks_for_a_round_that_is_not_kept_is_behind() -> None:
    machine = started(0)
    for number in range(1, 5):
        contributors(machine, 0, (number, 0))
        machine.summed((number, 0), SUMMED, 0.0)
    with pytest.raises(RankBehind, match="in round 4"):
        machine.join(1, "1", 0.0, ResumePoint(round=2))


def test_ranks_that_do_not_agree_on_a_sum_are_told_what_differs() -> None:
    machine = started(0, 1)
    contributors(machine, 0, (1, 0))
    [answer] = contributors(machine, 1, (1, 0), terms=replace(CODED, ratio=8.0))

    assert isinstance(answer, Response)
    assert answer.status is PayloadStatus.INVALID
    assert answer.text == "ratio is 4.0 for the other ranks and 8.0 here"


def test_a_member_has_few_payloads_put_together_at_a_time() -> None:
    machine = started(0, 1)
    answers = [contributors(machine, 0, (1, call)) for call in range(MAX_OPEN + 1)]

    assert answers[:-1] == [[]] * MAX_OPEN
    assert isinstance(answers[-1][0], Response)
    assert "at a time" in answers[-1][0].text


def test_a_restarted_server_does_not_make_a_sum_anew_that_was_replaced_by_a_newer_one() -> None:
    machine = RoundMachine(TERMS)
    machine.restore(kept(0, (3, 0)), epoch=2, history="h")  # rank 0 had gone on without rank 1, which comes back first
    machine.join(1, "1", 0.0, ResumePoint(round=2, epoch=1, known=2))
    machine.join(0, "0", 0.0, ResumePoint(round=3, epoch=2, known=1))

    [answer] = contributors(machine, 1, (2, 0))
    assert isinstance(answer, Response)
    assert answer.status is PayloadStatus.BEHIND
    [again] = contributors(machine, 0, (3, 0))
    assert isinstance(again, Response)
    assert again.status is PayloadStatus.DUPLICATE


def test_a_member_that_is_removed_while_its_sum_is_made_joins_again_and_gets_it() -> None:
    machine = started(0, 1)
    contributors(machine, 0, (1, 0))
    [due] = contributors(machine, 1, (1, 0))
    assert isinstance(due, SumDue)
    machine.join(0, "0", 9.0)

    [stale] = machine.tick(10.0)
    assert isinstance(stale, Response)
    assert (stale.rank, stale.key, stale.status) == (1, (1, 0), PayloadStatus.STALE_EPOCH)
    machine.join(1, "1", 10.0, ResumePoint(round=1, epoch=2, known=2))
    assert contributors(machine, 1, (1, 0), 10.0) == []
    told = machine.summed((1, 0), SUMMED, 11.0)
    assert {(each.rank, each.status) for each in told if isinstance(each, Response)} == {
        (0, PayloadStatus.ACCEPTED), (1, PayloadStatus.ACCEPTED),
    }  # fmt: skip


def test_a_process_whose_place_another_has_taken_does_not_take_it_back() -> None:
    machine = started(0, 1)
    contributors(machine, 1, (1, 0))
    _, [stale] = machine.join(1, "newer", 0.0)
    assert isinstance(stale, Response)
    assert (stale.incarnation, stale.status) == ("1", PayloadStatus.STALE_EPOCH)
    with pytest.raises(RankReplaced, match="rank 1"):
        machine.join(1, "1", 0.0, ResumePoint(round=1, epoch=2, known=2))
    assert machine.members.get(1, "newer") is not None


# Payloads.


@given(st.permutations([0, CHUNK_BYTES, 2 * CHUNK_BYTES]), st.lists(st.sampled_from([0, 1, 2]), max_size=3))
def test_chunks_in_any_order_and_repeated_are_the_payload(order: list[int], again: list[int]) -> None:
    payload = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 17)
    staging = Staging(len(payload))
    for offset in [*order, *(order[place] for place in again)]:
        data = payload[offset : offset + CHUNK_BYTES]
        assert not staging.problem(offset, len(payload), len(data))
        staging.put(offset, data, zlib.crc32(data))
        staging.put(offset, bytes(len(data)), 0)  # a second one changes nothing

    assert staging.is_complete
    assert bytes(staging.take().data) == payload
    assert staging.take().checksum == zlib.crc32(payload[8:])


@pytest.mark.parametrize(
    ("offset", "total", "size"), [(0, 9, 10), (0, 10, 11), (5, 10, 5), (-CHUNK_BYTES, 10, 10), (CHUNK_BYTES, 10, 0)]
)
def test_a_chunk_that_is_none_of_the_payload_is_named(offset: int, total: int, size: int) -> None:
    assert Staging(10).problem(offset, total, size)


# Terms and members.


def test_terms_beyond_what_a_server_holds_are_listed_at_once() -> None:
    bad = replace(TERMS, world_size=0, segment_sizes=(10**12,), patience=StragglerPolicy(quorum=0.0, lease_s=1e9))
    assert {problem.field for problem in bad.problems(max_elements=2**31)} >= {
        "world_size", "segment_sizes", "quorum", "lease_s",
    }  # fmt: skip
    assert not TERMS.problems(max_elements=SIZE)


def test_every_change_of_members_is_a_new_epoch_and_a_repeated_join_is_none() -> None:
    members = Membership(world_size=2, lease_s=10.0)
    first = Member(rank=0, incarnation="a", first_round=1, seen_s=0.0)
    assert members.add(first)
    assert not members.add(replace(first, seen_s=5.0))
    assert members.expired(14.0) == []
    assert members.expired(15.0) == [0]
    assert members.add(replace(first, incarnation="b"))
    assert members.get(0, "a") is None
    assert members.remove([0])
    assert members.epoch == 3


# Sums.


def due_of(tensors: list[torch.Tensor], *, number: int = 1, ratio: float = 4.0) -> SumDue:
    """Returns payloads of top-k that are due."""
    codec = TOPK[0].make(TOPK[0].settings())
    payloads = {}
    for rank, tensor in enumerate(tensors):
        round_ = Round(number=number, world_size=2, ratio=ratio, rank=rank)
        [payload] = codec.encode(tensor.clone(), codec.new_state(tensor), [0, SIZE], round_)
        payloads[rank] = StagedPayload.of(wire.encode(payload))
    return SumDue(
        key=(number, 0),
        terms=replace(CODED, number=number, ratio=ratio),
        payloads=payloads,
        contributors={rank: str(rank) for rank in payloads},
        member_count=len(payloads),
    )


def random_tensors(seed: int) -> list[torch.Tensor]:
    drawn = np.random.default_rng(seed).standard_normal((2, SIZE))
    return [torch.from_numpy(row.astype(np.float32)) for row in drawn]


def summed(sums: ShardSum, due: SumDue, *, epoch: int = 7, history: str = "h") -> bytes:
    return sums.reduce(due, epoch=epoch, history=history).data()


def test_a_sum_goes_on_from_its_file_as_if_nothing_had_happened(tmp_path: Path) -> None:
    lasting, first = ShardSum(TERMS), ShardSum(TERMS, folder=tmp_path)
    replies = [summed(each, due_of(random_tensors(1))) for each in (lasting, first)]
    second = ShardSum(TERMS, folder=tmp_path)
    restored = second.restore(at_least=1, known=2, history="h")

    assert replies[0] == replies[1] == restored.sums[1, 0][1].reply.data()
    assert (restored.epoch, restored.history, restored.has_lost) == (7, "h", False)
    assert summed(second, due_of(random_tensors(2), number=2)) == summed(lasting, due_of(random_tensors(2), number=2))
    assert summed(ShardSum(TERMS), due_of(random_tensors(2), number=2)) != summed(
        lasting, due_of(random_tensors(2), number=2)
    )


@pytest.mark.parametrize("what", ["too old", "cut off", "damaged", "of other terms", "of another history"])
def test_a_file_that_is_of_no_use_is_not_used_and_what_it_kept_back_counts_as_lost(what: str, tmp_path: Path) -> None:
    summed(ShardSum(TERMS, folder=tmp_path), due_of(random_tensors(1)))
    [path] = tmp_path.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    if what == "cut off":
        path.write_bytes(data[:100])
    if what == "damaged":
        data[data.index(wire.MAGIC) + 4] ^= 1
        path.write_bytes(data)
    terms = replace(TERMS, layout_digest="other") if what == "of other terms" else TERMS
    again = ShardSum(terms, folder=tmp_path)
    is_new = what in ("cut off", "damaged", "of other terms")  # nobody has to have known the exchange to lose that
    restored = again.restore(
        at_least=2 if what == "too old" else 1,
        known=0 if is_new else 2,
        history="another" if what == "of another history" else "h",
    )

    assert restored.sums == {}
    assert restored.has_lost == (what != "of other terms")
    due = due_of(random_tensors(2), number=2)
    assert summed(again, due) == summed(ShardSum(TERMS), due_of(random_tensors(2), number=2))


def test_the_files_of_other_buckets_are_used_where_one_cannot_be_read(tmp_path: Path) -> None:
    terms = replace(TERMS, segment_sizes=(SIZE, SIZE))
    first = ShardSum(terms, folder=tmp_path)
    for bucket in range(2):
        due = due_of(random_tensors(bucket))
        summed(first, replace(due, key=(1, bucket), terms=replace(due.terms, bucket=bucket)))
    (tmp_path / "bucket-1.safetensors").write_bytes(b"")
    restored = ShardSum(terms, folder=tmp_path).restore(at_least=1, known=2, history="h")

    assert list(restored.sums) == [(1, 0)]
    assert restored.has_lost
    assert restored.history == ""  # the sum that was lost may be one that a rank has


def test_a_file_is_whole_on_the_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, list[str]]] = []

    def note(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        synced.append((name, sorted(path.name for path in tmp_path.iterdir())))

    monkeypatch.setattr("os.fsync", note)
    summed(ShardSum(TERMS, folder=tmp_path, is_synced=False), due_of(random_tensors(1)))
    assert not synced
    summed(ShardSum(TERMS, folder=tmp_path), due_of(random_tensors(2)))

    before, after = ["bucket-0.new", "bucket-0.safetensors"], ["bucket-0.safetensors"]
    assert synced == [("bucket-0.new", before), (tmp_path.name, after)]


def test_a_shard_draws_by_a_number_that_no_rank_has(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[Round] = []

    def spy(bucket: int, payloads: Sequence[Payload], round_: Round) -> Payload:
        rounds.append(round_)
        return payloads[0]

    sums = ShardSum(TERMS)
    monkeypatch.setattr(sums._shard, "reduce", spy)
    due = due_of(random_tensors(1))
    summed(sums, replace(due, payloads={0: due.payloads[0], 2: due.payloads[1]}, contributors={0: "0", 2: "2"}))

    assert rounds[0].rank >= MAX_RANKS


def test_the_rank_whose_payload_cannot_be_summed_is_named() -> None:
    due = due_of(random_tensors(1))
    damaged = bytearray(due.payloads[1].data)
    damaged[-1] ^= 1
    with pytest.raises(PayloadsRefused) as caught:
        summed(ShardSum(TERMS), replace(due, payloads={0: due.payloads[0], 1: StagedPayload.of(damaged)}))

    assert caught.value.reasons == {1: "wrong checksum"}


def test_tensors_of_different_sizes_are_not_summed() -> None:
    payloads = {rank: StagedPayload.of(wire.encode(sum_payload(torch.zeros(rank + 1)))) for rank in range(2)}
    due = SumDue(key=(1, 0), terms=PLAIN, payloads=payloads, contributors={0: "0", 1: "1"}, member_count=2)
    with pytest.raises(PayloadsRefused, match="another type or size"):
        summed(ShardSum(TERMS), due)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"codec": "nothing"}, "codec"),
        ({"codec_version": 99}, "codec_version"),
        ({"settings_json": '{"codec": "topk", "ratoi": 3}'}, "codec_settings.ratoi"),
    ],
)
def test_a_codec_that_the_server_cannot_have_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(TermsRefused) as caught:
        ShardSum(replace(TERMS, **changes))  # type: ignore[arg-type]

    assert [problem.field for problem in caught.value.problems] == [field]
