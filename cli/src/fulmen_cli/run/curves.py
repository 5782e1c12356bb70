"""The metrics of a training run as curves of the store's history: as many points as a screen shows, however long the run is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.rpc.services import Services
from fulmen.store.v1 import run_history_service_pb2 as pb

__all__ = ["read_curves"]

POINTS: Final = 2000
# The least and the greatest value, and the last one.
FEWEST_POINTS: Final = 3
MAX_METRICS: Final = 64


async def read_curves(
    client: Services, run: str, *, drawn: Sequence[str]
) -> Sequence[training_run_pb2.StepMetrics] | None:
    """Reads the metrics of a run from the store.

    Args:
        client: The services.
        run: `projects/{project}/trainingRuns/{id}`.
        drawn: Metrics of which up to 2,000 points are read; of the others at least the last value.

    Returns:
        Steps in order, each with its metrics that are among the points; None if the store has no history of the run.
    """
    request = pb.GetRunMetricsRequest(training_runs=[run])
    (known,) = (await client.run_history.GetRunMetrics(request)).runs
    if not known.last_sequence:
        return None
    others = [name for name in known.metric_names if name not in drawn]
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    async for curve in _curves(client, run, list(drawn), others):
        for position, value in zip(curve.positions, curve.values, strict=True):
            steps[round(position)][curve.metric] = value
    return [training_run_pb2.StepMetrics(step=step, values=values) for step, values in sorted(steps.items())]


async def _curves(client: Services, run: str, drawn: list[str], others: list[str]) -> AsyncIterator[pb.RunCurve]:
    asked = [(drawn, POINTS)]
    asked += [(others[at : at + MAX_METRICS], FEWEST_POINTS) for at in range(0, len(others), MAX_METRICS)]
    for metrics, points in asked:
        request = pb.GetRunMetricsRequest(
            training_runs=[run], metrics=metrics, axis=pb.RUN_AXIS_STEP, max_points=points
        )
        (found,) = (await client.run_history.GetRunMetrics(request)).runs
        for curve in found.curves:
            yield curve
