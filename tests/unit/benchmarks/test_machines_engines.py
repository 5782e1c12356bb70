"""The benchmark of engines on other machines: its claims are those of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.machines.engines import claims_of
from benchmarks.outcome import FOLDER

RESULTS = Path(FOLDER) / "machines_engines.json"


def test_the_claims_are_those_of_the_figures() -> None:
    document = json.loads(RESULTS.read_text())
    assert document["claims"] == claims_of(document["raw"])


def test_a_line_that_carried_a_version_too_often_falls_short() -> None:
    raw = json.loads(RESULTS.read_text())["raw"]
    for version in raw["together"]:
        version["service_bytes"] = 8 * version["file_bytes"]
    found = {str(each["name"]): each["met"] for each in claims_of(raw)}
    assert found["what the service's line sent for a version, in files of a version"] is False
