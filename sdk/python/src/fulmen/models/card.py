"""The model card of an exported model: its origin and its results, from its run."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import FulmenError
from fulmen.models.base_names import HUB_PREFIX, HubName
from fulmen.policy_versions import PolicyVersion
from fulmen.rpc.services import Services

__all__ = ["Lineage", "base_of", "read_lineage", "write_card"]

CARD: Final = "README.md"
CURVE: Final = "curve.png"
_HEADING: Final = re.compile(r"^(#+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Origin of a model.

    Attributes:
        version: The version that is exported.
        run: Its training run; None if it was deleted.
        report: The run's report as Markdown; empty without one.
        curve_png: The run's curve; empty without one.
    """

    version: PolicyVersion
    run: training_run_pb2.TrainingRun | None = None
    report: str = ""
    curve_png: bytes = b""


async def read_lineage(services: Services, version: PolicyVersion) -> Lineage:
    """Reads the run of a version and its report; both are missing if the run was deleted."""
    if not version.run:
        return Lineage(version=version)
    try:
        run = await services.training_runs.GetTrainingRun(
            training_run_service_pb2.GetTrainingRunRequest(name=version.run)
        )
        report = await services.training_runs.GetTrainingRunReport(
            training_run_service_pb2.GetTrainingRunReportRequest(name=version.run)
        )
    except FulmenError:
        return Lineage(version=version)
    return Lineage(version=version, run=run.training_run, report=report.markdown, curve_png=report.curve_png)


def base_of(run: training_run_pb2.TrainingRun | None) -> str:
    """Returns the initial weights of a run: a model on the hub with its commit, a folder, a function or a version."""
    if run is None:
        return ""
    if base := run.provenance.get("policy.base") or run.provenance.get("policy.first_version"):
        return base.removeprefix("resources/policy.").replace("/versions/", "@")
    source = run.policy.WhichOneof("initial")
    return str(getattr(run.policy, source)) if source else ""


def write_card(folder: Path, lineage: Lineage) -> None:
    """Writes the card of a model, README.md, and the curve of its training to its folder."""
    (folder / CARD).write_text(_card(lineage), encoding="utf-8")
    if lineage.curve_png:
        (folder / CURVE).write_bytes(lineage.curve_png)


def _card(lineage: Lineage) -> str:
    """Writes a card in the form of a hub: YAML between dashes, then Markdown."""
    version, run = lineage.version, lineage.run
    parts = [_header(lineage), f"# {version.policy}", _summary(lineage), _use()]
    if run is not None:
        settings = json.dumps(json.loads(run.settings_json or "{}"), indent=2, sort_keys=True)
        parts.append(f"## Training\n\nAlgorithm `{run.algorithm}` with these settings:\n\n```json\n{settings}\n```")
    if lineage.curve_png:
        parts.append(f"![Curve of the training]({CURVE})")
    if lineage.report:
        parts.append("## Report\n\n" + _HEADING.sub(r"##\1 ", lineage.report.strip()))
    if run is not None and run.provenance:
        rows = [f"| {name} | `{value}` |" for name, value in sorted(run.provenance.items())]
        parts.append("\n".join(["## Provenance", "", "| | |", "|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _header(lineage: Lineage) -> str:
    fields = ["library_name: transformers", "pipeline_tag: text-generation"]
    base = base_of(lineage.run)
    if base.startswith(HUB_PREFIX):
        fields.append(f"base_model: {HubName.parse(base).repository}")
    fields += ["tags:", "- fulmen"]
    if lineage.run is not None:
        fields.append(f"- {lineage.run.algorithm}")
    return "\n".join(["---", *fields, "---"])


def _summary(lineage: Lineage) -> str:
    version, run = lineage.version, lineage.run
    facts = [
        ("version", version.short),
        ("began with", base_of(run)),
        ("trained by", f"Fulmen, {run.algorithm}" if run is not None else ""),
        ("training run", version.run),
        ("step", f"{version.step} of {run.step_count}" if run is not None else str(version.step)),
        ("weights (SHA-256)", version.sha256),
        *((name.replace("_", " "), f"{value:g}") for name, value in sorted(run.results.items() if run else ())),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in facts if value)])


def _use() -> str:
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".")\ntokenizer = AutoTokenizer.from_pretrained(".")\n```'
    )
