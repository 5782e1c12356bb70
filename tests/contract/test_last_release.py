"""Clients of the last release work with the new store, and every contract that was released still holds."""

from __future__ import annotations

import asyncio
import importlib
import json
import pkgutil
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
import zstandard
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, MethodDescriptor
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fulmen.ids import runner_name, uuid7
from tests.support.last_release import OldClient, descriptors, old_token
from tests.support.store.running import LIMIT_S, SIGNING_KEY, StoreHandle, running_store

PACKAGES = (
    "fulmen.store.v1", "fulmen.errors.v1", "fulmen.type.v1", "fulmen.runner.v1", "fulmen.llm_proxy.v1",
    "fulmen.algorithm.v1",
)  # fmt: skip
# Importing a file puts it into the default pool.
for _package in PACKAGES:
    for _module in pkgutil.iter_modules(importlib.import_module(_package).__path__):
        if _module.name.endswith("_pb2"):
            importlib.import_module(f"{_package}.{_module.name}")
Released = Descriptor | EnumDescriptor | MethodDescriptor


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a running store."""
    async with running_store(database_url) as handle:
        yield handle


@pytest.fixture
async def channel(store: StoreHandle) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a plain channel."""
    async with grpc.aio.insecure_channel(store.target) as opened:
        yield opened


@pytest.fixture
def trainer(channel: grpc.aio.Channel) -> OldClient:
    """Returns an algorithm service of the last release."""
    return OldClient(channel, old_token(SIGNING_KEY, "service"))


@pytest.fixture
def runner(channel: grpc.aio.Channel) -> OldClient:
    """Returns a runner of the last release."""
    return OldClient(channel, old_token(SIGNING_KEY, "runner"))


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_that_was_released_is_still_there(package: str) -> None:
    released = list(descriptors(package))
    assert released
    assert not [problem for each in released for problem in _problems(each)]


def test_a_change_of_what_was_released_is_noticed() -> None:
    lease = next(each for each in descriptors("fulmen.store.v1") if each.name == "Assignment")
    other = next(each for each in descriptors("fulmen.store.v1") if each.name == "AttemptResult")
    assert isinstance(lease, Descriptor)
    assert isinstance(other, Descriptor)
    assert list(_field_problems(lease, other))


async def test_the_whole_life_of_a_rollout(trainer: OldClient, runner: OldClient) -> None:
    rollouts = [
        {"group_id": "g", "group_size": 2, "input": b"1", "policy": {"max_attempts": 2, "retry_backoff": {"nanos": 1}}},
        {"group_id": "g", "group_size": 2, "input": b"2"},
    ]
    created = await trainer.call("RolloutService.BatchCreateRollouts", rollouts=rollouts, request_id="first")
    again = await trainer.call("RolloutService.BatchCreateRollouts", rollouts=rollouts, request_id="first")
    names = [rollout.name for rollout in created.rollouts]
    assert [rollout.name for rollout in again.rollouts] == names
    stream = runner.stream("LeaseService.StreamLeases")
    await stream.send(open={"info": {"host": "old", "version": "0.1.0", "slot_count": 2}})
    opened = (await stream.read()).opened
    assert opened.runner
    await stream.send(add_credits={"credit_count": 3})
    taken = []
    while len(taken) < 2:
        taken += (await stream.expect("assign")).assignments
    assert {(one.rollout.name, one.rollout.input, one.epoch) for one in taken} == {
        (names[0], b"1", 1),
        (names[1], b"2", 1),
    }
    failing = next(one for one in taken if one.rollout.name == names[0])
    good = next(one for one in taken if one.rollout.name == names[1])
    infra = runner.number("FailureKind", "FAILURE_KIND_INFRA")
    await stream.send(renew={})
    await stream.send(
        complete={"results": [_result(failing, failure_kind=infra), _result(good, rewards=[{"value": 0.5}])]}
    )
    assert [ack.status for ack in (await stream.expect("ack")).acks] == [1, 1]
    (retried,) = (await stream.expect("assign")).assignments
    assert (retried.rollout.name, retried.epoch) == (names[0], 2)
    held = await runner.call("LeaseService.RenewLeases", runner=opened.runner)
    assert held.lease_ttl.seconds > 0
    answer = await runner.call("LeaseService.CompleteAttempts", results=[_result(retried)])
    assert [ack.status for ack in answer.acks] == [1]
    answer = await runner.call("LeaseService.CompleteAttempts", results=[_result(retried), _result(failing)])
    assert [ack.status for ack in answer.acks] == [2, 3]
    await stream.close()

    watch = trainer.watch("RolloutService.WatchRollouts")
    (group,) = (await watch.read()).groups
    watch.cancel()
    assert (group.group_id, sorted(rollout.name for rollout in group.rollouts)) == ("g", sorted(names))
    shown = (await trainer.call("RolloutService.GetRollout", name=names[0])).rollout
    assert [(attempt.failure_kind, attempt.final) for attempt in shown.attempts] == [(infra, False), (0, True)]
    listed = await trainer.call("RolloutService.ListRollouts", states=[shown.state], page_size=1)
    assert len(listed.rollouts) == 1
    assert listed.next_page_token


async def test_simple_clients_cancel_and_run_again(trainer: OldClient, runner: OldClient) -> None:
    created = await trainer.call("RolloutService.BatchCreateRollouts", rollouts=[{}, {}])
    given = await runner.call("LeaseService.AcquireLeases", max_count=1, wait={"seconds": 10}, info={"host": "old"})
    (one,) = given.assignments
    counts = await trainer.call("RolloutService.CancelRollouts", names=[rollout.name for rollout in created.rollouts])
    assert (counts.cancelled_count, counts.cancelling_count) == (1, 1)
    renewed = await runner.call("LeaseService.RenewLeases", runner=given.runner)
    assert list(renewed.cancelled_attempts) == [one.attempt]
    cancelled = runner.number("FailureKind", "FAILURE_KIND_CANCELLED")
    await runner.call("LeaseService.CompleteAttempts", results=[_result(one, failure_kind=cancelled)])
    again = await trainer.call("RolloutService.RetryRollouts", names=[one.rollout.name], request_id="again")
    assert again.rollouts[0].metadata["fulmen.retry_of"] == one.rollout.name
    stats = await trainer.call("RolloutService.GetQueueStats")
    assert stats.queued_count == 1


async def test_spans_of_an_old_runner_are_read_by_an_old_trainer(trainer: OldClient, runner: OldClient) -> None:
    (rollout,) = (await trainer.call("RolloutService.BatchCreateRollouts", rollouts=[{}])).rollouts
    attempt = f"{rollout.name}/attempts/1"
    batch = runner.message("SpanBatch", spans=[{"otlp_span": b"", "scope": "old"}])
    chunk = {
        "attempt": attempt,
        "chunk_id": str(uuid7()),
        "span_count": 1,
        "codec": runner.number("SpanCodec", "SPAN_CODEC_ZSTD"),
        "payload": zstandard.ZstdCompressor().compress(batch.SerializeToString()),
    }
    stream = runner.stream("SpanService.AppendSpans")
    await stream.send(chunks=[chunk])
    assert (await stream.read()).accepted_count == 1
    await stream.close()
    read = [
        one async for message in trainer.watch("SpanService.StreamSpans", parents=[attempt]) for one in message.chunks
    ]
    assert [(one.attempt, one.payload) for one in read] == [(attempt, chunk["payload"])]
    listed = await trainer.call("SpanService.ListSpans", parent=rollout.name)
    assert [one.span.scope for one in listed.spans] == ["old"]


async def test_resources_of_an_old_trainer(trainer: OldClient, runner: OldClient) -> None:
    watch = runner.watch("ResourceService.WatchResources", id_prefix="policy.")
    contents = [json.dumps({"path": f"/models/{number}"}).encode() for number in (1, 2)]
    for content in contents:
        resource = {"name": "resources/policy.p", "kind": "policy", "content": content, "metadata": {"step": "1"}}
        await trainer.call("ResourceService.PublishResources", resources=[resource], request_id=content.decode())
    name = "resources/policy.p/aliases/stable"
    moved = (await trainer.call("ResourceService.SetAlias", name=name, version=2)).alias
    back = (await trainer.call("ResourceService.SetAlias", name=name, version=1, etag=moved.etag)).alias
    assert back.version == 1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await trainer.call("ResourceService.SetAlias", name=name, version=2, etag=moved.etag)
    assert _reason(refused.value) == "ETAG_MISMATCH"
    found = await runner.call("ResourceService.GetResources", names=[name, "resources/policy.p"])
    assert [(one.version, one.content) for one in found.resources] == [(1, contents[0]), (2, contents[1])]
    versions = await trainer.call("ResourceService.ListResourceVersions", parent="resources/policy.p")
    assert [one.version for one in versions.resources] == [2, 1]
    seen: set[tuple[str, int]] = set()
    async with asyncio.timeout(LIMIT_S):
        while ("stable", 1) not in seen:
            message = await watch.read()
            seen |= {(alias.name.rpartition("/")[2], alias.version) for alias in message.aliases}
    watch.cancel()


async def test_errors_are_those_that_an_old_client_knows(trainer: OldClient, runner: OldClient) -> None:
    for caller, rpc, fields, code, reason in (
        (
            trainer,
            "RolloutService.GetRollout",
            {"name": f"projects/default/rollouts/{uuid7()}"},
            "NOT_FOUND",
            "ROLLOUT_NOT_FOUND",
        ),
        (trainer, "RolloutService.BatchCreateRollouts", {}, "INVALID_ARGUMENT", "ARGUMENT_INVALID"),
        (runner, "LeaseService.RenewLeases", {"runner": runner_name(uuid7())}, "FAILED_PRECONDITION", "SESSION_ENDED"),
        (runner, "RolloutService.BatchCreateRollouts", {"rollouts": [{}]}, "PERMISSION_DENIED", "PERMISSION_DENIED"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await caller.call(rpc, **fields)
        assert (refused.value.code().name, _reason(refused.value)) == (code, reason)


def _result(one: object, **fields: object) -> dict[str, object]:
    return {"attempt": one.attempt, "lease_id": one.lease_id, "epoch": one.epoch, **fields}  # type: ignore[attr-defined]


def _reason(error: grpc.aio.AioRpcError) -> str:
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers[rpc_status.GRPC_DETAILS_METADATA_KEY])
    for detail in status.details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def _problems(released: Released) -> Iterator[str]:
    pool = descriptor_pool.Default()
    try:
        match released:
            case MethodDescriptor():
                yield from _method_problems(released, pool.FindMethodByName(released.full_name))
            case Descriptor():
                yield from _field_problems(released, pool.FindMessageTypeByName(released.full_name))
            case EnumDescriptor():
                now = {value.name: value.number for value in pool.FindEnumTypeByName(released.full_name).values}
                yield from (f"{one.name} has changed" for one in released.values if now.get(one.name) != one.number)
    except KeyError:
        yield f"{released.full_name} is gone"


def _method_problems(released: MethodDescriptor, now: MethodDescriptor) -> Iterator[str]:
    for old, new in ((released.input_type, now.input_type), (released.output_type, now.output_type)):
        if old.full_name != new.full_name:
            yield f"{released.full_name} takes or returns another message"
    if (released.client_streaming, released.server_streaming) != (now.client_streaming, now.server_streaming):
        yield f"{released.full_name} streams otherwise"


def _field_problems(released: Descriptor, now: Descriptor) -> Iterator[str]:
    for old in released.fields:
        new = now.fields_by_name.get(old.name)
        if new is None or _wire(old) != _wire(new):
            yield f"{old.full_name} has changed"
    for nested in released.nested_types:
        yield from _field_problems(nested, now.nested_types_by_name[nested.name])


def _wire(field: FieldDescriptor) -> tuple[object, ...]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof is not None else ""
    return field.number, field.type, field.is_repeated, kind.full_name if kind is not None else "", oneof
