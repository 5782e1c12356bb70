"""deploy/prometheus, deploy/grafana and deploy/otel agree with each other, with promtool, and with live services."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import typer
import yaml
from prometheus_client.parser import text_string_to_metric_families

from fulmen.rpc.services import Services, connect
from fulmen.store.v1.rollout_pb2 import Rollout
from fulmen.store.v1.runner_registry_service_pb2 import GetFleetDemandRequest
from fulmen.store.v1.schedule_service_pb2 import CreateScheduleRequest, Schedule
from fulmen_cli.local.record import StackFolder
from fulmen_cli.local.stack import LocalStack
from fulmen_cli.main import app
from tests.support.algorithm.training import create_run, publish_training_inputs
from tests.support.deploy.prometheus import program, running_prometheus
from tests.support.deploy.promql import names_in, without_variables
from tests.support.distributions import ROOT
from tests.support.stack import running_stack, stack_targets

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARDS = sorted((ROOT / "deploy/grafana/dashboards").glob("*.json"))
RUNBOOKS = (ROOT / "docs/runbooks.md").read_text(encoding="utf-8")
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
LIMIT_S = 60
WAIT_S = 200
# What Prometheus itself adds to every series, and to buckets.
ADDED = {"job", "instance", "le"}
# Exporters that are not ours: the names and labels that are used of them, as their documentation has them.
EXPORTERS = {
    "up": set(),
    "ALERTS": {"alertname", "alertstate"},
    "node_cpu_seconds_total": {"cpu", "mode"},
    "node_disk_io_time_seconds_total": {"device"},
    "node_filesystem_avail_bytes": {"device", "fstype", "mountpoint"},
    "node_filesystem_size_bytes": {"device", "fstype", "mountpoint"},
    "node_load1": set(),
    "node_memory_MemAvailable_bytes": set(),
    "node_memory_MemTotal_bytes": set(),
    "node_network_receive_bytes_total": {"device"},
    "node_network_transmit_bytes_total": {"device"},
    "pg_database_size_bytes": {"datname"},
    "pg_settings_max_connections": {"server"},
    "pg_stat_activity_count": {"datname", "state", "server"},
    "pg_stat_database_xact_commit": {"datname", "server"},
    "pg_stat_database_xact_rollback": {"datname", "server"},
    "otelcol_exporter_send_failed_spans": {"exporter"},
    **{
        f"DCGM_FI_{name}": {"gpu", "Hostname"}
        for name in (
            *("DEV_FB_FREE", "DEV_FB_USED", "DEV_GPU_TEMP", "DEV_GPU_UTIL", "DEV_MEM_COPY_UTIL", "DEV_POWER_USAGE"),
            *("DEV_XID_ERRORS", "PROF_PIPE_TENSOR_ACTIVE"),
        )
    },
}
# Of shards, which only several ranks make; tests/integration/exchange/test_metrics.py reads them.
OF_SHARDS = {"project", "run", "shard", "status"}
# Figures of other stages than the one that runs here, and of the exchange: docs/metrics.md and docs/exchange.md name them.
FIGURES_ELSEWHERE = re.compile(r"exchange_.*")
GRPO = {
    "steps": 500,
    "prompts_per_step": 2,
    "group_size": 4,
    "minibatches": 1,
    "max_tokens": 4,
    "mask_truncated": False,
    "validate_every": 2,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """An expression, and where it is from."""

    where: str
    expression: str
    legend: str = ""


def panels() -> Iterator[Used]:
    """Yields every expression of every dashboard."""
    for path in DASHBOARDS:
        board = json.loads(path.read_text(encoding="utf-8"))
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
                yield Used(where=f"{path.name}: ${variable['name']}", expression=f"sum by ({label}) ({metric})")
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                where = f"{path.name}: {panel['title']}"
                yield Used(where=where, expression=target["expr"], legend=target["legendFormat"])


def alerts() -> Iterator[Used]:
    """Yields the expression of every alert; its texts are the legend."""
    for rule in ALERTS:
        texts = " ".join(rule["annotations"].values())
        yield Used(where=rule["alert"], expression=rule["expr"], legend=texts)


def promtool(*arguments: str | Path) -> str:
    """Runs promtool; where it is missing, CI fails and others skip."""
    done = subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_dashboards_are_what_the_program_makes() -> None:
    command = [sys.executable, ROOT / "deploy/grafana/build.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert {path.stem for path in DASHBOARDS} == {"overview", "queue", "proxy", "training", "exchange", "hosts"}


def test_promtool_accepts_configuration_and_alerts() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", PROMETHEUS / "alerts.yml")


def test_promtool_sees_every_alert_fire_and_be_quiet() -> None:
    promtool("test", "rules", PROMETHEUS / "alerts_test.yml")

    seen, labels = defaultdict(set), {}
    for case in yaml.safe_load((PROMETHEUS / "alerts_test.yml").read_text(encoding="utf-8"))["tests"]:
        for check in case["promql_expr_test"]:
            [name] = re.findall(r'alertname="(\w+)", alertstate="firing"', check["expr"])
            seen[name].add(bool(check["exp_samples"]))
            labels[name] = {found for each in check["exp_samples"] for found in re.findall(r"(\w+)=", each["labels"])}
    assert seen == {rule["alert"]: {False, True} for rule in ALERTS}
    # An alert whose text names a label that it does not have would say nothing there.
    for rule in ALERTS:
        told = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
        assert told <= labels[rule["alert"]], rule["alert"]


def test_promtool_reads_every_expression_of_the_dashboards(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": without_variables(used.expression), "labels": {"panel": used.where}}
        for number, used in enumerate(panels())
    ]
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")

    promtool("check", "rules", path)


def test_every_alert_says_how_bad_it_is_and_has_its_section_in_the_runbook() -> None:
    sections = re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", RUNBOOKS, re.M | re.S)

    assert sorted(name for name, _ in sections) == sorted(rule["alert"] for rule in ALERTS)
    assert all(re.search(r"\*\*Meaning\*\*.*\*\*Check\*\*.*\*\*Remedy\*\*", text, re.S) for _, text in sections)
    for rule in ALERTS:
        assert rule["labels"] in ({"severity": "critical"}, {"severity": "warning"})
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert (
            rule["annotations"]["runbook_url"] == f"{{{{ $externalURL }}}}/user/runbooks.html#{rule['alert'].lower()}"
        )


def test_prometheus_serves_the_section_of_every_alert_where_the_alert_says() -> None:
    check = [sys.executable, PROMETHEUS / "build.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")

    page = (PROMETHEUS / "pages/runbooks.html").read_text(encoding="utf-8")
    assert {rule["alert"].lower() for rule in ALERTS} <= set(re.findall(r'<h3 id="(\w+)"', page))
    # No link of the page leads to a document that is not served.
    assert not re.findall(r'href="(?!https?://|#)[^"]*"', page)
    prometheus = yaml.safe_load((ROOT / "deploy/docker-compose.yml").read_text(encoding="utf-8"))["services"][
        "prometheus"
    ]
    assert "./prometheus:/etc/prometheus:ro" in prometheus["volumes"]
    assert "--web.user-assets=/etc/prometheus/pages" in prometheus["command"]
    # `$externalURL` would be the container's own name.
    assert any(each.startswith("--web.external-url=http://127.0.0.1:") for each in prometheus["command"])


def test_the_runbook_names_commands_that_exist() -> None:
    root = typer.main.get_command(app)
    for words in re.findall(r"`fulmen ([a-z -]+)", RUNBOOKS):
        command = root
        for word in words.split():
            if word.startswith("-") or not getattr(command, "commands", None):
                break
            command = command.commands[word]
        assert not getattr(command, "commands", None), words


def test_the_runbook_names_events_and_settings_that_exist() -> None:
    code = (*ROOT.glob("services/*/src/**/*.py"), *ROOT.glob("libs/*/src/**/*.py"), ROOT / "deploy/docker-compose.yml")
    sources = "".join(path.read_text(encoding="utf-8") for path in code).lower()
    named = {
        *re.findall(r"`([a-z]+(?:_[a-z]+)+)`", RUNBOOKS),
        *(name.lower() for name in re.findall(r"`(?!FULMEN_)([A-Z]+(?:_[A-Z]+)+)`", RUNBOOKS) if name != "DATA_LOSS"),
        *(name.lower() for name in re.findall(r"FULMEN_(?:STORE|RUNNER|ALGORITHM|LLM_PROXY)_(\w+)", RUNBOOKS)),
    }

    assert len(named) > 10
    assert {name for name in named if name not in sources} == set()


def test_the_collector_uses_what_it_defines_and_bounds_its_memory_first() -> None:
    config = yaml.safe_load((ROOT / "deploy/otel/collector.yaml").read_text(encoding="utf-8"))

    assert set(config["service"]["extensions"]) == config["extensions"].keys()
    for pipeline in config["service"]["pipelines"].values():
        assert pipeline["processors"] == ["memory_limiter", "batch"]
        for kind in ("receivers", "processors", "exporters"):
            used = {re.sub(r"\$\{env:\w+:-(\w+)}", r"\1", name) for name in pipeline[kind]}
            assert used <= config[kind].keys()


def labels_in_documents() -> dict[str, set[str]]:
    """Returns the labels of metrics as documents write them: `name{label,label}`."""
    found = {}
    for page in (ROOT / "docs").glob("*.md"):
        for name, labels in re.findall(r"`(fulmen_\w+)\{([\w, ]+)\}`", page.read_text(encoding="utf-8")):
            found[name] = {label.strip() for label in labels.split(",")}
    return found


class Exported:
    """What live services showed: labels by the name of a sample, and figures of runs."""

    def __init__(self) -> None:
        self.labels: dict[str, set[str]] = {}
        self.figures: set[str] = set()
        self._documented = labels_in_documents()

    def add(self, page: str) -> None:
        """Reads a page of /metrics. A family without samples has the labels that the documents say."""
        for family in text_string_to_metric_families(page):
            total = f"{family.name}_total" if family.type == "counter" else family.name
            if not family.samples:
                parts = ("_bucket", "_count", "_sum") if family.type == "histogram" else ("",)
                unseen = OF_SHARDS if "_exchange_" in total else self._documented.get(total, set())
                for part in parts:
                    self.labels.setdefault(f"{total}{part}", set()).update(unseen)
            for sample in family.samples:
                self.labels.setdefault(sample.name, set()).update(sample.labels)
                if sample.name == "fulmen_algorithm_run_metric":
                    self.figures.add(sample.labels["metric"])

    def problems(self, used: Used) -> Iterator[str]:
        """Says what an expression uses that is not there."""
        names = names_in(used.expression)
        known: Mapping[str, set[str]] = {**self.labels, **EXPORTERS}
        if missing := names.selected.keys() - known.keys():
            yield f"{used.where}: no metric {', '.join(sorted(missing))}"
            return
        everywhere = ADDED.union(*(known[name] for name in names.selected))
        for name, labels in names.selected.items():
            if unknown := labels - known[name] - ADDED:
                yield f"{used.where}: {name} has no label {', '.join(sorted(unknown))}"
        named = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*}}", used.legend))
        if unknown := (names.grouped | named) - everywhere:
            yield f"{used.where}: no label {', '.join(sorted(unknown))}"
        for pattern in re.findall(r'figure=~?"([^"]*)"', used.expression):
            for one in re.split(r"\|(?![^(]*\))", pattern):
                there = FIGURES_ELSEWHERE.match(one) or any(re.fullmatch(one, figure) for figure in self.figures)
                if not there:
                    yield f"{used.where}: no figure {one}"


@pytest.mark.long(short=True)
@pytest.mark.serial
@pytest.mark.timeout(300)
async def test_every_name_that_is_used_is_exported_by_a_live_service_and_every_question_has_an_answer(
    short_tmp_path: Path, tmp_path: Path
) -> None:
    monitored = {
        "FULMEN_RUNNER_HOOKS": "fulmen_runner.hooks.monitor:Monitor",
        "FULMEN_STORE_BLOB_URL": f"file://{tmp_path}/blobs",
    }
    async with (
        running_stack(short_tmp_path, slots=4, environment=monitored) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        # Due within a minute; no runner has its label.
        idle = Rollout(required_labels={"nowhere": "here"}, priority=-100)
        schedule = Schedule(name="projects/default/schedules/minutes", cron="* * * * *", rollouts=[idle])
        await client.schedules.CreateSchedule(CreateScheduleRequest(schedule=schedule))
        await train(client)
        # Some figures come with the second step, and the queue is counted when it is asked for, or every 15 s.
        ends = time.monotonic() + WAIT_S
        while (problems := await missing(stack)) and time.monotonic() < ends:
            await client.runners.GetFleetDemand(GetFleetDemandRequest())
            await asyncio.sleep(1)
        assert problems == [], "\n".join(problems)
        problems = [*await badly_named(stack), *await unanswered(ports_of(stack), tmp_path)]
    assert problems == [], "\n".join(problems)


async def badly_named(stack: LocalStack) -> list[str]:
    """Returns what promtool says of the names, units and descriptions of all metrics."""
    found: list[str] = []
    for page in await pages(stack):
        command = [program("promtool"), "check", "metrics"]
        done = subprocess.run(command, input=page, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        found += (done.stdout + done.stderr).splitlines()
    return found


async def unanswered(jobs: dict[str, list[int]], folder: Path) -> list[str]:
    """Asks a real Prometheus every question of dashboards and alerts; returns those that it cannot work out."""
    async with running_prometheus(folder, jobs, rules=PROMETHEUS / "alerts.yml") as prometheus:
        problems = []
        for used in panels():
            answer = await prometheus.get("query", query=without_variables(used.expression))
            if answer["status"] != "success":
                problems.append(f"{used.where}: {answer['error']}")
        groups = (await prometheus.get("rules"))["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(ALERTS)
    firing = [f"{rule['name']} fires" for rule in rules if rule["state"] == "firing"]
    return [*problems, *firing, *(f"{rule['name']}: {rule['lastError']}" for rule in rules if rule["health"] == "err")]


def ports_of(stack: LocalStack) -> dict[str, list[int]]:
    """Returns the ports with /metrics of a stack, by the names of Prometheus' jobs."""
    record = StackFolder(stack.folder.path).read()
    assert record is not None
    found = defaultdict(list)
    for service in record.services:
        for name, port in service.ports.items():
            if name.endswith("_metrics"):
                found[re.sub(r"-\d+$", "", service.name)].append(port)
    return found


async def train(client: Services) -> None:
    """Begins a run that goes on until the stack stops."""
    inputs = await publish_training_inputs(client, ROOT)
    await create_run(client, "watched", inputs, GRPO)


async def pages(stack: LocalStack) -> list[str]:
    """Reads /metrics of all services."""
    found = []
    async with aiohttp.ClientSession() as session:
        for port in chain.from_iterable(ports_of(stack).values()):
            async with session.get(f"http://127.0.0.1:{port}/metrics") as answer:
                found.append(await answer.text())
    return found


async def missing(stack: LocalStack) -> list[str]:
    """Reads /metrics of all services; returns what dashboards and alerts use and is not there."""
    exported = Exported()
    for page in await pages(stack):
        exported.add(page)
    return [problem for used in (*panels(), *alerts()) for problem in exported.problems(used)]
