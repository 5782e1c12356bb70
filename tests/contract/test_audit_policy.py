"""What is written down of administrators' calls are fields that their requests have, of rpcs that there are."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pool

from fulmen_algorithm.app import POLICY as ALGORITHM
from fulmen_llm_proxy.app import POLICY as LLM_PROXY
from fulmen_runner.app import POLICY as RUNNER
from fulmen_service_kit.auth import RolePolicy
from fulmen_store.access_policy import ROLE_POLICY as STORE
from fulmen_store.app import build  # noqa: F401  # loads the messages of every service of the store

POLICIES = {"store": STORE, "llm_proxy": LLM_PROXY, "algorithm": ALGORITHM, "runner": RUNNER}
# What changes how a deployment works begins with one of these; what the data plane does all the time is left out.
ADMINISTRATIVE = (
    "Put",
    "Set",
    "Register",
    "Drain",
    "Resume",
    "Delete",
    "Promote",
    "Rollback",
    "Issue",
    "Revoke",
    "Update",
)


def methods_of(policy: RolePolicy) -> set[str]:
    """Returns the rpcs of the services of a policy, such as `/fulmen.store.v1.ProjectService/IssueToken`."""
    pool = descriptor_pool.Default()
    found = set()
    for service in policy.services:
        if service.startswith("fulmen."):
            found |= {f"/{service}/{method.name}" for method in pool.FindServiceByName(service).methods}
    return found


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_what_is_written_down_is_there(policy: RolePolicy) -> None:
    assert policy.audited
    assert set(policy.audited) <= methods_of(policy)
    for rpc, paths in policy.audited.items():
        service, _, name = rpc.lstrip("/").partition("/")
        for path in paths:
            message = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type
            for part in path.split("."):
                field = message.fields_by_name[part]
                message = field.message_type


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_whatever_sounds_like_administration_is_written_down(policy: RolePolicy) -> None:
    sounding = {rpc for rpc in methods_of(policy) if rpc.rpartition("/")[2].startswith(ADMINISTRATIVE)}
    assert sounding - set(policy.audited) == set()
