"""What other LLM proxies got wrong, one test for each complaint.

A name alone is a test of this file; `file::test` proves the same where the feature is tested.

LiteLLM
- memory grows until the pod is killed -> test_memory_does_not_grow_with_calls_however_they_end,
  test_bookkeeping::test_a_settled_account_is_forgotten_after_its_time_and_an_open_one_is_not,
  test_limits::test_idle_accounts_are_forgotten_and_those_with_calls_are_not
- a caller that leaves does not end the backend's work
  -> test_a_caller_that_leaves_before_the_first_byte_of_a_stream_ends_the_backends_work,
  test_streams::test_a_caller_that_leaves_a_stream_aborts_the_backend_and_the_call_is_unusable,
  test_streams::test_a_caller_that_leaves_before_a_whole_answer_aborts_the_backend,
  test_holds::test_an_agent_that_leaves_while_its_call_waits_frees_its_place
- an answer that is cut is told as the caller's fault (400)
  -> test_bad_backends::test_what_is_no_answer_is_one_error_in_the_callers_dialect,
  test_bad_backends::test_a_stream_that_breaks_off_ends_with_an_error_in_the_callers_dialect_and_is_never_asked_for_again,
  test_dialects::test_a_stream_that_ends_midway_raises_in_the_client,
  test_kept_responses::test_a_stream_that_breaks_off_ends_with_a_numbered_event
- fallbacks are not asked when a stream is cut -> test_a_stream_that_is_cut_before_its_first_event_is_answered_elsewhere,
  test_reliability::test_a_stream_that_dies_is_told_within_it_never_asked_for_again_and_counts
- fallbacks are asked though they must not be -> test_reliability::test_a_training_call_of_a_policy_never_falls_back
- every chunk costs -> test_chat_assembly::test_plain_events_take_the_short_way; what it costs, benchmarks/proxy measures
- streams of messages lose tool arguments, the first chunk or the stop reason
  -> test_message_streams::test_whole_and_streamed_answers_amount_to_the_same_however_the_network_cuts,
  test_message_streams::test_text_after_a_call_and_a_name_that_comes_late,
  test_message_streams::test_an_answer_without_content_still_ends_with_a_stop_reason,
  test_dialects::test_an_agents_loop_calls_tools_and_hands_their_results_back
- of parallel tool calls only the first is streamed, and blocks overlap
  -> test_message_streams::test_pieces_of_parallel_calls_that_come_in_turns_make_blocks_that_do_not_overlap,
  test_message_streams::test_calls_without_an_index_or_with_the_same_one_are_told_apart_by_their_ids,
  test_anthropic::test_the_other_client_streams_parallel_tool_calls_and_thinks
- thinking that is handed back is changed on its way
  -> test_chat_to_messages::test_thinking_that_was_handed_out_is_handed_back,
  test_anthropic::test_an_answer_passes_byte_for_byte_with_the_callers_version_and_betas

Agent Lightning 0.3 and 1.0
- streams are made whole, or refused -> test_streams::test_the_first_event_arrives_before_the_backend_sends_its_last,
  test_dialects::test_what_an_engine_samples_is_captured_to_the_token_and_kept_from_the_agent
- agents get ids that they did not ask for
  -> test_exact_capture::test_a_whole_answer_is_captured_to_the_token_and_the_agents_bytes_are_those_of_a_call_without_capture,
  test_exact_capture::test_a_stream_is_captured_to_the_token_and_the_agents_bytes_are_those_of_a_call_without_capture,
  test_dialects::test_what_an_engine_samples_is_captured_to_the_token_and_kept_from_the_agent
- agents' own sampling is overwritten -> test_requests::test_without_capture_only_the_model_and_the_overrides_change
- answers hang while the collector is away -> test_a_store_that_takes_captures_and_says_nothing_holds_up_no_answer,
  test_spool::test_calls_of_before_during_and_after_the_stores_absence_arrive_in_order
- captures are lost with their process
  -> test_spool::test_a_proxy_killed_while_the_store_is_away_delivers_every_answered_call_once_and_in_order
- a hundred calls in flight at most -> test_two_hundred_calls_wait_at_a_slow_backend_together
- the server that refuses is asked again for 16 s -> test_a_server_that_refuses_is_not_asked_again_while_another_serves,
  test_retry::test_fallbacks_come_in_order_once_every_replica_was_tried_and_then_all_again
- the version is that of the choice, not that of the sampling
  -> test_policy_versions::test_a_stream_records_which_tokens_came_before_and_after_a_promotion,
  test_policy_versions::test_what_the_backend_says_of_its_versions_has_precedence,
  test_holds::test_a_call_that_waited_is_recorded_with_the_version_that_was_promoted_meanwhile
- state lives in one replica -> test_reliability::test_two_proxies_follow_a_change_and_keep_their_own_breakers,
  test_limits::test_two_proxies_hold_one_limit_of_requests_together,
  test_workers::test_every_worker_takes_calls_and_any_of_them_flushes_and_counts_them_all
- a replica that joins moves everybody
  -> test_routing::test_a_target_that_goes_or_comes_moves_only_its_own_attempts
- models change by a restart
  -> test_routing::test_a_swap_under_load_fails_no_call_and_later_calls_go_to_the_new_place
- one key opens everything -> test_routing::test_only_services_may_change_routes,
  test_attempt_urls::test_an_attempt_key_reaches_its_own_attempt_only,
  test_delivery::test_a_runner_may_flush_and_an_agent_may_not

Routers of vLLM and SGLang
- the breaker trips on long generations
  -> test_reliability::test_a_long_answer_is_no_failure_and_goes_to_another_replica_when_its_time_is_over,
  test_breaker::test_failed_probes_do_not_count_while_calls_are_answered
- a sticky hash pins a saturated engine -> test_seats::test_new_attempts_sit_where_the_fewest_are_by_weight,
  test_reliability::test_a_saturated_engine_gets_no_new_attempt_and_its_load_is_told
- the sick worker gets everything, since it looks idle -> test_a_worker_that_refuses_at_once_does_not_draw_the_calls
- a tree of prefixes grows without bound -> test_memory_does_not_grow_with_calls_however_they_end
- unknown fields and token ids are lost by reading and writing again
  -> test_exact_capture::test_a_whole_answer_is_captured_to_the_token_and_the_agents_bytes_are_those_of_a_call_without_capture,
  test_requests::test_the_capture_asks_for_ids_and_logprobs_and_keeps_everything_else,
  test_answers::test_an_answer_with_nothing_to_strip_passes_byte_for_byte
- 40 ms of Nagle's algorithm -> test_known_defects_of_gateways::test_no_segment_waits_for_an_acknowledgement

Gateways in general
- no bound on the bytes that are held -> test_known_defects_of_gateways::test_bodies_have_room_for_so_many_bytes_together,
  test_bookkeeping::test_the_queue_is_full_by_bytes_until_the_store_has_them
- a caller that leaves while it uploads leaks what was reserved
  -> test_known_defects_of_gateways::test_a_caller_that_leaves_while_it_uploads_gives_its_room_back
- a refused upload goes on -> test_known_defects_of_gateways::test_an_upload_that_is_refused_ends,
  test_bad_http::test_a_sender_of_too_large_a_body_sees_why_it_is_refused_when_it_has_sent_it_all
- a slow consumer does not slow the producer
  -> test_slow_callers::test_a_caller_that_reads_nothing_holds_its_backend_up_and_is_given_up,
  test_slow_callers::test_a_caller_over_grpc_that_takes_no_message_is_given_up
- no deadlines towards providers
  -> test_reliability::test_past_its_deadline_a_call_is_answered_504_and_its_backend_is_left,
  test_reliability::test_a_stream_that_stalls_ends_with_an_error_and_counts
- a deployment cuts streams -> test_killed_replicas::test_a_replica_that_is_told_to_stop_cuts_no_stream_within_its_grace
- headers of a hop leak
  -> test_headers::test_a_backend_gets_the_proxys_key_and_little_of_what_the_caller_sent,
  test_headers::test_a_caller_gets_limits_and_request_ids_and_nothing_of_the_backends_insides
"""

from __future__ import annotations

import asyncio
import gc
import re
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fulmen.llm_proxy.v1 import route_pb2
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.llm_proxy.pair import QUIET, put, stream
from tests.support.llm_proxy.scripted_backend import ScriptedBackend

DEADLINE_S = 40
TESTS = Path(__file__).parents[3]
OWN_CODE = ("fulmen", "fulmen_llm_proxy", "fulmen_service_kit")
WAYS = [route_pb2.BALANCING_STICKY, route_pb2.BALANCING_PREFIX_CACHE, route_pb2.BALANCING_LEAST_OUTSTANDING]
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def replicas(
    store: FakeStore, *names: str, route: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[RunningProxy, dict[str, Backend]]]:
    """Runs a proxy with a route to backends of these names, whose health nobody asks."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(asyncio.timeout(DEADLINE_S))
        proxy = await stack.enter_async_context(running_proxy(store.target, **(QUIET | settings)))
        held = {name: await stack.enter_async_context(Backend()) for name in names}
        for name, backend in held.items():
            await proxy.register(name, backend.url)
        await put(proxy, *(target(name) for name in names), **(route or {}))
        yield proxy, held


def test_every_complaint_names_tests_that_there_are() -> None:
    proofs = re.findall(r"(?:(\w+)::)?(test_\w+)(?!\w|::)", __doc__)
    assert len(proofs) > 50
    for file, name in proofs:
        places = TESTS.rglob(f"{file or Path(__file__).stem}.py")
        assert any(f"def {name}(" in place.read_text() for place in places), f"there is no {file}::{name}"


@pytest.mark.long
async def test_memory_does_not_grow_with_calls_however_they_end(store: FakeStore) -> None:
    route = {"balancing": route_pb2.BALANCING_PREFIX_CACHE}
    async with replicas(store, "one", "two", route=route, retry_deadline_s=0) as (proxy, held):
        attempt, key = proxy.attempt()

        async def calls(first: int, count: int) -> tuple[Counter[str], int]:
            for number in range(first, first + count):
                strange = f"{number}{'?' * 10_000}"
                assert (await proxy.chat(key, f"{number} begins a prompt that nobody sends again"))[0] == 200
                assert (await stream(proxy, key))[1].endswith(b"data: [DONE]\n\n")
                assert (await proxy.chat(key, model=strange))[0] == 404
                _set(held, cut_after_events=3)
                assert b"[DONE]" not in (await stream(proxy, key))[1]
                _set(held, cut_after_events=None, gate=asyncio.Event())
                await _leave(proxy, key, held)
                _set(held, gate=None)
            # What was delivered last may still be held: here it is one call, however many there were.
            for _ in range(2):
                assert (await proxy.flush(attempt)).flushed
                await proxy.chat(key)
            assert (await proxy.flush(attempt)).flushed
            store.chunks.clear()
            for backend in held.values():
                backend.received.clear()
            return _objects(), _allocated_bytes()

        tracemalloc.start()
        try:
            await calls(0, 20)
            before, bytes_before = await calls(100, 40)
            after, bytes_after = await calls(200, 40)
        finally:
            tracemalloc.stop()
    assert {name: count for name, count in (after - before).items() if count >= 40} == {}
    assert bytes_after - bytes_before < 40 * 5 * 50, "a call holds kilobytes while it runs"


def _set(held: dict[str, Backend], **switches: Any) -> None:
    for backend in held.values():
        for name, value in switches.items():
            setattr(backend.switches, name, value)


async def _leave(proxy: RunningProxy, key: str, held: dict[str, Backend]) -> None:
    """Makes a call and leaves once it is at a backend; returns when the backend has noticed."""
    arrived, aborted = asyncio.Semaphore(0), asyncio.Semaphore(0)
    for backend in held.values():
        backend.arrived, backend.aborted = arrived, aborted
    call = asyncio.create_task(proxy.chat(key))
    await arrived.acquire()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await aborted.acquire()


def _objects() -> Counter[str]:
    """Counts what is alive of our own classes and of aiohttp's, by class."""
    gc.collect()
    ours = (*OWN_CODE, "aiohttp")
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter({str(kind): held for kind, held in kinds.items() if str(kind.__module__).split(".")[0] in ours})


def _allocated_bytes() -> int:
    """Returns how many bytes lines of our own code have allocated that are still in use."""
    places = [tracemalloc.Filter(True, f"*/{package}/*") for package in OWN_CODE]
    return sum(one.size for one in tracemalloc.take_snapshot().filter_traces(places).statistics("filename"))


@pytest.mark.parametrize("begun", [False, True])
async def test_a_caller_that_leaves_before_the_first_byte_of_a_stream_ends_the_backends_work(
    store: FakeStore, begun: bool
) -> None:
    """Whether the head of the answer has come or not."""
    async with replicas(store, "one") as (proxy, held), ScriptedBackend("hang") as silent:
        await proxy.register("silent", silent.url)
        _set(held, gate=asyncio.Event(), gate_at=0)
        arrived, left = (held["one"].arrived, held["one"].aborted) if begun else (silent.arrived, silent.abandoned)
        await put(proxy, target("one" if begun else "silent"))
        _, key = proxy.attempt()
        calls = [asyncio.create_task(stream(proxy, key)) for _ in range(8)]
        for _ in calls:
            await arrived.acquire()
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        for _ in calls:
            await left.acquire()
        seen = await proxy.health("one" if begun else "silent")
    assert (seen.in_flight_count, seen.failure_count) == (0, 0)


@pytest.mark.parametrize("mode", ["train", "validation"])
async def test_a_stream_that_is_cut_before_its_first_event_is_answered_elsewhere(store: FakeStore, mode: str) -> None:
    """By another replica, and outside of training by a fallback."""
    async with replicas(store, "cut", "well") as (proxy, held):
        held["cut"].switches.cut_after_events = 0
        if mode == "validation":
            await put(proxy, target("well", policy=""), model="spare")
            await put(proxy, target("cut"), fallbacks=["routes/spare"])
        answers = [await stream(proxy, proxy.attempt(mode=mode)[1]) for _ in range(32)]
    assert held["cut"].received
    assert len(held["well"].received) == 32
    assert all(status == 200 and body.endswith(b"data: [DONE]\n\n") for status, body in answers)
    assert not any(b"error" in body for _, body in answers)


async def test_a_store_that_takes_captures_and_says_nothing_holds_up_no_answer(store: FakeStore) -> None:
    async with replicas(store, "one") as (proxy, _):
        store.acknowledge.clear()
        attempt, key = proxy.attempt()
        whole = await asyncio.gather(*[proxy.chat(key, str(number)) for number in range(50)])
        streams = await asyncio.gather(*[stream(proxy, key) for _ in range(50)])
        assert not store.chunks
        store.acknowledge.set()
        summary = await proxy.flush(attempt)
    assert [status for status, _ in whole] == [200] * 50
    assert all(body.endswith(b"data: [DONE]\n\n") for _, body in streams)
    assert (summary.flushed, summary.call_count, summary.unusable_count) == (True, 100, 0)
    assert len(store.spans(attempt)) == 100


async def test_two_hundred_calls_wait_at_a_slow_backend_together(store: FakeStore) -> None:
    async with replicas(store, "one") as (proxy, held):
        slow = held["one"]
        slow.switches.gate = asyncio.Event()
        _, key = proxy.attempt()
        calls = [asyncio.create_task(_chat_alone(proxy, key)) for _ in range(200)]
        for _ in calls:
            await slow.arrived.acquire()
        slow.switches.gate.set()
        assert await asyncio.gather(*calls) == [200] * 200


async def _chat_alone(proxy: RunningProxy, key: str) -> int:
    """Makes a call on a connection of its own, since the client's pool is bounded too."""
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {key}"}
        async with session.post(f"{proxy.url}/chat/completions", json=BODY, headers=headers) as answer:
            await answer.read()
            return answer.status


async def test_a_server_that_refuses_is_not_asked_again_while_another_serves(store: FakeStore) -> None:
    async with replicas(store, "sick", "well") as (proxy, held):
        sick = held["sick"]
        sick.switches.refusals.extend([503] * 1000)
        further = 12
        while further:
            # Which of the two is asked first is drawn from the attempt.
            further -= len(sick.received) >= 3
            before = len(sick.received)
            assert (await proxy.chat(proxy.attempt()[1]))[0] == 200
            assert len(sick.received) <= before + 1
    assert len(sick.received) == 3, "three failures open the breaker"


@pytest.mark.parametrize("way", WAYS)
async def test_a_worker_that_refuses_at_once_does_not_draw_the_calls(store: FakeStore, way: int) -> None:
    """It has none under way, ever, while those that work have many."""
    async with replicas(store, "sick", "well", "busy", route={"balancing": way}, recheck_s=300) as (proxy, held):
        sick, arrived = held.pop("sick"), asyncio.Semaphore(0)
        sick.switches.refusals.extend([503] * 1000)
        gate = asyncio.Event()
        _set(held, gate=gate)
        for backend in held.values():
            backend.arrived = arrived
        calls = []
        for number in range(30):
            calls.append(asyncio.create_task(proxy.chat(proxy.attempt()[1], f"prompt {number}")))
            await arrived.acquire()
        gate.set()
        answers = await asyncio.gather(*calls)
    assert len(sick.received) == 3
    assert [status for status, _ in answers] == [200] * 30
    assert all(len(backend.received) >= 10 for backend in held.values())
