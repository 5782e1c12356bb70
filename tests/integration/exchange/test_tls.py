"""Ranks reach the shards of a service over TLS, with a token; as the service itself gives it to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from fulmen.rpc.tls import TlsFiles
from fulmen_algorithm.app import build
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_exchange.errors import ExchangeFailed
from fulmen_exchange.links.grpc_link import GrpcLink
from fulmen_exchange.links.link import Link
from fulmen_exchange.links.opening import open_link
from fulmen_exchange.links.settings import ServerAccess
from fulmen_exchange.links.torch_link import TorchLink
from fulmen_exchange.ranks import Ranks
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.certificates import Authority
from tests.support.exchange.world import settings_named
from tests.support.service_kit.key_store import KeyService, serving_keys

KEY = "k" * 32
PARAMETERS = {"weight": nn.Parameter(torch.zeros(300, 16))}
ELSEWHERE = "projects/default/trainingRuns/of-another-service"
SHORT = {"min_wait_s": 0.1, "max_wait_s": 0.2, "straggler_timeout_s": 0.3, "deadline_s": 3.0}


def service_settings(folder: Path, **more: object) -> AlgorithmServiceSettings:
    given = {"port": 0, "metrics_port": 0, "token": issued(), "state_dir": folder / "state", **more}
    return AlgorithmServiceSettings.model_validate(given)


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[str]:
    """Yields the address of a service with TLS; its authority is `ours.pem`."""
    pair = Authority(tmp_path, "ours").issue("service")
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(serving_keys(KeyService(KEY)))
        settings = service_settings(tmp_path, store_target=store, **pair.settings())
        parts = await build(settings, stack)
        await parts.server.server.start()
        try:
            yield f"127.0.0.1:{parts.server.port}"
        finally:
            await parts.roles["gradient_exchange"].end()  # type: ignore[attr-defined]  # it is no longer served
            await parts.server.server.stop(None)


def issued(*, ttl_s: float = 3600.0, project: str = "projects/default") -> str:
    return TokenSigner(KEY).issue(Role.SERVICE, subject="ranks", ttl_s=ttl_s, project=project)


def opened(target: str, *, rank: int, of: int, token: str, certificate: Path | None, run: str = ELSEWHERE) -> Link:
    """Opens the link of a rank as its trainer does."""
    settings = settings_named("topk", link={"kind": "grpc", "targets": [target], **SHORT})
    access = ServerAccess(
        training_run=run,
        token=token,
        tls={target: TlsFiles(ca_file=str(certificate))} if certificate is not None else {},
    )
    return open_link(settings, parameters=PARAMETERS, ranks=Ranks(rank=rank, world_size=of), access=access)


async def summed(target: str, certificate: Path, *tokens: str, run: str = ELSEWHERE) -> list[float]:
    """Has ranks with these tokens sum their numbers plus one; returns what each gets."""

    def take_part(rank: int) -> float:
        link = opened(target, rank=rank, of=len(tokens), token=tokens[rank], certificate=certificate, run=run)
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


async def test_a_rank_reads_its_token_from_a_file(target: str, tmp_path: Path) -> None:
    file = tmp_path / "rank.token"
    file.write_text(issued())
    settings = settings_named("topk", link={"kind": "grpc", "targets": [target], **SHORT})
    tls = {target: TlsFiles(ca_file=str(tmp_path / "ours.pem"))}
    access = ServerAccess(training_run=ELSEWHERE, token_file=str(file), tls=tls)
    link = await asyncio.to_thread(
        partial(open_link, settings, parameters=PARAMETERS, ranks=Ranks(rank=0, world_size=1), access=access)
    )
    assert isinstance(link, GrpcLink)
    await asyncio.to_thread(link.close)


async def test_a_service_that_does_not_know_a_run_keeps_those_of_two_projects_apart(
    target: str, tmp_path: Path
) -> None:
    certificate = tmp_path / "ours.pem"
    ours = await asyncio.to_thread(partial(opened, target, rank=0, of=1, token=issued(), certificate=certificate))
    try:
        theirs = ELSEWHERE.replace("default", "other")
        assert await summed(target, certificate, issued(project="projects/other"), run=theirs) == [1.0]
    finally:
        assert isinstance(ours, GrpcLink)
        await asyncio.to_thread(ours.close)


@pytest.mark.parametrize(
    ("token", "told"),
    [
        (issued(ttl_s=-10.0), "TOKEN_INVALID.*expired"),
        (issued(project="projects/other"), "TRAINING_RUN_NOT_FOUND"),
        (TokenSigner("x" * 32).issue(Role.SERVICE, subject="ranks", ttl_s=60), "TOKEN_INVALID"),
        ("", "TOKEN_INVALID"),
    ],
    ids=["expired", "of another project, for a run that nobody knows", "of another deployment", "none"],
)
async def test_a_token_that_is_not_good_for_the_run_is_refused_and_named(
    token: str, told: str, target: str, tmp_path: Path
) -> None:
    join = partial(opened, target, rank=0, of=1, token=token, certificate=tmp_path / "ours.pem")
    with pytest.raises(ExchangeFailed, match=told):
        await asyncio.to_thread(join)


@pytest.mark.parametrize("trusts", ["another authority", "nobody, and speaks no TLS"])
async def test_a_rank_that_cannot_know_the_server_gives_up(trusts: str, target: str, tmp_path: Path) -> None:
    certificate = Authority(tmp_path, "theirs").file if trusts == "another authority" else None
    with pytest.raises(ExchangeFailed, match="no answer from"):
        await asyncio.to_thread(partial(opened, target, rank=0, of=1, token=issued(), certificate=certificate))


def test_a_rank_that_knows_this_service_by_a_name_of_its_certificate(tmp_path: Path) -> None:
    settings = service_settings(
        tmp_path, **Authority(tmp_path).issue("service").settings(), tls_ca_file="ours.pem", tls_own_name="algorithm"
    )
    tls = settings.sibling_tls()
    assert tls is not None
    assert (tls.ca_file, tls.server_name) == ("ours.pem", "algorithm")


def test_ranks_of_a_process_group_need_no_access() -> None:
    link = open_link(settings_named("topk"), parameters=PARAMETERS, ranks=Ranks())
    assert isinstance(link, TorchLink)
    assert (link.shards, link.missed_sums) == (1, 0)
