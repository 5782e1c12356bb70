"""The table of permissions names every rpc that is served, and nothing else; the audit log names fields that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pool

import fulmen_algorithm.app
import fulmen_llm_proxy.app
import fulmen_runner.app
import fulmen_store.app
from fulmen_service_kit.security.permissions import RULES

# What changes how a deployment works begins with one of these; what the data plane does all the time is left out.
ADMINISTRATIVE = (
    *("Put", "Set", "Register", "Drain", "Resume", "Delete", "Promote", "Rollback"),
    *("Issue", "Revoke", "Update", "Create"),
)
NOT_ADMINISTRATIVE = {
    "/fulmen.store.v1.RolloutService/StreamCreateRollouts",
    # Each score carries its author.
    "/fulmen.store.v1.AnnotationService/CreateAnnotation",
    # The proxy's, for each call of an agent.
    "/fulmen.store.v1.StoredResponseService/PutStoredResponse",
    "/fulmen.store.v1.StoredResponseService/DeleteStoredResponse",
}
SERVICES = (
    *fulmen_store.app.SERVICE_NAMES,
    *fulmen_llm_proxy.app.SERVICE_NAMES,
    *fulmen_algorithm.app.SERVICE_NAMES,
    *fulmen_runner.app.SERVICE_NAMES,
)
AUDITED = {rpc: rule.audited for rpc, rule in RULES.items() if rule.audited is not None}


def served() -> set[str]:
    """Returns every rpc of every service, such as `/fulmen.store.v1.ProjectService/IssueToken`."""
    pool = descriptor_pool.Default()
    return {f"/{name}/{method.name}" for name in SERVICES for method in pool.FindServiceByName(name).methods}


def test_every_served_rpc_has_a_rule_and_no_rule_is_left_over() -> None:
    assert {action for action in RULES if action.startswith("/")} == served()


@pytest.mark.parametrize("rpc", AUDITED)
def test_the_audit_log_names_fields_of_the_request(rpc: str) -> None:
    service, _, name = rpc.lstrip("/").partition("/")
    for path in AUDITED[rpc]:
        message = descriptor_pool.Default().FindServiceByName(service).methods_by_name[name].input_type
        for part in path.split("."):
            message = message.fields_by_name[part].message_type


def test_every_administrative_rpc_is_audited() -> None:
    administrative = {rpc for rpc in served() if rpc.rpartition("/")[2].startswith(ADMINISTRATIVE)}
    assert administrative - set(AUDITED) - NOT_ADMINISTRATIVE == set()


def test_the_table_in_the_documentation_is_current(repository_root: Path) -> None:
    subprocess.run([sys.executable, "tools/permissions_table.py", "--check"], cwd=repository_root, check=True)
