"""Access to a store from outside: forged and revoked tokens, attempt keys, introspection, the audit log."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from fulmen.errors import FulmenError, PermissionDenied, RolloutNotFound, TokenInvalid, TooManyInvalidTokens
from fulmen.keda import externalscaler_pb2 as keda
from fulmen.keda import externalscaler_pb2_grpc
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import lease_pb2, runner_registry_service_pb2, span_service_pb2
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.security.introspection import StoreVerifier
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, create_project, running_store

ALLOWED = 4
MARK = "s3cret"


async def asked(store: StoreHandle, token: str) -> FulmenError | None:
    """Asks for something with a token; returns what was wrong."""
    stubs = await store.stubs(token=token)
    try:
        await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest())
    except FulmenError as error:
        return error
    return None


async def held(store: StoreHandle) -> tuple[Runner, lease_pb2.Assignment]:
    """Returns a runner with an attempt."""
    stubs = await store.stubs()
    runner = await Runner(stubs).open()
    await create(stubs)
    (assignment,) = await runner.take(1)
    return runner, assignment


async def test_an_address_that_shows_many_forged_tokens_is_held_up_and_good_tokens_are_not(database_url: str) -> None:
    async with running_store(database_url, auth_failures_per_minute=ALLOWED) as store:
        told = [await asked(store, f"forged-{number}") for number in range(ALLOWED + 2)]
        assert [type(each) for each in told] == [TokenInvalid] * ALLOWED + [TooManyInvalidTokens] * 2
        last = told[-1]
        assert last is not None
        assert 0 < last.retry_after_s <= 60 / ALLOWED
        expired = TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="ann", ttl_s=-5)
        assert isinstance(await asked(store, expired), TokenInvalid), "one that was good once is no guess"
        assert await asked(store, store.token()) is None
        url = f"http://127.0.0.1:{store.parts.ports['http_port']}/v1/traces"
        headers = {"authorization": "Bearer forged", "content-type": "application/x-protobuf"}
        async with aiohttp.ClientSession() as session, session.post(url, data=b"", headers=headers) as answer:
            assert answer.status == 429, "the port of OTLP counts with the other"


async def test_tokens_forged_for_the_scaler_are_counted_with_the_others(database_url: str) -> None:
    async with running_store(database_url, auth_failures_per_minute=ALLOWED) as store:
        async with open_channel(store.target) as channel:
            scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)
            for number in range(ALLOWED):
                with pytest.raises(TokenInvalid):
                    await scaler.IsActive(keda.ScaledObjectRef(scalerMetadata={"token": f"forged-{number}"}))
            with pytest.raises(TooManyInvalidTokens):
                await scaler.IsActive(keda.ScaledObjectRef(scalerMetadata={"token": "forged"}))
            good = keda.ScaledObjectRef(scalerMetadata={"token": store.token(), "labels": ""})
            assert not (await scaler.IsActive(good)).result
        assert isinstance(await asked(store, "forged"), TooManyInvalidTokens)


def changed(key: str) -> Iterator[tuple[str, str]]:
    """Yields keys that an agent could make of its own."""
    head, claims, signature = key.split(".")
    decoded = json.loads(base64.urlsafe_b64decode(claims + "=="))

    def packed(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    yield "cut short", key[:-1]
    yield "cut to two parts", f"{head}.{claims}"
    yield "without a signature", f"{head}.{claims}."
    yield "said to need none", f"{packed({'alg': 'none', 'typ': 'JWT'})}.{claims}."
    for change in (
        {"role": "admin"},
        {"prj": "projects/*"},
        {"epo": 99},
        {"exp": decoded["exp"] + 3600},
        {"bud": 10**9},
    ):
        yield f"with another {next(iter(change))}", f"{head}.{packed(decoded | change)}.{signature}"
    yield "signed with another key", TokenSigner("x" * 40).issue(Role.ADMIN, subject="x", ttl_s=60)
    yield "signed with the key that everybody knows", TokenSigner(signature).issue(Role.ADMIN, subject="x", ttl_s=60)
    for place in range(0, len(key), 7):
        letter = "A" if key[place] != "A" else "B"
        yield f"with another letter at {place}", key[:place] + letter + key[place + 1 :]


async def test_nothing_that_an_agent_makes_of_its_key_opens_anything(database_url: str) -> None:
    async with running_store(database_url, auth_failures_per_minute=0) as store:
        _, assignment = await held(store)
        keys = dict(changed(assignment.attempt_key))
        told = await asyncio.gather(*(asked(store, key) for key in keys.values()))
        assert [what for what, error in zip(keys, told, strict=True) if not isinstance(error, TokenInvalid)] == []


async def test_an_agent_reaches_nothing_but_its_own_attempt(store: StoreHandle) -> None:
    runner, mine = await held(store)
    await create(await store.stubs())
    (other,) = await runner.take(1)
    agent = await store.stubs(token=mine.attempt_key)
    assert (await agent.rollouts.GetRollout(pb.GetRolloutRequest(name=mine.rollout.name))).rollout.name
    with pytest.raises(RolloutNotFound):
        await agent.rollouts.GetRollout(pb.GetRolloutRequest(name=other.rollout.name))
    with pytest.raises(PermissionDenied):
        await agent.spans.ListSpans(span_service_pb2.ListSpansRequest(parent=other.attempt))
    for refused in (
        agent.rollouts.ListRollouts(pb.ListRolloutsRequest()),
        agent.rollouts.CancelRollouts(pb.CancelRolloutsRequest(names=[other.rollout.name])),
        agent.projects.IssueToken(prj.IssueTokenRequest(project="projects/default", subject="x")),
        agent.projects.IntrospectToken(prj.IntrospectTokenRequest(token=mine.attempt_key)),
        agent.runners.ListRunners(runner_registry_service_pb2.ListRunnersRequest()),
    ):
        with pytest.raises(PermissionDenied):
            await refused


async def test_the_store_tells_who_a_token_is_of_and_no_more_than_the_asker_may_know(
    store: StoreHandle, stubs: Stubs
) -> None:
    for name in ("projects/a", "projects/b"):
        await create_project(stubs, name)
    _, assignment = await held(store)
    of_a, of_all = store.token(Role.CLIENT, project="projects/a"), store.token(Role.ADMIN)
    of_b = store.token(Role.CLIENT, project="projects/b")
    expired = TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="ann", ttl_s=-5, project="projects/a")
    runner = await store.stubs(role=Role.RUNNER, project="projects/a")

    async def told(token: str) -> prj.IntrospectTokenResponse:
        return await runner.projects.IntrospectToken(prj.IntrospectTokenRequest(token=token))

    answer = await told(of_a)
    assert (answer.active, answer.info.project, answer.info.role) == (True, "projects/a", prj.TOKEN_ROLE_CLIENT)
    assert (await told(of_all)).active
    for bad, problem in ((of_b, "forged"), (expired, "expired"), ("x", "forged"), (assignment.attempt_key, "forged")):
        assert await told(bad) == prj.IntrospectTokenResponse(problem=problem)


async def test_a_revoked_token_is_refused_by_a_verifier_that_introspects(store: StoreHandle, stubs: Stubs) -> None:
    issued = await stubs.projects.IssueToken(
        prj.IssueTokenRequest(project="projects/*", role=prj.TOKEN_ROLE_SERVICE, subject="ann")
    )
    now_s = 0.0
    channel = open_channel(store.target, token=store.token(Role.RUNNER))
    await store.stack.enter_async_context(channel)
    verifier = StoreVerifier(channel, clock=lambda: now_s)
    await verifier.prepare(issued.token)
    assert (verifier.verify(issued.token).role, verifier.verify(issued.token).subject) == (Role.SERVICE, "ann")
    await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=issued.token_id))
    now_s = 5.0
    await verifier.prepare(issued.token)
    with pytest.raises(TokenInvalid):
        verifier.verify(issued.token)


async def test_what_administrators_do_is_written_down_refused_or_not(database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    async with running_store(database_url, audit_file=str(file)) as store:
        admin, client = await store.stubs(), await store.stubs(role=Role.CLIENT)
        issued = await admin.projects.IssueToken(
            prj.IssueTokenRequest(project="projects/default", role=prj.TOKEN_ROLE_CLIENT, subject=MARK)
        )
        await admin.projects.RevokeToken(prj.RevokeTokenRequest(token_id=issued.token_id))
        with pytest.raises(PermissionDenied):
            await client.projects.CreateProject(prj.CreateProjectRequest(project=prj.Project(name="projects/mine")))
        with pytest.raises(TokenInvalid):
            await (await store.stubs(token="forged")).projects.RevokeToken(prj.RevokeTokenRequest(token_id="t"))
        await client.rollouts.ListRollouts(pb.ListRolloutsRequest())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    told = [(line["rpc"].rpartition("/")[2], line["code"], line["role"], line["asked"]) for line in lines]
    project = {"project": "projects/default", "role": "TOKEN_ROLE_CLIENT", "subject": MARK}
    assert told == [
        ("IssueToken", "OK", "admin", project | {"ttl": told[0][3]["ttl"]}),
        ("RevokeToken", "OK", "admin", {"token_id": issued.token_id}),
        ("CreateProject", "PERMISSION_DENIED", "client", {}),
        ("RevokeToken", "UNAUTHENTICATED", "", {}),
    ]
    assert file.stat().st_mode & 0o777 == 0o600
    assert issued.token not in file.read_text()


async def test_an_audit_file_that_takes_nothing_more_changes_no_answer(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_store(database_url, audit_file="/dev/full") as store:
        admin = await store.stubs()
        await create_project(admin, "projects/audited")
    assert "audit_file_not_written" in "".join(capsys.readouterr())
