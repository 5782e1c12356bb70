"""The Helm chart, rendered by Helm's own SDK (tools/helm_toolchain.sh) with several values: what must always hold.

No cluster is asked: manifests are held against the schemas of the API, references against one another. What the
services make of their variables is in test_helm_settings.py, who may talk to whom in test_helm_network.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.deploy.helm_chart import CHART, NAMESPACE, VALUES, Manifests, component_of, helm, problems, render

HOOK = "helm.sh/hook"
WIDE = frozenset({"ClusterRole", "ClusterRoleBinding"})
"""Kinds of no namespace."""
SECRET_KEYS = frozenset(
    {
        "signing-key",
        "attempt-key-secret",
        "service-token",
        "runner-token",
        "engine-token",
        "backend-keys",
        "reader-token",
        "cache-url",
        "console-session-key",
    }
)


@pytest.fixture(params=VALUES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def release(case: str) -> Manifests:
    return render(VALUES[case])


def selector_of(document: Mapping[str, Any]) -> dict[str, str]:
    selector: dict[str, Any] = document["spec"].get("selector", {})
    return selector.get("matchLabels", selector)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_helm_finds_nothing_to_complain_about(case: str) -> None:
    done = helm("lint", VALUES[case])
    assert (done.returncode, done.stdout) == (0, "Chart.yaml: icon is recommended\n"), done.stderr


def test_every_manifest_is_valid(release: Manifests) -> None:
    assert [problem for document in release.documents if (problem := problems(document))] == []


def test_names_occur_once_and_fit(case: str) -> None:
    long = "a-release-with-a-name-as-long-as-helm-permits-which-is"[:53]
    for name in ("fulmen", long):
        release = render(VALUES[case], name=name)
        named = [
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in release.documents
        ]
        assert len(set(named)) == len(named)
        places = {each["metadata"].get("namespace", "") for each in release.documents if each["kind"] not in WIDE}
        assert places <= {NAMESPACE, "fulmen-agents", "fulmen-ranks"}
        assert not [each for each in release.documents if each["kind"] in WIDE and "namespace" in each["metadata"]]
        # Pods of a StatefulSet get `-N`, those of an indexed Job `-N` and five letters; labels hold 63.
        assert max(len(name) for kind, _, name in named if kind in {"StatefulSet", "Job", "Service"}) <= 63 - 7


def test_labels_follow_the_conventions(case: str, release: Manifests) -> None:
    chart = {
        "app.kubernetes.io/part-of": "fulmen",
        "app.kubernetes.io/managed-by": "Helm",
        "helm.sh/chart": "fulmen-0.1.0",
    }
    for document in release.documents:
        labels = document["metadata"]["labels"]
        assert selects(
            {**chart, "app.kubernetes.io/instance": "fulmen", **VALUES[case].get("commonLabels", {})}, labels
        )
        assert labels["app.kubernetes.io/name"] == VALUES[case].get("nameOverride", "fulmen")
        assert {"app.kubernetes.io/component", "app.kubernetes.io/version"} <= labels.keys()
    for owner, metadata, _ in release.pods():
        if owner["kind"] != "Pod":
            # A version in here would restart every pod of the release with each version of the chart.
            assert not {"helm.sh/chart", "app.kubernetes.io/version"} & metadata["labels"].keys()
    for document in release.of("StatefulSet"):
        for claim in document["spec"]["volumeClaimTemplates"]:
            assert "helm.sh/chart" not in claim["metadata"]["labels"]


def test_selectors_find_the_pods_of_their_component_and_no_others(release: Manifests) -> None:
    pods = {component_of(owner): metadata["labels"] for owner, metadata, _ in release.pods()}
    for document in release.documents:
        if document["kind"] in {"Deployment", "StatefulSet", "PodDisruptionBudget", "Service"}:
            found = {component for component, labels in pods.items() if selects(selector_of(document), labels)}
            if document["kind"] == "Service" and component_of(document) == "torchrun":
                # The cluster adds the label of the Job.
                assert document["spec"]["selector"].pop("batch.kubernetes.io/job-name") == document["metadata"]["name"]
                continue
            assert found == {component_of(document)}, document["metadata"]["name"]


def test_services_lead_to_ports_that_exist(case: str, release: Manifests) -> None:
    ports = {
        component_of(owner): {port["name"]: port["containerPort"] for port in container["ports"]}
        for owner, _, container in release.containers()
        if "ports" in container
    }
    for service in release.of("Service"):
        for port in service["spec"]["ports"]:
            assert ports[component_of(service)][port["targetPort"]] == port["port"]
    services = {service["metadata"]["name"]: service for service in release.of("Service")}
    for document in release.of("StatefulSet"):
        assert services[document["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    for _, _, container in release.containers():
        named = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["port"] in named
    for component in ports.keys() & {"store", "llm-proxy", "runner", "algorithm", "console"}:
        # One Service has the port of metrics, so that Prometheus finds each pod once.
        serving = [each for each in release.of("Service") if component_of(each) == component]
        ports_of_metrics = [
            port["name"] for each in serving for port in each["spec"]["ports"] if port["name"].startswith("metrics")
        ]
        assert ports_of_metrics == ["metrics"]


def test_everything_that_pods_refer_to_is_there(case: str, release: Manifests) -> None:
    accounts = {each["metadata"]["name"] for each in release.of("ServiceAccount")}
    assert all(each["automountServiceAccountToken"] is False for each in release.of("ServiceAccount"))
    given = {volume["name"] for part in VALUES[case].values() if isinstance(part, dict) for volume in part.get("extraVolumes", [])}  # fmt: skip
    for owner, _, spec in release.pods():
        hooked = HOOK in owner["metadata"].get("annotations", {})
        assert ("serviceAccountName" not in spec) if hooked or component_of(owner) == "torchrun" else (
            spec["serviceAccountName"] in accounts
        )  # fmt: skip
        claims = {each["metadata"]["name"] for each in owner["spec"].get("volumeClaimTemplates", [])}
        volumes = [volume["name"] for volume in spec["volumes"]]
        assert len(set(volumes)) == len(volumes)
        mounted = {
            mount["name"]
            for container in [*spec.get("initContainers", []), *spec["containers"]]
            for mount in container["volumeMounts"]
        }
        assert mounted == set(volumes) | claims
        for volume in spec["volumes"]:
            assert {"name", "emptyDir"} == volume.keys() or "secret" in volume or volume["name"] in given
    assert release.of("ConfigMap") == []


def test_secrets_are_named_and_never_written(case: str, release: Manifests) -> None:
    assert release.of("Secret") == []
    used: set[tuple[str, str]] = set()
    for owner, _, spec in release.pods():
        for volume in spec["volumes"]:
            secret = volume.get("secret", {})
            used |= {(secret["secretName"], item["key"]) for item in secret.get("items", [])}
            if volume["name"] == "tls":
                assert secret["secretName"] in tls_secrets(case, component_of(owner))
    for _, _, container in release.containers():
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                used.add((reference["name"], reference["key"]))
            elif re.search(
                r"(TOKEN|SIGNING_KEY|SESSION_KEY|KEY_SECRET|_KEYS|DATABASE_URL|CACHE_URL|PASSWORD)", variable["name"]
            ):
                assert variable["name"].endswith("_FILE"), variable
                assert variable["value"].startswith("/etc/fulmen/"), variable
    assert used <= {("fulmen", key) for key in SECRET_KEYS} | {
        ("fulmen-database", "url"),
        ("fulmen-database", "root.pem"),
        ("fulmen-database", "standby"),
        ("solver-engines", "token"),
    }
    assert ("fulmen-database", "url") in used
    keda = VALUES[case].get("runner", {}).get("scaling", {}).get("kind") == "keda"
    assert (("fulmen", "reader-token") in used) is keda
    assert (("fulmen", "cache-url") in used) is VALUES[case].get("llmProxy", {}).get("sharedCache", False)


def tls_secrets(case: str, component: str) -> set[str]:
    given = VALUES[case].get("tls", {}).get("existingSecrets", {})
    component = "store" if component == "test" else component
    made = {each["spec"]["secretName"] for each in render(VALUES[case]).of("Certificate")}
    name = "fulmen-trainer" if "nameOverride" in VALUES[case] else "fulmen"
    wanted = given.get(component, f"{name}-{component}-tls")
    assert not made or wanted in made
    return {wanted}


def test_a_pod_sees_only_the_secrets_that_it_needs() -> None:
    seen = {
        component_of(owner): {
            item["key"] for volume in spec["volumes"] for item in volume.get("secret", {}).get("items", [])
        }
        for owner, _, spec in render(VALUES["keda"]).pods()
    }
    assert seen == {
        "store": {"signing-key", "url"},
        "migration": {"signing-key", "url"},
        "llm-proxy": {"attempt-key-secret", "service-token", "backend-keys"},
        "algorithm": {"service-token", "engine-token"},
        # Agents run beside it: what makes tokens is not there.
        "runner": {"runner-token"},
        "console": set(),
        "test": set(),
    }
    [engine] = [spec for owner, _, spec in render(VALUES["engines"]).pods() if component_of(owner) == "engine"]
    secrets = {volume["secret"]["secretName"] for volume in engine["volumes"] if "secret" in volume}
    assert secrets == {"fulmen", "fulmen-engine-tls", "solver-engines"}
    items = {item["key"] for volume in engine["volumes"] for item in volume.get("secret", {}).get("items", [])}
    assert items == {"engine-token", "token"}


def test_no_container_is_root_or_may_become_it(release: Manifests) -> None:
    for owner, _, spec in release.pods():
        pod = spec["securityContext"]
        assert (pod["runAsNonRoot"], pod["runAsUser"], pod["seccompProfile"]) == (
            True,
            10001,
            {"type": "RuntimeDefault"},
        )
        # Only who makes Jobs reaches the cluster's API.
        makers = {component_of(role) for role in release.of("Role")}
        assert spec["automountServiceAccountToken"] is (component_of(owner) in makers)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        # Otherwise FULMEN_STORE_PORT and the like of the cluster would be read as settings.
        assert spec["enableServiceLinks"] is False
    for _, _, container in release.containers():
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
        }  # fmt: skip
        assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]


def test_nothing_is_killed_before_its_grace_is_over(release: Manifests) -> None:
    for _, spec, container in release.containers():
        for variable in container.get("env", []):
            if variable["name"].endswith("_DRAIN_GRACE_S"):
                sleep = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", "0"])
                # The proxy's documents ask for 15 seconds more.
                assert spec["terminationGracePeriodSeconds"] >= float(variable["value"]) + float(sleep[1]) + 15


def test_budgets_of_disruption_block_no_node(case: str, release: Manifests) -> None:
    by_component = {component_of(each): each for each in release.of("PodDisruptionBudget")}
    assert set(by_component) == (set() if case == "small" else {"store", "llm-proxy"})
    assert all(each["spec"]["maxUnavailable"] == 1 for each in by_component.values())
    scaled = {each["spec"]["scaleTargetRef"]["name"] for kind in ("HorizontalPodAutoscaler", "ScaledObject") for each in release.of(kind)}  # fmt: skip
    for deployment in [*release.of("Deployment"), release.one("StatefulSet", "llm-proxy")]:
        # Who scales it would fight with whoever upgrades it about the number.
        assert ("replicas" in deployment["spec"]) is (deployment["metadata"]["name"] not in scaled)


def test_hooks_run_when_they_should() -> None:
    hooks = {
        component_of(each): each["metadata"]["annotations"]
        for each in render({}).documents
        if HOOK in each["metadata"].get("annotations", {})
    }
    tidy = {"helm.sh/hook-delete-policy": "before-hook-creation,hook-succeeded"}
    assert hooks == {
        "migration": {HOOK: "pre-install,pre-upgrade", "helm.sh/hook-weight": "0", **tidy},
        "test": {HOOK: "test", **tidy},
    }
    migration = render({}).one("Job", "migration")["spec"]["template"]["spec"]["containers"][0]
    assert migration["args"] == ["migrate"]
    assert render({"migration": {"post": True}}).one("Job")["spec"]["template"]["spec"]["containers"][0]["args"] == [
        "migrate", "--post",
    ]  # fmt: skip
    assert render({"migration": {"enabled": False}}).of("Job") == []


def test_an_install_is_put_together_by_helm_and_says_what_is_next(case: str) -> None:
    done = helm("install", VALUES[case], "--namespace", NAMESPACE)
    assert done.returncode == 0, done.stderr
    release = json.loads(done.stdout)
    # Hooks are no part of what is installed: they come and go by themselves.
    assert "kind: Deployment" in release["manifest"]
    assert HOOK not in release["manifest"]
    assert "helm test fulmen --namespace fulmen" in release["notes"]
    assert ("port-forward service/fulmen-algorithm" in release["notes"]) is (case not in {"small", "everything"})


def test_gpus_are_asked_for_where_they_are() -> None:
    release = render(VALUES["gpu-nodes"])
    engines = render(VALUES["engines"])
    [(engine, serving)] = [(s, c) for owner, s, c in engines.containers() if component_of(owner) == "engine"]
    assert serving["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert engine["nodeSelector"] == {"example.com/gpu": "h200"}
    for component in ("algorithm", "torchrun"):
        [(spec, container)] = [(s, c) for owner, s, c in release.containers() if component_of(owner) == component]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8
        assert spec["nodeSelector"] == {"example.com/gpu": "h200"}
        assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    job = release.one("Job", "torchrun")
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 4, 4)
    [container] = job["spec"]["template"]["spec"]["containers"]
    name, script = job["metadata"]["name"], container["command"][2]
    assert f"--rdzv-endpoint {name}-0.{name}.{NAMESPACE}.svc:29400" in script
    assert "--nnodes 4 --nproc-per-node 8" in script
    assert container["args"] == ["/code/train.py", "--lr", "0.1"]
    assert job["spec"]["template"]["spec"]["subdomain"] == name
    other = render({"torchrun": {**VALUES["gpu-nodes"]["torchrun"], "nodes": 5}}).one("Job", "torchrun")
    assert other["metadata"]["name"] != name


def test_runners_make_jobs_in_a_namespace_without_the_releases_secrets() -> None:
    release = render(VALUES["everything"])
    role, binding = release.one("Role", "runner"), release.one("RoleBinding", "runner")
    assert {each["metadata"]["namespace"] for each in (role, binding)} == {"fulmen-agents"} != {NAMESPACE}
    account = release.one("ServiceAccount", "runner")["metadata"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["name"], "namespace": NAMESPACE}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    # It can neither read, list nor change a Secret, nor run anything in pods.
    verbs = {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]}
    assert verbs["secrets"] == ["create"]
    assert verbs.keys() == {"jobs", "secrets", "pods", "pods/log"}
    assert render({}).of("Role") == []


def test_the_algorithm_service_makes_jobs_in_a_namespace_without_the_releases_secrets() -> None:
    release = render(VALUES["everything"])
    role, binding = release.one("Role", "algorithm"), release.one("RoleBinding", "algorithm")
    wide, widely = release.one("ClusterRole"), release.one("ClusterRoleBinding")
    assert {each["metadata"]["namespace"] for each in (role, binding)} == {"fulmen-ranks"} != {NAMESPACE}
    account = release.one("ServiceAccount", "algorithm")["metadata"]["name"]
    for each, of in ((binding, role), (widely, wide)):
        assert each["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]
        assert each["roleRef"] == {
            "apiGroup": "rbac.authorization.k8s.io", "kind": of["kind"], "name": of["metadata"]["name"],
        }  # fmt: skip
    # It can neither read, list nor change a Secret, nor run anything in pods, nor do anything to nodes.
    verbs = {resource: rule["verbs"] for rule in role["rules"] for resource in rule["resources"]}
    assert verbs.keys() == {"jobs", "secrets", "pods", "pods/log"}
    assert verbs["secrets"] == ["create"]
    assert wide["rules"] == [{"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list"]}]
    # Another release has other names where there are no namespaces.
    assert wide["metadata"]["name"].startswith(f"{NAMESPACE}-")


def test_a_ray_cluster_needs_the_port_and_no_role() -> None:
    release = render({"algorithm": {"ranks": {"enabled": True, "namespace": ""}}})
    assert [each for kind in ("Role", "ClusterRole") for each in release.of(kind)] == []
    [container] = [c for owner, _, c in release.containers() if component_of(owner) == "algorithm"]
    assert {"name": "ranks", "containerPort": 7303} in container["ports"]
    without = render({"algorithm": {"ranks": {"enabled": True, "readNodes": False}}})
    assert (len(without.of("Role")), without.of("ClusterRole")) == (1, [])


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"stores": {}}, "stores"),
        ({"store": {"replica": 3}}, "replica"),
        ({"store": {"replicas": 0}}, "/store/replicas"),
        ({"store": {"settings": {"LEASE_TTL": 1}}}, "LEASE_TTL"),
        ({"store": {"settings": {"SIGNING_KEY": "a secret"}}}, "SIGNING_KEY"),
        ({"store": {"settings": {"PORT": 1}}}, "PORT"),
        ({"runner": {"settings": {"SLOTS": [1]}}}, "/runner/settings/SLOTS"),
        ({"runner": {"extraEnv": [{"name": "FULMEN_RUNNER_TOKEN", "value": "a secret"}]}}, "/runner/extraEnv/0/name"),
        ({"runner": {"scaling": {"kind": "magic"}}}, "/runner/scaling/kind"),
        ({"runner": {"jobs": {"enabled": True, "namespace": NAMESPACE}}}, "runner.jobs.namespace"),
        ({"algorithm": {"gpu": {"count": -1}}}, "/algorithm/gpu/count"),
        ({"algorithm": {"ranks": {"enabled": True, "namespace": NAMESPACE}}}, "algorithm.ranks.namespace"),
        ({"algorithm": {"ranks": {"enabled": "yes"}}}, "/algorithm/ranks/enabled"),
        ({"algorithm": {"settings": {"CLUSTER_PORT": 9}}}, "CLUSTER_PORT"),
        ({"algorithm": {"storage": {"size": "lots"}}}, "/algorithm/storage/size"),
        ({"secrets": {"signingKey": "a secret"}}, "signingKey"),
        ({"database": {"url": "postgresql://"}}, "url"),
        ({"tls": {"certManager": {"enabled": True}}}, "tls.certManager.issuerRef.name"),
        ({"torchrun": {"enabled": True}}, "torchrun.args"),
        ({"tls": {"enabled": False, "clientCertificates": True}}, "tls.clientCertificates"),
        ({"tls": {"enabled": False, "certManager": {"enabled": True, "issuerRef": {"name": "x"}}}}, "tls.certManager"),
        ({"runner": {"scaling": {"kind": "hpa", "minReplicas": 0}}}, "runner.scaling.minReplicas"),
        ({"runner": {"scaling": {"minReplicas": 30}}}, "runner.scaling.maxReplicas"),
        ({"store": {"autoscaling": {"minReplicas": 9}}}, "store.autoscaling.maxReplicas"),
        ({"llmProxy": {"autoscaling": {"minReplicas": 9}}}, "llmProxy.autoscaling.maxReplicas"),
        ({"algorithm": {"maxEngines": 1}}, "algorithm.maxEngines"),
        ({"engines": {"enabled": True}}, "engines.tokenSecret"),
        ({"engines": {"enabled": True, "tokenSecret": "x"}, "algorithm": {"enabled": False}}, "algorithm.enabled"),
        ({"engines": {"replicas": 64}}, "/engines/replicas"),
        ({"engines": {"enabled": True, "tokenSecret": "x", "scaling": {"kind": "keda"}}}, "engines.scaling.keda"),
        (
            {"engines": {"enabled": True, "tokenSecret": "x", "scaling": {"minReplicas": 9}}},
            "engines.scaling.maxReplicas",
        ),
        ({"engines": {"scaling": {"keda": {"policy": 'x"}) or vector(9'}}}}, "/engines/scaling/keda/policy"),
        ({"collector": {"endpoint": "collector:4317"}}, "/collector/endpoint"),
        ({"collector": {"endpoint": "http://collector"}}, "/collector/endpoint"),
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values: dict[str, Any], named: str) -> None:
    done = helm("template", values, "--namespace", NAMESPACE)
    assert done.returncode == 1
    assert named in done.stderr


def test_every_value_is_in_the_schema_and_explained() -> None:
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    sections = {line.partition(":")[0] for line in text.splitlines() if re.match(r"[a-z]", line, re.IGNORECASE)}
    assert sections == schema["properties"].keys() - {"global"}
    # Helm reads the schema too, but only of what is given; this is of the schema itself.
    for path, found in objects_of(schema):
        assert "additionalProperties" in found or path.endswith(("/affinity", "/global", "/valueFrom", "/objects/items")), path  # fmt: skip


def objects_of(schema: Mapping[str, Any], path: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    found = [(path, schema)] if schema.get("type") == "object" else []
    for key, part in schema.items():
        if isinstance(part, dict):
            found += objects_of(part, f"{path}/{key}" if key not in {"properties", "definitions"} else path)
    return found


def test_prometheus_calls_the_jobs_as_alerts_and_dashboards_do() -> None:
    endpoints = render(VALUES["everything"]).one("ServiceMonitor")["spec"]["endpoints"]
    assert [each["port"] for each in endpoints] == ["metrics"]
    alerts = (CHART.parent.parent / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
    for component in ("store", "llm-proxy", "runner", "algorithm"):
        job = component
        for rule in endpoints[0]["relabelings"]:
            job = rule["replacement"] if job == rule.get("regex") else job
        assert re.search(rf"[\"|]{job}[\"|]", alerts)
