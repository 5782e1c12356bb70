"""No message of the store is larger than 4 MiB, whatever rows hold: a gRPC client without options reads everything.

Fields are as large as their limits allow, and calls go over a channel of gRPC's defaults.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import asyncpg
import grpc.aio
import pytest
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.errors import ArgumentInvalid, MessageTooLarge
from fulmen.rpc.resource_contents import read_resources
from fulmen.rpc.services import Services
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.store.v1 import (
    lease_pb2,
    lease_service_pb2,
    resource_pb2,
    resource_service_pb2,
    rollout_pb2,
    secret_service_pb2,
    span_pb2,
    span_service_pb2,
)
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.training import following
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import LIMIT_S, Runner, StoreHandle, Stubs, get, pages_of
from tests.support.store.spans import append, packed, span

MIB = 1024 * 1024
INPUT = b"i" * 256 * 1024
OUTPUT = b"o" * 64 * 1024
MESSAGE = "m" * 4096


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """A store that accepts calls without a token."""
    return {"dev_mode": True, "host": "127.0.0.1", "lease_ttl_s": 60.0}


@pytest.fixture
async def plain(store: StoreHandle) -> AsyncIterator[Stubs]:
    """Yields stubs over a channel without any option."""
    async with grpc.aio.insecure_channel(store.target) as channel:
        yield Stubs(channel)


def full_rollout(**fields: Any) -> rollout_pb2.Rollout:
    """Returns a rollout with every field at its limit."""
    full: dict[str, Any] = {
        "input": INPUT,
        "input_content_type": "t" * 128,
        "metadata": {f"{index:03}": "v" * 1021 for index in range(32)},
        "required_labels": {f"{index:02}" + "k" * 61: "\u00e9" * 128 for index in range(16)},
        "task_type": "\u00e9" * 64,
        "policy": rollout_pb2.RolloutPolicy(max_attempts=100),
    }
    return rollout_pb2.Rollout(**(full | fields))


def full_result(assignment: lease_pb2.Assignment, **fields: Any) -> lease_pb2.AttemptResult:
    """Returns a result with every field at its limit."""
    rewards = [{"dimension": f"{index:03}" + "d" * 61, "value": 0.5, "step": 2**31 - 1} for index in range(256)]
    return lease_pb2.AttemptResult(
        attempt=assignment.attempt,
        lease_id=assignment.lease_id,
        epoch=assignment.epoch,
        failure_message=MESSAGE,
        rewards=rewards,
        output=OUTPUT,
        output_content_type="t" * 128,
        **fields,
    )


async def create_each(stubs: Stubs, rollouts: list[rollout_pb2.Rollout]) -> list[str]:
    """Creates rollouts, a few in a request, and returns their names."""
    names: list[str] = []
    for start in range(0, len(rollouts), 16):
        request = pb.BatchCreateRolloutsRequest(rollouts=rollouts[start : start + 16])
        names += [one.name for one in (await stubs.rollouts.BatchCreateRollouts(request)).rollouts]
    return names


async def read_groups(stubs: Stubs, count: int, **selection: Any) -> list[tuple[str, list[rollout_pb2.Rollout]]]:
    """Reads so many finished groups, of as many parts as they have."""
    found: list[tuple[str, list[rollout_pb2.Rollout]]] = []
    members: list[rollout_pb2.Rollout] = []
    stream = stubs.rollouts.WatchRollouts(pb.WatchRolloutsRequest(**selection))
    async with asyncio.timeout(3 * LIMIT_S):
        while len(found) < count:
            for part in (await stream.read()).groups:
                members += part.rollouts
                if part.cursor:
                    found.append((part.group_id, members))
                    members = []
    stream.cancel()
    return found


async def test_a_group_larger_than_a_message_is_read_whole_and_so_is_what_follows_it(plain: Stubs) -> None:
    labels = full_rollout().required_labels
    members = await create_each(plain, [full_rollout(group_id="large", group_size=40) for _ in range(40)])
    runner = await Runner(plain).open(labels=dict(labels))
    for assignment in await runner.take(40):
        complete = lease_service_pb2.CompleteAttemptsRequest(results=[full_result(assignment)])
        await plain.leases.CompleteAttempts(complete)
    (after,) = await create_each(plain, [rollout_pb2.Rollout()])
    await runner.complete(await runner.take(1))
    (large, rollouts), (following, _) = await read_groups(plain, 2)
    assert (large, following) == ("large", after)
    assert [one.name for one in rollouts] == sorted(members)
    assert {(one.input, one.attempts[0].output) for one in rollouts} == {(INPUT, OUTPUT)}


async def test_readers_of_python_join_the_parts_of_a_group_or_refuse_it_with_its_cursor(
    plain: Stubs, store: StoreHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = await create_each(plain, [rollout_pb2.Rollout(input=INPUT, group_id="g", group_size=9) for _ in range(9)])
    runner = await Runner(plain).open()
    await runner.complete(await runner.take(9))
    (after,) = await create_each(plain, [rollout_pb2.Rollout()])
    await runner.complete(await runner.take(1))
    services = cast("Services", await store.stubs())

    async def first(**selection: str) -> pb.FinishedGroup:
        groups = following.follow_groups(services, pb.WatchRolloutsRequest(**selection))
        async with asyncio.timeout(LIMIT_S):
            group = await anext(groups)
        await groups.aclose()
        return group

    whole = await first()
    assert (whole.group_id, whole.group_size, [one.name for one in whole.rollouts]) == ("g", 9, sorted(members))
    monkeypatch.setattr(following, "MAX_GROUP_BYTES", MIB)
    with pytest.raises(MessageTooLarge) as refused:
        await first()
    assert (refused.value.metadata["group_id"], refused.value.metadata["cursor"]) == ("g", whole.cursor)
    assert (await first(cursor=refused.value.metadata["cursor"])).group_id == after


async def test_leases_that_do_not_fit_into_an_answer_are_not_acquired(plain: Stubs) -> None:
    names = await create_each(plain, [full_rollout(required_labels={}) for _ in range(30)])
    request = lease_service_pb2.AcquireLeasesRequest(max_count=30, info=lease_pb2.RunnerInfo(host="h"))
    request.wait.seconds = 5
    leased: list[str] = []
    while len(leased) < len(names):
        answer = await plain.leases.AcquireLeases(request)
        assert 4 <= len(answer.assignments) <= 13
        leased += [one.rollout.name for one in answer.assignments]
        running = await plain.rollouts.ListRollouts(
            pb.ListRolloutsRequest(states=[rollout_pb2.ROLLOUT_STATE_RUNNING], page_size=100)
        )
        assert sorted(one.name for one in running.rollouts) == sorted(leased)
    assert sorted(leased) == sorted(names)


async def test_a_rollout_comes_with_its_latest_attempts_and_all_of_them_are_listed(plain: Stubs) -> None:
    policy = rollout_pb2.RolloutPolicy(max_attempts=40, retry_on=[1])
    policy.retry_backoff.SetInParent()
    (name,) = await create_each(plain, [full_rollout(required_labels={}, policy=policy)])
    runner = await Runner(plain).open()
    for _ in range(40):
        (assignment,) = await runner.take(1)
        failed = full_result(assignment, failure_kind=1)
        await plain.leases.CompleteAttempts(lease_service_pb2.CompleteAttemptsRequest(results=[failed]))
    rollout = await get(plain, name)
    ((_, (of_feed,)),) = await read_groups(plain, 1)
    assert [one.name.rpartition("/")[2] for one in rollout.attempts] == [str(number) for number in range(25, 41)]
    assert (rollout.ended_attempt_count, of_feed.ended_attempt_count) == (40, 40)
    assert of_feed.attempts == rollout.attempts
    pages = await pages_of(plain.rollouts.ListAttempts, pb.ListAttemptsRequest(parent=name, page_size=64))
    listed = [attempt for page in pages for attempt in page.attempts]
    assert len(pages) > 1
    assert [one.name.rpartition("/")[2] for one in listed] == [str(number) for number in range(1, 41)]
    assert listed[24:] == list(rollout.attempts)
    assert {(one.output, one.failure_message, len(one.rewards)) for one in listed} == {(OUTPUT, MESSAGE, 256)}


@pytest.mark.parametrize("order_by", ["", "priority, create_time"])
async def test_lists_of_rollouts_end_their_pages_early_and_leave_none_out(plain: Stubs, order_by: str) -> None:
    names = await create_each(plain, [full_rollout(input=b"") for _ in range(160)])
    request = pb.ListRolloutsRequest(page_size=1000, order_by=order_by)
    pages = await pages_of(plain.rollouts.ListRollouts, request)
    listed = [one.name for page in pages for one in page.rollouts]
    assert len(pages) > 1
    assert sorted(listed) == sorted(names)
    if not order_by:
        assert listed == sorted(names, reverse=True)


async def test_a_repeated_creation_is_answered_with_names_and_states(plain: Stubs) -> None:
    rollouts = [full_rollout(input=b"") for _ in range(200)]
    request = pb.BatchCreateRolloutsRequest(rollouts=rollouts, request_id="once")
    first = await plain.rollouts.BatchCreateRollouts(request)
    assert (await plain.rollouts.BatchCreateRollouts(request)).rollouts == first.rollouts
    cancelled = pb.CancelRolloutsRequest(names=[one.name for one in first.rollouts])
    await plain.rollouts.CancelRollouts(cancelled)
    again = await plain.rollouts.RetryRollouts(pb.RetryRolloutsRequest(names=cancelled.names))
    assert [one.metadata["fulmen.retry_of"] for one in again.rollouts] == list(cancelled.names)


async def test_fields_that_the_store_does_not_know_count_towards_the_limits(plain: Stubs, store: StoreHandle) -> None:
    rollout = rollout_pb2.Rollout()
    rollout.MergeFromString(b"\xfa\x3e" + b"\x80\x80\x20" + b"u" * 512 * 1024)
    typed = await store.stubs()
    with pytest.raises(ArgumentInvalid) as refused:
        await typed.rollouts.BatchCreateRollouts(pb.BatchCreateRolloutsRequest(rollouts=[rollout]))
    assert [one.field for one in refused.value.violations] == ["rollouts[0]"]
    await create_each(plain, [rollout_pb2.Rollout()])
    runner = await Runner(plain).open()
    (assignment,) = await runner.take(1)
    result = lease_pb2.AttemptResult(
        attempt=assignment.attempt, lease_id=assignment.lease_id, epoch=assignment.epoch, rewards=[{"value": 1}]
    )
    result.rewards[0].MergeFromString(b"\xfa\x3e" + b"\x80\x80\x08" + b"u" * 128 * 1024)
    answer = await plain.leases.CompleteAttempts(lease_service_pb2.CompleteAttemptsRequest(results=[result]))
    assert answer.acks[0].status == lease_pb2.COMPLETION_STATUS_INVALID


async def test_a_row_larger_than_a_message_stops_no_feed_and_is_named(
    plain: Stubs, connection: asyncpg.Connection
) -> None:
    names = sorted(await create_each(plain, [rollout_pb2.Rollout(group_id="g", group_size=3) for _ in range(3)]))
    runner = await Runner(plain).open()
    await runner.complete(await runner.take(3))
    huge = rollout_pb2.Rollout(group_id="g", group_size=3, input=b"i" * 6 * MIB).SerializeToString()
    poisoned = names[0].rpartition("/")[2]
    await connection.execute("update rollout set request = $1 where id = $2", huge, poisoned)
    await connection.execute("update attempt set report = $1 where rollout_id = $2", huge, poisoned)
    (after,) = await create_each(plain, [rollout_pb2.Rollout()])
    await runner.complete(await runner.take(1))
    (group, rollouts), (following, _) = await read_groups(plain, 2)
    assert (group, following) == ("g", after)
    assert [one.name for one in rollouts] == names
    assert [bool(one.failure_message) for one in rollouts] == [True, False, False]
    assert (await get(plain, names[0])).failure_message == rollouts[0].failure_message


async def test_contents_larger_than_a_message_are_read_in_parts(plain: Stubs) -> None:
    contents = [bytes([65 + index]) * size for index, size in enumerate((16 * MIB, 2 * MIB, 2 * MIB, 100))]
    metadata = {f"{index:03}": "v" * 1021 for index in range(32)}
    for index, content in enumerate(contents):
        version = resource_pb2.ResourceVersion(
            name=f"resources/large.{index}", kind="large", content=content, metadata=metadata
        )
        await plain.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
    names = [f"resources/large.{index}" for index in range(4)]
    answer = await plain.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=names))
    assert [len(one.content) for one in answer.resources] == [0, 2 * MIB, 0, 100]
    assert [one.size_bytes for one in answer.resources] == [len(content) for content in contents]
    assert [one.content for one in await read_resources(plain.resources, names)] == contents
    stream = plain.resources.WatchResources(resource_service_pb2.WatchResourcesRequest())
    watched: list[resource_pb2.ResourceVersion] = []
    while not (message := await stream.read()).snapshot_complete:
        watched += message.resources
    stream.cancel()
    assert [len(one.content) for one in watched] == [0, 0, 0, 100]


async def test_many_full_versions_are_published_got_listed_and_watched(plain: Stubs) -> None:
    dependency = resource_pb2.ResourceVersion(name="resources/" + "d" * 128, kind="k" * 32, content=b"1")
    await plain.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[dependency]))
    versions = [
        resource_pb2.ResourceVersion(
            name=f"resources/{index:03}" + "n" * 125,
            kind="k" * 32,
            content_type="\u00e9" * 128,
            content=b"c" * 12 * 1024,
            parent=f"{dependency.name}/versions/1",
            metadata={f"{position:03}": "v" * 1021 for position in range(32)},
            dependencies=[f"{dependency.name}/versions/1"] * 32,
        )
        for index in range(128)
    ]
    names = [version.name for version in versions]
    for part in (slice(0, 64), slice(64, 128)):
        published = resource_service_pb2.PublishResourcesRequest(resources=versions[part])
        assert len((await plain.resources.PublishResources(published)).resources) == 64
        got = await plain.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=names[part]))
        assert {len(one.content) for one in got.resources} == {12 * 1024}
    request = resource_service_pb2.ListResourceVersionsRequest(page_size=1000)
    pages = await pages_of(plain.resources.ListResourceVersions, request)
    listed = [one.name.removesuffix("/versions/1") for page in pages for one in page.resources]
    assert len(pages) > 1
    assert sorted(listed) == sorted([*names, dependency.name])
    stream = plain.resources.WatchResources(resource_service_pb2.WatchResourcesRequest())
    watched: list[str] = []
    while not (message := await stream.read()).snapshot_complete:
        watched += [one.name.removesuffix("/versions/1") for one in message.resources]
    stream.cancel()
    assert sorted(watched) == sorted(listed)


async def test_a_span_larger_than_a_message_is_listed_without_what_makes_it_large(plain: Stubs) -> None:
    (name,) = await create_each(plain, [rollout_pb2.Rollout()])
    (assignment,) = await (await Runner(plain).open()).take(1)
    large = span("large", start=2, text="t" * 6 * MIB)
    others = [span("small", start=1), span("late", start=3, text="x" * 2 * MIB)]
    for one in (large, *others):
        assert (await append(plain, packed(assignment.attempt, one))).accepted_count == 1
    pages = await pages_of(plain.spans.ListSpans, span_service_pb2.ListSpansRequest(parent=name, page_size=1000))
    listed = [trace_pb2.Span.FromString(one.span.otlp_span) for page in pages for one in page.spans]
    assert [one.name for one in listed] == ["small", "large", "late"]
    assert (len(listed[1].attributes), listed[1].dropped_attributes_count) == (0, 1)
    assert len(listed[2].attributes) == 1
    parents = [name] * 2
    pages = await pages_of(plain.spans.ListSpans, span_service_pb2.ListSpansRequest(parents=parents, page_size=1000))
    assert sum(len(page.spans) for page in pages) == 6
    for wanted in (None, span_service_pb2.SpanFilter(name_prefix="l")):
        stream = plain.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[name], filter=wanted))
        chunks = [chunk async for message in stream for chunk in message.chunks]
        assert len(chunks) == (3 if wanted is None else 2)


async def test_tiny_chunks_are_streamed_in_messages_of_a_client_without_options(plain: Stubs) -> None:
    (name,) = await create_each(plain, [rollout_pb2.Rollout()])
    (assignment,) = await (await Runner(plain).open()).take(1)
    for _ in range(16):
        sent = [packed(assignment.attempt, trace_pb2.Span(span_id=index.to_bytes(8))) for index in range(512)]
        assert (await append(plain, *sent)).accepted_count == 512
    stream = plain.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=[name]))
    sizes = [(message.ByteSize(), len(message.chunks)) async for message in stream]
    assert sum(count for _, count in sizes) == 16 * 512
    assert max(size for size, _ in sizes) < 1.1 * MIB


async def test_ids_of_rejected_chunks_are_shortened(plain: Stubs) -> None:
    chunk = span_pb2.SpanChunk(chunk_id="c" * 5 * MIB)
    (rejected,) = (await append(plain, chunk)).rejected
    assert rejected.chunk_id == "c" * 64


async def test_all_secrets_of_an_agent_fit_into_an_answer(store: StoreHandle, plain: Stubs) -> None:
    names = [f"SECRET_{index:03}" for index in range(16)]
    for name in names:
        await plain.secrets.SetSecret(secret_service_pb2.SetSecretRequest(name=name, value=b"s" * 64 * 1024))
    spec = agent_spec_pb2.AgentSpec(command={"argv": ["true"]}, secrets=names)
    agent = resource_pb2.ResourceVersion(
        name="resources/agent.x", kind="agent", content=spec.SerializeToString(),
        content_type="application/x-protobuf; messageType=fulmen.runner.v1.AgentSpec",
    )  # fmt: skip
    published = await plain.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[agent]))
    await create_each(plain, [rollout_pb2.Rollout(agent=published.resources[0].name)])
    (assignment,) = await (await Runner(plain).open()).take(1)
    request = secret_service_pb2.GetAttemptSecretsRequest(attempt=assignment.attempt, lease_id=assignment.lease_id)
    runner = (("authorization", f"Bearer {store.token(Role.RUNNER)}"),)
    values = (await plain.secrets.GetAttemptSecrets(request, metadata=runner)).values
    assert {name: len(value) for name, value in values.items()} == dict.fromkeys(names, 64 * 1024)


async def test_acknowledgements_of_many_results_come_in_several_messages(plain: Stubs) -> None:
    runner = await Runner(plain).open()
    attempt = f"projects/{'p' * 63}/rollouts/01900000-0000-7000-8000-000000000000/attempts/1"
    results = [
        lease_pb2.AttemptResult(attempt=attempt, rewards=[{"dimension": "d" * 64, "value": 1, "step": -1}])
    ] * 1000
    message = lease_service_pb2.StreamLeasesRequest(complete=lease_service_pb2.CompletedAttempts(results=results))
    for _ in range(20):
        await runner.stream.write(message)
    acknowledged = 0
    while acknowledged < 20_000:
        acknowledged += len((await runner.expect("ack")).acks)
    assert acknowledged == 20_000
