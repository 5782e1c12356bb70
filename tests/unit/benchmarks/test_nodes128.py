"""The model of 128 nodes: what it is told comes out again, and rounds with stragglers are those of order statistics."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks.exchange import nodes128, nodes128_pages
from benchmarks.exchange.stragglers import Jitter, simulate
from fulmen_exchange.policies.cost_model import Model


def points(model: Model, *, timed: bool = False) -> list[dict[str, object]]:
    """Makes steps of a cluster that follows the model, as a file of results has them."""
    found = []
    for ranks in (2, 4, 8):
        for codec, topology, ratio in (("none", "ring", 1.0), ("topk", "sharded", 80.0), ("qsgd", "sharded", 3.9)):
            for mbit in (100, 1000):
                point = {
                    "codec": codec, "topology": topology, "world_size": ranks, "gradient_bytes": 8e7, "ratio": ratio,
                    "line_mbit": mbit, "compute_s": 0.4, "step_s": 1.0, "something": "else",
                }  # fmt: skip
                step = nodes128.Point.model_validate(point).measured().step
                point["step_s"] = model.step_s(step)
                found.append(point | ({"codec_s": model.codec_s(step)} if timed else {}))
    return found


TRUE = Model(slowdown=1.1, latency_s=2e-3, codec_s_per_byte={"topk": 2e-10, "qsgd": 5e-10})


def test_the_cluster_of_the_claim_has_its_figures():
    cluster = nodes128.Cluster.of_claim()
    assert 2 * 31 / 32 * cluster.pass_s == pytest.approx(2.3)
    dense_s = 2 * 127 / 128 * cluster.pass_s
    assert dense_s / (dense_s + cluster.compute_s) == pytest.approx(0.58)
    found = nodes128.on_cluster(cluster)
    assert found["dense ring"][128].share == pytest.approx(0.58)
    gathered_s = 127 / 100 * cluster.pass_s
    assert found["DGC 100x, all-gather"][128].share == pytest.approx(gathered_s / (gathered_s + cluster.compute_s))


def test_the_ratio_and_the_codec_that_a_share_needs_give_that_share():
    cluster = nodes128.Cluster.of_claim()
    gathered_s = 127 * cluster.pass_s / nodes128.ratio_for(cluster, 0.22, 128)
    assert gathered_s / (gathered_s + cluster.compute_s) == pytest.approx(0.22)
    alone = nodes128.on_cluster(cluster)[nodes128.SHARDED.name][128]
    rate = nodes128.codec_rate_for(cluster, alone, 0.05)
    coded = nodes128.on_cluster(cluster, codec_s_per_byte={"dgc": 1 / rate})
    assert coded[nodes128.SHARDED.name][128].share == pytest.approx(0.05)


@pytest.mark.parametrize("timed", [False, True])
def test_steps_that_follow_the_model_are_predicted_and_told(tmp_path, timed):
    file, document = tmp_path / "exchange.json", tmp_path / "page.md"
    given = points(TRUE, timed=timed)
    file.write_text(json.dumps({"raw": {"points": [{"something": "else", **point} for point in given]}}))
    report = nodes128.Report.of(nodes128.read(file))
    assert len(report.held_back) == 6
    assert report.on_held_back.worst < 1e-3
    codecs_s = (
        report.with_codecs["8 bits, sharded"][128].exchange_s - report.wire_alone["8 bits, sharded"][128].exchange_s
    )
    assert codecs_s == pytest.approx(5e-10 * nodes128.gradient_bytes(report.cluster), rel=0.01)
    document.write_text(f"before\n{nodes128.MARKS[0]}\nold\n{nodes128.MARKS[1]}\nafter\n")
    text = nodes128_pages.markdown(report, source="a test")
    nodes128_pages.replace_part(document, text)
    written = document.read_text()
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert "old" not in written
    tables = [part for part in text.split("\n\n") if part.startswith("|") and "held back" not in part]
    assert len(tables) == 2
    assert all(table.startswith("| SIMULATED") for table in tables)
    assert "No codec time was measured for bf16" in text


def test_files_without_steps_or_without_any_to_hold_back_are_refused(tmp_path):
    file = tmp_path / "exchange.json"
    file.write_text(json.dumps({"raw": {}}))
    with pytest.raises(ValueError, match=r"no raw\.points"):
        nodes128.read(file)
    file.write_text(json.dumps({"raw": {"points": points(TRUE)[:6]}}))
    with pytest.raises(ValueError, match="same number of ranks"):
        nodes128.Report.of(nodes128.read(file))


def test_without_jitter_a_round_is_computing_and_exchange():
    found = simulate(
        world_size=8, compute_s=2.0, exchange_s=0.5, jitter=Jitter(spread=0.0), quorum=1.0, rounds=50
    )  # fmt: skip
    # The first half of the first exchange and no second half of the last: 50 times 2.5 s, less a quarter second.
    assert found.round_s * 50 == pytest.approx(50 * 2.5 - 0.25)
    assert (found.accepted, found.late) == (1.0, 0.0)


def test_waiting_for_all_is_waiting_for_the_slowest():
    found = simulate(world_size=64, compute_s=1.0, exchange_s=0.0, jitter=Jitter(spread=0.2), quorum=1.0, rounds=400)
    slowest = np.exp(np.random.default_rng(1).normal(0, 0.2, (4000, 64))).max(axis=1)
    assert found.round_s == pytest.approx(slowest.mean(), rel=0.03)
    assert found.late == 0.0


def test_a_quorum_waits_for_its_share_and_refuses_the_rest():
    jitter = Jitter(spread=0.05, slow_share=0.02, slow_factor=10.0)
    every, most = (
        simulate(world_size=64, compute_s=1.0, exchange_s=0.1, jitter=jitter, quorum=quorum, rounds=200)
        for quorum in (1.0, 0.75)
    )
    assert most.accepted == 0.75
    assert most.round_s < 0.3 * every.round_s
    assert most.payloads_per_s > 2 * every.payloads_per_s
    assert most.late > 0.1
