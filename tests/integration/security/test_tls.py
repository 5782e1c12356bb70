"""TLS and mTLS of the services' ports and channels; certificates are renewed while both sides run."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from fulmen.errors import PermissionDenied, Unavailable
from fulmen.keda import externalscaler_pb2, externalscaler_pb2_grpc
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.rpc.tls import TlsFiles
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import project_service_pb2_grpc, span_service_pb2, span_service_pb2_grpc
from fulmen.watched_file import LOOK_S
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.tls import http_context, rpc_credentials
from fulmen_service_kit.security.tokens import Role
from fulmen_store.replicas.notifications import Notification
from fulmen_store.replicas.peer_client import PeerClient, PeerUnreachableError
from tests.support.certificates import Authority, Pair
from tests.support.llm_proxy.harness import running_proxy
from tests.support.ports import free_ports
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, running_store

ANSWER_S = 5.0


@pytest.fixture
def ours(tmp_path: Path) -> Authority:
    """Returns the deployment's authority."""
    return Authority(tmp_path, "ours")


@pytest.fixture
def theirs(tmp_path: Path) -> Authority:
    """Returns another deployment's authority."""
    return Authority(tmp_path, "theirs")


def client_files(authority: Authority, pair: Pair | None = None) -> TlsFiles:
    """Returns with what a client goes: whom it trusts, and what it shows."""
    if pair is None:
        return TlsFiles(ca_file=str(authority.file))
    return TlsFiles(ca_file=str(authority.file), certificate_file=str(pair.certificate), key_file=str(pair.key))


@asynccontextmanager
async def channel_to(store: StoreHandle, tls: TlsFiles | None, *, port: int = 0) -> AsyncIterator[FulmenChannel]:
    """Opens a channel of an administrator."""
    target = f"127.0.0.1:{port}" if port else store.target
    async with open_channel(target, token=store.token(), tls=tls, timeout_s=ANSWER_S) as channel:
        yield channel


async def projects_of(channel: FulmenChannel) -> list[str]:
    stub = project_service_pb2_grpc.ProjectServiceStub(channel)
    return [each.name for each in (await stub.ListProjects(prj.ListProjectsRequest())).projects]


async def shown_by(port: int) -> str:
    """Returns the certificate that a port shows, in PEM."""
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=ANSWER_S)


async def test_a_store_with_a_certificate_is_reached_by_those_who_trust_its_authority(
    database_url: str, ours: Authority, theirs: Authority
) -> None:
    async with running_store(database_url, **ours.issue("store").settings()) as store:
        async with channel_to(store, client_files(ours)) as channel:
            assert "projects/default" in await projects_of(channel)
        for refused in (client_files(theirs), None):
            async with channel_to(store, refused) as channel:
                with pytest.raises(Unavailable):
                    await projects_of(channel)


async def test_with_mutual_tls_only_certificates_of_the_authority_are_let_in(
    database_url: str, ours: Authority, theirs: Authority
) -> None:
    settings = {**ours.issue("store").settings(), "tls_client_ca_file": str(ours.file)}
    async with running_store(database_url, **settings) as store:
        async with channel_to(store, client_files(ours, ours.issue("client"))) as channel:
            assert "projects/default" in await projects_of(channel)
        for refused in (client_files(ours), client_files(ours, theirs.issue("stranger"))):
            async with channel_to(store, refused) as channel:
                with pytest.raises(Unavailable):
                    await projects_of(channel)


async def test_agents_have_a_port_of_their_own_that_takes_their_keys_alone(database_url: str, ours: Authority) -> None:
    agents_port = free_ports()[0]
    settings = {**ours.issue("store").settings(), "tls_client_ca_file": str(ours.file), "agents_port": agents_port}
    async with running_store(database_url, **settings) as store:
        async with channel_to(store, client_files(ours, ours.issue("client"))) as channel:
            stubs = Stubs(channel)
            runner = await Runner(stubs).open()
            await create(stubs)
            (assignment,) = await runner.take(1)
        async with channel_to(store, client_files(ours), port=agents_port) as channel:
            with pytest.raises(PermissionDenied, match="for agents"):
                await projects_of(channel)
            # KEDA's calls have their token in the request.
            query = externalscaler_pb2.ScaledObjectRef(scalerMetadata={"token": store.token(Role.READER)})
            for opening in (store.token(), ""):
                async with open_channel(f"127.0.0.1:{agents_port}", token=opening, tls=client_files(ours)) as bare:
                    with pytest.raises(PermissionDenied, match="for agents"):
                        await externalscaler_pb2_grpc.ExternalScalerStub(bare).IsActive(query)
        own_target = f"127.0.0.1:{agents_port}"
        async with open_channel(own_target, token=assignment.attempt_key, tls=client_files(ours)) as channel:
            listing = span_service_pb2.ListSpansRequest(parent=assignment.attempt)
            assert not (await span_service_pb2_grpc.SpanServiceStub(channel).ListSpans(listing)).spans


async def test_renewed_certificates_are_shown_and_sent_without_a_restart(
    database_url: str, ours: Authority, tmp_path: Path
) -> None:
    server, client = ours.issue("store"), ours.issue("client")
    both = tmp_path / "both.pem"
    both.write_bytes(ours.file.read_bytes())
    settings = {**server.settings(), "tls_client_ca_file": str(both)}
    async with (
        running_store(database_url, **settings) as store,
        open_channel(
            store.target,
            token=store.token(),
            tls=TlsFiles(ca_file=str(both), certificate_file=str(client.certificate), key_file=str(client.key)),
            timeout_s=ANSWER_S,
        ) as channel,
    ):
        runner = await Runner(Stubs(channel)).open()
        http_port = store.parts.ports["http_port"]
        assert await shown_by(http_port) == server.certificate.read_text()
        newer = Authority(tmp_path, "newer")
        both.write_bytes(ours.file.read_bytes() + newer.file.read_bytes())
        newer.issue("store", to=server)
        newer.issue("client", to=client)
        await asyncio.sleep(LOOK_S + 0.1)
        both.write_bytes(newer.file.read_bytes())
        await asyncio.sleep(LOOK_S + 0.1)
        assert await shown_by(http_port) == server.certificate.read_text()
        assert "projects/default" in await projects_of(channel)
        await create(Stubs(channel))
        assert len(await runner.take(1)) == 1, "a stream that was open before continues"
        async with channel_to(store, client_files(newer, client)) as fresh:
            assert "projects/default" in await projects_of(fresh)
        old = client_files(ours, ours.issue("old-client"))
        async with channel_to(store, old) as stale:
            with pytest.raises(Unavailable):
                await projects_of(stale)


async def test_the_http_ports_of_store_and_proxy_speak_tls_and_ask_agents_for_no_certificate(
    database_url: str, ours: Authority
) -> None:
    served = ours.issue("service")
    inside = {"tls_ca_file": str(ours.file), **served.settings(), "tls_client_ca_file": str(ours.file)}
    trusting = ssl.create_default_context(cafile=str(ours.file))
    async with (
        running_store(database_url, **inside) as store,
        running_proxy(store.target, signing_key=SIGNING_KEY, **inside) as proxy,
        aiohttp.ClientSession() as session,
    ):
        for port in (store.parts.ports["http_port"], proxy.parts.ports["http_port"]):
            async with session.get(f"https://127.0.0.1:{port}/healthz", ssl=trusting) as answer:
                assert answer.status == 200
            with pytest.raises(aiohttp.ClientError):
                await session.get(f"http://127.0.0.1:{port}/healthz", timeout=aiohttp.ClientTimeout(total=ANSWER_S))


async def test_replicas_know_one_another_by_a_name_of_their_certificate(database_url: str, ours: Authority) -> None:
    pair = ours.issue("store", dns=("store.example",))
    settings = {**pair.settings(), "tls_client_ca_file": str(ours.file)}
    async with running_store(database_url, **settings) as store:
        for name, reaches in (("store.example", True), ("", False)):
            tls = replace(client_files(ours, pair), server_name=name)
            peers = PeerClient(lambda: store.token(Role.SERVICE), tls=tls)
            try:
                if reaches:
                    await peers.notify(f"localhost:{store.port}", Notification())
                else:
                    with pytest.raises(PeerUnreachableError):
                        await peers.notify(f"localhost:{store.port}", Notification())
            finally:
                await peers.close()


@pytest.mark.parametrize("make", [rpc_credentials, http_context])
def test_files_that_are_no_pair_or_not_there_end_the_start(make: object, ours: Authority, tmp_path: Path) -> None:
    assert callable(make)
    good, other = ours.issue("good"), ours.issue("other")
    with pytest.raises(StartupError, match="not a matching certificate and key"):
        make(TlsFiles(certificate_file=str(good.certificate), key_file=str(other.key)))
    with pytest.raises(StartupError, match="cannot be read"):
        make(TlsFiles(certificate_file=str(good.certificate), key_file=str(tmp_path / "nowhere.key")))
    with pytest.raises(StartupError, match="not a matching certificate and key"):
        make(TlsFiles(ca_file=str(good.key), certificate_file=str(good.certificate), key_file=str(good.key)))


async def test_a_server_name_is_checked(database_url: str, ours: Authority) -> None:
    pair = ours.issue("store", dns=("store.example",))
    async with running_store(database_url, **pair.settings()) as store:
        named = TlsFiles(ca_file=str(ours.file), server_name="store.example")
        async with channel_to(store, named) as channel:
            assert "projects/default" in await projects_of(channel)
        async with channel_to(store, TlsFiles(ca_file=str(ours.file), server_name="other.example")) as channel:
            with pytest.raises(Unavailable):
                await projects_of(channel)
