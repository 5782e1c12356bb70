"""The fields of a request in the audit log: lists are lists, of a bounded length, and texts are cut."""

from __future__ import annotations

from fulmen.store.v1 import resource_pb2, resource_service_pb2, rollout_service_pb2, secret_service_pb2
from fulmen_service_kit.security.audit import fields_of


def test_a_repeated_field_is_a_list_of_its_first_values() -> None:
    names = [f"projects/a/rollouts/{number}" for number in range(100)]
    request = rollout_service_pb2.CancelRolloutsRequest(names=names)
    assert fields_of(request, ("project", "names")) == {"names": names[:64]}


def test_a_path_through_a_repeated_field_is_a_list_of_its_first_values() -> None:
    versions = [resource_pb2.ResourceVersion(name=f"resources/{number}") for number in range(100)]
    request = resource_service_pb2.PublishResourcesRequest(resources=versions)
    assert fields_of(request, ("resources.name",)) == {"resources.name": [each.name for each in versions[:64]]}


def test_texts_are_cut_and_what_is_not_named_is_left_out() -> None:
    request = secret_service_pb2.SetSecretRequest(
        project="projects/a", name="x" * 1000, value=b"secret", hosts=["h" * 1000]
    )
    assert fields_of(request, ("project", "name", "hosts")) == {
        "project": "projects/a",
        "name": "x" * 256,
        "hosts": ["h" * 256],
    }
