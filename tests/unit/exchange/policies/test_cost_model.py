"""The cost model: volumes by hand, parameters recovered from steps that were made with known ones."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_exchange.policies.cost_model import (
    Exchange,
    Measured,
    Model,
    Step,
    Topology,
    break_even,
    calibrate,
    validate,
)

G = 80e6


def exchange(topology: str, ranks: int, **more: object) -> Exchange:
    return Exchange(topology=Topology(topology), world_size=ranks, gradient_bytes=G, **more)


@pytest.mark.parametrize(
    ("one", "sent", "messages"),
    [
        (exchange("ring", 4), 1.5 * G, 6),
        (exchange("ring", 128, ratio=2.0), 254 / 128 * G / 2, 254),
        (exchange("gather", 128, ratio=100.0), 1.27 * G, 127),
        (exchange("sharded", 4, ratio=100.0), 0.015 * G, 2),
        (exchange("sharded", 2, ratio=100.0, union=True), 0.005 * G * (1 + 2**0.62), 2),
        # The union of what many ranks send is no more than everything in bfloat16.
        (exchange("sharded", 128, ratio=2.0, union=True), G * 127 / 128, 2),
        (exchange("ring", 1), 0.0, 0),
        (exchange("sharded", 1), 0.0, 0),
        (exchange("gather", 1), 0.0, 0),
    ],
)
def test_volumes_are_those_of_the_topology(one, sent, messages):
    assert one.wire_bytes == pytest.approx(sent)
    assert one.messages == messages


def test_a_step_is_computing_and_what_of_the_wire_is_not_hidden_and_the_codec():
    step = Step(exchange=exchange("ring", 4), compute_s=2.0, codec_s=0.25, line_bytes_per_s=1e7)
    model = Model(slowdown=1.1, latency_s=0.01, overlap=0.5)
    assert model.step_s(step) == pytest.approx(2.0 + (1.5 * G / 1e7 * 1.1 + 6 * 0.01 - 1.0) + 0.25)
    assert model.step_s(replace(step, line_bytes_per_s=1e12)) == pytest.approx(2.25)
    assert Model(codec_s_per_byte={"c": 1e-9}).codec_s(replace(step, codec="c", codec_s=None)) == pytest.approx(0.08)


def steps() -> list[Step]:
    """Steps of several topologies, codecs and lines; where much overlaps, some hide their whole exchange."""
    return [
        Step(
            exchange=exchange(topology, ranks, ratio=ratio),
            compute_s=0.4,
            codec=codec,
            codec_s=0.0 if codec == "none" else None,
            line_bytes_per_s=line,
        )
        for topology, codec, ratio in (("ring", "none", 1.0), ("gather", "topk", 20.0), ("sharded", "qsgd", 4.0))
        for ranks in (2, 4, 8)
        for line in (1e7, 1e8)
    ]


@settings(deadline=None, max_examples=25)
@given(
    slowdown=st.floats(0.8, 3),
    latency=st.floats(1e-4, 2e-2),
    overlap=st.sampled_from([0.0, 0.3, 0.6, 0.85]),
    topk=st.floats(1e-10, 1e-8),
    qsgd=st.floats(1e-10, 1e-8),
)
def test_known_parameters_are_found_again(slowdown, latency, overlap, topk, qsgd):
    true = Model(
        slowdown=slowdown, latency_s=latency, overlap=overlap, codec_s_per_byte={"qsgd": qsgd, "topk": topk}
    )  # fmt: skip
    measured = [Measured(step=step, step_s=true.step_s(step)) for step in steps()]
    found = calibrate(measured)
    assert validate(found, measured).worst < 1e-3
    # What is predicted for other machines is what the true parameters say.
    other = Step(exchange=exchange("ring", 32), compute_s=1.0, line_bytes_per_s=3e7)
    assert found.step_s(other) == pytest.approx(true.step_s(other), rel=1e-2)


def test_parameters_are_found_through_noise_and_the_error_of_what_was_held_back_is_told():
    true = Model(slowdown=1.2, latency_s=5e-3, codec_s_per_byte={"qsgd": 2e-9, "topk": 1e-9})
    rng = np.random.default_rng(3)
    measured = [Measured(step=one, step_s=true.step_s(one) * float(np.exp(rng.normal(0, 0.03)))) for one in steps()]
    kept = [one for one in measured if one.step.exchange.world_size < 8]
    held_back = [one for one in measured if one.step.exchange.world_size == 8]
    found = calibrate(kept, overlaps=(0.0,))
    assert found.slowdown == pytest.approx(1.2, rel=0.05)
    validation = validate(found, held_back)
    assert len(validation.errors) == 6
    assert 0 < validation.median <= validation.worst < 0.15


def test_the_error_of_a_model_that_is_wrong_is_told():
    measured = [Measured(step=one, step_s=2 * Model().step_s(one)) for one in steps()[:6]]
    assert validate(Model(), measured).median == pytest.approx(0.5)


def test_no_parameter_is_negative():
    # Faster the more messages there are: no latency explains that.
    measured = [
        Measured(step=Step(exchange=exchange("ring", ranks), compute_s=0.1, line_bytes_per_s=1e8), step_s=1.5 / ranks)
        for ranks in (2, 4, 8, 16)
    ]
    model = calibrate(measured)
    assert min(model.slowdown, model.latency_s) >= 0


def test_too_few_steps_are_refused():
    with pytest.raises(ValueError, match="fit 4 parameters"):
        calibrate([Measured(step=steps()[index], step_s=1.0) for index in (0, 7, 13)])
    with pytest.raises(ValueError, match="held-out"):
        validate(Model(), [])


def test_break_even_is_where_both_take_as_long():
    assert break_even(lambda rate: 1 + 100 / rate, lambda rate: 1.5 + 50 / rate) == pytest.approx(100)
    assert break_even(lambda rate: 1 + 100 / rate, lambda rate: 2 + 100 / rate) == 0.0
    assert break_even(lambda rate: 1 + 100 / rate, lambda rate: 0.5 + 50 / rate) == inf
