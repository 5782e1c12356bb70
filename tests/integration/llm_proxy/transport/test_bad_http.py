"""Whatever bytes a caller sends, and however slowly: an answer that its client can read, or the end of its connection."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_service_kit.http import server as http_server
from fulmen_service_kit.http import wire as http_wire
from tests.support.llm_proxy.rogue_backend import CHAT, COUNT, MESSAGES, STREAM_END, Peer, chunk
from tests.support.llm_proxy.rogue_world import (
    DEADLINE_S,
    NATIVE,
    OPENAI,
    PROMPT,
    Answer,
    RogueWorld,
    answers_in,
    bounded,
    head_of,
    request_of,
    rogue_fixtures,
    sized,
)
from tests.support.llm_proxy.vendors.errors import error_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_REQUEST_BYTES = 64 * 1024
BODIES = {path: json.dumps(request_of(path, model)).encode() for path, model in NATIVE.items()}
BODY = BODIES[CHAT]
CHUNKED = b"transfer-encoding: chunked"
LAST = b"connection: close"


shared, world = rogue_fixtures(max_request_bytes=MAX_REQUEST_BYTES, request_timeout_s=0.4)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets connections of refused requests end soon."""
    monkeypatch.setattr(http_wire, "_LINGER_S", 0.1)
    monkeypatch.setattr(http_server, "_LINGER_S", 0.1)


def chunks_of(body: bytes, size: int = 7) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def only(received: bytes) -> Answer:
    [answer] = answers_in(received)
    return answer


@pytest.mark.parametrize("path", NATIVE)
async def test_too_large_a_body_is_refused_by_its_announced_length_alone(world: RogueWorld, path: str) -> None:
    received = await world.exchange(
        head_of(path, world.key(), b"content-length: %d" % (MAX_REQUEST_BYTES + 1)), eof=True
    )
    answer = only(received)
    assert (answer.status, world.told(path, answer)) == (413, "message_too_large")
    assert answer.headers["connection"] == "close"


def send_all_then_read(port: int, *pieces: bytes) -> bytes:
    """Sends as a client does that looks for its answer only when it has sent everything."""
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_a_sender_of_too_large_a_body_sees_why_it_is_refused_when_it_has_sent_it_all(
    world: RogueWorld, path: str, chunked: bool
) -> None:
    before = len(world.backend.asked)
    body = b"x" * 30_000_000  # more than the sockets' own buffers hold: who does not read makes the sender fail
    size, data = (CHUNKED, chunks_of(body, 1_000_000)) if chunked else (sized(body), body)
    async with asyncio.timeout(DEADLINE_S):
        received = await asyncio.to_thread(send_all_then_read, world.port, head_of(path, world.key(), size), data)
    answer = only(received)
    assert (answer.status, world.told(path, answer)) == (413, "message_too_large")
    assert len(world.backend.asked) == before


@pytest.mark.parametrize("path", NATIVE)
async def test_a_body_in_chunks_is_a_body(world: RogueWorld, path: str) -> None:
    received = await world.exchange(head_of(path, world.key(), CHUNKED, LAST), chunks_of(BODIES[path]))
    assert only(received).status == 200
    sent = json.loads(world.backend.asked[-1].body)
    assert sent == json.loads(BODIES[path])


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("lines", "data"),
    [
        ([CHUNKED], b"zz\r\n{}\r\n0\r\n\r\n"),
        ([CHUNKED], b"5\r\n{}\r\n0\r\n\r\n" + BODY),
        ([CHUNKED], b"-2\r\n{}\r\n0\r\n\r\n"),
        ([CHUNKED], b"ffffffffffffffffff\r\n{}"),
        ([CHUNKED, sized(BODY)], chunks_of(BODY)),
        ([sized(BODY), sized(BODY[:-1])], BODY),
        ([b"content-length: -1"], BODY),
        ([b"content-length: ten"], BODY),
        ([b"content-length: 1e2"], BODY),
        ([b"content-length: 0x10"], BODY),
        ([b"content-length: 99999999999999999999"], BODY),
        ([b"transfer-encoding: gzip"], BODY),
        ([b"transfer-encoding: xchunked"], chunks_of(BODY)),
    ],
)
async def test_a_body_of_no_clear_length_is_refused(world: RogueWorld, lines: list[bytes], data: bytes) -> None:
    for path in (CHAT, MESSAGES):
        before = len(world.backend.asked)
        answer = answers_in(await world.exchange(head_of(path, world.key(), *lines), data, eof=True))[0]
        assert answer.status in (400, 413)
        error_of(BY_PATH[path].dialect, answer.status, answer.headers, answer.body)
        assert len(world.backend.asked) == before


@pytest.mark.usefixtures("hasty")
async def test_what_follows_too_short_a_length_is_not_taken_for_a_request(world: RogueWorld) -> None:
    key = world.key()
    smuggled = head_of(CHAT, key, sized(BODY)) + BODY
    received = await world.exchange(head_of(CHAT, key, b"content-length: 5") + BODY + smuggled)
    first, *others = answers_in(received)
    assert (first.status, world.told(CHAT, first)) == (400, "argument_invalid")
    assert [one.code for one in others] in ([], ["request_malformed"])


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("path", NATIVE)
@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_that_does_not_come_to_its_end_is_given_up(world: RogueWorld, path: str, chunked: bool) -> None:
    size = CHUNKED if chunked else b"content-length: 9999"
    answer = only(await world.exchange(head_of(path, world.key(), size), b"5\r\n{" if chunked else b"{"))
    assert (answer.status, world.told(path, answer)) == (408, "request_timeout")
    assert answer.headers["connection"] == "close"


async def test_a_body_that_comes_byte_by_byte_is_given_up_all_the_same_and_its_sender_sees_that(
    world: RogueWorld,
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(head_of(CHAT, world.key(), sized(BODY)))
        answered = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        for byte in BODY:
            if answered.done():
                break
            writer.write(bytes([byte]))
            await asyncio.wait([answered], timeout=0.05)
        writer.write(BODY)
        await writer.drain()
        assert (await answered).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("slowly", [b"", b"POST /v1/chat/comp", head_of(CHAT, "k")[:-2] + b"x-more: 1"])
async def test_a_head_that_does_not_come_to_its_end_is_given_up(
    world: RogueWorld, slowly: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_LIMIT_S", 0.1)
    answer = only(await world.exchange(*([slowly[:9], slowly[9:]] if slowly else [])))
    assert (answer.status, answer.code) == (408, "request_timeout")
    for path in (CHAT, MESSAGES):
        error_of(BY_PATH[path].dialect, answer.status, answer.headers, answer.body)


async def test_a_second_head_that_never_ends_does_not_spoil_the_answer_before_it(
    world: RogueWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_LIMIT_S", 0.05)
    over = asyncio.Event()

    async def slow_stream(peer: Peer) -> bool:
        await peer.stream(*peer.events[:2])
        asyncio.get_running_loop().call_later(0.2, over.set)
        await over.wait()
        await peer.send(*map(chunk, peer.events[2:]), STREAM_END)
        return True

    world.backend.act = slow_stream
    body = json.dumps(request_of(CHAT, OPENAI) | {"stream": True}).encode()
    for second in (b"POST /v1/ch", b"\x00\x01garbage\r\n\r\n", head_of(CHAT, "k" * 400_000)):
        over.clear()
        received = await world.exchange(head_of(CHAT, world.key(), sized(body)) + body, second)
        answer = only(received)
        assert (answer.status, answer.body.count(b"data: "), answer.body[-14:]) == (200, 5, b"data: [DONE]\n\n")


async def test_a_caller_that_waits_to_be_told_to_go_on_is_told(world: RogueWorld) -> None:
    async with asyncio.timeout(DEADLINE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(head_of(CHAT, world.key(), sized(BODY), b"expect: 100-continue", LAST))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        assert only(await reader.read()).status == 200
        writer.close()


@pytest.mark.usefixtures("hasty")
async def test_a_caller_that_is_refused_before_its_body_is_told_so_and_its_connection_ends(world: RogueWorld) -> None:
    expect = b"expect: 100-continue"
    for path in (CHAT, MESSAGES):
        for key, size, status in (("wrong", 9, 401), (world.key(), MAX_REQUEST_BYTES + 1, 413)):
            answer = only(await world.exchange(head_of(path, key, b"content-length: %d" % size, expect)))
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            world.told(path, answer)


async def test_requests_sent_at_once_are_answered_in_their_order(world: RogueWorld) -> None:
    key = world.key()
    paths = [CHAT, MESSAGES, COUNT, CHAT, "/v1/nothing", MESSAGES]
    requests = [head_of(path, key, sized(BODIES.get(path, b""))) + BODIES.get(path, b"") for path in paths[:-1]]
    requests.append(head_of(MESSAGES, key, sized(BODIES[MESSAGES]), LAST) + BODIES[MESSAGES])
    found = answers_in(await world.exchange(b"".join(requests)))
    assert [answer.status for answer in found] == [200, 200, 200, 200, 404, 200]
    kinds = [json.loads(answer.body).get("object") or json.loads(answer.body).get("type") for answer in found]
    assert kinds == ["chat.completion", "message", None, "chat.completion", None, "message"]


async def test_http_1_0_is_answered_whole_and_its_connection_closed(world: RogueWorld) -> None:
    for path, body in BODIES.items():
        answer = only(await world.exchange(head_of(path, world.key(), sized(body), version=b"1.0") + body))
        assert (answer.status, answer.headers["connection"]) == (200, "close")


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "request_",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/chat/completions HTTP/9.9\r\nhost: x\r\n\r\n",
        b"POST  HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n: no name\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nna me: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nx: a\x00b\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\n folded: x\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx: a\rb: c\r\n\r\n",
        b"CONNECT inside:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"BREW /v1/chat/completions HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % number for number in range(500)) + b"\r\n",
        b"GET / HTTP/1.1\r\nx: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_with_an_error_of_either_dialect(world: RogueWorld, request_: bytes) -> None:
    answer = only(await world.exchange(request_, eof=False))
    assert 400 <= answer.status < 500
    for dialect in {api.dialect for api in BY_PATH.values()}:
        error_of(dialect, answer.status, answer.headers, answer.body)


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"TLS/1.0"])
async def test_a_connection_is_not_upgraded(world: RogueWorld, upgrade: bytes) -> None:
    lines = [b"connection: Upgrade, HTTP2-Settings", b"upgrade: " + upgrade, b"http2-settings: AAMAAABk"]
    key = world.key()
    second = head_of(MESSAGES, key, *lines, CHUNKED) + chunks_of(BODIES[MESSAGES])
    last = head_of("/healthz", key, LAST, method=b"GET")
    found = answers_in(await world.exchange(head_of(CHAT, key, *lines, sized(BODY)), BODY[:9], BODY[9:], second, last))
    assert [answer.status for answer in found] == [200, 200, 200]
    seen = [json.loads(asked.body) for asked in world.backend.asked[-2:]]
    assert seen == [json.loads(BODY), json.loads(BODIES[MESSAGES])]


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "path",
    [
        "/", "//", "/v1", "/v1/", "/v1//chat/completions", "//v1/chat/completions", "/v1/chat/completions/",
        "/v1/./chat/completions", "/v1/../v1/chat/completions", "/v1/models/../chat/completions", "/V1/chat/completions",
        "/v1/chat%2Fcompletions/x", "/v1/chat/completions%00", "/v1/chat/completions;x=1", "/v1/chat/completions%20",
        "/v1/%2e%2e/%2e%2e/etc/passwd", "/v1/chat/%E2%80%A8", "/v1/%ff%fe", "/healthz/../v1/chat/completions",
        "/projects/p/rollouts/x/attempts/1/metrics", "/projects//rollouts//attempts//v1/chat/completions", "/openai/deployments/",
        "/v1/responses/%2e%2e%2fmodels", "/v1/models/" + "x" * 3000, "/openai/openai/v1/chat/completions",
    ],
)  # fmt: skip
async def test_a_path_that_is_none_leads_nowhere(world: RogueWorld, path: str) -> None:
    before = len(world.backend.asked)
    for method in (b"POST", b"GET", b"DELETE"):
        answer = only(await world.exchange(head_of(path, world.key(), sized(BODY), LAST, method=method), BODY))
        assert answer.status in (400, 404, 405), answer.body
        error_of(BY_PATH[CHAT].dialect, answer.status, answer.headers, answer.body)
    assert len(world.backend.asked) == before


async def test_an_absolute_address_is_this_proxys_own(world: RogueWorld) -> None:
    before = len(world.backend.asked)
    received = await world.exchange(
        head_of("http://inside.example/v1/chat/completions", world.key(), sized(BODY), LAST), BODY
    )
    assert only(received).status == 200
    assert len(world.backend.asked) == before + 1


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Basic eDp5",
        b"Bearer \xff\xfe",
        b"Bearer a b",
        b"Bearer " + b"x" * 30_000,
        b"\x7f",
        b"bearer\tx",
    ],
)
async def test_an_authorization_of_whatever_bytes_is_refused(world: RogueWorld, value: bytes) -> None:
    for path in (CHAT, MESSAGES):
        head = b"POST %b HTTP/1.1\r\nhost: x\r\nauthorization: %b\r\n%b\r\n%b\r\n\r\n" % (
            path.encode(),
            value,
            sized(BODY),
            LAST,
        )
        answer = only(await world.exchange(head, BODY))
        assert (answer.status, world.told(path, answer)) in ((401, "token_invalid"), (400, "request_malformed"))


HEAD = head_of(CHAT, "a-key", sized(BODY)) + BODY
PARTS = st.sampled_from(
    [
        *(b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" ", b":", b"\x00", b"\xff", b"POST ", b"GET / ", b"HTTP/1.1"),
        *(CHUNKED + b"\r\n", b"expect: 100-continue\r\n", b"connection: upgrade\r\nupgrade: x\r\n"),
        *(b"content-length: 5\r\n", b"0\r\n\r\n", b"5\r\nhello\r\n"),
    ]
)


@settings(bounded)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(HEAD)), st.integers(0, 3), PARTS | st.binary(max_size=4)), max_size=5)
)
@example(edits=[(0, len(HEAD), b"")])
async def test_bytes_of_any_kind_end_in_answers_or_the_end_of_the_connection(
    world: RogueWorld, edits: list[tuple[int, int, bytes]]
) -> None:
    data = HEAD
    for place, cut, part in edits:
        data = data[:place] + part + data[place + cut :]
    received = await world.exchange(data, eof=True)
    for answer in answers_in(received):
        assert answer.status < 500, answer.body
        assert PROMPT.encode() not in answer.body
        if answer.status >= 400:
            json.loads(answer.body)


async def test_a_caller_that_leaves_with_its_body_half_sent_is_forgotten(world: RogueWorld) -> None:
    before = len(world.backend.asked)
    for path, body in BODIES.items():
        _, writer = await asyncio.open_connection("127.0.0.1", world.port)
        writer.write(head_of(path, world.key(), sized(body)) + body[:-3])
        await writer.drain()
        writer.transport.abort()
    assert len(world.backend.asked) == before


async def test_a_refusal_of_one_request_leaves_the_connection_to_the_next(world: RogueWorld) -> None:
    key, bad = world.key(), b"[]"
    requests = head_of(CHAT, key, sized(bad)) + bad + head_of(CHAT, "wrong", sized(BODY)) + BODY
    found = answers_in(await world.exchange(requests + head_of(CHAT, key, sized(BODY), LAST) + BODY))
    assert [answer.status for answer in found] == [400, 401, 200]
