"""NetworkPolicies of the chart: between every two pods exactly the connections of the architecture, and no others.

A connection is possible if a policy of its source lets it out and one of its destination lets it in; both say the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.support.deploy.helm_chart import VALUES, Manifests, component_of, render

PORTS = [
    53,
    80,
    443,
    5432,
    6443,
    7101,
    7102,
    7103,
    7104,
    7200,
    7201,
    7301,
    7302,
    7303,
    7309,
    *range(7310, 7314),
    7401,
    7402,
    7501,
    7502,
    7510,
]

# Who calls whom at which port, as ARCHITECTURE.md says.
FLOWS = {
    ("store", "store", 7101),
    ("llm-proxy", "store", 7101),
    ("runner", "store", 7101),
    ("runner", "store", 7103),
    ("algorithm", "store", 7101),
    ("runner", "llm-proxy", 7200),
    ("runner", "llm-proxy", 7201),
    ("algorithm", "llm-proxy", 7201),
    ("llm-proxy", "algorithm", 7310),
    ("llm-proxy", "algorithm", 7311),
    ("llm-proxy", "algorithm", 7312),
    ("algorithm", "algorithm", 7301),
    ("console", "store", 7101),
    ("console", "llm-proxy", 7201),
    ("console", "algorithm", 7301),
    ("test", "store", 7101),
    ("test", "llm-proxy", 7201),
    ("test", "algorithm", 7301),
}

ENGINE_FLOWS = {
    ("engine", "store", 7101),
    ("engine", "algorithm", 7301),
    ("engine", "engine", 7501),
    ("llm-proxy", "engine", 7510),
}


def pods_of(release: Manifests) -> dict[str, dict[str, str]]:
    return {component_of(owner): metadata["labels"] for owner, metadata, _ in release.pods()}


def policies_of(release: Manifests, labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for policy in release.of("NetworkPolicy"):
        if policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items():
            yield policy["spec"]


def lets(rule: Mapping[str, Any], side: str, labels: Mapping[str, str], port: int) -> bool:
    """True if a rule lets a pod of the release's namespace through, at a TCP port."""
    ports = rule.get("ports")
    if ports and not any(
        each.get("protocol", "TCP") == "TCP" and each["port"] <= port <= each.get("endPort", each["port"])
        for each in ports
    ):
        return False
    peers = rule.get(side)
    if not peers:
        return True
    return any(
        "podSelector" in peer and "namespaceSelector" not in peer
        and peer["podSelector"]["matchLabels"].items() <= labels.items()
        for peer in peers
    )  # fmt: skip


def lets_out(release: Manifests, source: Mapping[str, str], target: Mapping[str, str], port: int) -> bool:
    """True if a rule of the source names the target. Rules to anywhere have a test of their own."""
    rules = [rule for spec in policies_of(release, source) for rule in spec.get("egress") or [] if "to" in rule]
    return any(lets(rule, "to", target, port) for rule in rules)


def lets_in(release: Manifests, source: Mapping[str, str], target: Mapping[str, str], port: int) -> bool:
    rules = [rule for spec in policies_of(release, target) for rule in spec.get("ingress") or []]
    return any(lets(rule, "from", source, port) for rule in rules)


def flows_of(release: Manifests) -> set[tuple[str, str, int]]:
    """Returns what is possible; each side says the same, so that neither is wider than the other."""
    pods = pods_of(release)
    every = [(source, target, port) for source in pods for target in pods for port in PORTS]
    out = {flow for flow in every if lets_out(release, pods[flow[0]], pods[flow[1]], flow[2])}
    into = {flow for flow in every if lets_in(release, pods[flow[0]], pods[flow[1]], flow[2])}
    assert out == into
    return out


def test_pods_reach_one_another_as_the_architecture_says_and_not_otherwise() -> None:
    assert flows_of(render(VALUES["default"])) == FLOWS
    assert flows_of(render(VALUES["engines"])) == FLOWS | ENGINE_FLOWS


def test_agents_spans_have_a_port_of_their_own_where_certificates_are_asked_for() -> None:
    torchrun = {("torchrun", "torchrun", port) for port in PORTS}
    assert flows_of(render(VALUES["everything"])) == FLOWS | ENGINE_FLOWS | {("runner", "store", 7104)} | torchrun


def test_ranks_of_torchrun_reach_one_another_and_nobody_else() -> None:
    flows = flows_of(render(VALUES["gpu-nodes"]))
    assert {flow for flow in flows if "torchrun" in flow[:2]} == {("torchrun", "torchrun", port) for port in PORTS}
    assert {flow for flow in flows if "torchrun" not in flow[:2]} == FLOWS


@pytest.mark.parametrize("case", [case for case in VALUES if case != "small"])
def test_every_pod_is_closed_but_for_its_rules(case: str) -> None:
    release = render(VALUES[case])
    for component, labels in pods_of(release).items():
        found = list(policies_of(release, labels))
        assert {"policyTypes": ["Ingress", "Egress"], "podSelector": found[0]["podSelector"]} in found
        # Its own, and the one for all.
        assert len(found) == 2, component
    assert release.of("NetworkPolicy")
    assert not render(VALUES["small"]).of("NetworkPolicy")


def test_what_leaves_the_release_is_names_and_the_database() -> None:
    release = render(VALUES["default"])
    for component, labels in pods_of(release).items():
        anywhere = [
            port["port"]
            for spec in policies_of(release, labels)
            for rule in spec.get("egress") or []
            if "to" not in rule
            for port in rule["ports"]
        ]
        assert anywhere == [53, 53, *([5432] if component in {"store", "migration"} else [])], component


def test_who_else_gets_in_is_said_in_the_values() -> None:
    release = render(VALUES["default"])
    keda = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}
    assert strangers(release) == {}
    assert strangers(render(VALUES["keda"])) == {"store": [(str(keda), [7101])]}
    tools, prometheus, agents, ranks, ray = (
        str({"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}})
        for name in ("tools", "monitoring", "fulmen-agents", "fulmen-ranks", "ray")
    )
    assert strangers(render(VALUES["everything"])) == {
        "store": [
            (agents, [7101]), (tools, [7101]), (str(keda), [7101]), (agents, [7103, 7104]), (tools, [7103, 7104]),
            (prometheus, [7102]),
        ],
        "llm-proxy": [(agents, [7200]), (tools, [7200]), (tools, [7201]), (prometheus, [7202])],
        "runner": [(tools, [7401]), (prometheus, [7402])],
        "algorithm": [(tools, [7301]), (prometheus, [7302]), (ranks, [7303]), (ray, [7303])],
        "console": [(tools, [7500]), (prometheus, [7502])],
        "engine": [(prometheus, [7502])],
    }  # fmt: skip


def strangers(release: Manifests) -> dict[str, list[tuple[str, list[int]]]]:
    """Returns the peers outside the release that get in, with the ports, by component."""
    found: dict[str, list[tuple[str, list[int]]]] = {}
    for component, labels in pods_of(release).items():
        for spec in policies_of(release, labels):
            for rule in spec.get("ingress") or []:
                for peer in rule["from"]:
                    if "podSelector" not in peer:
                        found.setdefault(component, []).append((str(peer), [port["port"] for port in rule["ports"]]))
    return found


def test_a_database_elsewhere_and_further_ways_out() -> None:
    release = render(VALUES["everything"])
    database = {"to": [{"ipBlock": {"cidr": "10.9.0.0/16"}}], "ports": [{"port": 6432}]}
    for component in ("store", "migration"):
        [spec] = [spec for spec in policies_of(release, pods_of(release)[component]) if "egress" in spec]
        assert database in spec["egress"]
    [runner] = [spec for spec in policies_of(release, pods_of(release)["runner"]) if "egress" in spec]
    # The API server, for Jobs: no selector finds it.
    api_server = {"ports": [{"port": 443}, {"port": 6443}]}
    assert runner["egress"][-2:] == [api_server, {"ports": [{"port": 443}]}]
    [algorithm] = [spec for spec in policies_of(release, pods_of(release)["algorithm"]) if "egress" in spec]
    assert api_server in algorithm["egress"]


def test_every_service_tells_the_collector_and_may_reach_it() -> None:
    release = render(VALUES["everything"])
    to_it = {
        "ports": [{"port": 4317}],
        "to": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
    }
    reaching = set()
    for component, labels in pods_of(release).items():
        reaching |= {component for spec in policies_of(release, labels) if to_it in (spec.get("egress") or [])}
    telling = {
        component_of(owner): variable["value"]
        for owner, _, spec in release.pods()
        for container in spec["containers"]
        for variable in container.get("env", [])
        if variable["name"].endswith("_OTLP_ENDPOINT")
    }
    services = {"store", "llm-proxy", "runner", "algorithm", "console", "engine"}
    assert telling == dict.fromkeys(services, "https://otel-collector.monitoring:4317")
    assert reaching == services
    at_any_address = render({"collector": {"endpoint": "http://10.0.0.7:14317"}})
    [store] = [spec for spec in policies_of(at_any_address, pods_of(at_any_address)["store"]) if "egress" in spec]
    assert {"ports": [{"port": 14317}]} in store["egress"]
