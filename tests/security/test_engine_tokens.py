"""The token of an engine, or of ranks, is for one training run, for minutes, and for nothing else."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied, TokenInvalid
from fulmen.ids import DEFAULT_PROJECT
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen_service_kit.security.introspection import ROLE_NUMBERS
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.tokens import RUN_ROLES, Role, TokenSigner, TokenVerifier
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs, create_project, run_token

RUN = f"{DEFAULT_PROJECT}/trainingRuns/arithmetic"
TEN_MINUTES_S = 600
DAY_S = 86_400
EACH_ROLE = pytest.mark.parametrize("role", sorted(RUN_ROLES))


async def issued(stubs: Stubs, **fields: Any) -> prj.IssueTokenResponse:
    values: dict[str, Any] = {
        "project": DEFAULT_PROJECT,
        "role": prj.TOKEN_ROLE_ENGINE,
        "subject": "gpu-7",
        "training_run": RUN,
    }
    answer: prj.IssueTokenResponse = await stubs.projects.IssueToken(prj.IssueTokenRequest(**values | fields))
    return answer


@EACH_ROLE
async def test_it_names_its_run_and_lives_ten_minutes_unless_more_is_asked_for(stubs: Stubs, role: Role) -> None:
    caller = TokenVerifier(SIGNING_KEY).verify((await issued(stubs, role=ROLE_NUMBERS[role])).token)
    assert (caller.role, caller.project, caller.training_run) == (role, DEFAULT_PROJECT, RUN)
    assert caller.expires_s - caller.issued_s == TEN_MINUTES_S
    longer = await issued(stubs, role=ROLE_NUMBERS[role], ttl={"seconds": DAY_S})
    caller = TokenVerifier(SIGNING_KEY).verify(longer.token)
    assert caller.expires_s - caller.issued_s == DAY_S


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"training_run": ""}, {"training_run"}),
        ({"training_run": "arithmetic"}, {"training_run"}),
        ({"training_run": "projects/a/trainingRuns/arithmetic"}, {"training_run"}),
        ({"training_run": f"{RUN}/x", "ttl": {"seconds": DAY_S + 1}}, {"training_run", "ttl"}),
        ({"project": "projects/*", "training_run": "projects/*/trainingRuns/arithmetic"}, {"training_run"}),
        ({"role": prj.TOKEN_ROLE_CLIENT}, {"training_run"}),
    ],
)
async def test_it_is_issued_for_a_run_of_its_project_alone(
    stubs: Stubs, fields: dict[str, Any], refused: set[str]
) -> None:
    await create_project(stubs, "projects/a")
    with pytest.raises(ArgumentInvalid) as error:
        await issued(stubs, **fields)
    assert {violation.field for violation in error.value.violations} == refused


@EACH_ROLE
async def test_a_refreshed_one_is_for_the_same_run(store: StoreHandle, stubs: Stubs, role: Role) -> None:
    own = await store.stubs(token=(await issued(stubs, role=ROLE_NUMBERS[role])).token)
    answer = await own.projects.RefreshToken(prj.RefreshTokenRequest())
    caller = TokenVerifier(SIGNING_KEY).verify(answer.token)
    assert (caller.training_run, caller.expires_s - caller.issued_s) == (RUN, TEN_MINUTES_S)


@EACH_ROLE
async def test_it_opens_nothing_else_of_the_store(store: StoreHandle, stubs: Stubs, role: Role) -> None:
    own = await store.stubs(token=run_token(RUN, role=role))
    for call in (
        own.projects.GetProject(prj.GetProjectRequest(name=DEFAULT_PROJECT)),
        own.projects.IntrospectToken(prj.IntrospectTokenRequest(token="x")),
        own.projects.ListTokens(prj.ListTokensRequest()),
        own.projects.ListRevokedTokens(prj.ListRevokedTokensRequest()),
    ):
        with pytest.raises(PermissionDenied):
            await call


@pytest.mark.parametrize(
    "changed",
    [{"run": ""}, {"run": None}, {"run": 7}, {"run": "projects/other/trainingRuns/r"}, {"prj": "projects/*"}],
    ids=str,
)
@EACH_ROLE
def test_one_without_a_run_of_its_project_is_no_token(changed: dict[str, Any], role: Role) -> None:
    key = StoreKeys(SIGNING_KEY).signing()
    header, payload, _ = run_token(RUN, role=role).split(".")
    claims = json.loads(base64.urlsafe_b64decode(payload + "==")) | changed
    signed = header.encode() + b"." + _base64url(json.dumps(claims).encode())
    token = (signed + b"." + _base64url(key.sign(signed))).decode()
    with pytest.raises(TokenInvalid):
        TokenVerifier(SIGNING_KEY).verify(token)


@pytest.mark.parametrize(("role", "run"), [(Role.ENGINE, ""), (Role.RANK, ""), (Role.CLIENT, RUN), (Role.ADMIN, RUN)])
def test_the_signer_makes_no_other(role: Role, run: str) -> None:
    with pytest.raises(ValueError, match="name a training run"):
        TokenSigner(SIGNING_KEY).issue(role, subject="x", ttl_s=60, project=DEFAULT_PROJECT, training_run=run)


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
