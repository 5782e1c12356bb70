"""SIMULATED: what 128 nodes would spend on exchanging gradients, by a model fitted to steps that were measured on few.

Method: the cost model of the package (`fulmen_exchange.policies.cost_model`) is fitted to the measured steps of all
but the largest number of ranks, and compared with those of the largest, which were held back. Then it is asked about
another cluster: that of a claim, of which two figures are given (2.3 s of dense exchange with 32 nodes; 58 %
of a step with 128), from which its two unknowns follow (seconds for the gradient to pass a line once, seconds of
computing). Those leave no room for what a message takes, so it takes nothing there. Codecs take nothing, or what they
take in the measured steps: both are told.

`python -m benchmarks.exchange` measures the steps and does all this at its end. For other steps, or another document:
`python -m benchmarks.exchange.nodes128 [--results FILE] [--doc FILE] [--picture FILE]`. The file of results has a list
`raw.points` of steps: codec, topology (ring, sharded, gather), world_size, gradient_bytes, ratio (measured: bytes of
float32 for each byte sent), line_mbit, compute_s, step_s, and optionally union, codec_s, link, and what leaves a step
out of the fit: a latency_ms that was added to the line, or `loopback` for its line, which has no rate of its own. In the
document, all between the two lines that name this benchmark is replaced.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pydantic import BaseModel, ConfigDict, Field

from benchmarks import outcome
from benchmarks.exchange.stragglers import Jitter, Rounds, simulate
from fulmen_exchange.policies.cost_model import (
    Exchange,
    Measured,
    Model,
    Step,
    Topology,
    Validation,
    calibrate,
    validate,
)

RESULTS = outcome.FOLDER / "exchange.json"
MARKS = ("<!-- nodes128: begin -->", "<!-- nodes128: end -->")
NODES = (32, 128, 256)
CLAIMED = 128
DENSE_SHARE, DENSE_S, DENSE_NODES = 0.58, 2.3, 32
"""Of the claim: share of a step with 128 nodes; seconds with 32."""
DGC_SHARE, DGC_GAIN = 0.22, 1.8
"""Of the claim, with DGC and 128 nodes: share of a step, and throughput over dense."""


class Point(BaseModel):
    """A measured step, as the file has it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    codec: str
    topology: Topology
    world_size: int = Field(ge=1)
    gradient_bytes: float = Field(gt=0)
    ratio: float = Field(ge=1)
    line_mbit: float = Field(gt=0)
    compute_s: float = Field(ge=0)
    step_s: float = Field(gt=0)
    codec_s: float | None = None
    union: bool = False
    link: str = "torch"
    line: str = ""
    latency_ms: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the model has what decides on this step."""
        return not self.latency_ms and self.line != "loopback"

    def measured(self) -> Measured:
        """Says it in the words of the cost model."""
        exchange = Exchange(
            topology=self.topology,
            world_size=self.world_size,
            gradient_bytes=self.gradient_bytes,
            ratio=self.ratio,
            union=self.union,
        )
        step = Step(
            exchange=exchange,
            compute_s=self.compute_s,
            codec=self.codec if self.link == "torch" else f"{self.codec} over {self.link}",
            codec_s=0.0 if self.codec == "none" and self.codec_s is None else self.codec_s,
            line_bytes_per_s=self.line_mbit * 1e6 / 8,
        )
        return Measured(step=step, step_s=self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster of the claim.

    Attributes:
        pass_s: Seconds for all gradients, as float32, to pass a node's line once.
        compute_s: Seconds of computing a step.
    """

    pass_s: float
    compute_s: float

    @classmethod
    def of_claim(cls) -> Cluster:
        """Solves the two figures for the two unknowns: a dense ring passes 2 (N - 1) / N of the gradients."""
        pass_s = DENSE_S / (2 * (DENSE_NODES - 1) / DENSE_NODES)
        wire_s = pass_s * 2 * (CLAIMED - 1) / CLAIMED
        return cls(pass_s=pass_s, compute_s=wire_s * (1 - DENSE_SHARE) / DENSE_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecChoice:
    """A way to send gradients: its name in tables, and what decides its cost."""

    name: str
    topology: Topology
    ratio: float = 1.0
    codec: str = "none"
    union: bool = False


WAYS = (
    CodecChoice(name="dense ring", topology=Topology.RING),
    CodecChoice(name="bf16 ring", topology=Topology.RING, ratio=2.0, codec="bf16"),
    CodecChoice(name="8 bits, sharded", topology=Topology.SHARDED, ratio=3.97, codec="qsgd"),
    CodecChoice(name="DGC 100x, all-gather", topology=Topology.GATHER, ratio=100.0, codec="dgc"),
    CodecChoice(name="DGC 300x, all-gather", topology=Topology.GATHER, ratio=300.0, codec="dgc"),
    CodecChoice(name="DGC 100x, sharded, union back", topology=Topology.SHARDED, ratio=100.0, codec="dgc", union=True),
    CodecChoice(name="DGC 100x, sharded, sparse back", topology=Topology.SHARDED, ratio=100.0, codec="dgc"),
)
SHARDED, UNION = WAYS[-1], WAYS[-2]
OVERLAP = 0.6
JITTERS = {
    "10 % spread": Jitter(spread=0.1),
    "10 % spread, 1 step of 100 takes 5 times as long": Jitter(spread=0.1, slow_share=0.01, slow_factor=5.0),
}
QUORUMS = (1.0, 0.95, 0.9, 0.75)
ROUNDS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A predicted step.

    Attributes:
        exchange_s: Seconds by which the exchange makes it longer.
        share: What part of the step that is.
        gain: Steps per second over those of the dense ring with as many nodes.
    """

    exchange_s: float
    share: float
    gain: float


def split(points: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Splits steps into those to fit and those that are held back: the ones with the most ranks.

    Raises:
        ValueError: if all have the same number of ranks.
    """
    most = max(each.step.exchange.world_size for each in points)
    fitted = [each for each in points if each.step.exchange.world_size < most]
    if not fitted:
        raise ValueError("all steps were measured with the same number of ranks: none can be held back")
    known = {each.step.codec for each in fitted}
    held_back = [each for each in points if each.step.exchange.world_size == most and each.step.codec in known]
    return fitted, held_back


Table = dict[str, dict[int, Predicted]]


def on_cluster(cluster: Cluster, *, overlap: float = 0.0, codec_s_per_byte: Mapping[str, float] | None = None) -> Table:
    """Predicts steps of the claim's cluster, by way and number of nodes.

    Args:
        cluster: Of the claim.
        overlap: Share of the computing during which gradients are sent already; the claim's figures leave no room for
            one.
        codec_s_per_byte: By codec of `WAYS`; one without costs nothing.
    """
    model, per_byte = Model(overlap=overlap), codec_s_per_byte or {}
    found: Table = {}
    for way in WAYS:
        found[way.name] = {}
        for nodes in NODES:
            # A gradient of one byte on a line on which that takes as long as the cluster says.
            exchange = Exchange(
                topology=way.topology, world_size=nodes, gradient_bytes=1.0, ratio=way.ratio, union=way.union
            )
            step = Step(
                exchange=exchange,
                compute_s=cluster.compute_s,
                codec_s=per_byte.get(way.codec, 0.0) * gradient_bytes(cluster),
                line_bytes_per_s=1.0 / cluster.pass_s,
            )
            exchange_s, step_s = model.exchange_s(step), model.step_s(step)
            dense = found[WAYS[0].name].get(nodes)
            gain = (cluster.compute_s + dense.exchange_s) / step_s if dense else 1.0
            found[way.name][nodes] = Predicted(exchange_s=exchange_s, share=exchange_s / step_s, gain=gain)
    return found


LINE_BYTES_PER_S = 9.2e9 / 8
"""Of a 10 Gbit/s line: with it the claim's gradient is 1.37 GB, 340 million parameters. Only codecs depend on it."""


def gradient_bytes(cluster: Cluster) -> float:
    """Returns how large the gradient of the claim's cluster is, if its lines carry what lines of 10 Gbit/s do."""
    return cluster.pass_s * LINE_BYTES_PER_S


def ratio_for(cluster: Cluster, share: float, nodes: int) -> float:
    """Returns the ratio at which an all-gather takes a share of a step, codec and messages aside."""
    return (nodes - 1) * cluster.pass_s * (1 - share) / (share * cluster.compute_s)


def codec_rate_for(cluster: Cluster, predicted: Predicted, share: float) -> float:
    """Returns how many bytes of float32 per second a codec must pass, so that the exchange takes a share of a step.

    Args:
        cluster: Of the claim.
        predicted: Without a codec.
        share: Above that of `predicted`.
    """
    return gradient_bytes(cluster) / (share / (1 - share) * cluster.compute_s - predicted.exchange_s)


def stragglers(cluster: Cluster, exchange_s: float) -> dict[str, dict[float, Rounds]]:
    """Simulates rounds of a sharded aggregator among the claim's nodes, by jitter and quorum."""
    return {
        name: {
            quorum: simulate(
                world_size=CLAIMED,
                compute_s=cluster.compute_s,
                exchange_s=exchange_s,
                jitter=jitter,
                quorum=quorum,
                rounds=ROUNDS,
            )
            for quorum in QUORUMS
        }
        for name, jitter in JITTERS.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report: fit and errors, predictions, rounds with stragglers."""

    model: Model
    fitted: Sequence[Measured]
    held_back: Sequence[Measured]
    on_fitted: Validation
    on_held_back: Validation
    cluster: Cluster
    wire_alone: Table
    with_codecs: Table
    overlapped: Table
    rounds: Mapping[str, Mapping[float, Rounds]]
    missing: Sequence[str]

    @classmethod
    def of(cls, points: Sequence[Measured]) -> Report:
        """Fits, validates and predicts.

        Raises:
            ValueError: if the steps are too few, or none can be held back.
        """
        fitted, held_back = split(points)
        model, cluster = calibrate(fitted), Cluster.of_claim()
        codecs, wire_alone = _codecs_of_candidates(model, fitted), on_cluster(cluster)
        return cls(
            model=model,
            fitted=fitted,
            held_back=held_back,
            on_fitted=validate(model, fitted),
            on_held_back=validate(model, held_back),
            cluster=cluster,
            wire_alone=wire_alone,
            with_codecs=on_cluster(cluster, codec_s_per_byte=codecs),
            overlapped=on_cluster(cluster, overlap=OVERLAP),
            rounds=stragglers(cluster, wire_alone[SHARDED.name][CLAIMED].exchange_s),
            missing=sorted({way.codec for way in WAYS} - set(codecs) - {"none"}),
        )

    def claims(self) -> list[outcome.Claim]:
        """Returns what the claims come to."""
        what = f"SIMULATED {CLAIMED} nodes, {SHARDED.name}"
        alone, coded = self.wire_alone[SHARDED.name][CLAIMED], self.with_codecs[SHARDED.name][CLAIMED]
        union, error = self.wire_alone[UNION.name][CLAIMED], self.on_held_back.median
        return [
            outcome.claim(f"{what}: share, the wire alone", 100 * alone.share, "%", goal=5.0, better="lower"),
            outcome.claim(f"{what}: share, codec as measured", 100 * coded.share, "%", goal=5.0, better="lower"),
            outcome.claim(f"{what}: gain, the wire alone", alone.gain, "x", goal=DGC_GAIN, better="higher"),
            outcome.claim(f"{what}: gain, codec as measured", coded.gain, "x", goal=DGC_GAIN, better="higher"),
            outcome.claim(
                f"SIMULATED {CLAIMED} nodes, {UNION.name}: share, the wire alone",
                100 * union.share,
                "%",
                goal=100 * DGC_SHARE,
                better="lower",
            ),
            outcome.claim("median error on steps held back", 100 * error, "%", goal=20.0, better="lower"),
        ]


def _codecs_of_candidates(model: Model, points: Sequence[Measured]) -> dict[str, float]:
    """Returns seconds per byte of the codecs; an unmeasured codec uses the value of one with the same loops."""
    similar = {"dgc": ("dgc", "topk"), "qsgd": ("qsgd", "double_quantization"), "bf16": ("bf16", "fp16")}
    known = dict(model.codec_s_per_byte)
    for name in {each.step.codec for each in points}:
        timed = [each.step for each in points if each.step.codec == name and each.step.codec_s is not None]
        if timed:
            known[name] = median((each.codec_s or 0.0) / each.exchange.gradient_bytes for each in timed)
    found = {}
    for codec, names in similar.items():
        there = [known[name] for name in names if name in known]
        if there:
            found[codec] = there[0]
    return found


def steps_of(points: Sequence[Mapping[str, object]]) -> list[Measured]:
    """Returns the measured steps that can be fitted.

    Raises:
        ValueError: if there are none, or one is not what it should be.
    """
    found = [point.measured() for point in map(Point.model_validate, points) if point.fits]
    if not found:
        raise ValueError("no raw.points, the steps that were measured on lines of a rate")
    return found


def read(file: Path) -> list[Measured]:
    """Reads the measured steps of a file that can be fitted.

    Raises:
        ValueError: see `steps_of`.
    """
    return steps_of(json.loads(file.read_text(encoding="utf-8")).get("raw", {}).get("points", []))


def main() -> None:
    """Reads, predicts, prints, and writes document and picture."""
    from benchmarks.exchange import nodes128_pages as pages

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="measured steps")
    parser.add_argument("--source", default="the file of results", help="whence they are, for the document")
    parser.add_argument("--doc", type=Path, help="document whose part is replaced")
    parser.add_argument("--picture", type=Path, help="picture that is written")
    given = parser.parse_args()
    report = Report.of(read(given.results))
    text = pages.markdown(report, source=given.source)
    sys.stdout.write(text)
    outcome.show(None, report.claims())
    if given.doc:
        pages.replace_part(given.doc, text)
    if given.picture:
        pages.draw(report, given.picture, source=given.source)


if __name__ == "__main__":
    main()
