"""The OpenAPI description says what the console answers, and every rpc is forwarded or left out for a reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor

from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_console.gateway.methods import FORWARDED, LEFT_OUT, Target, forwarded_methods
from fulmen_service_kit.security.permissions import RULES
from tests.support.console import ROLLOUTS, console_of
from tests.support.store.running import running_store

ROOT = Path(__file__).parents[2]


def test_it_is_as_the_protos_say() -> None:
    subprocess.run([sys.executable, ROOT / "tools/openapi.py", "--check"], check=True, timeout=60)


def services() -> list[ServiceDescriptor]:
    """Returns every service of the permissions' table that is Fulmen's."""
    names = {action[1:].rpartition("/")[0] for action in RULES if action.startswith("/fulmen.")}
    return [descriptor_pool.Default().FindServiceByName(name) for name in sorted(names)]


def test_every_rpc_is_forwarded_or_left_out_for_a_reason() -> None:
    import fulmen_algorithm.app  # noqa: F401  # imported for their protos
    import fulmen_llm_proxy.app  # noqa: F401
    import fulmen_runner.app  # noqa: F401
    import fulmen_store.app  # noqa: F401

    offered = {service.full_name for each in FORWARDED.values() for service in each}
    left_out = {service.full_name for service in services() if service.full_name in LEFT_OUT}
    assert {service.full_name for service in services()} == offered | left_out
    assert not offered & left_out
    known = {method.full_name for service in services() for method in service.methods} | left_out
    assert LEFT_OUT.keys() <= known


def test_no_stream_of_requests_is_forwarded() -> None:
    assert not [method.full_name for each in Target for method in forwarded_methods(each) if method.client_streaming]


async def test_answers_are_as_it_says(database_url: str) -> None:
    async with running_store(database_url) as store, console_of(store) as browser:
        described = (await browser.send("GET", "/openapi.json")).body
        stubs = await store.stubs()
        rollout = rollout_pb2.Rollout(project="projects/default", metadata={"a": "b"}, input=b"x", priority=3)
        await stubs.rollouts.BatchCreateRollouts(pb.BatchCreateRolloutsRequest(rollouts=[rollout]))
        answer = await browser.call(f"{ROLLOUTS}/ListRollouts", token=store.token())
        assert len(answer.body["rollouts"]) == 1
        schemas = described["components"]["schemas"]
        closed = {
            name: schema | ({"additionalProperties": False} if "properties" in schema else {})
            for name, schema in schemas.items()
        }
        named = described["paths"][f"/{ROLLOUTS}/ListRollouts"]["post"]["responses"]["200"]["content"]
        reference = named["application/json"]["schema"]["$ref"]
        whole: dict[str, Any] = {"$ref": reference, "components": {"schemas": closed}}
        jsonschema.validate(json.loads(json.dumps(answer.body)), whole, cls=jsonschema.Draft202012Validator)
