"""What docs/proxy-operations.md says of settings, metrics and health is so."""

from __future__ import annotations

import re

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from fulmen_llm_proxy.settings import LlmProxySettings
from tests.support.distributions import ROOT
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy

PAGE = ROOT / "docs/proxy-operations.md"
METRIC = re.compile(r"\bfulmen_llm_proxy_[a-z_]+")
SAMPLE_SUFFIXES = re.compile(r"_(bucket|count|sum)$")
UNITS = ((1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB"))
ANSWERED = 200
NOT_NOW = 503


def exported(registry: CollectorRegistry) -> set[str]:
    """Returns the names of all metrics as Prometheus gets them, of histograms without their parts."""
    return {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in registry.collect()
        if family.name.startswith("fulmen_")
    }


def default_of(name: str) -> str:
    """Writes the default of a setting as people read it."""
    field = LlmProxySettings.model_fields[name]
    value = field.get_default(call_default_factory=True)
    if hasattr(value, "get_secret_value"):
        value = value.get_secret_value()
    if name.endswith("_bytes"):
        size, unit = next((size, unit) for size, unit in UNITS if value % size == 0)
        return f"{value // size} {unit}"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else f"{value}" if value not in ("", {}) else ""


def rows_of_settings() -> list[str]:
    """Returns the table of all settings, made from their code."""
    return [
        f"| `{name.upper()}` | {default_of(name)} | {field.description} |"
        for name, field in sorted(LlmProxySettings.model_fields.items())
    ]


def test_the_page_has_every_setting_with_its_default_as_the_code_has_it() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| `FULMEN_LLM_PROXY_...` | default | |") + 2
    end = lines.index("", start)

    assert lines[start:end] == rows_of_settings(), "make it so:\n" + "\n".join(rows_of_settings())


async def test_the_page_has_exactly_the_metrics_that_the_proxy_exports(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    await proxy.chat(key)
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `fulmen_llm_proxy_")]
    documented = [METRIC.findall(row.split("|")[1]) for row in rows]

    assert all(len(names) == 1 for names in documented)
    assert sorted(name for [name] in documented) == sorted(exported(proxy.registry))


async def test_labels_are_those_that_the_page_names(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    await proxy.chat(key)
    text = PAGE.read_text(encoding="utf-8")
    for family in proxy.registry.collect():
        for sample in family.samples:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            if name.startswith("fulmen_") and not sample.name.endswith("_created"):
                labels = re.search(rf"`{name}(?:{{([^}}]*)}})?`", text)
                assert labels is not None
                documented = set((labels[1] or "").replace(" ", "").split(",")) - {""}
                assert sample.labels.keys() - {"le"} == documented, name


async def test_every_metric_that_any_page_names_exists(proxy: RunningProxy) -> None:
    known = exported(proxy.registry)
    for page in ROOT.glob("docs/**/*.md"):
        named = {SAMPLE_SUFFIXES.sub("", name) for name in METRIC.findall(page.read_text(encoding="utf-8"))}
        assert {name for name in named if name not in known and f"{name}_total" not in known} == set(), page.name


@pytest.mark.parametrize("store_is_there", [True, False], ids=["with a store", "without"])
async def test_a_proxy_is_alive_at_once_and_ready_when_it_has_heard_its_routes(
    store: FakeStore, backend: Backend, store_is_there: bool
) -> None:
    target = store.target if store_is_there else "127.0.0.1:1"
    async with running_proxy(target) as proxy, aiohttp.ClientSession() as session:
        root = proxy.url.removesuffix("/v1")
        if store_is_there:
            await proxy.register("one", backend.url)

        async def status(path: str) -> int:
            async with session.get(root + path) as answer:
                return answer.status

        assert await status("/healthz") == ANSWERED
        assert await status("/readyz") == (ANSWERED if store_is_there else NOT_NOW)
        if not store_is_there:
            assert (await proxy.chat(proxy.attempt()[1], model=MODEL))[0] == NOT_NOW
