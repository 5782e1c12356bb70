"""The number of engines that the Helm chart has KEDA set."""

from __future__ import annotations

import re

import pytest

from fulmen_algorithm.engines.proxy_admin import backend_id
from tests.support.deploy.helm_chart import VALUES, render


def test_engines_are_as_many_as_the_attempts_of_their_policy_need() -> None:
    scaled = render(VALUES["engines"]).one("ScaledObject", "engine")["spec"]
    deployment = render(VALUES["engines"]).one("Deployment", "engine")
    assert scaled["scaleTargetRef"] == {"name": deployment["metadata"]["name"]}
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 47)
    [trigger] = scaled["triggers"]
    assert trigger["metricType"] == "AverageValue"
    # Those that fit into the one engine of the run's settings are no reason for another one.
    assert trigger["metadata"]["query"] == (
        'clamp_min(sum(fulmen_llm_proxy_backend_attempts{backend=~"engine([.][0-9]+)?-solver"}) - 93, 0)'
    )
    assert trigger["metadata"]["threshold"] == "93"
    assert render(VALUES["everything"]).one("Deployment", "engine")["spec"]["replicas"] == 1


@pytest.mark.parametrize("place", [0, 1, 64, 127])
def test_the_query_of_engines_finds_the_backends_of_their_policy_and_of_no_other(place: int) -> None:
    query = render(VALUES["engines"]).one("ScaledObject", "engine")["spec"]["triggers"][0]["metadata"]["query"]
    found = re.search(r'backend=~"([^"]*)"', query)
    assert found is not None
    assert re.fullmatch(found[1], backend_id("engine", "solver", place))
    assert not re.fullmatch(found[1], backend_id("engine", "other-solver", place))
    longest = "s" * 44
    assert backend_id("engine", longest, place).endswith(longest)
