"""Ranks reach the shards of a service over TLS, with a token; as the service itself gives it to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from pydantic import ValidationError
from torch import nn

from fulmen_algorithm.app import build
from fulmen_algorithm.exchange.failure import ExchangeFailed
from fulmen_algorithm.exchange.link import Link
from fulmen_algorithm.exchange.links.access import TOKEN_TTL_S, LinkAccess
from fulmen_algorithm.exchange.links.grpc_link import GrpcLink
from fulmen_algorithm.exchange.links.opening import open_link
from fulmen_algorithm.exchange.links.torch_link import TorchLink
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.training.parallel import Ranks
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.tokens import Role, TokenSigner
from tests.integration.exchange.world import settings_named

KEY = "k" * 32
PARAMETERS = {"weight": nn.Parameter(torch.zeros(300, 16))}
ELSEWHERE = "trainingRuns/of-another-service"
SHORT = {"least_wait_s": 0.1, "most_wait_s": 0.2, "give_up_s": 0.3, "deadline_s": 3.0}


def certified(folder: Path, name: str) -> tuple[Path, Path]:
    """Makes a certificate of its own authority for this machine; returns its file and that of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / f"{name}.pem", folder / f"{name}.key"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def service_settings(folder: Path, **more: object) -> AlgorithmServiceSettings:
    given = {"port": 0, "metrics_port": 0, "tls_port": 0, "signing_key": KEY, "state_dir": folder / "state", **more}
    return AlgorithmServiceSettings.model_validate(given)


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[str]:
    """Yields the address of a service's port with TLS; its certificate is `ours.pem`."""
    certificate, key = certified(tmp_path, "ours")
    async with AsyncExitStack() as stack:
        settings = service_settings(tmp_path, tls_certificate=str(certificate), tls_key=str(key))
        parts = await build(settings, stack)
        await parts.server.server.start()
        try:
            yield f"127.0.0.1:{parts.ports['tls_port']}"
        finally:
            await parts.roles["gradient_exchange"].end()  # type: ignore[attr-defined]  # it is no longer served
            await parts.server.server.stop(None)


def issued(*, ttl_s: float = TOKEN_TTL_S, project: str = "projects/default") -> str:
    return TokenSigner(KEY).issue(Role.SERVICE, subject="ranks", ttl_s=ttl_s, project=project)


def opened(target: str, *, rank: int, of: int, token: str, certificate: Path | None) -> Link:
    """Opens the link of a rank as its trainer does."""
    settings = settings_named("topk", link={"kind": "grpc", "targets": [target], **SHORT})
    access = LinkAccess(
        training_run=ELSEWHERE,
        token=token,
        certificates={target: certificate.read_text()} if certificate is not None else {},
    )
    return open_link(settings, parameters=PARAMETERS, ranks=Ranks(rank=rank, world_size=of), access=access)


async def summed(target: str, certificate: Path, *tokens: str) -> list[float]:
    """Has ranks with these tokens sum their numbers plus one; returns what each gets."""

    def take_part(rank: int) -> float:
        link = opened(target, rank=rank, of=len(tokens), token=tokens[rank], certificate=certificate)
        assert isinstance(link, GrpcLink)
        try:
            number = torch.tensor([rank + 1.0])
            link.begin()
            link.all_reduce(number)
            return float(number)
        finally:
            link.close()

    return list(await asyncio.gather(*(asyncio.to_thread(take_part, rank) for rank in range(len(tokens)))))


async def test_ranks_exchange_over_tls_with_a_token_of_their_project(target: str, tmp_path: Path) -> None:
    assert await summed(target, tmp_path / "ours.pem", issued(), issued()) == [3.0, 3.0]


async def test_a_service_that_does_not_know_a_run_keeps_those_of_two_projects_apart(
    target: str, tmp_path: Path
) -> None:
    certificate = tmp_path / "ours.pem"
    ours = await asyncio.to_thread(partial(opened, target, rank=0, of=1, token=issued(), certificate=certificate))
    try:
        assert await summed(target, certificate, issued(project="projects/other")) == [1.0]
    finally:
        assert isinstance(ours, GrpcLink)
        await asyncio.to_thread(ours.close)


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (issued(ttl_s=-10.0), "TOKEN_INVALID.*expired"),
        (issued(project="projects/*"), "TRAINING_RUN_NOT_FOUND"),
        (TokenSigner("x" * 32).issue(Role.SERVICE, subject="ranks", ttl_s=60), "TOKEN_INVALID"),
        ("", "TOKEN_INVALID"),
    ],
    ids=["expired", "of all projects, for a run that nobody knows", "of another deployment", "none"],
)
async def test_a_token_that_is_not_good_for_the_run_is_refused_and_named(
    token: str, told: str, target: str, tmp_path: Path
) -> None:
    join = partial(opened, target, rank=0, of=1, token=token, certificate=tmp_path / "ours.pem")
    with pytest.raises(ExchangeFailed, match=told):
        await asyncio.to_thread(join)


@pytest.mark.parametrize("trusts", ["another authority", "nobody, and speaks no TLS"])
async def test_a_rank_that_cannot_know_the_server_gives_up(trusts: str, target: str, tmp_path: Path) -> None:
    certificate = certified(tmp_path, "theirs")[0] if trusts == "another authority" else None
    with pytest.raises(ExchangeFailed, match="no answer from"):
        await asyncio.to_thread(partial(opened, target, rank=0, of=1, token=issued(), certificate=certificate))


async def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="go together"):
        service_settings(tmp_path, tls_certificate="a.pem")
    certificate, key = certified(tmp_path, "ours")
    others_key = certified(tmp_path, "theirs")[1]
    for file, problem in ((tmp_path / "nowhere.key", "cannot be read"), (others_key, "are a pair")):
        async with AsyncExitStack() as stack:
            settings = service_settings(tmp_path, tls_certificate=str(certificate), tls_key=str(file))
            with pytest.raises(StartupError, match=problem):
                await build(settings, stack)
    assert key.exists()


def test_ranks_of_a_process_group_need_no_access() -> None:
    link = open_link(settings_named("topk"), parameters=PARAMETERS, ranks=Ranks())
    assert isinstance(link, TorchLink)
    assert (link.shards, link.missed_sums) == (1, 0)
