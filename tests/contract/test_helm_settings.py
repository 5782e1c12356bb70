"""What the chart sets, each service accepts: rendered variables are read by the services' own settings classes.

Secrets are files here as they are in a pod; Helm renders the chart (tools/helm_toolchain.sh).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from fulmen_algorithm.cluster.settings import KubernetesSettings
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.transport.join_streams import LEAVE_LIMIT_S
from fulmen_algorithm.weight_agent.settings import WeightAgentSettings
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.settings import ServiceSettings, is_loopback
from fulmen_store.settings import StoreSettings
from tests.support.deploy.helm_chart import NAMESPACE, VALUES, Manifests, component_of, render
from tools.helm_settings import CHART, CLASSES, with_names

SERVICES: dict[str, type[ServiceSettings]] = {str(each.model_config["env_prefix"]): each for each in CLASSES.values()}
COMPONENTS = {"store": "FULMEN_STORE_", "llm-proxy": "FULMEN_LLM_PROXY_", "runner": "FULMEN_RUNNER_",
              "algorithm": "FULMEN_ALGORITHM_", "console": "FULMEN_CONSOLE_", "engine": "FULMEN_WEIGHT_AGENT_"}  # fmt: skip
FILES = {
    "/etc/fulmen/database/url": "postgresql://fulmen:pass@database.example.com:5432/fulmen",
    "/etc/fulmen/secrets/cache-url": "rediss://:pass@redis.example.com:6379/0",
    "/etc/fulmen/secrets/signing-key": "k" * 64,
    "/etc/fulmen/secrets/console-session-key": "s" * 43,
    "/etc/fulmen/secrets/attempt-key-secret": "a" * 43,
    "/etc/fulmen/secrets/backend-keys": '{"engine": {"key": "an engine\'s token", "hosts": ["*"]}}',
}
OTHER_FILE = "a token"
# What the cluster would put there.
KNOWN = {"POD_IP": "10.1.2.3", "POD_NAME": "fulmen-algorithm-0"}


def variables_of(release: Manifests, component: str) -> dict[str, str]:
    [container] = [
        c for owner, _, c in release.containers() if component_of(owner) == component and c["name"] == component
    ]
    return expanded(container)


def expanded(container: dict[str, Any]) -> dict[str, str]:
    names = [variable["name"] for variable in container["env"]]
    # One that stands twice is refused by server-side apply.
    assert len(set(names)) == len(names)
    found: dict[str, str] = {}
    for variable in container["env"]:
        value = KNOWN.get(variable["name"], "a secret") if "valueFrom" in variable else variable["value"]
        for name, known in found.items():
            value = value.replace(f"$({name})", known)
        assert "$(" not in value
        found[variable["name"]] = value
    return found


def accepted(variables: dict[str, str], prefix: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> ServiceSettings:
    """Reads variables as the service would; the files that they name are made in a folder."""
    for name, value in variables.items():
        path = folder / value.lstrip("/")
        if name.startswith(prefix) and name.endswith("_FILE"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(FILES.get(value, OTHER_FILE), encoding="utf-8")
            value = str(path)
        monkeypatch.setenv(name, value)
    return SERVICES[prefix].from_environment()


@pytest.mark.parametrize("component", [*COMPONENTS, "migration"])
@pytest.mark.parametrize("case", VALUES)
def test_services_know_every_variable(
    case: str, component: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = render(VALUES[case])
    if component not in {component_of(owner) for owner, _, _ in release.pods()}:
        assert case == "small" or (component == "engine" and case not in {"engines", "everything"})
        return
    prefix = COMPONENTS.get(component, "FULMEN_STORE_")
    variables = variables_of(release, component)
    strange = {name for name in variables if name.startswith("FULMEN_") and not name.startswith(prefix)}
    assert strange <= {"FULMEN_SCALER_TOKEN"}
    # Raises if a variable of its prefix is no setting of the service, or a value is not one that it takes.
    settings = accepted(variables, prefix, monkeypatch, tmp_path)
    if component == "migration":
        return
    [container] = [
        c for owner, _, c in release.containers() if component_of(owner) == component and c["name"] == component
    ]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.port == ports["grpc"]
    # The proxy has its metrics at its HTTP port.
    assert settings.metrics_port == ports.get("metrics", 0)
    assert getattr(settings, "http_port", None) == ports.get("http", ports.get("otlp-http"))
    assert settings.agents_port == ports.get("otlp-grpc", 0)
    assert not is_loopback(settings.host)
    assert not settings.dev_mode
    assert (
        (settings.own_tls() is not None)
        is (settings.peer_tls() is not None)
        is VALUES[case].get("tls", {}).get("enabled", True)
    )


def test_values_arrive_as_they_were_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    release = render(VALUES["everything"])
    proxy = accepted(variables_of(release, "llm-proxy"), "FULMEN_LLM_PROXY_", monkeypatch, tmp_path)
    assert isinstance(proxy, LlmProxySettings)
    # As Helm reads YAML, it would come out as 1.073741824e+09.
    assert (proxy.cache_bytes, proxy.workers, proxy.drain_grace_s) == (1073741824, 2, 60)
    assert proxy.cache_url.get_secret_value() == "rediss://:pass@redis.example.com:6379/0"
    assert proxy.backend_keys["engine"].key.get_secret_value() == "an engine's token"
    store = accepted(variables_of(release, "store"), "FULMEN_STORE_", monkeypatch, tmp_path)
    assert isinstance(store, StoreSettings)
    assert (store.lease_ttl_s, store.blob_url, store.auto_migrate) == (20, "s3://spans/fulmen", False)
    assert store.peer_address(7101) == "10.1.2.3:7101"
    runner = accepted(variables_of(release, "runner"), "FULMEN_RUNNER_", monkeypatch, tmp_path)
    assert isinstance(runner, RunnerSettings)
    assert (runner.slots, runner.label_map(), runner.job_namespace) == ("auto", {"gpu": "none"}, "fulmen-agents")
    assert runner.address(7401) == "10.1.2.3:7401"
    algorithm = accepted(variables_of(release, "algorithm"), "FULMEN_ALGORITHM_", monkeypatch, tmp_path)
    assert isinstance(algorithm, AlgorithmServiceSettings)
    assert isinstance(algorithm.clusters["gpus"], KubernetesSettings)
    assert (algorithm.cluster_host, algorithm.cluster_port) == ("0.0.0.0", 7303)
    # Ranks know the service by a name of its certificate.
    [certificate] = [each for each in release.of("Certificate") if component_of(each) == "algorithm"]
    names = {"algorithm": certificate["spec"]["dnsNames"]}
    assert is_certified(algorithm.cluster_advertise_host, names)
    assert is_certified(algorithm.tls_own_name, names)
    stores = variables_of(render({"migration": {"enabled": False}}), "store")
    assert stores["FULMEN_STORE_AUTO_MIGRATE"] == "true"
    assert variables_of(render({"algorithm": {"gpu": {"count": 1}}}), "algorithm")["FULMEN_ALGORITHM_DEVICE"] == "cuda"


def test_an_engine_joins_under_the_address_and_with_the_grace_of_its_pod(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    release = render(VALUES["engines"])
    agent = accepted(variables_of(release, "engine"), "FULMEN_WEIGHT_AGENT_", monkeypatch, tmp_path)
    assert isinstance(agent, WeightAgentSettings)
    assert (agent.engine_advertise_host, agent.engine_port, agent.device) == ("10.1.2.3", 7510, "cuda")
    # The service waits for so long until the engine has no calls.
    assert agent.drain_grace_s > LEAVE_LIMIT_S


@pytest.mark.parametrize("case", VALUES)
def test_targets_are_ports_that_services_serve(case: str) -> None:
    release = render(VALUES[case])
    ports = {s["metadata"]["name"]: {port["port"] for port in s["spec"]["ports"]} for s in release.of("Service")}
    sets = {s["metadata"]["name"]: s["spec"] for s in release.of("StatefulSet")}
    certified = {component_of(each): each["spec"]["dnsNames"] for each in release.of("Certificate")}
    count = 0
    for owner, _, container in release.containers():
        for name, value in expanded({"env": container.get("env", [])}).items():
            if not name.startswith("FULMEN_") or not name.endswith(("_TARGET", "_TARGETS", "_URL")) or "BLOB" in name:
                continue
            for target in value.split(","):
                address = urlsplit(target if "://" in target else f"grpc://{target}")
                *pod, service, namespace, svc = (address.hostname or "").split(".")
                assert (namespace, svc) == (NAMESPACE, "svc"), (component_of(owner), name)
                assert address.port in ports[service], (component_of(owner), name)
                if pod:
                    [workload, number] = pod[0].rsplit("-", 1)
                    assert sets[workload]["serviceName"] == service
                    assert int(number) < sets[workload].get("replicas", 2)
                if certified:
                    assert is_certified(address.hostname or "", certified), address.hostname
                if "://" in target:
                    assert address.scheme == ("https" if VALUES[case].get("tls", {}).get("enabled", True) else "http")
                count += 1
    assert count > 0


def is_certified(host: str, certified: dict[str, list[str]]) -> bool:
    wild = f"*.{host.partition('.')[2]}"
    return any(host in names or wild in names for names in certified.values())


def test_runners_ask_whichever_proxy_answers_so_that_their_number_may_follow_their_load() -> None:
    release = render(VALUES["everything"])
    target = variables_of(release, "runner")["FULMEN_RUNNER_LLM_PROXY_TARGETS"]
    proxies = release.one("StatefulSet", "llm-proxy")
    assert target.partition(".")[0] == proxies["metadata"]["name"]
    scaled = {each["spec"]["scaleTargetRef"]["name"]: each["spec"] for each in release.of("HorizontalPodAutoscaler")}
    assert scaled[proxies["metadata"]["name"]]["scaleTargetRef"]["kind"] == "StatefulSet"
    assert "replicas" not in proxies["spec"]
    # One that goes finishes its calls, and hands over what it knows of attempts.
    assert proxies["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 60 + 5 + 15


def test_replicas_know_one_another_by_a_name_of_their_certificate() -> None:
    release = render(VALUES["everything"])
    for certificate in release.of("Certificate"):
        component = component_of(certificate)
        own = variables_of(release, component)[f"{COMPONENTS[component]}TLS_OWN_NAME"]
        assert own in certificate["spec"]["dnsNames"]


def test_keda_knows_the_store_by_its_certificate() -> None:
    release = render(VALUES["everything"])
    authentication = release.one("TriggerAuthentication")
    [trigger] = release.one("ScaledObject")["spec"]["triggers"]
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    secret = release.one("Certificate", "runner")["spec"]["secretName"]
    assert {each["parameter"]: (each["name"], each["key"]) for each in authentication["spec"]["secretTargetRef"]} == {
        "caCert": (secret, "ca.crt"), "tlsClientCert": (secret, "tls.crt"), "tlsClientKey": (secret, "tls.key"),
    }  # fmt: skip
    host = trigger["metadata"]["scalerAddress"].rpartition(":")[0]
    assert is_certified(host, {"store": release.one("Certificate", "store")["spec"]["dnsNames"]})
    scaled = release.one("ScaledObject")["spec"]["scaleTargetRef"]
    deployment = release.one("Deployment", "runner")
    assert scaled == {"name": deployment["metadata"]["name"], "envSourceContainerName": "runner"}
    names = {variable["name"] for variable in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert trigger["metadata"]["tokenFromEnv"] in names
    plain = render({**VALUES["keda"], "tls": {"enabled": False}})
    assert plain.of("TriggerAuthentication") == []
    assert "authenticationRef" not in plain.one("ScaledObject")["spec"]["triggers"][0]


def test_the_schema_lists_the_settings_as_they_are() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert with_names(text) == text, "run `make helm-settings`"
    listed = json.loads(text)["definitions"]["storeSettings"]["propertyNames"]["enum"]
    assert "LEASE_TTL_S" in listed
    assert not {"PORT", "SIGNING_KEY", "DATABASE_URL", "DEV_MODE"} & set(listed)


def test_agents_come_by_a_port_without_certificates_where_the_others_ask_for_them() -> None:
    for case, port in (("tls", 7101), ("everything", 7104), ("default", 7101)):
        url = variables_of(render(VALUES[case]), "runner")["FULMEN_RUNNER_AGENTS_OTLP_URL"]
        assert urlsplit(url).port == port
