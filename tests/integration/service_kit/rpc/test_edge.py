"""The edge of every rpc, over a real socket."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from opentelemetry import trace

from fulmen import errors
from fulmen.errors import Violation
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2_grpc as rpc
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.rpc import edge
from fulmen_service_kit.rpc.reads import Read
from fulmen_service_kit.rpc.server import RpcServer, build_server
from fulmen_service_kit.security.auth import current_caller
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, settings_config

KEY = "k" * 32
SERVICE = "fulmen.store.v1.RolloutService"


class SampleSettings(KeyHolderSettings):
    service_name = "sample"
    model_config = settings_config("FULMEN_SAMPLE_")


class SampleServicer(rpc.RolloutServiceServicer):
    async def GetRollout(self, request: pb.GetRolloutRequest, context: object) -> pb.GetRolloutResponse:
        if request.name == "caller":
            raise errors.RolloutNotFound(current_caller().subject, rollout="projects/default/rollouts/1")
        if request.name == "trace":
            raise errors.RolloutNotFound(f"{trace.get_current_span().get_span_context().trace_id:032x}")
        if request.name == "bad":
            violations = [Violation(field="a", description="wrong"), Violation(field="b", description="too")]
            raise errors.ArgumentInvalid("The request is malformed.", violations=violations)
        if request.name.startswith("long"):
            text = "é☃x"[len(request.name) - 5] * 1_000_000
            raise errors.ArgumentInvalid(text, violations=[Violation(field="f", description=text)])
        raise RuntimeError("postgres://user:secret@host")

    async def WatchRollouts(
        self, request: pb.WatchRolloutsRequest, context: object
    ) -> AsyncIterator[pb.WatchRolloutsResponse]:
        yield pb.WatchRolloutsResponse(cursor="1")
        raise errors.CursorInvalid("The cursor is not one of this feed.")

    async def StreamCreateRollouts(
        self, requests: AsyncIterator[pb.StreamCreateRolloutsRequest], context: object
    ) -> AsyncIterator[pb.StreamCreateRolloutsResponse]:
        async for _ in requests:
            yield pb.StreamCreateRolloutsResponse()


@asynccontextmanager
async def sample_server(**settings: object) -> AsyncIterator[RpcServer]:
    server = build_server(
        SampleSettings(**({"signing_key": KEY} | settings)),
        verifier=TokenVerifier(KEY),
        service_names=[SERVICE],
        register=lambda server: rpc.add_RolloutServiceServicer_to_server(SampleServicer(), server),
    )
    await server.server.start()
    try:
        yield server
    finally:
        await server.server.stop(None)


@asynccontextmanager
async def sample_stub() -> AsyncIterator[rpc.RolloutServiceStub]:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=60)
    async with sample_server() as server, open_channel(f"127.0.0.1:{server.port}", token=token) as channel:
        yield rpc.RolloutServiceStub(channel)


@pytest.mark.parametrize("name", ["long.", "long..", "long..."])
async def test_an_error_with_a_very_long_text_arrives_with_its_reason_and_a_part_of_the_text(name: str) -> None:
    async with sample_stub() as stub:
        with pytest.raises(errors.ArgumentInvalid) as raised:
            await stub.GetRollout(pb.GetRolloutRequest(name=name))
    assert raised.value.message.endswith(" …")
    assert 100 < len(raised.value.message) < 2000
    assert len(raised.value.violations) == 1


async def test_an_error_of_the_catalogue_arrives_as_the_same_class_with_its_details() -> None:
    async with sample_stub() as stub:
        with pytest.raises(errors.RolloutNotFound, match="ann") as caught:
            await stub.GetRollout(pb.GetRolloutRequest(name="caller"))

        assert caught.value.metadata == {"rollout": "projects/default/rollouts/1"}
        with pytest.raises(errors.ArgumentInvalid) as bad:
            await stub.GetRollout(pb.GetRolloutRequest(name="bad"))
        assert [violation.field for violation in bad.value.violations] == ["a", "b"]
        with pytest.raises(errors.Unimplemented):
            await stub.GetQueueStats(pb.GetQueueStatsRequest())


async def test_the_callers_trace_continues_in_the_rpc() -> None:
    span = trace.SpanContext(trace_id=0xABC, span_id=1, is_remote=False, trace_flags=trace.TraceFlags(1))
    async with sample_stub() as stub:
        with trace.use_span(trace.NonRecordingSpan(span)), pytest.raises(errors.RolloutNotFound, match=f"{0xABC:032x}"):
            await stub.GetRollout(pb.GetRolloutRequest(name="trace"))
        with pytest.raises(errors.RolloutNotFound) as alone:
            await stub.GetRollout(pb.GetRolloutRequest(name="trace"))
    assert f"{0xABC:032x}" not in str(alone.value), "a call outside of it is of another trace, or of none"


async def test_the_text_of_an_unexpected_exception_never_reaches_the_client() -> None:
    async with sample_stub() as stub:
        with pytest.raises(errors.InternalError) as caught:
            await stub.GetRollout(pb.GetRolloutRequest(name="x"))

    assert "secret" not in str(caught.value)
    assert caught.value.metadata["error_id"] in str(caught.value)


async def test_an_error_in_mid_stream_arrives_after_the_messages_before_it() -> None:
    async with sample_stub() as stub:
        stream = stub.WatchRollouts(pb.WatchRolloutsRequest())
        first = await stream.read()
        with pytest.raises(errors.CursorInvalid):
            await stream.read()

    assert first.cursor == "1"


@pytest.mark.parametrize(
    ("role", "key", "rpc_name", "error"),
    [
        (Role.READER, KEY, "CancelRollouts", errors.PermissionDenied),
        (Role.ADMIN, KEY, "CancelRollouts", errors.Unimplemented),  # admitted
        (Role.CLIENT, "x" * 32, "GetRollout", errors.TokenInvalid),  # of another deployment
        (None, KEY, "GetRollout", errors.TokenInvalid),
    ],
)
async def test_a_role_that_the_table_does_not_name_is_refused_and_an_admin_is_not(
    role: Role | None, key: str, rpc_name: str, error: type[errors.FulmenError]
) -> None:
    token = "" if role is None else TokenSigner(key).issue(role, subject="ann", ttl_s=60)
    async with sample_server() as server, open_channel(f"127.0.0.1:{server.port}", token=token) as channel:
        with pytest.raises(error):
            await getattr(rpc.RolloutServiceStub(channel), rpc_name)(getattr(pb, f"{rpc_name}Request")())


async def test_no_read_of_an_rpc_is_cancelled_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[Any] = []

    class Noted(Read[Any]):
        """What it does is tested in `unit/service_kit/rpc/test_reads.py`."""

        def __init__(self, read: Any) -> None:
            wrapped.append(read)
            super().__init__(read)

    monkeypatch.setattr(edge, "Read", Noted)
    async with sample_stub() as stub:
        stream = stub.StreamCreateRollouts()
        await stream.write(pb.StreamCreateRolloutsRequest())
        await stream.read()
        of_a_stream = len(wrapped)
        stream.cancel()
        with pytest.raises(errors.InternalError):
            await stub.GetRollout(pb.GetRolloutRequest())
    assert of_a_stream >= 1
    assert len(wrapped) > of_a_stream


async def test_a_message_over_the_limit_is_refused_by_its_own_error() -> None:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=60)
    async with sample_server(max_message_bytes=4096) as server:
        channel: FulmenChannel = open_channel(f"127.0.0.1:{server.port}", token=token)
        async with channel:
            with pytest.raises(errors.MessageTooLarge):
                await rpc.RolloutServiceStub(channel).GetRollout(pb.GetRolloutRequest(name="x" * 8192))


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with sample_server() as server:
        with pytest.raises(StartupError, match=f"127.0.0.1:{server.port}"):
            async with sample_server(port=server.port):
                pass
