"""Training with vLLM as the engine: the real store, runner, proxy, algorithm service, and the vLLM that it starts."""

from __future__ import annotations

import asyncio
import tempfile
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.ids import DEFAULT_PROJECT, trace_id_of
from fulmen.llm_proxy.v1 import backend_service_pb2
from fulmen.rpc.services import connect
from fulmen.store.v1 import rollout_service_pb2
from fulmen.store.v1.attempt_pb2 import ATTEMPT_STATE_FAILED
from fulmen.store.v1.rollout_pb2 import ROLLOUT_STATE_SUCCEEDED
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.engines.engine import ENGINE_KEY_NAME, EngineAddress, EngineFailed, EngineKind
from fulmen_algorithm.engines.proxy_admin import PolicyRoutes, ProxyAdmin, ProxyGate
from fulmen_algorithm.engines.vllm_api import VllmApi, Weights, read_whole
from fulmen_algorithm.policy.engine_settings import SwapMode, VllmEngine
from fulmen_algorithm.policy.served import ServedPolicy
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.training import POLICY, check_books, finished_groups, read_consumed
from tests.support.algorithm.vllm import ENVIRONMENT, VllmServer, require_vllm, settled
from tests.support.algorithm.vllm_training import STEPS, WAIT_S, Trained, train
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.processes import alive
from tests.support.service_kit.otlp_collector import SentSpan, running_collector
from tests.support.stack import running_stack, stack_targets

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.long,
    pytest.mark.xdist_group("vllm"),
    pytest.mark.timeout(1200),
]

BACKEND = "spanning"
TOKENS = 400
CALLS = 8
BEGUN_LINES = 600
"""Of a stream: 300 events, so that what is computed anew after a swap is more than vLLM prefills at once."""
# vLLM on a CPU that two other stacks keep busy.
LIMIT_S = 240
ROUNDS_LIMIT_S = 700
LAST_LINES = 120
TOLD = [f"FULMEN_{service}_OTLP_ENDPOINT" for service in ("STORE", "RUNNER", "LLM_PROXY", "ALGORITHM")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained(repository_root: Path) -> AsyncIterator[Trained]:
    """Trains with vLLM, which is killed on the way."""
    require_vllm()
    environment = {
        "FULMEN_ALGORITHM_VLLM_COMMAND": str(ENVIRONMENT / "bin" / "vllm"),
        "VLLM_CACHE_ROOT": str(ENVIRONMENT / "cache"),
    }
    with tempfile.TemporaryDirectory(prefix="fulmen-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short
        async with (
            running_collector() as (collector, endpoint),
            running_stack(Path(folder), environment=environment | dict.fromkeys(TOLD, endpoint)) as stack,
            connect(stack_targets(stack), token=stack.client_token) as client,
        ):
            yield await train(stack, client, repository_root, collector)


async def test_a_run_whose_vllm_is_killed_ends_well_and_uses_every_group_once(trained):
    story = "\n".join([*trained.notices, trained.stack.log_tail("algorithm")])
    assert trained.run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, story
    assert trained.run.step == STEPS
    # With the same weights, or with the next ones if it was just given these.
    assert any("is restarted" in text for text in trained.notices), story
    assert len(trained.served_ns) == 2, story
    check_books(
        read_consumed(trained.stack.folder.path / "algorithm/runs/default/on-vllm"),
        await finished_groups(trained.client, trained.run.name),
        steps=STEPS,
    )
    assert len(trained.killed) > 1
    assert not any(alive(pid) for pid in trained.killed), "a process of the killed vLLM is left"


async def test_no_attempt_fails_but_those_that_the_kill_met(trained):
    troubled = await trained.troubled_rollouts()
    assert [rollout.name for rollout in troubled if rollout.state != ROLLOUT_STATE_SUCCEEDED] == []
    failed = [a for rollout in troubled for a in rollout.attempts if a.state == ATTEMPT_STATE_FAILED]
    # Swaps made no other fail, of any step before or after.
    for attempt in failed:
        assert attempt.end_time.ToNanoseconds() >= trained.killed_ns, attempt
        assert attempt.start_time.ToNanoseconds() <= trained.served_ns[1], attempt
    assert all(metrics.get("rollouts_masked", 0) == 0 for metrics in trained.metrics)


async def test_every_token_has_the_probability_that_the_trainer_gives_it_in_its_version(trained):
    compared = [metrics for metrics in trained.metrics if "engine_mismatch_kl" in metrics]
    assert len(compared) == STEPS
    assert all(metrics["engine_mismatch_tokens"] >= 4 for metrics in compared)
    assert max(metrics["engine_mismatch_kl"] for metrics in compared) < 1e-6
    assert max(metrics["engine_mismatch_logprob_max"] for metrics in compared) < 1e-3
    assert not [text for text in trained.notices if "disagree" in text]


async def test_each_step_says_what_its_publication_took(trained):
    swaps = [metrics for metrics in trained.metrics if metrics.get("publish_pause_ms", 0) > 0]
    # The version that could not be swapped in, while vLLM started anew, has no pause.
    assert len(swaps) >= STEPS - 2
    size = (Path(trained.run.model_path) / "model.safetensors").stat().st_size
    assert {metrics["publish_bytes"] for metrics in swaps} == {size}


async def test_what_store_runner_proxy_and_vllm_did_for_a_rollout_is_one_tree(trained):
    request = rollout_service_pb2.ListRolloutsRequest(
        training_run=trained.run.name, page_size=1, filter="state = SUCCEEDED AND ended_attempt_count = 1"
    )
    [rollout] = (await trained.client.rollouts.ListRollouts(request)).rollouts
    top = ["fulmen-store fulmen.rollout", "fulmen-store fulmen.attempt"]
    expected = (
        [top[0], "fulmen-store fulmen.store.queue"],
        [*top, "fulmen-runner fulmen.runner.run"],
        [*top, "fulmen-store fulmen.store.spans"],
        [*top, f"fulmen-llm_proxy chat {POLICY}", "vllm llm_request"],
    )

    def spans() -> list[SentSpan]:
        return trained.collector.trace(trace_id_of(rollout.name))

    # Exporters send every five seconds, each at its own time.
    await settled(lambda: all(path in paths(spans()) for path in expected), limit_s=LIMIT_S)
    assert len([one for one in spans() if not one.parent]) == 1
    assert all(one.span.start_time_unix_nano <= one.span.end_time_unix_nano for one in spans())


def paths(spans: Sequence[SentSpan]) -> list[list[str]]:
    """Returns each span's way from the root, as far as it has come."""
    known = {one.id: one for one in spans}

    def path(one: SentSpan) -> list[str]:
        above = known.get(one.parent)
        return [*(path(above) if above is not None else []), f"{one.service} {one.span.name}"]

    return [path(one) for one in spans]


@dataclass(frozen=True, kw_only=True)
class Served:
    """The vLLM that the run has left, what swaps its weights, and a proxy and a store of the test's own."""

    proxy: RunningProxy
    store: FakeStore
    api: VllmApi
    server: VllmServer
    admin: ProxyAdmin
    versions: dict[int, PublishedPolicy]

    async def swap(
        self,
        version: int,
        *,
        mode: SwapMode = SwapMode.FREEZE,
        weights: Weights | None = None,
        recompute_cache: bool = True,
    ) -> None:
        """Gives it a version; `weights` are what is loaded unread."""
        policy = self.versions[version]
        gate = ProxyGate(self.admin, policy, Patience(service="LLM proxy", notify=lambda *_: None, limit_s=LIMIT_S))
        weights = weights or await read_whole(policy, adapters=False)
        await self.api.swap(weights, version, gate, mode=mode, drain_limit_s=LIMIT_S, recompute_cache=recompute_cache)

    async def logprobs(self, record: ModelCallRecord) -> list[float]:
        """Computes the probabilities of a recorded answer with the weights that it has now."""
        prompt, sampled = ids(record.prompt_token_ids), ids(record.completion_token_ids)
        body = {"model": POLICY, "prompt": prompt + sampled, "max_tokens": 1, "prompt_logprobs": 0}
        answer = await asyncio.to_thread(self.server.ask, "/v1/completions", body)
        found = answer["choices"][0]["prompt_logprobs"][len(prompt) :]
        return [entry[str(token)]["logprob"] for entry, token in zip(found, sampled, strict=True)]


@pytest_asyncio.fixture(loop_scope="module")
async def store() -> AsyncIterator[FakeStore]:
    """Yields a store that keeps what is captured."""
    async with FakeStore() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def served(trained: Trained, store: FakeStore) -> AsyncIterator[Served]:
    """Yields the run's vLLM behind a proxy of its own, with version 101 of two."""
    url, token = await address_that_answers(trained), engine_token(trained.stack)
    folders = sorted((trained.stack.folder.path / "algorithm/runs/default/on-vllm/models").glob("epoch-*/*"))
    versions = {
        number: PublishedPolicy(name=f"resources/policy.{POLICY}/versions/{number}", version=number, path=folder)
        for number, folder in zip((101, 102), (folders[0], folders[-1]), strict=True)
    }
    async with running_proxy(
        store.target, backend_keys={ENGINE_KEY_NAME: {"key": token, "hosts": ["127.0.0.1"]}}
    ) as proxy:
        admin = ProxyAdmin(
            proxy.channel, backend_id=BACKEND, routes=PolicyRoutes(proxy.channel, project=DEFAULT_PROJECT)
        )
        root = url.removesuffix("/v1")
        found = Served(
            proxy=proxy,
            store=store,
            api=VllmApi(root, token, reload_method="fulmen_reload"),
            server=VllmServer(root=root, key=token),
            admin=admin,
            versions=versions,
        )
        await admin.register(EngineAddress(base_url=url, kind=EngineKind.VLLM, key_name=ENGINE_KEY_NAME))
        policy = ServedPolicy(
            project=DEFAULT_PROJECT, policy=versions[101], overrides={}, engine=VllmEngine(kind="vllm")
        )
        await admin.put_routes(policy, version=101, engine_model="")
        await found.swap(101)
        yield found
    print(last_words(trained.stack))  # shown with a test that fails


def last_words(stack: LocalStack) -> str:
    """Returns what vLLM's engine and its workers said at last; its server repeats the same end for every call."""
    (log,) = (stack.folder.path / "algorithm/engines").glob("*.log")
    lines = [line for line in log.read_text(errors="replace").splitlines() if not line.startswith("(APIServer")]
    return "\n".join([line for line in lines if line.strip() and " INFO " not in line][-LAST_LINES:])


async def address_that_answers(trained: Trained) -> str:
    """Returns the address of the run's vLLM; the service puts another in its place if it is deaf on a busy machine."""
    try:
        async with asyncio.timeout(WAIT_S), aiohttp.ClientSession() as http:
            while True:
                listed = await trained.client.backends.ListBackends(backend_service_pb2.ListBackendsRequest())
                [url] = [backend.base_url for backend in listed.backends]
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with http.get(url.removesuffix("/v1") + "/health") as answer:
                        if answer.ok:
                            return url
                await asyncio.sleep(1.0)
    except TimeoutError:
        raise AssertionError(trained.stack.log_tail("algorithm")) from None


def engine_token(stack: LocalStack) -> str:
    """Returns the key that the stack's engines ask for."""
    environment = stack.spec("algorithm").environment
    return next(value for name, value in environment.items() if name.endswith("ENGINE_TOKEN"))


def ids(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


async def answered(
    proxy: RunningProxy, key: str, *, stream: bool, seed: int, begun: asyncio.Semaphore | None = None
) -> None:
    """Has a long answer made; releases `begun` when a part of a stream is there, and raises if the call fails."""
    body: dict[str, Any] = {
        "model": POLICY,
        "messages": [{"role": "user", "content": "1+1="}],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": stream,
    }
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        lines = []
        async for line in answer.content:
            lines.append(line.decode())
            if begun is not None and len(lines) == BEGUN_LINES:
                begun.release()
    if begun is not None and len(lines) < BEGUN_LINES:
        begun.release()  # a busy server puts several tokens into one event
    text = "".join(lines)
    assert answer.status == 200, text
    assert '"error"' not in text


async def records_over_a_swap(served: Served, mode: SwapMode, *, recompute_cache: bool = True) -> list[ModelCallRecord]:
    """Swaps version 102 in while long answers are made, half of them streams; returns what was recorded of them."""
    proxy, weights = served.proxy, await read_whole(served.versions[102], adapters=False)
    sent, begun = (await proxy.health(BACKEND)).request_count, asyncio.Semaphore(0)
    attempts = [proxy.attempt() for _ in range(CALLS)]
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for number, (_, key) in enumerate(attempts):
            group.create_task(answered(proxy, key, stream=number % 2 == 1, seed=number, begun=begun))
        for _ in range(CALLS // 2):
            await begun.acquire()
        # Whole answers say nothing before they end, but that they were sent is counted.
        while (await proxy.health(BACKEND)).request_count < sent + CALLS:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.02)
        await served.swap(102, mode=mode, weights=weights, recompute_cache=recompute_cache)
    records: list[ModelCallRecord] = []
    for attempt, _ in attempts:
        await proxy.flush(attempt)
        records += [record for _, record in served.store.spans(attempt) if record is not None]
    assert len(records) == CALLS
    assert [record.unusable_reason for record in records] == [""] * CALLS
    return records


async def test_every_token_of_a_long_answer_over_a_swap_is_of_the_version_that_sampled_it(served):
    spans = 0
    async with asyncio.timeout(ROUNDS_LIMIT_S):
        # On a busy machine answers may have ended when the engine hears of the swap.
        while spans <= CALLS / 2:
            records = await records_over_a_swap(served, SwapMode.FREEZE)
            spans = await checked_spans(served, records)


async def checked_spans(served: Served, records: list[ModelCallRecord]) -> int:
    """Checks every token by the weights of its version; returns how many answers have both, and leaves version 101."""
    new = [await served.logprobs(record) for record in records]
    await served.swap(101)
    old = [await served.logprobs(record) for record in records]
    spans = 0
    for record, of_old, of_new in zip(records, old, new, strict=True):
        said = array("f", record.completion_logprobs).tolist()
        for version, start, end in parts(record):
            by = {101: of_old, 102: of_new}[version]
            other = {101: of_new, 102: of_old}[version]
            assert said[start:end] == pytest.approx(by[start:end], abs=1e-3)
            assert said[start:end] != pytest.approx(other[start:end], abs=1e-3)
        spans += [version for version, _, _ in parts(record)] == [101, 102]
    return spans


def parts(record: ModelCallRecord) -> list[tuple[int, int, int]]:
    """Returns which version sampled which tokens: the version, the first and the end."""
    return [(part.version, part.start, part.end) for part in record.policy_versions]


async def test_calls_keep_their_cache_unless_it_is_to_be_recomputed(served):
    spans = 0
    async with asyncio.timeout(ROUNDS_LIMIT_S):
        while not spans:
            records = await records_over_a_swap(served, SwapMode.FREEZE, recompute_cache=False)
            for record in records:
                new, said = await served.logprobs(record), array("f", record.completion_logprobs).tolist()
                if [version for version, _, _ in parts(record)] == [101, 102]:
                    start = parts(record)[1][1]
                    assert said[start:] != pytest.approx(new[start:], abs=1e-3)
                    spans += 1
            await served.swap(101)


async def test_a_drain_leaves_every_answer_with_one_version(served):
    records = await records_over_a_swap(served, SwapMode.DRAIN)
    assert [[part.version for part in record.policy_versions] for record in records] == [[101]] * CALLS
    await answered(served.proxy, (attempt := served.proxy.attempt())[1], stream=False, seed=0)
    await served.proxy.flush(attempt[0])
    [record] = [record for _, record in served.store.spans(attempt[0]) if record is not None]
    assert [part.version for part in record.policy_versions] == [102]


async def test_weights_that_are_not_there_leave_it_with_those_that_it_had(served):
    ask = partial(served.server.complete, "1+1=", model=POLICY, temperature=0, max_tokens=16)
    had = (await asyncio.to_thread(ask))["choices"][0]["token_ids"]
    served.versions[103] = replace(served.versions[102], version=103, path=Path("/nowhere"))
    with pytest.raises(EngineFailed, match="vLLM answered 500 to POST /collective_rpc"):
        await served.swap(103, weights=Weights(folder=Path("/nowhere"), adapters={}, size_bytes=0))
    assert (await asyncio.to_thread(ask))["choices"][0]["token_ids"] == had
    await served.swap(102)


async def test_vllm_cannot_be_administered_without_the_key(served):
    stranger = VllmServer(root=served.server.root)
    for path in ("/pause?mode=keep", "/collective_rpc", "/update_weight_version", "/v1/chat/completions"):
        assert stranger.post(path, {})[0] == 401
