"""An attempt key is good for as long as its attempt runs: expiry is when the store is asked, not when an attempt fails."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from fulmen.errors import DeadlineExceeded, TokenInvalid, Unavailable
from fulmen.ids import DEFAULT_PROJECT, AttemptName
from fulmen_service_kit.security.asked_attempts import KEEP_S, SLACK_S
from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.tokens import Caller, Role, TokenSigner, TokenVerifier

KEY = "k" * 32
ATTEMPT = AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid.UUID(int=7), number=2)
HOUR_S = 3600.0


class Store:
    """A store that is asked, with clocks that the test sets."""

    def __init__(self) -> None:
        self.now_s = self.monotonic_s = 1e9
        self.is_running = True
        self.is_away = False
        self.questions = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.keys = StoreKeys(KEY)
        self.verifier = TokenVerifier(
            self.keys, clock=lambda: self.now_s, runs=self.runs, monotonic=lambda: self.monotonic_s
        )

    async def runs(self, key: Caller) -> bool:
        assert key.attempt == ATTEMPT
        self.questions += 1
        await self.answers.wait()
        if self.is_away:
            raise DeadlineExceeded("away")
        return self.is_running

    def key(self, *, ttl_s: float = 60) -> str:
        signer = TokenSigner(KEY, clock=lambda: self.now_s)
        return signer.attempt_key(ATTEMPT, project=DEFAULT_PROJECT, lease_id="l", epoch=2, mode="train", ttl_s=ttl_s)

    async def caller(self, token: str) -> Caller:
        """Verifies as every edge does."""
        await self.verifier.prepare(token)
        return self.verifier.verify(token)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.monotonic_s += seconds


@pytest.fixture
def store() -> Store:
    return Store()


async def test_nobody_is_asked_about_a_key_that_has_not_expired(store: Store) -> None:
    key = store.key()
    for _ in range(3):
        assert (await store.caller(key)).attempt == ATTEMPT
    assert store.questions == 0


async def test_many_calls_at_once_with_a_key_that_has_expired_ask_once(store: Store) -> None:
    key = store.key(ttl_s=-1)
    store.answers.clear()
    calls = [asyncio.create_task(store.caller(key)) for _ in range(50)]
    await asyncio.sleep(0)
    calls.pop().cancel()
    await asyncio.sleep(0)
    store.answers.set()

    assert {caller.attempt for caller in await asyncio.gather(*calls)} == {ATTEMPT}
    assert store.questions == 1


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_clock_that_jumps_fails_no_attempt_that_runs(store: Store, jump_s: float) -> None:
    before = store.key()
    await store.caller(before)
    store.now_s += jump_s
    meanwhile = store.key()
    for key in (before, meanwhile):
        assert (await store.caller(key)).attempt == ATTEMPT
    store.now_s -= jump_s
    for key in (before, meanwhile):
        assert (await store.caller(key)).attempt == ATTEMPT


async def test_an_answer_counts_for_some_seconds_and_no_longer(store: Store) -> None:
    key = store.key(ttl_s=-1)
    for _ in range(100):
        await store.caller(key)
    assert store.questions == 1
    store.is_running = False
    store.pass_time(KEEP_S)
    with pytest.raises(TokenInvalid, match="expired"):
        await store.caller(key)
    with pytest.raises(TokenInvalid, match="expired"):
        await store.caller(key)
    assert store.questions == 2


async def test_an_answer_that_is_known_to_a_check_is_not_gone_within_it(store: Store) -> None:
    key = store.key(ttl_s=-1)
    await store.caller(key)
    store.pass_time(KEEP_S - 1e-6)
    await store.verifier.prepare(key)
    store.pass_time(2e-6)
    assert store.verifier.verify(key).attempt == ATTEMPT
    store.pass_time(SLACK_S)
    with pytest.raises(TokenInvalid, match="expired"):
        store.verifier.verify(key)


async def test_a_store_that_does_not_answer_is_a_reason_to_try_again_and_names_the_attempt(store: Store) -> None:
    key = store.key(ttl_s=-1)
    store.is_away = True
    with pytest.raises(Unavailable) as raised:
        await store.caller(key)
    assert raised.value.metadata["attempt"] == str(ATTEMPT)
    store.is_away = False
    assert (await store.caller(key)).attempt == ATTEMPT


async def test_an_open_stream_is_checked_again_when_the_answer_is_old(store: Store) -> None:
    caller = await store.caller(store.key(ttl_s=-1))
    store.verifier.check(caller)
    store.pass_time(KEEP_S)
    with pytest.raises(Unavailable):
        store.verifier.check(caller)


async def test_only_keys_of_attempts_that_this_deployment_made_are_asked_about(store: Store) -> None:
    signer = TokenSigner("x" * 32, clock=lambda: store.now_s)
    forged = signer.attempt_key(ATTEMPT, project=DEFAULT_PROJECT, lease_id="l", epoch=2, mode="train", ttl_s=-1)
    role = TokenSigner(KEY, clock=lambda: store.now_s).issue(Role.CLIENT, subject="ann", ttl_s=-1)
    for token in (forged, role, "", "x", store.key(ttl_s=-1)[:-1]):
        with pytest.raises(TokenInvalid):
            await store.caller(token)
    assert store.questions == 0


async def test_a_verifier_that_asks_nobody_refuses_what_has_expired(store: Store) -> None:
    verifier = TokenVerifier(KEY, clock=lambda: store.now_s)
    await verifier.prepare(store.key(ttl_s=-1))
    with pytest.raises(TokenInvalid, match="expired"):
        verifier.verify(store.key(ttl_s=-1))
