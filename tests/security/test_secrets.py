"""A secret is read by the runner of an attempt whose agent names it, and by nobody else, wherever it may lie."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import asyncpg
import pytest
from structlog.testing import capture_logs

from fulmen.errors import ArgumentInvalid, FulmenError, LeaseLost, PermissionDenied, QuotaExceeded, SecretNotFound
from fulmen.ids import DEFAULT_PROJECT
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, PythonEntry
from fulmen.secret_names import MAX_SECRETS, place
from fulmen.store.v1 import lease_pb2, resource_pb2, resource_service_pb2
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.sealing import BACKEND_KEYS_LABEL, SECRETS_LABEL, CannotOpen, Sealer
from fulmen_service_kit.security.secret import split_keys
from fulmen_service_kit.security.tokens import RUN_ROLES, Role, TokenSigner
from tests.support.store.running import (
    SIGNING_KEY,
    Runner,
    StoreHandle,
    Stubs,
    create,
    create_project,
    run_token,
    running_store,
)

VALUE = b"sunny-and-warm-0123456789"
OTHER = "projects/other"


async def put(
    stubs: Stubs, name: str = "WEATHER_KEY", *, value: bytes = VALUE, project: str = "", **fields: object
) -> None:
    request = pb.SetSecretRequest(name=name, value=value, project=project, **fields)  # type: ignore[arg-type]
    await stubs.secrets.SetSecret(request)


def agent_naming(*secrets: str) -> bytes:
    return AgentSpec(python=PythonEntry(target="agent.py:solve"), secrets=secrets).SerializeToString()


async def publish_agent(stubs: Stubs, *secrets: str, name: str = "resources/agent.a", project: str = "") -> str:
    content = agent_naming(*secrets)
    version = resource_pb2.ResourceVersion(name=name, kind="agent", content=content, project=project)
    request = resource_service_pb2.PublishResourcesRequest(resources=[version])
    return str((await stubs.resources.PublishResources(request)).resources[0].name)


async def leased(store: StoreHandle, *secrets: str) -> tuple[Stubs, lease_pb2.Assignment, Runner]:
    """Leases an attempt of an agent that names secrets, as a runner of the default project."""
    admin = await store.stubs()
    stubs = await store.stubs(role=Role.RUNNER, project=DEFAULT_PROJECT)
    await create(admin, agent=await publish_agent(admin, *secrets))
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    return stubs, assignment, runner


def asked(assignment: lease_pb2.Assignment) -> pb.GetAttemptSecretsRequest:
    return pb.GetAttemptSecretsRequest(attempt=assignment.attempt, lease_id=assignment.lease_id)


async def test_the_runner_of_a_leased_attempt_gets_what_its_agent_names_and_nothing_else(store: StoreHandle) -> None:
    client = await store.stubs(role=Role.CLIENT, project=DEFAULT_PROJECT)
    await put(client)
    await put(client, "UNNAMED_KEY")
    stubs, assignment, _ = await leased(store, "WEATHER_KEY")
    assert dict((await stubs.secrets.GetAttemptSecrets(asked(assignment))).values) == {"WEATHER_KEY": VALUE}
    await put(client, value=b"rainy-and-cold")
    assert dict((await stubs.secrets.GetAttemptSecrets(asked(assignment))).values) == {"WEATHER_KEY": b"rainy-and-cold"}


async def test_no_other_role_reads_a_value_not_even_an_administrator(store: StoreHandle) -> None:
    await put(await store.stubs())
    await put(await store.stubs(), "openai", hosts=["api.openai.com"])
    _, assignment, _ = await leased(store, "WEATHER_KEY")
    own_run = (Role.ATTEMPT, *RUN_ROLES)
    tokens = [store.token(role) for role in Role if role not in own_run] + [assignment.attempt_key]
    tokens += [run_token(f"{DEFAULT_PROJECT}/trainingRuns/r", role=role) for role in RUN_ROLES]
    answers: list[object] = []
    for token in tokens:
        stubs = await store.stubs(token=token)
        for call in (
            stubs.secrets.GetAttemptSecrets(asked(assignment)),
            stubs.secrets.GetBackendKeys(pb.GetBackendKeysRequest(project=DEFAULT_PROJECT)),
            stubs.secrets.ListSecrets(pb.ListSecretsRequest(project=DEFAULT_PROJECT)),
        ):
            answers += await asyncio.gather(call, return_exceptions=True)
    read = [each for each in answers if isinstance(each, pb.GetAttemptSecretsResponse)]
    assert len(read) == 1
    assert all(isinstance(each, PermissionDenied) for each in answers if isinstance(each, Exception))
    assert not [each for each in answers if each not in read and VALUE in str(each).encode()]


async def test_a_runner_reads_nothing_of_a_lease_that_it_does_not_hold(store: StoreHandle) -> None:
    admin = await store.stubs()
    await put(admin)
    await create_project(admin, OTHER)
    stubs, assignment, runner = await leased(store, "WEATHER_KEY")
    foreign = await store.stubs(role=Role.RUNNER, project=OTHER)
    another = (await Runner(await store.stubs(role=Role.RUNNER)).open()).session_id
    attempts = [assignment.attempt, assignment.attempt[:-1] + "2", assignment.attempt.replace("default", "other")]
    for attempt, lease_id in itertools.product(attempts, [assignment.lease_id, another, "", "x" * 100]):
        request = pb.GetAttemptSecretsRequest(attempt=attempt, lease_id=lease_id)
        callers = [foreign] if request == asked(assignment) else [foreign, stubs]
        for caller in callers:
            with pytest.raises((LeaseLost, ArgumentInvalid)) as refused:
                await caller.secrets.GetAttemptSecrets(request)
            assert refused.value.message == "The runner does not hold this lease."
    await runner.complete([assignment])
    with pytest.raises(LeaseLost):
        await stubs.secrets.GetAttemptSecrets(asked(assignment))


async def test_an_agent_of_another_project_gets_its_own_projects_secret_or_none(store: StoreHandle) -> None:
    admin = await store.stubs()
    await create_project(admin, OTHER)
    await put(admin, project=OTHER)
    stubs, assignment, _ = await leased(store, "WEATHER_KEY")
    with pytest.raises(SecretNotFound, match="WEATHER_KEY") as refused:
        await stubs.secrets.GetAttemptSecrets(asked(assignment))
    assert refused.value.metadata["secrets"] == "WEATHER_KEY"


@pytest.mark.parametrize("name", ["openai", "OPENAI_API_KEY", "PATH", "x' or 1=1", "", "A" * 200])
async def test_an_agent_gets_no_backends_key_and_nothing_by_a_malformed_name(
    store: StoreHandle, database_url: str, name: str
) -> None:
    admin = await store.stubs()
    await put(admin, "openai", hosts=["api.openai.com"])
    with pytest.raises(ArgumentInvalid, match="secrets"):
        await publish_agent(admin, name)
    # A version that was stored before the rule.
    stubs, assignment, _ = await leased(store, "WEATHER_KEY")
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("update resource_version set content = $1", agent_naming(name))
    finally:
        await connection.close()
    with pytest.raises(SecretNotFound):
        await stubs.secrets.GetAttemptSecrets(asked(assignment))


async def test_a_client_sets_secrets_of_agents_in_its_own_project_only(store: StoreHandle) -> None:
    await create_project(await store.stubs(), OTHER)
    client = await store.stubs(role=Role.CLIENT, project=DEFAULT_PROJECT)
    for fields in ({"name": "openai", "hosts": ["evil.example"]}, {"project": OTHER}):
        with pytest.raises(PermissionDenied):
            await put(client, **fields)  # type: ignore[arg-type]
    await put(await store.stubs(role=Role.SERVICE, project=DEFAULT_PROJECT), "openai", hosts=["api.openai.com"])
    with pytest.raises(PermissionDenied):
        await client.secrets.DeleteSecret(pb.DeleteSecretRequest(name="openai"))
    reader = await store.stubs(role=Role.READER, project=DEFAULT_PROJECT)
    (listed,) = (await reader.secrets.ListSecrets(pb.ListSecretsRequest())).secrets
    assert (listed.name, list(listed.hosts)) == ("openai", ["api.openai.com"])


async def test_the_algorithm_service_holds_a_service_token_and_cannot_open_backends_keys(store: StoreHandle) -> None:
    await put(await store.stubs(), "openai", hosts=["api.openai.com"])
    service = await store.stubs(role=Role.SERVICE)
    (key,) = (await service.secrets.GetBackendKeys(pb.GetBackendKeysRequest(project=DEFAULT_PROJECT))).keys
    about = place(DEFAULT_PROJECT, "openai", ["api.openai.com"])
    assert VALUE not in key.sealed
    lines = split_keys(attempt_secrets(SIGNING_KEY))
    assert Sealer(lambda: lines, BACKEND_KEYS_LABEL).open(key.sealed, about=about) == VALUE
    for elsewhere in (place(DEFAULT_PROJECT, "openai", ["evil.example"]), place(OTHER, "openai", ["api.openai.com"])):
        with pytest.raises(CannotOpen):
            Sealer(lambda: lines, BACKEND_KEYS_LABEL).open(key.sealed, about=elsewhere)
    with pytest.raises(CannotOpen):
        Sealer(lambda: lines, SECRETS_LABEL).open(key.sealed, about=about)


async def test_the_database_logs_errors_and_reprs_hold_no_value(store: StoreHandle, database_url: str) -> None:
    with capture_logs() as logs:
        await put(await store.stubs())
        stubs, assignment, _ = await leased(store, "WEATHER_KEY")
        await stubs.secrets.GetAttemptSecrets(asked(assignment))
        errors = []
        for bad in ({"name": "bad name"}, {"name": "openai"}, {"name": "A", "hosts": ["x"]}, {"value": VALUE + b"\0"}):
            with pytest.raises(ArgumentInvalid) as refused:
                await put(await store.stubs(), **bad)  # type: ignore[arg-type]
            errors.append(f"{refused.value!r} {refused.value}")
    connection = await asyncpg.connect(database_url)
    try:
        tables = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
        rows = [row for (table,) in tables for row in await connection.fetch(f'select * from "{table}"')]
    finally:
        await connection.close()
    held = [repr(row).encode() for row in rows]
    assert any(b"WEATHER_KEY" in row for row in held)
    assert not [row for row in held if VALUE in row]
    assert VALUE.decode() not in repr((logs, errors))


async def test_a_row_that_is_moved_or_changed_in_the_database_opens_no_more(
    store: StoreHandle, database_url: str
) -> None:
    admin = await store.stubs()
    await put(admin)
    await put(admin, "openai", hosts=["api.openai.com"])
    stubs, assignment, _ = await leased(store, "MOVED_KEY")
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute("update secret set name = 'MOVED_KEY' where name = 'WEATHER_KEY'")
        await connection.execute("update secret set hosts = '{evil.example}' where name = 'openai'")
    finally:
        await connection.close()
    with pytest.raises(SecretNotFound):
        await stubs.secrets.GetAttemptSecrets(asked(assignment))
    service = await store.stubs(role=Role.SERVICE)
    assert not (await service.secrets.GetBackendKeys(pb.GetBackendKeysRequest(project=DEFAULT_PROJECT))).keys


async def test_secrets_survive_the_rotation_of_the_signing_key_step_by_step(
    database_url: str,
) -> None:
    old, new = "o" * 40, "n" * 40
    for lines in (old, f"{old}\n{new}", f"{new}\n{old}"):
        async with running_store(database_url, signing_key=lines) as store:
            if lines == old:
                await put(await store.stubs(token=TokenSigner(old).issue(Role.ADMIN, subject="x", ttl_s=60)))
            while await store.parts.roles["secret-resealer"].reseal_once():
                pass
    async with running_store(database_url, signing_key=new) as store:
        sealer = Sealer(lambda: (new.encode(),), SECRETS_LABEL)
        connection = await asyncpg.connect(database_url)
        try:
            (row,) = await connection.fetch("select key_id, sealed from secret")
        finally:
            await connection.close()
    assert row["key_id"] == sealer.key_id == row["sealed"][:8]
    assert sealer.open(row["sealed"], about=place(DEFAULT_PROJECT, "WEATHER_KEY", [])) == VALUE


async def test_a_project_has_a_bounded_number_of_secrets_also_when_they_are_set_at_once(store: StoreHandle) -> None:
    stubs = await store.stubs()
    calls = (put(stubs, f"KEY_{number}") for number in range(MAX_SECRETS + 5))
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(isinstance(each, QuotaExceeded) for each in outcomes) == 5
    assert sum(each is None for each in outcomes) == MAX_SECRETS
    await put(stubs, next(f"KEY_{n}" for n, each in enumerate(outcomes) if each is None), value=b"another value")


@pytest.mark.parametrize(
    "fields",
    [
        {"value": b"1234567"},
        {"value": b"x" * (64 * 1024 + 1)},
        {"value": b"\xff" * 10},
        {"name": "openai", "hosts": ["api.openai.com"], "value": b"x" * 8193},
        {"name": "openai", "hosts": ["api.openai.com"], "value": b"two\r\nlines"},
        {"name": "openai", "hosts": ["https://api.openai.com/v1"]},
        {"name": "openai", "hosts": ["user@host"]},
        {"name": "openai", "hosts": ["h"] * 17},
        {"name": "LD PRELOAD"},
        {"name": "TRACEPARENT"},
        {"name": "OTEL_EXPORTER_OTLP_HEADERS"},
    ],
)
async def test_a_malformed_secret_is_refused_with_every_problem(store: StoreHandle, fields: dict[str, object]) -> None:
    stubs = await store.stubs()
    with pytest.raises(ArgumentInvalid) as refused:
        await put(stubs, **fields)  # type: ignore[arg-type]
    assert refused.value.violations
    assert not (await stubs.secrets.ListSecrets(pb.ListSecretsRequest())).secrets


async def test_setting_and_deleting_are_audited_without_the_value(database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    async with running_store(database_url, audit_file=str(file)) as store:
        stubs = await store.stubs(role=Role.CLIENT, project=DEFAULT_PROJECT)
        await put(stubs)
        await stubs.secrets.DeleteSecret(pb.DeleteSecretRequest(name="WEATHER_KEY"))
        with pytest.raises(FulmenError):
            await put(stubs, "openai", hosts=["a.test"])
    lines = file.read_text().splitlines()
    assert [("SetSecret" in line, "WEATHER_KEY" in line, '"code":"OK"' in line) for line in lines] == [
        (True, True, True), (False, True, True), (True, False, False),
    ]  # fmt: skip
    assert VALUE.decode() not in file.read_text()
