"""Makes deploy/grafana/dashboards/*.json from `boards/`. Needs nothing but Python.

python deploy/grafana/build.py            writes them
python deploy/grafana/build.py --check    exits with 1 if they are not what it makes
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from boards import BOARDS
from boards.panels import Board, Panel, Variable

FOLDER = Path(__file__).parent / "dashboards"
GRID_WIDTH = 24
PANEL_HEIGHT = 8
STAT_HEIGHT = 4
SCHEMA_VERSION = 39
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# Steps of a panel with a threshold: below it, from it on.
CALM, ALARM = "green", "red"


def dashboard(board: Board) -> dict[str, Any]:
    """Makes the dashboard of a board."""
    return {
        "uid": f"fulmen-{board.name}",
        "title": f"Fulmen: {board.title}",
        "description": board.description,
        "tags": ["fulmen"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": f"now-{board.span}", "to": "now"},
        "timezone": "utc",
        "links": [{"type": "dashboards", "tags": ["fulmen"], "asDropdown": True, "title": "Fulmen", "keepTime": True}],
        "templating": {"list": [_datasource(), *(_variable(each) for each in board.variables)]},
        "annotations": {"list": [_alerts()]},
        "panels": list(_panels(board)),
    }


def files() -> dict[Path, str]:
    """Returns the text of every dashboard by its path."""
    return {FOLDER / f"{board.name}.json": json.dumps(dashboard(board), indent=1) + "\n" for board in BOARDS}


def _panels(board: Board) -> Iterator[dict[str, Any]]:
    number, y = 1, 0
    for row in board.rows:
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "panels": [],
               "gridPos": {"h": 1, "w": GRID_WIDTH, "x": 0, "y": y}}  # fmt: skip
        number, y, x, tallest = number + 1, y + 1, 0, 0
        for panel in row.panels:
            height = STAT_HEIGHT if panel.kind == "stat" else PANEL_HEIGHT
            if x + panel.width > GRID_WIDTH:
                x, y, tallest = 0, y + tallest, 0
            yield _panel(panel, number, {"h": height, "w": panel.width, "x": x, "y": y})
            number, x, tallest = number + 1, x + panel.width, max(tallest, height)
        y += tallest


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    lines = {"lineWidth": 1, "fillOpacity": 15 if panel.stacked else 0, "showPoints": "never",
             "stacking": {"mode": "normal" if panel.stacked else "none"}}  # fmt: skip
    defaults: dict[str, Any] = {"unit": panel.unit, "min": panel.minimum, "max": panel.maximum}
    if panel.kind == "timeseries":
        defaults["custom"] = lines
    if panel.alarm is not None:
        defaults["thresholds"] = {"mode": "absolute", "steps": _steps(panel)}
        if panel.kind == "timeseries":
            lines["thresholdsStyle"] = {"mode": "line"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {key: value for key, value in defaults.items() if value is not None},
            "overrides": [],
        },
        "options": _options(panel),
        "targets": [
            {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend, "datasource": DATASOURCE}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def _steps(panel: Panel) -> Sequence[dict[str, Any]]:
    below, above = (ALARM, CALM) if panel.alarm_below else (CALM, ALARM)
    return [{"color": below, "value": None}, {"color": above, "value": panel.alarm}]


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "colorMode": "background" if panel.alarm is not None else "none",
        }
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {"name": variable.name, "label": variable.name.capitalize(), "type": "query", "datasource": DATASOURCE,
            "query": {"query": query, "refId": "A"}, "refresh": 2, "sort": 1, "multi": True, "includeAll": True,
            "allValue": ".*", "current": {"text": "All", "value": "$__all"}}  # fmt: skip


def _alerts() -> dict[str, Any]:
    return {"name": "Alerts", "datasource": DATASOURCE, "enable": True, "iconColor": ALARM,
            "expr": 'ALERTS{alertname=~"Fulmen.*", alertstate="firing"}', "titleFormat": "{{alertname}}"}  # fmt: skip


def main() -> int:
    """Writes or checks the dashboards; returns the exit status."""
    made = files()
    there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    if "--check" in sys.argv:
        if made == there:
            return 0
        sys.stderr.write("deploy/grafana/dashboards is not current: run `python deploy/grafana/build.py`\n")
        return 1
    for path in there.keys() - made.keys():
        path.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
