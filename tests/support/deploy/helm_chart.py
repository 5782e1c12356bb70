"""The Helm chart, rendered: by Helm's own SDK in the environment of tools/helm_toolchain.sh, no cluster and no network.

Where that environment is missing a test is skipped, but fails in CI.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from yaml.constructor import SafeConstructor

from tests.support.kubernetes.schema import schema_problems

__all__ = ["CHART", "NAMESPACE", "VALUES", "Manifests", "helm", "problems", "render"]

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "fulmen"
PYTHON = ROOT / ".venv-helm" / "bin" / "python"
NAME = NAMESPACE = "fulmen"
LIMIT_S = 60

Document = dict[str, Any]

_CLIENTS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "tools"}}}]
_PROMETHEUS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
_RAY = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ray"}}}]
_CACHE: Document = {
    "extraEnv": [{"name": "HF_HOME", "value": "/models"}],
    "extraVolumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
    "extraVolumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True}],
}
_COLLECTOR = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
_GPU_NODES: Document = {
    "nodeSelector": {"example.com/gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
}

CLUSTERS: Document = {
    "gpus": {"kind": "kubernetes", "image": "registry.example.com/ai/fulmen-algorithm:9.9", "namespace": "fulmen-ranks"}
}
VALUES: dict[str, Document] = {
    "default": {},
    "small": {
        "tls": {"enabled": False},
        "fullnameOverride": "short",
        "networkPolicy": {"enabled": False},
        "migration": {"enabled": False},
        "store": {"replicas": 1},
        "llmProxy": {"replicas": 1},
        "runner": {"enabled": False},
        "algorithm": {"enabled": False},
        "console": {"enabled": False},
    },
    "tls": {
        "tls": {"existingSecrets": {"store": "my-store-tls"}},
        "runner": {"scaling": {"kind": "hpa"}},
    },
    "keda": {"runner": {"scaling": {"kind": "keda", "minReplicas": 0, "keda": {"labels": "gpu=h200"}}}},
    "engines": {
        "engines": {
            "enabled": True, "tokenSecret": "solver-engines", "image": {"repository": "fulmen-vllm"}, "gpu": {"count": 2},
            "scaling": {"kind": "keda", "maxReplicas": 47,
                        "keda": {"prometheusAddress": "http://prometheus.monitoring:9090", "policy": "solver",
                                 "attemptsPerEngine": 93}},
            **_GPU_NODES, **_CACHE,
        },
    },
    "gpu-nodes": {
        "algorithm": {"replicas": 3, "gpu": {"count": 8}, **_GPU_NODES, **_CACHE},
        "torchrun": {
            "enabled": True, "nodes": 4, "processesPerNode": 8, "gpusPerNode": 8, "args": ["/code/train.py", "--lr", "0.1"],
            **_GPU_NODES, **_CACHE,
        },
    },
    "everything": {
        "nameOverride": "trainer",
        "commonLabels": {"team": "research"},
        "image": {"registry": "registry.example.com/ai", "tag": "9.9", "pullSecrets": ["registry"]},
        "tls": {
            "clientCertificates": True,
            "certManager": {"enabled": True, "issuerRef": {"name": "internal"}},
        },
        "networkPolicy": {
            "clientsFrom": _CLIENTS,
            "metricsFrom": _PROMETHEUS,
            "ranksFrom": _RAY,
            "database": {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "port": 6432},
            "extraEgress": {"llmProxy": [{"ports": [{"port": 443}]}], "runner": [{"ports": [{"port": 443}]}]},
        },
        "database": {"existingSecret": "fulmen-database", "caKey": "root.pem", "standbyKey": "standby"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "collector": {"endpoint": "https://otel-collector.monitoring:4317", "to": _COLLECTOR},
        "store": {"autoscaling": {"enabled": True}, "settings": {"BLOB_URL": "s3://spans/fulmen", "LEASE_TTL_S": 20}},
        "migration": {"post": True},
        "llmProxy": {
            "autoscaling": {"enabled": True},
            "settings": {"CACHE_BYTES": 1073741824, "WORKERS": 2},
            "sharedCache": True,
            **_GPU_NODES,
        },
        "runner": {
            "scaling": {"kind": "keda"},
            "settings": {"SLOTS": "auto", "LABELS": "gpu=none", "ISOLATION": "process"},
            "jobs": {"enabled": True},
            "podAnnotations": {"example.com/note": "x"},
            **_CACHE,
        },
        "algorithm": {
            "gpu": {"count": 2},
            "ranks": {"enabled": True},
            "settings": {"MAX_CONCURRENT_RUNS": 1, "CLUSTERS": json.dumps(CLUSTERS)},
            **_CACHE,
        },
        "console": {"sessionKey": True, "settings": {"IS_PUBLIC_HTTPS": True, "PATH_PREFIX": "/fulmen"}},
        "engines": {"enabled": True, "tokenSecret": "solver-engines", "settings": {"OUTAGE_LIMIT_S": 600}},
        "torchrun": {"enabled": True, "args": ["-m", "my_training"]},
    },
}  # fmt: skip
"""Values by the name of the case; every test of what must always hold goes through all of them."""


class _StrictLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Refuses a key that stands twice in a mapping, of which the last would win silently."""


def _mapping(loader: _StrictLoader, node: yaml.MappingNode, deep: bool = False) -> Document:
    keys = [loader.construct_object(key, deep=deep) for key, _ in node.value]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise AssertionError(f"{node.start_mark}: twice: {', '.join(sorted(map(str, twice)))}")
    return SafeConstructor.construct_mapping(loader, node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


@dataclass(frozen=True, slots=True)
class Manifests:
    """What a release consists of."""

    documents: tuple[Document, ...]

    def of(self, kind: str) -> list[Document]:
        """Returns the documents of a kind."""
        return [each for each in self.documents if each["kind"] == kind]

    def one(self, kind: str, component: str = "") -> Document:
        """Returns the only document of a kind, or of a kind and a component."""
        [found] = [each for each in self.of(kind) if not component or component_of(each) == component]
        return found

    def pods(self) -> Iterator[tuple[Document, Document, Document]]:
        """Yields what makes pods, and the metadata and specification of its pods."""
        for each in self.documents:
            if each["kind"] in {"Deployment", "StatefulSet", "Job"}:
                template = each["spec"]["template"]
                yield each, template["metadata"], template["spec"]
            elif each["kind"] == "Pod":
                yield each, each["metadata"], each["spec"]

    def containers(self) -> Iterator[tuple[Document, Document, Document]]:
        """Yields what makes pods, their specification, and each of their containers."""
        for owner, _, spec in self.pods():
            for container in [*spec.get("initContainers", []), *spec["containers"]]:
                yield owner, spec, container


def component_of(document: Document) -> str:
    """Returns the component that a document belongs to."""
    return str(document["metadata"]["labels"]["app.kubernetes.io/component"])


def helm(command: str, values: Mapping[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    """Runs tools/helm_chart.py on the chart with values."""
    if not PYTHON.exists():
        why = "Helm's library is not installed: `make helm` installs it"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    program = [str(PYTHON), str(ROOT / "tools" / "helm_chart.py"), command, str(CHART), "--values", "-", *options]
    return subprocess.run(
        program, input=json.dumps(values), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def render(values: Mapping[str, Any], *, name: str = NAME) -> Manifests:
    """Renders the chart.

    Raises:
        AssertionError: if Helm refuses it.
    """
    return _rendered(json.dumps(values), name)


@functools.cache
def _rendered(values: str, name: str) -> Manifests:
    done = helm("template", json.loads(values), "--name", name, "--namespace", NAMESPACE, "--json")
    assert done.returncode == 0, done.stderr
    files: dict[str, str] = json.loads(done.stdout)
    documents = [
        document
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for document in yaml.load_all(text, Loader=_StrictLoader)  # a SafeLoader
        if document is not None
    ]
    return Manifests(tuple(documents))


def _strict(required: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Document:
    properties = {**required, **(optional or {})}
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


_TEXT = {"type": "string", "minLength": 1}
_COUNT = {"type": "integer", "minimum": 0}
_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_NAMED = _strict({"name": _TEXT})
_EXTERNAL = _strict(
    {"type": {"const": "external"}, "metadata": {**_TEXTS, "required": ["scalerAddress", "tokenFromEnv"]}},
    {"authenticationRef": _NAMED},
)
_PROMETHEUS_QUERY = _strict(
    {"type": {"const": "prometheus"}, "metricType": {"enum": ["AverageValue", "Value"]},
     "metadata": {**_TEXTS, "required": ["serverAddress", "query", "threshold"]}},
)  # fmt: skip
_TRIGGER: Document = {"oneOf": [_EXTERNAL, _PROMETHEUS_QUERY]}
_KEY = _strict({"secret": _strict({"name": _TEXT, "key": _TEXT})})
_ENDPOINT = _strict(
    {"port": _TEXT},
    {"path": _TEXT, "interval": _TEXT, "scheme": {"enum": ["http", "https"]},
     "tlsConfig": _strict({"ca": _KEY, "serverName": _TEXT}), "relabelings": {"type": "array"}},
)  # fmt: skip
# Of the custom resources, the fields that the chart writes, and which of them must be there. Their whole definitions are
# not at hand here.
CUSTOM: dict[str, Document] = {
    "keda.sh/v1alpha1 ScaledObject": _strict(
        {"scaleTargetRef": _strict({"name": _TEXT}, {"envSourceContainerName": _TEXT}),
         "triggers": {"type": "array", "items": _TRIGGER, "minItems": 1}},
        {"minReplicaCount": _COUNT, "maxReplicaCount": _COUNT, "pollingInterval": _COUNT, "cooldownPeriod": _COUNT,
         "advanced": {"type": "object"}},
    ),
    "keda.sh/v1alpha1 TriggerAuthentication": _strict(
        {"secretTargetRef": {"type": "array", "items": _strict({"parameter": _TEXT, "name": _TEXT, "key": _TEXT})}}
    ),
    "cert-manager.io/v1 Certificate": _strict(
        {"secretName": _TEXT, "issuerRef": _strict({"name": _TEXT}, {"kind": _TEXT, "group": _TEXT}),
         "dnsNames": {"type": "array", "items": _TEXT, "minItems": 1}},
        {"duration": _TEXT, "renewBefore": _TEXT, "usages": {"type": "array", "items": _TEXT},
         "privateKey": _strict({"algorithm": {"enum": ["RSA", "ECDSA", "Ed25519"]}, "size": _COUNT,
                                "rotationPolicy": {"enum": ["Always", "Never"]}})},
    ),
    "monitoring.coreos.com/v1 ServiceMonitor": _strict(
        {"selector": _strict({"matchLabels": _TEXTS}),
         "endpoints": {"type": "array", "items": _ENDPOINT}},
        {"targetLabels": {"type": "array", "items": _TEXT}},
    ),
}  # fmt: skip


def problems(document: Document) -> str:
    """Returns what is wrong with a document by its schema; empty if nothing."""
    own = CUSTOM.get(f"{document['apiVersion']} {document['kind']}")
    if own is None:
        return schema_problems(document)
    try:
        jsonschema.validate(document["spec"], own)
    except jsonschema.ValidationError as error:
        return f"{document['kind']} {error.json_path}: {error.message}"
    return ""
