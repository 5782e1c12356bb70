"""The parts of policies, each alone: warm-up, stages, the adaptive controller, rollback, settings."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fulmen_exchange.codecs.dgc import DgcSettings
from fulmen_exchange.codecs.qsgd import QsgdSettings
from fulmen_exchange.codecs.topk import TopkSettings
from fulmen_exchange.policies.choosers import Adaptive, Stages
from fulmen_exchange.policies.decision import CodecChoice, Proposal
from fulmen_exchange.policies.guards import Rollback
from fulmen_exchange.policies.policy import make_policy, warmup_ratio
from fulmen_exchange.policies.settings import AdaptivePolicy, NoRollback, RollbackOnDrop, StagesPolicy
from tests.support.exchange.policy_world import calm

TOPK = CodecChoice(codec="topk", ratio=100.0)
MILD = CodecChoice(codec="topk", ratio=50.0)


def test_the_ratio_grows_as_published():
    assert [warmup_ratio(1000.0, number, 8) for number in range(1, 11)] == [
        4.0, 4.0, 16.0, 16.0, 64.0, 64.0, 256.0, 256.0, 1000.0, 1000.0,
    ]  # fmt: skip


@settings(deadline=None)
@given(ratio=st.floats(1, 4096), rounds=st.integers(0, 50))
def test_the_ratio_never_shrinks_in_the_warm_up_and_ends_at_its_own(ratio, rounds):
    found = [warmup_ratio(ratio, number, rounds) for number in range(1, rounds + 2)]
    assert found == sorted(found)
    assert found[-1] == ratio


def test_stages_have_the_ratios_that_were_asked_for():
    chooser = Stages(TOPK, StagesPolicy(kind="stages"))
    ratios = [chooser.choose(calm(1, progress=at), now=None).choice.ratio for at in (0, 0.19, 0.2, 0.79, 0.8, 1.0)]
    assert ratios == [75.0, 75.0, 150.0, 150.0, 50.0, 50.0]


class TestAdaptive:
    SETTINGS = AdaptivePolicy(kind="adaptive", patience=3, residual_window=5, cool_down=20)

    def play(self, captured, *, rounds, residual=None, chooser=None, first=1):
        """Returns the densities, when what is captured is a function of the density."""
        chooser = chooser or Adaptive(TOPK, self.SETTINGS)
        now, found = None, []
        for number in range(first, first + rounds):
            phi = captured(1 / now.ratio) if now else None
            kept = residual(number) if residual else None
            proposal = chooser.choose(calm(number, captured=phi, residual=kept), now=now)
            now = proposal.choice
            found.append(proposal)
        return found

    @settings(deadline=None, max_examples=20)
    @given(power=st.floats(0.2, 0.6))
    def test_it_finds_a_density_at_which_the_captured_energy_is_in_its_band(self, power):
        choices = self.play(lambda density: density**power, rounds=600)
        last = [1 / proposal.choice.ratio for proposal in choices[-50:]]
        inside = [0.25 <= density**power <= 0.5 for density in last]
        at_bounds = [proposal.choice.ratio in (10.0, 1000.0) for proposal in choices[-50:]]
        assert all(one or other for one, other in zip(inside, at_bounds, strict=True))

    def test_it_stands_still_within_the_band(self):
        assert {proposal.choice.ratio for proposal in self.play(lambda _: 0.4, rounds=50)} == {100.0}

    def test_it_waits_for_its_patience_and_begins_again_after_a_round_within_the_band(self):
        phis = iter([0.1, 0.1, 0.4, 0.1, 0.1, 0.1, 0.1])
        ratios = [proposal.choice.ratio for proposal in self.play(lambda _: next(phis), rounds=8)]
        assert ratios[:6] == [100.0] * 6
        assert ratios[6] == pytest.approx(1 / 0.011, rel=1e-4)

    def test_the_density_grows_by_steps_and_shrinks_by_a_factor(self):
        grown = [1 / proposal.choice.ratio for proposal in self.play(lambda _: 0.1, rounds=14)][1::3]
        assert np.diff(grown) == pytest.approx([0.001] * 4, rel=1e-2)
        shrunk = [1 / proposal.choice.ratio for proposal in self.play(lambda _: 0.9, rounds=14)][1::3]
        assert np.divide(shrunk[1:], shrunk[:-1]) == pytest.approx([0.8] * 4, rel=1e-2)

    def test_figures_of_rounds_in_another_way_do_not_count(self):
        chooser = Adaptive(TOPK, self.SETTINGS)
        for number in range(1, 30):
            assert chooser.choose(calm(number, captured=0.01), now=MILD).choice == TOPK

    def test_a_density_beyond_what_is_not_zero_does_not_grow(self):
        chooser, now = Adaptive(TOPK, self.SETTINGS), TOPK
        for number in range(1, 30):
            now = chooser.choose(calm(number, captured=0.1, sparsity=0.995), now=now).choice
        assert now == TOPK

    def test_a_residual_that_grows_without_bound_is_sent_and_most_is_sent_from_then_on(self):
        choices = self.play(lambda _: 0.4, rounds=45, residual=lambda number: 1.2**number)
        [at] = [number for number, proposal in enumerate(choices) if proposal.flush]
        assert {proposal.choice.ratio for proposal in choices[:at]} == {100.0}
        assert {proposal.choice.ratio for proposal in choices[at : at + 20]} == {10.0}

    @pytest.mark.parametrize(
        "residual",
        [
            lambda number: 3.0 * (1 - 0.97**number),
            lambda number: 3.0 + number % 2,
            lambda number: 1e-3 * 1.05**number,
        ],
        ids=["settles", "swings", "is small"],
    )
    def test_a_residual_within_its_bound_is_left_alone(self, residual):
        choices = self.play(lambda _: 0.4, rounds=120, residual=residual)
        assert not any(proposal.flush for proposal in choices)


class TestRollback:
    SETTINGS = RollbackOnDrop(kind="rollback", drop=0.5, window=2, smoothing=1.0, cool_down=10)

    def play(self, rounds):
        """Plays (metric, wanted choice) of rounds; returns candidates and events."""
        guard, now, candidates, events = Rollback(self.SETTINGS), None, [], []
        for number, (metric, wanted) in enumerate(rounds, start=1):
            proposal = guard.guard(calm(number, metric=metric), Proposal(choice=wanted, reason=""), now=now)
            now = proposal.choice
            candidates.append(now)
            events += proposal.events
        return candidates, events

    def test_settings_under_which_the_metric_fell_give_way_to_the_last_good_ones(self):
        candidates, events = self.play([(1.0, MILD)] * 5 + [(1.0, TOPK)] + [(0.2, TOPK)] * 4)
        assert candidates == [MILD] * 5 + [TOPK] * 2 + [MILD] * 3
        [text] = events
        assert "topk at 100x" in text
        assert "topk at 50x" in text

    def test_a_fall_under_the_good_settings_themselves_changes_nothing(self):
        candidates, events = self.play([(1.0, MILD)] * 5 + [(0.2, MILD)] * 10)
        assert candidates == [MILD] * 15
        assert not events

    @pytest.mark.parametrize("metrics", [(0.6, 0.6, 0.6), (0.2, 1.0, 0.2), (0.2, None, None)])
    def test_a_small_a_short_and_a_single_fall_change_nothing(self, metrics):
        candidates, _ = self.play([(1.0, MILD)] * 5 + [(1.0, TOPK)] + [(metric, TOPK) for metric in metrics])
        assert candidates[5:] == [TOPK] * 4

    def test_what_was_rolled_back_is_tried_again_and_stays_away_twice_as_long_the_next_time(self):
        good, bad = (1.0, TOPK), (0.2, TOPK)
        guard, now, candidates = Rollback(self.SETTINGS), None, []
        for number in range(1, 80):
            metric = (good if now in (None, MILD) else bad)[0]
            wanted = MILD if number < 5 else TOPK
            now = guard.guard(calm(number, metric=metric), Proposal(choice=wanted, reason=""), now=now).choice
            candidates.append(now)
        runs = [(choice, len(list(group))) for choice, group in groupby(candidates)]
        assert runs[:7] == [(MILD, 4), (TOPK, 2), (MILD, 10), (TOPK, 2), (MILD, 20), (TOPK, 2), (MILD, 39)]

    def test_a_metric_that_does_not_come_back_is_no_fault_of_the_compression(self):
        rounds = [(1.0, MILD)] * 5 + [(1.0, TOPK)] + [(0.2, TOPK)] * 60
        candidates, events = self.play(rounds)
        assert candidates[7:] == [MILD] * 10 + [TOPK] * 49
        assert len(events) == 2
        assert "not the cause" in events[1]

    def test_what_the_policy_tells_and_flushes_meanwhile_is_passed_on(self):
        guard, now = Rollback(self.SETTINGS), None
        found = []
        for number in range(1, 20):
            metric, choice = (1.0, MILD) if number < 5 else (0.2 if now == TOPK else 1.0, TOPK)
            wanted = Proposal(choice=choice, reason="", flush=number % 3 == 0, events=(f"told in {number}",))
            proposal = guard.guard(calm(number, metric=metric), wanted, now=now)
            now = proposal.choice
            found.append(proposal)
        assert any(proposal.choice == MILD for proposal in found[8:]), "it was rolled back"
        for number, proposal in enumerate(found, start=1):
            assert proposal.flush == (number % 3 == 0)
            assert f"told in {number}" in proposal.events

    def test_nothing_is_watched_unless_that_was_asked_for(self):
        guard = Rollback(NoRollback())
        for number, metric in enumerate([1.0] * 5 + [-100.0] * 20, start=1):
            assert guard.guard(calm(number, metric=metric), Proposal(choice=TOPK, reason=""), now=TOPK).choice == TOPK


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"kind": "stages", "stages": [{"until_progress": 0.5, "ratio": 2.0}]}, "end at 1"),
        ({"kind": "stages", "stages": []}, "end at 1"),
        ({"kind": "adaptive", "low": 0.6}, "low must be below high"),
        ({"kind": "adaptive", "min_ratio": 100.0, "max_ratio": 10.0}, "min_ratio"),
        ({"kind": "auto", "ratios": [100.0, 50.0]}, "ascending order"),
    ],
)
def test_settings_that_make_no_sense_are_refused(policy, says):
    with pytest.raises(ValidationError, match=says):
        TopkSettings.model_validate_json(json.dumps({"policy": policy}))


@pytest.mark.parametrize("kind", ["stages", "adaptive"])
def test_a_codec_without_a_ratio_has_no_policy_that_changes_it(kind):
    with pytest.raises(ValidationError, match="needs a codec with a ratio"):
        QsgdSettings.model_validate({"policy": {"kind": kind}})


def test_a_codec_that_holds_the_momentum_has_no_outer_loop():
    with pytest.raises(ValidationError, match="momentum"):
        DgcSettings.model_validate({"outer": {"kind": "outer"}})


@pytest.mark.parametrize(
    "outer", [{"learning_rate": 1.1}, {"decay": 1.0}, {"momentum": 0.9}, {"momentum": 0.5, "decay": 0.97}]
)
def test_outer_steps_that_would_count_what_was_kept_back_too_often_are_refused(outer):
    asked = {"kind": "outer", **outer}
    with pytest.raises(ValidationError, match="learning_rate must be at most"):
        TopkSettings.model_validate({"outer": asked})
    assert QsgdSettings.model_validate({"outer": asked}).outer.kind == "outer", "it keeps nothing back"
    assert TopkSettings.model_validate({"outer": {**asked, "decay": 0.8, "learning_rate": 0.4}})


def test_a_warm_up_counts_the_steps_of_an_outer_loop():
    settings = TopkSettings.model_validate({"outer": {"kind": "outer", "steps": 30}})
    policy = make_policy(settings, optimizer="adamw", world_size=2, gradient_bytes=4e6)
    assert [policy.decide(calm(number)).ratio for number in (1, 2, 3, 4)] == [16.0, 64.0, 100.0, 100.0]


def test_the_service_reads_settings_and_decides_without_torch():
    code = (
        "import sys, fulmen_exchange.policies.policy, fulmen_exchange.policies.cost_model;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
