"""The policy that measures: played on simulated machines whose speeds are known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange.codecs.dgc import DgcSettings
from fulmen_exchange.codecs.qsgd import QsgdSettings
from fulmen_exchange.codecs.topk import TopkSettings
from fulmen_exchange.policies.auto import Prediction, Sample
from fulmen_exchange.policies.decision import CodecChoice, Decision, Seconds
from fulmen_exchange.policies.policy import Policy, make_policy
from fulmen_exchange.policies.settings import AutoPolicy
from tests.support.exchange.policy_world import calm

GRADIENT_BYTES = 80e6
MBIT = 1e6 / 8
RANKS = 4


@dataclass(kw_only=True)
class Cluster:
    """Machines on which a round takes as long as they say.

    Attributes:
        bytes_per_s: Of a line.
        compute_s: Of a step.
        codec_s: Of every codec but none.
        noise: Standard deviation of all that is measured, as a share of it.
    """

    bytes_per_s: float
    compute_s: float = 0.4
    codec_s: float = 0.05
    noise: float = 0.0

    def seconds(self, choice: CodecChoice, rng: np.random.Generator) -> Seconds:
        # By hand, not by the model: 2 (N - 1) / N of what is sent goes through each line, with 0.5 ms for each message:
        # 2 (N - 1) in a ring, 2 by choice of shards. N^0.62 times what a rank sends comes back of sparse codecs, at most half.
        ratio = choice.ratio or {"none": 1, "bf16": 2, "qsgd": 32 / (choice.bits or 32)}[choice.codec]
        shares = 1 / ratio + (min(0.5, RANKS**0.62 / ratio) if choice.ratio else 1 / ratio)
        transfer = (RANKS - 1) / RANKS * GRADIENT_BYTES * shares / self.bytes_per_s
        transfer += 0.003 if choice.codec in ("none", "bf16") else 0.001
        codec = 0.0 if choice.codec == "none" else self.codec_s
        drawn = np.exp(rng.normal(0, self.noise, 3)) if self.noise else np.ones(3)
        return Seconds(compute_s=self.compute_s * drawn[0], codec_s=codec * drawn[1], transfer_s=transfer * drawn[2])


def policy_for(*, optimizer="adamw", codec=QsgdSettings, full_sync_every=0, **given: object) -> Policy:
    settings = codec(policy=AutoPolicy(kind="auto", warmup_rounds=0, **given), full_sync_every=full_sync_every)
    return make_policy(settings, optimizer=optimizer, world_size=RANKS, gradient_bytes=GRADIENT_BYTES)


def play(policy: Policy, cluster: Cluster, *, rounds: int, first: int = 1, seed: int = 0) -> list[Decision]:
    rng, seconds, found = np.random.default_rng(seed), None, []
    for number in range(first, first + rounds):
        decision = policy.decide(calm(number, seconds=seconds))
        seconds = cluster.seconds(decision.choice, rng)
        if decision.flush:
            seconds = replace(seconds, transfer_s=seconds.transfer_s + 1000.0)
        found.append(decision)
    return found


def test_every_kind_of_way_is_measured_before_one_is_chosen():
    candidates = [one.choice for one in play(policy_for(), Cluster(bytes_per_s=100 * MBIT), rounds=13)]
    assert candidates[:12:3] == [
        CodecChoice(codec="none"),
        CodecChoice(codec="bf16"),
        CodecChoice(codec="qsgd", bits=8),
        CodecChoice(codec="qsgd", bits=4),
    ]


@pytest.mark.parametrize(
    ("mbit", "chosen"),
    [
        (100, CodecChoice(codec="qsgd", bits=4)),
        (100_000, CodecChoice(codec="none")),
        (2400, CodecChoice(codec="qsgd", bits=8)),
    ],
)
def test_the_cheapest_way_that_is_worth_it_is_taken(mbit, chosen):
    cluster = Cluster(bytes_per_s=mbit * MBIT)
    assert {one.choice for one in play(policy_for(), cluster, rounds=40)[12:]} == {chosen}


def test_what_gains_little_is_not_worth_it():
    # Of 1.0 s the exchange takes 0.12 s: 8 bits save 0.09 s and cost 0.02 s.
    cluster = Cluster(bytes_per_s=120e6 / 0.12, compute_s=0.88, codec_s=0.02)
    assert play(policy_for(), cluster, rounds=14)[-1].choice.codec == "none"
    assert play(policy_for(gain=0.03), cluster, rounds=14)[-1].choice == CodecChoice(codec="qsgd", bits=8)


def test_rounds_that_send_everything_are_not_measured():
    # Every second one does, and takes long: each choice but the first comes upon one.
    policy = policy_for(probe_rounds=1, full_sync_every=2)
    assert play(policy, Cluster(bytes_per_s=100 * MBIT), rounds=12)[-1].choice == CodecChoice(codec="qsgd", bits=4)


def test_dgc_is_only_chosen_with_the_optimiser_that_stands_it():
    slow = Cluster(bytes_per_s=200 * MBIT)
    with_sgd = play(policy_for(codec=DgcSettings, optimizer="sgd"), slow, rounds=40)
    assert with_sgd[-1].choice == CodecChoice(codec="dgc", ratio=100.0)
    for codec, optimizer in (
        (DgcSettings, "adamw"),
        (TopkSettings, "adamw"),
        (TopkSettings, "sgd"),
        (DgcSettings, "?"),
    ):
        used = {one.choice.codec for one in play(policy_for(codec=codec, optimizer=optimizer), slow, rounds=40)}
        assert used == {"none", "bf16", "qsgd"}


def test_what_dgc_kept_back_while_it_was_measured_is_sent_before_another_way_is_taken():
    decisions = play(policy_for(codec=DgcSettings, optimizer="sgd"), Cluster(bytes_per_s=1e12), rounds=20)
    at = [number for number, one in enumerate(decisions) if one.choice.codec == "dgc"]
    assert [decisions[number].flush for number in at] == [False, False, False, True]
    assert decisions[-1].choice.codec == "none"


def test_the_break_even_that_is_told_is_that_of_the_machines():
    # Closed form: 4 bits save 7/8 of 1.5 G through the line, and 2 ms of waiting, and cost 0.05 s.
    expected = 0.875 * 1.5 * GRADIENT_BYTES / 0.048
    samples = [
        Sample(choice=choice, seconds=Cluster(bytes_per_s=1e8).seconds(choice, np.random.default_rng(0)))
        for choice in (CodecChoice(codec="none"), CodecChoice(codec="qsgd", bits=4))
    ]
    prediction = Prediction.of(samples, gradient_bytes=GRADIENT_BYTES, world_size=RANKS)
    assert prediction.pays_below([one.choice for one in samples]) == pytest.approx(expected, rel=1e-3)
    events = [text for one in play(policy_for(), Cluster(bytes_per_s=100 * MBIT), rounds=14) for text in one.events]
    assert any("compression pays off below" in text and "Gbit/s" in text for text in events)


@settings(deadline=None, max_examples=10)
@given(mbit=st.floats(20, 50_000), compute=st.floats(0.05, 2), codec=st.floats(0.001, 0.5))
def test_predictions_are_the_steps_of_machines_that_follow_the_model(mbit, compute, codec):
    cluster, rng = Cluster(bytes_per_s=mbit * MBIT, compute_s=compute, codec_s=codec), np.random.default_rng(0)
    kinds = [
        CodecChoice(codec="none"),
        CodecChoice(codec="bf16"),
        CodecChoice(codec="qsgd", bits=8),
        CodecChoice(codec="dgc", ratio=50.0),
    ]
    samples = [Sample(choice=choice, seconds=cluster.seconds(choice, rng)) for choice in kinds]
    prediction = Prediction.of(samples, gradient_bytes=GRADIENT_BYTES, world_size=RANKS)
    for choice in (*kinds, CodecChoice(codec="dgc", ratio=200.0)):
        seconds = cluster.seconds(choice, rng)
        expected = seconds.compute_s + seconds.codec_s + seconds.transfer_s
        assert prediction.step_s(choice) == pytest.approx(expected, rel=1e-3)


def test_a_network_that_becomes_slow_is_found_out():
    policy = policy_for(measure_every=50)
    assert play(policy, Cluster(bytes_per_s=1e12), rounds=30)[-1].choice.codec == "none"
    decisions = play(policy, Cluster(bytes_per_s=100 * MBIT), rounds=170, first=31)
    assert decisions[-1].choice == CodecChoice(codec="qsgd", bits=4)
    assert sum(any("qsgd" in text and "predicted" in text for text in one.events) for one in decisions) == 1


def test_noise_does_not_make_it_flutter():
    # Where two candidates are about as fast as each other, ten measurements choose at most twice.
    cluster = Cluster(bytes_per_s=60e6 / 0.12, compute_s=0.5, noise=0.05)
    decisions = play(policy_for(measure_every=50, measure_share=1.0), cluster, rounds=600)
    assert sum(any("predicted" in text for text in one.events) for one in decisions) <= 2


def test_a_way_gives_way_to_a_milder_one_when_its_gain_has_shrunk_to_half():
    # 8 bits over none: 11 %, then 6 %, then 4 %.
    policy, chosen = policy_for(measure_every=50, measure_share=1.0), []
    for turn, exchange_s in enumerate((0.2, 0.12, 0.08)):
        cluster = Cluster(bytes_per_s=120e6 / exchange_s, compute_s=1.0, codec_s=0.02)
        chosen.append(play(policy, cluster, rounds=80, first=1 + 80 * turn)[-1].choice)
    assert chosen == [CodecChoice(codec="qsgd", bits=8), CodecChoice(codec="qsgd", bits=8), CodecChoice(codec="none")]


def test_the_first_round_of_a_way_is_not_measured():
    policy, now, seconds = policy_for(probe_rounds=2), None, None
    for number in range(1, 15):
        choice = policy.decide(calm(number, seconds=seconds)).choice
        seconds = Cluster(bytes_per_s=1e12).seconds(choice, np.random.default_rng(0))
        if choice != now and choice.codec == "none":
            # Memory touched for the first time, for example.
            seconds = replace(seconds, transfer_s=100.0)
        now = choice
    assert now == CodecChoice(codec="none")


def test_what_was_measured_counts_for_more_than_what_the_model_says_of_it():
    rng, cluster = np.random.default_rng(0), Cluster(bytes_per_s=1e7, codec_s=0.0)
    kinds = [CodecChoice(codec="none"), CodecChoice(codec="bf16"), CodecChoice(codec="dgc", ratio=50.0)]
    samples = [Sample(choice=choice, seconds=cluster.seconds(choice, rng)) for choice in kinds]
    slow = replace(samples[2].seconds, transfer_s=3 * samples[2].seconds.transfer_s)
    prediction = Prediction.of(
        [*samples[:2], Sample(choice=kinds[2], seconds=slow)], gradient_bytes=GRADIENT_BYTES, world_size=RANKS
    )
    assert prediction.step_s(kinds[2]) == pytest.approx(slow.compute_s + slow.transfer_s)
    assert prediction.step_s(CodecChoice(codec="dgc", ratio=200.0)) < prediction.step_s(kinds[2])


def test_measuring_again_takes_no_more_than_its_share():
    policy = policy_for(measure_every=100, measure_share=0.05)
    decisions = play(policy, Cluster(bytes_per_s=50 * MBIT), rounds=320)
    again = [one.choice for one in decisions[13:] if one.reason == "measuring"]
    # 5 rounds' worth of every 100: only the cheapest kind fits.
    assert set(again) == {CodecChoice(codec="qsgd", bits=4)}
    assert len(again) == 8
