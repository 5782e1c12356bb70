"""What docs/kubernetes.md tells to write is what the chart takes; Helm renders it (tools/helm_toolchain.sh)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from fulmen_algorithm.cluster.settings import ClusterName, ClusterSettings, KubernetesSettings
from tests.support.deploy.helm_chart import CHART, ROOT, helm, problems, render
from tests.support.docs.blocks import code_blocks

DOCUMENT = ROOT / "docs" / "kubernetes.md"
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))


def examples() -> list[dict[str, Any]]:
    """Returns the blocks of the document that are values of the chart."""
    return [yaml.safe_load(block.text) for block in code_blocks("yaml") if ROOT / block.page == DOCUMENT]


@pytest.mark.parametrize("values", examples(), ids=lambda values: next(iter(values)))
def test_an_example_is_what_the_chart_takes(values: dict[str, Any]) -> None:
    assert [problem for document in render(values).documents if (problem := problems(document))] == []


def test_there_are_examples() -> None:
    assert [list(each) for each in examples()] == [
        ["image", "runner", "tls"],
        ["networkPolicy"],
        ["algorithm"],
        ["algorithm"],
        ["engines"],
        ["algorithm"],
        ["torchrun"],
        ["tls"],
    ]


def test_the_clusters_of_an_example_are_what_the_service_takes() -> None:
    written = [each["algorithm"]["settings"] for each in examples() if "settings" in each.get("algorithm", {})]
    [clusters] = [json.loads(settings["CLUSTERS"]) for settings in written if "CLUSTERS" in settings]
    [cluster] = TypeAdapter(dict[ClusterName, ClusterSettings]).validate_python(clusters).values()
    assert isinstance(cluster, KubernetesSettings)
    [values] = [each["algorithm"] for each in examples() if "CLUSTERS" in each.get("algorithm", {}).get("settings", {})]
    # Ranks see the folder of runs where the service has it.
    mounts = {mount["mountPath"] for mount in values["extraVolumeMounts"]}
    assert {str(volume.path) for volume in cluster.volumes} == mounts
    assert cluster.namespace == values["ranks"]["namespace"]


def test_values_that_are_named_exist() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    sections = "|".join(SCHEMA["properties"])
    named = set(re.findall(rf"--set ((?:{sections})\.[A-Za-z.]+)=", text))
    named |= {name.rstrip(".") for name in re.findall(rf"`((?:{sections})\.[A-Za-z.]+)(?::[^`]*)?`", text)}
    named -= {"tls.crt", "tls.key"}  # keys of Secrets
    assert len(named) > 15
    for name in named:
        part, *inner = name.split(".")
        if inner[:1] == ["settings"] and len(inner) > 1:
            continue
        assert is_there(SCHEMA["properties"][part], inner), name
    settings = set(re.findall(r"([a-zA-Z]+)\.settings\.([A-Z_]+)", text))
    assert all(setting in listed(service) for service, setting in settings)


def is_there(schema: Mapping[str, Any], path: list[str]) -> bool:
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    if not path:
        return True
    inner = schema.get("properties", {}).get(path[0])
    return inner is not None and is_there(inner, path[1:])


def listed(service: str) -> list[str]:
    names: list[str] = SCHEMA["definitions"][f"{service}Settings"]["propertyNames"]["enum"]
    return names


def test_the_install_of_the_document_is_whole() -> None:
    """The Secrets that it makes have every key that a default release wants, and KEDA's."""
    text = DOCUMENT.read_text(encoding="utf-8")
    made = set(re.findall(r"--from-file=([a-z-]+)", text))
    wanted = set()
    for _, spec, container in render({"runner": {"scaling": {"kind": "keda"}}}).containers():
        wanted |= {
            item["key"]
            for volume in spec["volumes"]
            if volume.get("secret", {}).get("secretName") == "fulmen"
            for item in volume["secret"]["items"]
        }
        wanted |= {
            variable["valueFrom"]["secretKeyRef"]["key"]
            for variable in container.get("env", [])
            if "secretKeyRef" in variable.get("valueFrom", {})
        }
    assert made == wanted
    assert helm("lint", {}).returncode == 0
