"""The store beside its peers: the page says what was measured."""

from __future__ import annotations

import json

from benchmarks.store.peers import report
from tests.support.distributions import ROOT

RESULTS = json.loads((ROOT / "benchmarks/results/store_peers.json").read_text(encoding="utf-8"))


def test_the_page_has_the_tables_of_the_results() -> None:
    page = (ROOT / "docs/capacity.md").read_text(encoding="utf-8")

    assert report.page(RESULTS["raw"]) in page
