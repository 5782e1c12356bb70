"""Captures survive the proxy's death and the store's absence: each arrives once, in order."""

from __future__ import annotations

import asyncio
import signal
import uuid
from array import array
from pathlib import Path

import pytest

from fulmen.ids import parse_rollout_name, uuid7
from fulmen.store.v1 import span_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_service_kit.errors import StartupError
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore, batch_of
from tests.support.llm_proxy.harness import MODEL, SIGNING_KEY, RunningProxy, running_proxy, target
from tests.support.llm_proxy.proxy_process import ProxyProcess, new_attempt, proxy_process
from tests.support.llm_proxy.waits import EARLY_S
from tests.support.store import running as real

DEADLINE_S = 90
DROPPED = "fulmen_llm_proxy_captures_dropped_total"
CALLS = 12
SPOOLED = "fulmen_llm_proxy_captures_spooled_total"
ALONE = "fulmen_llm_proxy_serves_alone"
RECORDS = "fulmen_llm_proxy_spool_records"


async def set_up(store_target: str, backend: Backend, *, signing_key: str = SIGNING_KEY) -> None:
    """Registers the backend, a route with a policy and one without."""
    async with running_proxy(store_target, backend_url=backend.url, signing_key=signing_key) as proxy:
        await proxy.put_route(target("one", policy=""), model="judge")


async def until_routed(proxy: ProxyProcess, key: str) -> None:
    """Returns when the proxy has heard its routes."""
    headers = {"Authorization": f"Bearer {key}"}
    while True:
        async with proxy.http.get(f"{proxy.url}/models", headers=headers) as answer:
            if len((await answer.json())["data"]) == 2:
                return
        await asyncio.sleep(0.02)


def content_of(call: ModelCallRecord) -> str:
    """What the agent said last."""
    return bytes(array("i", call.prompt_token_ids).tolist()).decode().removeprefix("<user>").removesuffix("\n")


@pytest.mark.long(short=True)
async def test_a_proxy_killed_while_the_store_is_away_delivers_every_answered_call_once_and_in_order(
    tmp_path: Path, database_url: str
) -> None:
    options = {"signing_key": real.SIGNING_KEY, "spool_dir": tmp_path / "spool"}
    ready = tmp_path / "ready.json"
    async with asyncio.timeout(DEADLINE_S), Backend() as backend:
        async with real.running_store(database_url) as store:
            port = store.port
            names = await real.create(await store.stubs(), 2)
            await set_up(store.target, backend, signing_key=real.SIGNING_KEY)
            attempts = dict(
                new_attempt(parse_rollout_name(name).rollout_id, signing_key=real.SIGNING_KEY) for name in names
            )
            running = proxy_process(store.target, ready, **options)
            proxy = await running.__aenter__()
            await until_routed(proxy, next(iter(attempts.values())))
            await proxy.until(ALONE, 1)
        # The store is gone. Agents notice nothing.
        for number in range(CALLS):
            for key in attempts.values():
                assert (await proxy.chat(key, f"call {number}", model=MODEL))[0] == 200
        await proxy.until(SPOOLED, CALLS * len(attempts))
        [early] = await proxy.flush([next(iter(attempts))], timeout=EARLY_S)
        await proxy.kill()
        await running.__aexit__(None, None, None)

        async with proxy_process(f"127.0.0.1:{port}", ready, **options) as heir:
            unsent = await heir.flush(list(attempts), timeout=EARLY_S)
            async with real.running_store(database_url, port=port) as store:
                sent = await heir.flush(list(attempts), timeout=30)
                await heir.until(RECORDS, 0)
                stubs = await store.stubs()
                stream = stubs.spans.StreamSpans(span_service_pb2.StreamSpansRequest(parents=list(attempts)))
                chunks = [chunk async for message in stream for chunk in message.chunks]
    assert (early.flushed, early.call_count) == (False, CALLS)
    assert [(one.flushed, one.call_count) for one in unsent] == [(False, CALLS)] * 2
    assert [(one.flushed, one.call_count, one.unusable_count) for one in sent] == [(True, CALLS, 0)] * 2
    for attempt in attempts:
        records = [r for chunk in chunks if chunk.attempt == attempt for r in batch_of(chunk).spans]
        calls = [ModelCallRecord.FromString(record.model_call) for record in records]
        assert [content_of(call) for call in calls] == [f"call {number}" for number in range(CALLS)]
        assert all(call.usable for call in calls)
    left = sorted(path.suffix for path in (tmp_path / "spool").iterdir() if path.is_file())
    assert left == [".keys", ".lock"], "captures are gone, the store's public keys are kept"


async def test_a_proxy_killed_while_it_delivers_doubles_nothing(tmp_path: Path) -> None:
    options = {"signing_key": SIGNING_KEY, "spool_dir": tmp_path / "spool"}
    ready = tmp_path / "ready.json"
    attempt, key = new_attempt()
    async with asyncio.timeout(DEADLINE_S), Backend() as backend, FakeStore() as store:
        await set_up(store.target, backend)
        async with proxy_process(store.target, ready, **options) as proxy:
            await until_routed(proxy, key)
            await proxy.until(ALONE, 1)
            await store.stop()
            for number in range(CALLS):
                assert (await proxy.chat(key, f"call {number}", model=MODEL))[0] == 200
            await proxy.until(SPOOLED, CALLS)
            await store.start()
            await store.appended.acquire()  # the store has some, and the proxy does not know it yet
            await proxy.kill()
        async with proxy_process(store.target, ready, **options) as heir:
            [summary] = await heir.flush([attempt], timeout=30)
    assert summary.flushed
    assert [content_of(record) for _, record in store.spans(attempt)] == [f"call {n}" for n in range(CALLS)]


async def test_a_proxy_that_is_stopped_leaves_on_disk_what_the_store_has_not_got(tmp_path: Path) -> None:
    options = {"signing_key": SIGNING_KEY, "spool_dir": tmp_path / "spool", "drain_grace_s": 20}
    ready = tmp_path / "ready.json"
    attempt, key = new_attempt()
    async with asyncio.timeout(DEADLINE_S), Backend() as backend, FakeStore() as store:
        await set_up(store.target, backend)
        async with proxy_process(store.target, ready, **options) as proxy:
            await until_routed(proxy, key)
            store.acknowledge.clear()  # it is there, and answers nothing
            for number in range(CALLS):
                assert (await proxy.chat(key, f"call {number}", model=MODEL))[0] == 200
            proxy.process.send_signal(signal.SIGTERM)
            assert await proxy.process.wait() == 0
        assert not any('"drain_cut_short"' in line for line in proxy.log)
        store.acknowledge.set()
        async with proxy_process(store.target, ready, **options) as heir:
            [summary] = await heir.flush([attempt], timeout=30)
    # Nobody has told the store that these were all: the attempt runs again.
    assert (summary.lost, summary.unusable_count) == (True, 0)
    assert [content_of(record) for _, record in store.spans(attempt)] == [f"call {n}" for n in range(CALLS)]


async def test_calls_of_before_during_and_after_the_stores_absence_arrive_in_order(
    store: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        running_proxy(store.target, backend_url=backend.url, spool_dir=str(tmp_path)) as proxy,
    ):
        attempt, key = proxy.attempt()
        for number in range(5):
            await proxy.chat(key, f"call {number}")
        await store.stop()
        for number in range(5, 10):
            await proxy.chat(key, f"call {number}")
        await store.start()
        for number in range(10, 15):
            await proxy.chat(key, f"call {number}")
        summary = await proxy.flush(attempt)
    chunks = [chunk for chunk in store.chunks.values() if chunk.attempt == attempt]
    records = [ModelCallRecord.FromString(r.model_call) for chunk in chunks for r in batch_of(chunk).spans]
    assert (summary.flushed, summary.call_count, summary.unusable_count) == (True, 15, 0)
    assert [content_of(record) for record in records] == [f"call {number}" for number in range(15)]
    assert [chunk.chunk_id for chunk in chunks] == sorted(chunk.chunk_id for chunk in chunks)


async def test_a_full_spool_drops_what_is_not_trained_on_says_so_and_then_lets_calls_wait(
    store: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    small = {"spool_dir": str(tmp_path), "spool_bytes": 1024 * 1024, "capture_buffer_bytes": 400_000}
    async with asyncio.timeout(DEADLINE_S), running_proxy(store.target, backend_url=backend.url, **small) as proxy:
        await proxy.put_route(target("one", policy=""), model="judge")
        judged, judge_key = proxy.attempt()
        attempt, key = proxy.attempt()
        store.acknowledge.clear()
        # The first one is what the proxy tries to send all the time; that is never dropped.
        assert (await proxy.chat(key))[0] == 200
        await until_spooled(proxy, 1)
        for _ in range(3):
            assert (await proxy.chat(judge_key, model="judge"))[0] == 200
        await until_spooled(proxy, 4)
        answered, refused, status = 1, 0, 200
        # While the disk is busy, a call may be refused for a moment; only a full spool drops anything.
        while status == 200 or not proxy.registry.get_sample_value(DROPPED, {"reason": "spool_full"}):
            status, _ = await proxy.chat(key, _incompressible(answered), max_tokens=16)
            answered, refused = answered + (status == 200), refused + (status == 503)
            assert answered + refused < 5000
        early = await proxy.flush(judged, timeout=EARLY_S)
        store.acknowledge.set()
        summary = await proxy.flush(attempt, timeout=30)
        told = await proxy.flush(judged)
    assert (early.flushed, early.unusable_count) == (True, 3)
    assert (told.flushed, told.unusable_count, store.spans(judged)) == (True, 3, [])
    assert (summary.flushed, summary.unusable_count, summary.call_count) == (True, 0, answered + refused)
    assert len(store.spans(attempt)) == answered


async def test_a_disk_that_fails_hurts_no_caller_and_loses_nothing(
    store: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    async with (
        asyncio.timeout(DEADLINE_S),
        running_proxy(store.target, backend_url=backend.url, spool_dir=str(tmp_path)) as proxy,
    ):
        attempt, key = proxy.attempt()
        [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
        folder.rename(tmp_path / "aside")
        folder.write_text("no folder any more")
        await store.stop()
        for number in range(CALLS):
            assert (await proxy.chat(key, f"call {number}"))[0] == 200
        while proxy.metric("spool_errors_total") == 0:  # noqa: ASYNC110  # a counter tells nobody
            await asyncio.sleep(0.02)
        await store.start()
        summary = await proxy.flush(attempt)
        folder.unlink()
        (tmp_path / "aside").rename(folder)
    assert (summary.flushed, summary.call_count, summary.unusable_count) == (True, CALLS, 0)
    assert [content_of(record) for _, record in store.spans(attempt)] == [f"call {n}" for n in range(CALLS)]


async def until_spooled(proxy: RunningProxy, calls: int) -> None:
    while (proxy.metric("captures_spooled_total") or 0) < calls:  # noqa: ASYNC110  # a counter tells nobody
        await asyncio.sleep(0.02)


async def test_a_proxy_starts_on_a_full_disk_and_keeps_captures_in_memory(
    store: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    # One inode, which is the folder's own: nothing can be made in it.
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k,nr_inodes=1", "tmpfs", str(tmp_path)]
    if await (await asyncio.create_subprocess_exec(*mount)).wait():
        pytest.skip("no file system can be mounted here")
    try:
        async with (
            asyncio.timeout(DEADLINE_S),
            running_proxy(store.target, backend_url=backend.url, spool_dir=str(tmp_path)) as proxy,
        ):
            attempt, key = proxy.attempt()
            await store.stop()
            assert (await proxy.chat(key))[0] == 200
            await store.start()
            summary = await proxy.flush(attempt)
            assert proxy.metric("spool_errors_total") == 1
    finally:
        await (await asyncio.create_subprocess_exec("umount", str(tmp_path))).wait()
    assert (summary.flushed, summary.call_count, summary.unusable_count) == (True, 1, 0)


async def test_a_spool_that_is_no_folder_is_a_mistake_that_the_start_tells(store: FakeStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="spool_dir"):
        async with running_proxy(store.target, spool_dir=str(tmp_path / "file")):
            pass


def _incompressible(number: int) -> str:
    return "".join(uuid.UUID(int=number * 1000 + i).hex + uuid7().hex for i in range(240))
