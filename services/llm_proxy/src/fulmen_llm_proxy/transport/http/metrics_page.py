"""`/metrics`: the metrics of this process, or of all workers behind the port."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from fulmen_llm_proxy.workers.siblings import Siblings


class MetricsPage:
    """Renders the metrics; with several workers each sample has a label `worker`."""

    def __init__(self, *, registry: CollectorRegistry, siblings: Siblings | None, worker_index: int) -> None:
        self._registry = registry
        self._siblings = siblings
        self._worker_index = worker_index

    async def render(self, *, own_only: bool) -> bytes:
        """Returns the page in Prometheus text format."""
        own = generate_latest(self._registry)
        if own_only or self._siblings is None:
            return own
        pages = {self._worker_index: own.decode(), **await self._siblings.metrics()}
        merged = CollectorRegistry(auto_describe=False)
        merged.register(_Pages(pages))
        return generate_latest(merged)


class _Pages(Collector):
    """Merges several pages."""

    def __init__(self, pages: dict[int, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        """Returns each family once, with the samples of all workers."""
        families: dict[str, Metric] = {}
        for index, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type, family.unit)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "worker": str(index)}
                    merged.add_sample(sample.name, labels, sample.value)
        return families.values()
