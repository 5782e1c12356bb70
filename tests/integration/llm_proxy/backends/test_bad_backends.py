"""Backends break off, hang, lie and send rubbish: what the caller sees, what is recorded, what is sent again and what not."""

from __future__ import annotations

import asyncio
import gzip
import json
from typing import Any

import pytest

from fulmen.llm_proxy.v1 import backend_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from tests.support.llm_proxy.harness import target
from tests.support.llm_proxy.rogue_backend import (
    CHAT,
    DONE,
    EVENTS,
    MESSAGES,
    RESPONSES,
    STREAM_HEAD,
    WHOLE,
    Act,
    Peer,
    answers,
    chunk,
    event,
    hangs_after,
    response,
    serve_well,
    streams,
)
from tests.support.llm_proxy.rogue_world import (
    BACKEND_KEY,
    DEADLINE_S,
    STREAMED,
    TINY,
    WAYS,
    Answer,
    RogueWorld,
    request_of,
    rogue_fixtures,
    rogue_world,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_ANSWER_BYTES = 100_000
GOOD = json.dumps(WHOLE[CHAT]).encode()
HTML = b"<html><body>502 Bad Gateway at 10.0.0.7</body></html>"
FIRST = EVENTS[CHAT][:3]


shared, world = rogue_fixtures(
    max_answer_bytes=MAX_ANSWER_BYTES, read_timeout_s=0.15, first_byte_timeout_s=0.15, retry_deadline_s=0
)


async def call(world: RogueWorld, path: str, model: str, act: Act, key: str = "", **fields: Any) -> Answer:
    """Makes a call that the backend answers in a certain way, once; checks that it was asked once."""
    before = world.backend.will(act)
    answer = await world.post(path, request_of(path, model) | fields, key or world.key())
    assert len(world.backend.asked) == before + 1
    return answer


async def recorded(world: RogueWorld, attempt: str) -> ModelCallRecord:
    assert (await world.proxy.flush(attempt)).flushed
    return world.store.record(attempt)


def last_error(path: str, stream: bytes) -> dict[str, Any]:
    """Returns the error that ends a stream, as the vendor's client looks for it."""
    last = stream.rstrip(b"\n").rpartition(b"\n\n")[2] if stream.count(b"\n\n") > 1 else stream.rstrip(b"\n")
    lines = dict(line.split(b": ", 1) for line in last.split(b"\n"))
    document = json.loads(lines[b"data"])
    if path == MESSAGES:
        assert (lines[b"event"], document["type"]) == (b"error", "error")
    if path == RESPONSES:
        return document if document["type"] == "error" else document["response"]["error"]
    return document["error"]


NO_ANSWERS: dict[str, tuple[Act, int, str]] = {
    "closes before the head": (answers(), 502, "backend_unavailable"),
    "closes in the head": (answers(b"HTTP/1.1 200 OK\r\ncontent-ty"), 502, "backend_unavailable"),
    "closes before the body": (answers(response(GOOD)[: -len(GOOD)]), 502, "backend_unavailable"),
    "closes in the body": (answers(response(GOOD)[:-9]), 502, "backend_unavailable"),
    "closes in a chunk": (answers(STREAM_HEAD.replace(b"text/event-stream", b"application/json") + chunk(GOOD)[:-9]), 502, "backend_unavailable"),
    "is no HTTP": (answers(b"SSH-2.0-OpenSSH_9.6\r\n"), 502, "backend_unavailable"),
    "announces too much": (answers(response(GOOD).replace(b"length: ", b"length: 1")), 502, "backend_unavailable"),
    "announces too little": (answers(response(GOOD).replace(b"length: %d" % len(GOOD), b"length: 9")), 502, "backend_unavailable"),
    "announces rubbish": (answers(response(GOOD).replace(b"length: ", b"length: x")), 502, "backend_unavailable"),
    "bad chunks": (answers(STREAM_HEAD.replace(b"text/event-stream", b"application/json") + b"zz\r\n" + GOOD), 502, "backend_unavailable"),
    "hangs before the head": (hangs_after(), 504, "deadline_exceeded"),
    "hangs in the head": (hangs_after(b"HTTP/1.1 200 OK\r\n"), 504, "deadline_exceeded"),
    "hangs in the body": (hangs_after(response(GOOD)[:-9]), 504, "deadline_exceeded"),
    "a web page": (answers(response(HTML, content_type=b"text/html")), 502, "backend_unavailable"),
    "an empty body": (answers(response(b"")), 502, "backend_unavailable"),
    "a list": (answers(response(b"[]")), 502, "backend_unavailable"),
    "cut JSON": (answers(response(GOOD[:-1])), 502, "backend_unavailable"),
    "deep JSON": (answers(response(b'{"x":' + b"[" * 40_000 + b"]" * 40_000 + b"}")), 502, "backend_unavailable"),
    "a redirection": (answers(response(b"", b"location: http://127.0.0.1:9/", status=b"302 Found")), 502, "backend_unavailable"),
    "a lasting redirection": (answers(response(HTML, b"location: /v1/x", status=b"308 X")), 502, "backend_unavailable"),
    "not modified": (answers(b"HTTP/1.1 304 Not Modified\r\n\r\n"), 502, "backend_unavailable"),
    "no content": (answers(b"HTTP/1.1 204 No Content\r\n\r\n"), 502, "backend_unavailable"),
    "a status of its own": (answers(response(GOOD, status=b"999 X")), 502, "backend_unavailable"),
    "another protocol": (answers(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"), 502, "backend_unavailable"),
    "compressed": (answers(response(gzip.compress(GOOD), b"content-encoding: gzip")), 502, "backend_unavailable"),
    "too large": (answers(response(b" " * MAX_ANSWER_BYTES + GOOD)), 502, "backend_unavailable"),
    "a head without end": (answers(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 50_000), 502, "backend_unavailable"),
    "too long a header": (answers(response(GOOD, b"x: " + b"y" * 100_000)), 502, "backend_unavailable"),
    "a refusal in HTML": (answers(response(HTML, status=b"503 X", content_type=b"text/html")), 503, "backend_503"),
    "a compressed refusal": (answers(response(gzip.compress(HTML), b"content-encoding: gzip", status=b"500 X")), 500, "backend_500"),
    "an empty refusal": (answers(response(b"", status=b"400 X")), 400, "backend_400"),
    "a refusal in Latin-1": (answers(response(b'"\xff"', status=b"422 X", content_type=b"text/plain")), 422, "backend_422"),
}  # fmt: skip


@pytest.mark.parametrize(("act", "status", "code"), NO_ANSWERS.values(), ids=NO_ANSWERS.keys())
async def test_what_is_no_answer_is_one_error_in_the_callers_dialect(
    world: RogueWorld, act: Act, status: int, code: str
) -> None:
    attempt, key = world.proxy.attempt()
    for path, model in WAYS:
        answer = await call(world, path, model, act, key)
        assert (answer.status, world.told(path, answer)) == (status, code), (path, model, answer.body)
        assert b"10.0.0.7" not in answer.body
        assert "location" not in answer.headers
        assert answer.headers["x-fulmen-error-source"] == ("proxy" if status == 504 else "backend")
    summary = await world.proxy.flush(attempt)
    failed = summary.call_count if status >= 500 else 0
    assert (summary.flushed, summary.infra_failure_count, summary.prompt_token_count) == (True, failed, 0)


@pytest.mark.parametrize(
    "before",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"HTTP/1.1 102 Processing\r\nx: y\r\n\r\n" * 3,
        b"HTTP/1.1 103 Early Hints\r\nlink: <x>\r\n\r\n",
    ],
)
async def test_what_comes_before_an_answer_is_no_answer(world: RogueWorld, before: bytes) -> None:
    for path, model in WAYS:

        async def act(peer: Peer) -> bool:
            await peer.send(before, response(peer.whole))
            return True

        answer = await call(world, path, model, act)
        assert answer.status == 200, (path, model, answer.body)


async def test_an_answer_of_unknown_length_that_ends_with_its_connection_is_an_answer(world: RogueWorld) -> None:
    head = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n"
    answer = await call(world, CHAT, TINY, answers(head, GOOD))
    assert answer.status == 200
    large = await call(world, CHAT, TINY, answers(head, GOOD, b" " * MAX_ANSWER_BYTES))
    assert (large.status, world.told(CHAT, large)) == (502, "backend_unavailable")


# Streams that end before their end.

BREAKS: dict[str, tuple[Any, str]] = {
    "closes": (lambda events: streams(*events[:2], ends=False), "backend_unavailable"),
    "hangs": (lambda events: hangs_after(STREAM_HEAD, *map(chunk, events[:2])), "backend_unavailable"),
    "closes in an event": (lambda events: streams(*events[:2], events[2][:-7], ends=False), "backend_unavailable"),
    "hangs in an event": (lambda events: hangs_after(STREAM_HEAD, *map(chunk, (*events[:2], events[2][:-7]))), "backend_unavailable"),
    "bad chunks": (lambda events: answers(STREAM_HEAD, *map(chunk, events[:2]), b"zz\r\n"), "backend_unavailable"),
    "an event without end": (lambda events: streams(*events[:2], b"data: " + b"x" * (MAX_ANSWER_BYTES + 10)), "backend_unavailable"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "code"), BREAKS.values(), ids=BREAKS.keys())
async def test_a_stream_that_breaks_off_ends_with_an_error_in_the_callers_dialect_and_is_never_asked_for_again(
    world: RogueWorld, make: Any, code: str
) -> None:
    for path, model in STREAMED:

        async def act(peer: Peer) -> bool:
            goes_on: bool = await make(peer.events)(peer)
            return goes_on

        attempt, key = world.proxy.attempt()
        answer = await call(world, path, model, act, key, stream=True)
        if answer.status == 502 and make is BREAKS["bad chunks"][0]:
            world.told(path, answer)  # all of it came at once: nothing was answered yet
            continue
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        error = last_error(path, answer.body)
        # A translated response ends with the event of its own API, whose codes are few.
        assert error["code"] in (code, "server_error"), (path, model, answer.body)
        assert b"[DONE]" not in answer.body
        assert BACKEND_KEY.encode() not in answer.body
        summary = await world.proxy.flush(attempt)
        assert (summary.flushed, summary.call_count, summary.infra_failure_count) == (True, 1, 1)


@pytest.mark.parametrize("make", [BREAKS[name][0] for name in ("closes", "hangs")])
async def test_of_a_broken_stream_the_ids_so_far_are_kept_and_marked(world: RogueWorld, make: Any) -> None:
    attempt, key = world.proxy.attempt()
    await call(world, CHAT, TINY, make(EVENTS[CHAT]), key, stream=True)
    record = await recorded(world, attempt)
    assert record.completion_token_ids == (72).to_bytes(4, "little")
    assert not record.usable
    assert "incomplete" in record.unusable_reason


async def test_a_stream_that_ends_before_its_first_event_is_one_error(world: RogueWorld) -> None:
    for act, status in ((answers(STREAM_HEAD), 502), (streams(), 502), (hangs_after(STREAM_HEAD), 504)):
        for path, model in STREAMED:
            answer = await call(world, path, model, act, stream=True)
            assert answer.status == status
            world.told(path, answer)


JUDGED: dict[str, tuple[tuple[bytes, ...], str]] = {
    "as it should be": (EVENTS[CHAT], ""),
    "no [DONE]": (EVENTS[CHAT][:-1], "incomplete"),
    "no end of its last event": ((*EVENTS[CHAT][:-1], DONE[:-2]), ""),
    "data that is no JSON": ((*FIRST, b"data: {no\n\n", *EVENTS[CHAT][3:]), "malformed_answer"),
    "data of another type": ((*FIRST, b"data: [1]\n\n", *EVENTS[CHAT][3:]), "malformed_answer"),
    "no UTF-8": ((*FIRST, event(b'{"choices": [], "x": "\xff"}'), *EVENTS[CHAT][3:]), "malformed_answer"),
    "no UTF-8 in a key": ((*FIRST, event(b'{"choices": [], "\xff": 1}'), *EVENTS[CHAT][3:]), "malformed_answer"),
    "an error within": ((*FIRST, event({"error": {"message": "out of memory", "code": 500}}), DONE), "backend_error"),
    "only carriage returns": ((b"".join(EVENTS[CHAT]).replace(b"\n", b"\r"),), "incomplete, malformed_answer"),
    "both line ends": ((b"".join(EVENTS[CHAT]).replace(b"\n", b"\r\n"),), ""),
    "no blank lines": ((b"".join(EVENTS[CHAT]).replace(b"\n\n", b"\n"),), "incomplete, malformed_answer"),
    "comments and retries": ((b": ping\n\n", b"retry: 5\n\n", *EVENTS[CHAT][:2], b":\n\n", *EVENTS[CHAT][2:]), ""),
    "more after [DONE]": ((*EVENTS[CHAT], *FIRST), "usage_mismatch"),
    "an id twice": ((*FIRST, FIRST[-1], *EVENTS[CHAT][3:]), "usage_mismatch"),
    "an id left out": ((*FIRST[:-1], *EVENTS[CHAT][3:]), "usage_mismatch"),
    "ids that are none": ((*FIRST, FIRST[-1].replace(b"[105]", b'["x"]'), *EVENTS[CHAT][3:]), "malformed_answer"),
}  # fmt: skip


@pytest.mark.parametrize(("events", "flaw"), JUDGED.values(), ids=JUDGED.keys())
async def test_a_stream_that_is_not_as_it_should_be_is_passed_on_and_marked(
    world: RogueWorld, events: tuple[bytes, ...], flaw: str
) -> None:
    attempt, key = world.proxy.attempt()
    answer = await call(world, CHAT, TINY, streams(*events), key, stream=True)
    assert answer.status == 200
    record = await recorded(world, attempt)
    assert (record.usable, record.unusable_reason[: len(flaw)]) == (not flaw, flaw), record.unusable_reason


async def test_a_stream_that_drips_byte_by_byte_is_the_same_stream(world: RogueWorld) -> None:
    async def drip(peer: Peer) -> bool:
        data = b"".join(peer.events)
        await peer.send(STREAM_HEAD, *(chunk(data[at : at + 1]) for at in range(len(data))))
        await peer.send(b"0\r\n\r\n")
        return True

    for path, model in STREAMED:
        attempt, key = world.proxy.attempt()
        whole = await call(world, path, model, serve_well, stream=True)
        dripped = await call(world, path, model, drip, key, stream=True)
        assert dripped.status == 200
        assert dripped.body.count(b"data: ") == whole.body.count(b"data: "), (path, model)
        if model == TINY:
            assert (await recorded(world, attempt)).usable


async def test_a_stream_that_is_asked_for_and_not_given_is_an_answer_or_an_error(world: RogueWorld) -> None:
    for path, model in STREAMED:
        page = await call(world, path, model, answers(response(HTML, content_type=b"text/html")), stream=True)
        assert (page.status, world.told(path, page)) == (502, "backend_unavailable")
        head = STREAM_HEAD[:-2] + b"content-encoding: gzip\r\n\r\n"
        act = answers(head, chunk(gzip.compress(b"".join(EVENTS[path]))), b"0\r\n\r\n")
        packed = await call(world, path, model, act, stream=True)
        assert (packed.status, world.told(path, packed)) == (502, "backend_unavailable")


# Connections.


async def test_a_connection_with_more_on_it_than_the_answer_is_not_used_again(world: RogueWorld) -> None:
    evil = response(GOOD.replace(b"Hi", b"of another call"))
    late = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def at_once(peer: Peer) -> bool:
        await peer.send(response(peer.whole) + evil)
        return True

    async def rubbish(peer: Peer) -> bool:
        await peer.send(response(peer.whole) + b"\r\nrubbish")
        return True

    async def later(peer: Peer) -> bool:
        await peer.send(response(peer.whole))
        loop.call_later(0.02, lambda: (peer.write_now(evil), late.set()))
        return True

    for act in (at_once, rubbish, later):
        late.clear()
        assert (await call(world, CHAT, TINY, act)).status in ((200,) if act is later else (200, 502))
        if act is later:
            await late.wait()
            await asyncio.sleep(0.02)  # what it sent has arrived
        answer = await call(world, CHAT, TINY, serve_well)
        assert b"of another call" not in answer.body
        assert json.loads(answer.body)["choices"][0]["message"]["content"] == "Hi"
        assert world.backend.asked[-1].connection != world.backend.asked[-2].connection


async def test_a_connection_whose_answer_was_cut_or_refused_unread_is_not_used_again(world: RogueWorld) -> None:
    for act in (
        hangs_after(response(GOOD)[:-9]),
        hangs_after(response(gzip.compress(GOOD), b"content-encoding: gzip")[:-2]),
        hangs_after(response(b"", b"location: /", status=b"302 X")[:-2]),
    ):
        await call(world, CHAT, TINY, act)
        assert (await call(world, CHAT, TINY, serve_well)).status == 200
        assert world.backend.asked[-1].connection != world.backend.asked[-2].connection


async def test_a_good_connection_is_used_again(world: RogueWorld) -> None:
    for stream in (False, True):
        await call(world, CHAT, TINY, serve_well, stream=stream)
        await call(world, CHAT, TINY, serve_well, stream=stream)
        assert world.backend.asked[-1].connection == world.backend.asked[-2].connection


@pytest.mark.parametrize("stream", [False, True])
async def test_a_kept_connection_that_closes_as_it_is_used_costs_no_call(stream: bool) -> None:
    async with asyncio.timeout(DEADLINE_S), rogue_world() as world:
        for path, model in STREAMED:
            world.backend.will(serve_well, answers())  # the second request on it finds it closing
            attempt, key = world.proxy.attempt()
            for _ in range(2):
                answer = await world.post(path, request_of(path, model) | {"stream": stream}, key)
                assert answer.status == 200, answer.body
            first, second, third = world.backend.asked[-3:]
            assert first.connection == second.connection != third.connection
            summary = await world.proxy.flush(attempt)
            assert (summary.call_count, summary.infra_failure_count) == (2, 0)


async def test_a_half_closed_backend_still_answers(world: RogueWorld) -> None:
    async def half(peer: Peer) -> bool:
        await peer.send(response(peer.whole)[:-1])
        await peer.send(response(peer.whole)[-1:])
        peer.end_writing()
        await peer.left()
        return False

    assert (await call(world, CHAT, TINY, half)).status == 200


# Answers whose parts have other types than their API's.


def _piece(**fields: Any) -> bytes:
    return event({**_ODD, "choices": [{"index": 0, "delta": {}, "finish_reason": None} | fields]})


_ODD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "byte-model"}
ODD_EVENTS: dict[str, bytes] = {
    "a delta that is a text": _piece(delta="text"),
    "log-probabilities that are a number": _piece(logprobs=1),
    "a message that is a list": _piece(message=["x"]),
    "bytes that are not UTF-8": b'data: {"id": "\xff", "choices": []}\n\n',
    "choices that are a text": event({**_ODD, "choices": "none"}),
    "an index that is a list": _piece(index=[]),
}


@pytest.mark.parametrize("odd", ODD_EVENTS.values(), ids=ODD_EVENTS.keys())
async def test_an_event_of_other_types_costs_the_record_nothing_but_itself(world: RogueWorld, odd: bytes) -> None:
    attempt, key = world.proxy.attempt()
    events = EVENTS[CHAT]
    answer = await call(world, CHAT, TINY, streams(*events[:3], odd, *events[3:]), key, stream=True)
    assert answer.status == 200
    record = await recorded(world, attempt)
    assert json.loads(record.response_json)["choices"][0]["message"]["content"] == "Hi"
    assert json.loads(record.request_json)["messages"]


@pytest.mark.parametrize("body", [b'{"choices": "none"}', b'{"choices": [{"message": 1}]}', b'{"a": "\xed\xa0\x80"}'])
async def test_an_odd_answer_that_becomes_a_stream_is_passed_on(world: RogueWorld, body: bytes) -> None:
    await world.proxy.register(
        "odd", world.backend.url, apis=[backend_pb2.API_CHAT_COMPLETIONS], engine=backend_pb2.ENGINE_SGLANG
    )
    await world.proxy.put_route(target("odd"), model="odd")
    answer = await call(world, CHAT, "odd", answers(response(body)), stream=True)
    assert answer.status == 200
    assert answer.body.startswith(b"data: ")
