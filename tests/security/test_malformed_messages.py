"""Every rpc of every service refuses what is no message, and values that no field can mean, with a typed error."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from fulmen.errors import ArgumentInvalid, FulmenError, InternalError, TokenInvalid
from fulmen.store.v1.lease_service_pb2 import OpenSession, StreamLeasesRequest
from fulmen_service_kit.security.permissions import rule
from fulmen_service_kit.security.tokens import Role
from tests.support.services import SERVICES, serving, target_of
from tests.support.store.rpcs import Outcome, Rpc, exchange, listed_rpcs
from tests.support.store.running import StoreHandle

pytestmark = pytest.mark.long(short=True)

F = FieldDescriptor
MAX_DEPTH = 3
ANSWERS = 3
UNDECODABLE = {
    "a tag without a value": b"\x0a",
    "a group that does not end": b"\x0b",
    "a length beyond the end": b"\x0a\x7f",
    "a number without an end": b"\x08" + b"\xff" * 11,
    "noise": b"\xff",
}
MOMENTS: list[dict[str, int]] = [
    {"seconds": 10**15},
    {"seconds": -(10**15)},
    {"nanos": -5},
    {"nanos": 2 * 10**9},
    {"seconds": 1, "nanos": -1},
]
SCALARS = {
    F.CPPTYPE_INT32: (2**31 - 1, -(2**31)),
    F.CPPTYPE_UINT32: (2**32 - 1,),
    F.CPPTYPE_INT64: (2**63 - 1, -(2**63)),
    F.CPPTYPE_UINT64: (2**64 - 1,),
    F.CPPTYPE_ENUM: (99, -1),
    F.CPPTYPE_DOUBLE: (math.nan, math.inf, -1e308),
    F.CPPTYPE_FLOAT: (math.nan, -math.inf),
    F.CPPTYPE_STRING: ("\x00", "..", "\U0010ffff" * 300),
}
# What a stream must begin with; others begin with an empty message.
FIRST = {"/fulmen.store.v1.LeaseService/StreamLeases": StreamLeasesRequest(open=OpenSession()).SerializeToString()}
# Stops the service, or is answered by nothing that a test could await.
SKIPPED = {"/fulmen.runner.v1.RunnerService/Drain"}
# A servicer checks these itself: it may ignore a time that it only gives out, and rejects a chunk in its answer.
CHECKED_LATER = ("fulmen.store.v1.Rollout.", "fulmen.store.v1.SpanChunk.")


def values_in(message_class: type[Message], kinds: frozenset[str], depth: int = 0) -> Iterator[tuple[Message, str]]:
    """Yields messages that each have one hostile value, with its path.

    Args:
        message_class: Class of the messages.
        kinds: "moments" for times and durations, "numbers" for every other field.
        depth: Depth of the message in the request.
    """
    descriptor: Descriptor = message_class.DESCRIPTOR
    if descriptor.full_name in ("google.protobuf.Timestamp", "google.protobuf.Duration"):
        is_time = descriptor.name == "Timestamp"
        for value in MOMENTS if "moments" in kinds else ():
            if is_time or value != {"nanos": -5}:
                yield message_class(**value), ""
        return
    for field in descriptor.fields if depth < MAX_DEPTH else ():
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            continue
        path = f"{descriptor.full_name}.{field.name} "
        if inner is not None:
            for value, rest in values_in(message_factory.GetMessageClass(inner), kinds, depth + 1):
                yield _with(message_class, field, value), path + rest
        elif "numbers" in kinds:
            for scalar in (b"\xff\x00",) if field.type == F.TYPE_BYTES else SCALARS.get(field.cpp_type, ()):
                yield _with(message_class, field, scalar), f"{path}= {scalar!r:.30}"


def _with(message_class: type[Message], field: Any, value: Any) -> Message:
    message = message_class()
    if field.message_type is not None:
        where = getattr(message, field.name)
        (where if field.has_presence else where.add()).CopyFrom(value)
    elif isinstance(getattr(message, field.name), int | float | str | bytes):
        setattr(message, field.name, value)
    else:
        getattr(message, field.name).append(value)
    return message


async def outcomes(
    store: StoreHandle, target: str, calls: list[tuple[Rpc, list[bytes]]], *, limit_s: float = 20.0
) -> list[Outcome]:
    """Makes calls as one who may, some at a time; a stream that waits for events ends after `limit_s`."""
    # Enough for all streams that wait.
    room = asyncio.Semaphore(64)
    async with grpc.aio.insecure_channel(target) as channel:

        async def outcome(rpc: Rpc, payloads: list[bytes]) -> Outcome:
            allowed = rule(rpc.path)
            role = Role.ADMIN if allowed.allows(Role.ADMIN) else min(allowed.roles)
            metadata = (("authorization", f"Bearer {store.token(role)}"),)
            async with room:
                return await exchange(channel, rpc, payloads, metadata=metadata, answers=ANSWERS, timeout_s=limit_s)

        return await asyncio.gather(*(outcome(*call) for call in calls))


async def rpcs_of(target: str) -> list[Rpc]:
    async with grpc.aio.insecure_channel(target) as channel:
        return list((await listed_rpcs(channel)).values())


def wrong(told: Outcome, *expected: type[FulmenError]) -> str:
    """Returns what is wrong with an outcome; empty if it is an error of one of the classes."""
    return "" if isinstance(told, expected) else f"{type(told).__name__} {told!s:.200}"


@pytest.mark.parametrize("service", SERVICES)
async def test_every_rpc_refuses_what_cannot_be_decoded_first_or_later(
    store: StoreHandle, tmp_path: Path, service: str
) -> None:
    async with serving(service, store, tmp_path) as parts:
        cells = [
            (rpc, what, payloads)
            for rpc in await rpcs_of(target_of(parts))
            for what, payload in UNDECODABLE.items()
            for payloads in ([payload], [FIRST.get(rpc.path, b""), payload])[: 1 + rpc.method.client_streaming]
        ]
        told = await outcomes(store, target_of(parts), [(rpc, payloads) for rpc, _, payloads in cells])
    problems = [
        f"{rpc.path}, {what}: {problem}"
        for (rpc, what, _), each in zip(cells, told, strict=True)
        if (problem := wrong(each, ArgumentInvalid))
    ]
    assert problems == []


@pytest.mark.parametrize("service", SERVICES)
async def test_every_rpc_refuses_times_and_durations_that_are_none(
    store: StoreHandle, tmp_path: Path, service: str
) -> None:
    async with serving(service, store, tmp_path) as parts:
        cells = [
            (rpc, where, message)
            for rpc in await rpcs_of(target_of(parts))
            for message, where in values_in(rpc.request_class, frozenset({"moments"}))
        ]
        told = await outcomes(store, target_of(parts), [(rpc, [each.SerializeToString()]) for rpc, _, each in cells])
    problems = [
        f"{rpc.path}, {where}: {problem}"
        for (rpc, where, message), each in zip(cells, told, strict=True)
        if (problem := wrong(each, ArgumentInvalid))
        and (isinstance(each, InternalError) or not any(name in where for name in CHECKED_LATER))
    ]
    assert problems == []


@pytest.mark.parametrize("service", SERVICES)
async def test_no_number_or_text_makes_an_rpc_fail_inside(store: StoreHandle, tmp_path: Path, service: str) -> None:
    async with serving(service, store, tmp_path) as parts:
        cells = [
            (rpc, where, message)
            for rpc in await rpcs_of(target_of(parts))
            for message, where in values_in(rpc.request_class, frozenset({"numbers"}))
            if rpc.path not in SKIPPED
        ]
        told = await outcomes(
            store, target_of(parts), [(rpc, [each.SerializeToString()]) for rpc, _, each in cells], limit_s=2.0
        )
    problems = [
        f"{rpc.path}, {where}: {each!s:.200}"
        for (rpc, where, _), each in zip(cells, told, strict=True)
        if isinstance(each, InternalError | TokenInvalid)
    ]
    assert problems == []
