"""The benchmark of convergence: its arithmetic, its ranks, and that a run that was cut off goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from statistics import stdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.exchange.convergence import pages, store, text
from benchmarks.exchange.convergence.cases import ADAMW, CASES, SEEDS, SPREAD_SEEDS, Case, Cell, Learned, Size, Task
from benchmarks.exchange.convergence.local_ranks import LocalLink, Meeting, on_ranks
from benchmarks.exchange.convergence.report import claims_of, lines_of
from benchmarks.exchange.convergence.verdicts import spread_of, verdict_of
from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_exchange.codecs.codec import Round, SegmentCodec
from fulmen_exchange.registry import load_codecs

DENSE = Case(name="dense", task=Task.TEXT, exchange={"codec": "none"}, optimizer=ADAMW, rate=0.003)
OTHER = Case(
    name="other", task=Task.TEXT, exchange={"codec": "dgc", "ratio": 80.0}, optimizer=ADAMW, rate=0.003, dense="dense",
    claimed=True,
)  # fmt: skip
SIZE = Size(steps=3, rounds=3, every=3)


def learned(final: float, *, sent: float = 100.0, late: float = 100.0) -> Learned:
    return Learned(final=final, curve=[(1, final + 1), (2, final)], sent_bytes=sent, late_sent_bytes=late)


def test_a_difference_is_the_mean_over_the_seeds_in_units_of_the_dense_spread() -> None:
    dense = {1: 2.0, 2: 2.1, 3: 2.2, 4: 1.9}
    verdict = verdict_of({1: 2.3, 2: 2.2, 3: 2.3}, dense, higher_is_better=False)
    assert verdict.seeds == pytest.approx([0.3, 0.1, 0.1])
    assert verdict.worse_by == pytest.approx(0.5 / 3)
    # 2.05 in the mean: deviations of 0.05, 0.05, 0.15 and 0.15, over three degrees of freedom.
    assert verdict.spread == pytest.approx((0.05 / 3) ** 0.5)
    assert verdict.spreads == pytest.approx(0.5 / 3 / (0.05 / 3) ** 0.5)
    assert verdict.text("nats") == "worse by 0.167 nats"


def test_a_lower_reward_is_worse_and_a_higher_one_better() -> None:
    dense = {1: 0.8, 2: 0.9, 3: 0.85}
    assert verdict_of({1: 0.7, 2: 0.8}, dense, higher_is_better=True).worse_by == pytest.approx(0.1)
    assert verdict_of({1: 0.9}, dense, higher_is_better=True).text("reward") == "better by 0.100 reward"


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.floats(0.5, 5.0), min_size=2, max_size=6, unique=True).filter(lambda found: stdev(found) > 1e-6),
    st.floats(-3.0, 3.0).filter(lambda shift: abs(abs(shift) - 1.0) > 1e-3),
)
def test_what_is_off_by_no_more_than_one_spread_is_within_noise(finals: list[float], shift: float) -> None:
    dense = dict(enumerate(finals))
    found = {seed: final + shift * spread_of(finals) for seed, final in dense.items()}
    verdict = verdict_of(found, dense, higher_is_better=False)
    assert verdict.spreads == pytest.approx(shift, abs=1e-6)
    assert (verdict.text("nats") == "within noise") == (abs(shift) <= 1.0)


def test_without_a_spread_or_a_dense_seed_nothing_is_told() -> None:
    with pytest.raises(ValueError, match="two seeds"):
        spread_of([1.0])
    with pytest.raises(ValueError, match="two seeds"):
        spread_of([1.0, 1.0])
    with pytest.raises(ValueError, match=r"lacks the seeds \[3\]"):
        verdict_of({1: 1.0, 3: 1.0}, {1: 1.0, 2: 2.0}, higher_is_better=False)


def test_a_line_has_ratios_by_bytes_and_a_claim_fails_where_the_case_is_worse() -> None:
    dense = {1: learned(2.0, sent=1000.0, late=1000.0), 2: learned(2.1, sent=1000.0, late=1000.0)}
    other = {1: learned(2.3, sent=20.0, late=10.0), 2: learned(2.2, sent=30.0, late=10.0)}
    first, second = lines_of([DENSE, OTHER], {"dense": dense, "other": other})
    assert first.verdict is None
    assert (second.ratio, second.late_ratio) == (40.0, 100.0)
    assert second.verdict is not None
    assert second.verdict.worse_by == pytest.approx(0.2)
    claims = {claim["name"]: claim for claim in claims_of([first, second])}
    assert {name: claim["met"] for name, claim in claims.items()} == {
        "text: other worse than dense, in spreads of its seeds": False,
        "text: other, fewer bytes than dense, whole run": False,
        "text: other, fewer bytes than dense, second half": True,
    }
    table = pages.markdown({Task.TEXT: [first, second]}, [])
    assert (
        "| `dgc` ratio 80 | 0.003 | 2.2500 ± 0.0707 | +0.2000 | +2.8 | worse by 0.200 nats | 25 | 40.0x | 100.0x |"
        in table
    )


def test_the_tables_take_the_place_of_those_before_and_leave_the_text_alone(tmp_path: Any) -> None:
    document = tmp_path / "page.md"
    begin, end = pages.MARKS
    document.write_text(f"before\n{begin}\nold\n{end}\nafter\n", encoding="utf-8")
    for table in ("first", "second"):
        pages.replace_part(document, table)
    assert document.read_text(encoding="utf-8") == f"before\n{begin}\n\nsecond\n{end}\nafter\n"
    document.write_text("no place", encoding="utf-8")
    with pytest.raises(ValueError, match="no place for the tables"):
        pages.replace_part(document, "table")


def test_a_finished_cell_is_read_back_and_not_trained_again(tmp_path: Any) -> None:
    # Nobody could train it.
    cell = Cell(case=replace(DENSE, exchange={"codec": "unheard-of"}), seed=1, size=SIZE, rate=0.003)
    found = Learned(
        final=1.5, curve=[(1, 2.0), (2, 1.5)], sent_bytes=1.0, late_sent_bytes=0.5, held_out=0.75, seconds=3.0
    )
    with pytest.raises(ValueError, match="unheard-of"):
        store.complete([cell], processes=1, folder=tmp_path)
    assert store.read(cell, tmp_path) is None
    store.write(cell, found, tmp_path)
    store.complete([cell], processes=1, folder=tmp_path)
    assert store.read(cell, tmp_path) == found
    assert store.read_weights(cell, tmp_path) is None
    store.write(cell, replace(found, weights=b"weights"), tmp_path)
    assert store.read_weights(cell, tmp_path) == b"weights"


def test_every_case_is_held_against_a_dense_one_with_the_same_optimiser_and_no_setting_was_chosen_on_its_seeds() -> (
    None
):
    names = {(case.task, case.name): case for case in CASES}
    assert len(names) == len(CASES)
    for case in CASES:
        dense = names[case.task, case.dense or case.name]
        assert (dense.exchange["codec"], dense.dense) == ("none", "")
        assert dense.optimizer["kind"] == case.optimizer["kind"]
        momenta = [one.optimizer.get("momentum", 0.0) for one in (case, dense)]
        if case.exchange["codec"] == "dgc":
            assert momenta[0] == 0.0  # it has its own
        elif case.exchange["codec"] != "none":
            assert momenta[0] == momenta[1]
        assert not case.tried or case.rate in case.tried
    # Masked sums are those of `none`, but for steps of 10^-8.
    compared = set(load_codecs()) - {"masked"}
    assert {case.exchange["codec"] for case in CASES if case.task is Task.TEXT} == compared
    assert {case.exchange["codec"] for case in CASES if case.task is Task.ARITHMETIC} == compared
    assert set(SEEDS) < set(SPREAD_SEEDS)
    assert 0 not in SPREAD_SEEDS


def test_settings_of_a_run_take_every_case_but_the_trap() -> None:
    entry = load_registry()["grpo"]
    for case in CASES:
        cell = Cell(case=case, seed=1, size=SIZE, rate=case.rate)
        given = {"learning_rate": case.rate, "optimizer": dict(case.optimizer), "exchange": cell.exchange}
        given["parallel"] = {"kind": "ddp", "ranks": 2}
        if case.trap:
            with pytest.raises(ValueError, match="optimizer"):
                entry.settings.model_validate({**given, "steps": 3})
        else:
            entry.settings.model_validate({**given, "steps": 3})


def test_ranks_that_are_threads_get_the_sum_and_the_same_bytes_and_count_what_they_send() -> None:
    def work(meeting: Meeting, rank: int) -> tuple[torch.Tensor, int]:
        link, tensor = LocalLink(meeting, rank), torch.arange(8.0) * 10**rank
        link.all_reduce(tensor)
        return tensor, link.sent_bytes

    for tensor, sent in on_ranks(4, work):
        torch.testing.assert_close(tensor, torch.arange(8.0) * 1111, rtol=0, atol=0)
        assert sent == 2 * 3 * 8 * 4 // 4


def test_shards_that_are_threads_reply_the_same_bytes_to_all() -> None:
    entry = load_codecs()["qsgd"]
    codec = entry.make(entry.settings())
    assert isinstance(codec, SegmentCodec)

    def work(meeting: Meeting, rank: int) -> tuple[torch.Tensor, int]:
        link, gradient = LocalLink(meeting, rank), torch.full((8192,), float(rank))
        link.use(codec)
        offsets = [0, 4096, 8192]
        round_ = Round(number=1, world_size=2, rank=rank)
        payloads = codec.encode(gradient, codec.new_state(gradient), offsets, round_)
        sums = link.exchange({0: payloads}, round_)[0]
        assert sums.accepted == [True, True]
        out = torch.zeros(8192)
        for reply, (left, right) in zip(sums.replies, ((0, 4096), (4096, 8192)), strict=True):
            codec.add(reply, out[left:right])
        return out, link.sent_bytes

    (one, sent), (other, _) = on_ranks(2, work)
    torch.testing.assert_close(one, torch.ones(8192), rtol=0, atol=0)
    assert torch.equal(one, other)
    # A payload and a reply of 8 bits and a scale of each 512 elements go to the other rank.
    assert 2 * (4096 + 8 * 4) <= sent < 2 * (4096 + 8 * 4 + 100)


def test_a_rank_that_fails_keeps_nobody_waiting_and_its_error_is_told() -> None:
    def work(meeting: Meeting, rank: int) -> None:
        if rank == 1:
            raise KeyError("of rank 1")
        meeting.all(rank, None)

    with pytest.raises(KeyError, match="of rank 1"):
        on_ranks(3, work)


def test_a_dense_run_of_ranks_is_that_of_one_process_on_all_their_lines() -> None:
    cell = Cell(case=DENSE, seed=5, size=SIZE, rate=0.003)
    found = text.train(cell)
    model = text.model_of(5)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    before = text.held_out_loss(model)
    # Warm-up over one step of three, then half a cosine: 1, 1 and a half of the rate.
    for step, share in enumerate((1.0, 1.0, 0.5)):
        seeds = [(5 * 1000 + step) * 4 + rank for rank in range(4)]
        lines = torch.cat([text.batches(text.texts()[0], seed=seed, lines=8) for seed in seeds])
        text.loss_of(model, lines).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * share
        optimizer.step()
        optimizer.zero_grad()
    expected = text.held_out_loss(model)
    assert expected < before - 0.1
    assert found.curve == [(3, pytest.approx(expected, abs=2e-4))]
    weights = sum(p.numel() for p in model.parameters())
    assert found.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * weights, rel=1e-3)
    assert found.final == found.curve[-1][1]
    # The norms are those of numpy; the first weights are the seed's.
    assert found.weights is not None
    first, ended = text.flat(text.model_of(5)).numpy(), np.frombuffer(found.weights, dtype=np.float32)
    assert ended == pytest.approx(text.flat(model).numpy(), abs=1e-4)
    other = (ended + 0.25 * np.linalg.norm(ended - first) * np.eye(1, len(ended))[0]).astype(np.float32)
    assert text.distance(cell, other.tobytes(), found.weights) == pytest.approx(0.25, rel=1e-3)
