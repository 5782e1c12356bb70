"""Names of rollouts that people shorten."""

from __future__ import annotations

import base64
import json

import pytest

from fulmen_cli.connection import Connection
from fulmen_cli.rollout.listing import rollout_name

UUID = "0192f0c1-7a6e-7c53-9f3e-0123456789ab"


def connection(project: str | None) -> Connection:
    """Returns a connection with a token that is bound to a project, or with none."""
    if project is None:
        return Connection(store_target="127.0.0.1:1")
    payload = base64.urlsafe_b64encode(json.dumps({"prj": project, "exp": 0}).encode()).rstrip(b"=").decode()
    return Connection(token=f"e30.{payload}.signature")


@pytest.mark.parametrize(
    ("bound_to", "project"),
    [("projects/a", "projects/a"), ("projects/*", "projects/default"), (None, "projects/default")],
)
def test_a_bare_uuid_is_completed_with_the_project_of_the_token(bound_to: str | None, project: str) -> None:
    caller = connection(bound_to)
    assert rollout_name(UUID, caller) == f"{project}/rollouts/{UUID}"
    assert rollout_name(f"{UUID}/attempts/2", caller) == f"{project}/rollouts/{UUID}/attempts/2"
    assert rollout_name(f"projects/b/rollouts/{UUID}", caller) == f"projects/b/rollouts/{UUID}"
