"""HTTP of the proxy and of the store's OTLP port. A line says `METHOD PATH KIND`; `raw` are bytes of a connection."""

from __future__ import annotations

import asyncio
import json
import random

from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.target import Leak, check_text
from tests.fuzz.targets import otlp, requests
from tests.fuzz.world import LiveTarget, LiveWorld
from tests.support.llm_proxy.rogue_backend import CHAT
from tests.support.llm_proxy.rogue_world import REQUESTS

LIMIT_S = 20.0
RAW_S = 0.15
_KINDS = {"json": "application/json", "protobuf": "application/x-protobuf", "gzip": "application/json"}
_PATHS = (
    "/", "/v1", "/v1/models", "/v1/models/x", "/v1/responses/resp_1", "/healthz", "/readyz", "/metrics", "/v1//chat/completions",
    "/openai/deployments/m/chat/completions?api-version=1", "/projects/a/rollouts/x/attempts/1/v1/chat/completions", "/v1/%ff",
)  # fmt: skip
_RAW = b"raw\nPOST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer @KEY@\r\ncontent-type: application/json\r\n"


def seeds(world: LiveWorld) -> list[bytes]:
    """Returns requests of every API, of every kind of export, and connections."""
    body = json.dumps({**REQUESTS[CHAT], "model": "chat_completions-unknown"}).encode()
    found = []
    for seed in requests.TARGET.seeds:
        head, _, document = seed.partition(b"\n")
        path = requests.APIS[requests.ApiName(head.decode())].path
        found.append(
            f"POST /v1{path} json\n".encode() + document.replace(b'"model": "m"', b'"model": "chat_completions-vllm"')
        )
    found += [f"GET {path} json\n".encode() for path in _PATHS]
    for seed in otlp.TARGET.seeds:
        found.append((b"OTLP /v1/traces json\n" if seed[:1] == b"j" else b"OTLP /v1/traces protobuf\n") + seed[1:])
    found.append(_RAW + b"content-length: %d\r\n\r\n" % len(body) + body)
    found.append(_RAW + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    return found


def mutate(world: LiveWorld, data: bytes, rng: random.Random) -> bytes:
    """Changes the body by its kind, the path, or the bytes of a connection."""
    head, _, body = data.partition(b"\n")
    if head == b"raw":
        return b"raw\n" + mutate_bytes(body, rng)
    words = head.split(b" ")
    if len(words) != 3 or rng.random() < 0.03:
        return (
            data
            if len(words) != 3
            else b" ".join(
                [words[0], mutate_bytes(words[1], rng).replace(b"\n", b"").replace(b" ", b"") or b"/", words[2]]
            )
            + b"\n"
            + body
        )
    if words[0] == b"OTLP":
        return head + b"\n" + otlp.mutate((b"j" if words[2] == b"json" else b"p") + body, rng)[1:]
    return head + b"\n" + requests.mutate(b"chat_completions\n" + body, rng).partition(b"\n")[2]


async def send(world: LiveWorld, data: bytes) -> None:
    """Sends a request, or bytes; checks the answer."""
    head, _, body = data.partition(b"\n")
    key = world.keys[len(data) % len(world.keys)]
    if head == b"raw":
        status, received = await _raw(world, body.replace(b"@KEY@", key.encode()))
    else:
        status, received = await _request(world, head, body, key)
    if status == 500:
        raise Leak(f"status {status}: {received[:300]!r}")
    if status >= 400:
        check_text(received.decode("latin-1"))


async def _request(world: LiveWorld, head: bytes, body: bytes, key: str) -> tuple[int, bytes]:
    words = head.decode("latin-1").split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[0].isalpha():
        return 0, b""
    method, path, kind = words
    port = world.ports["store_http" if method == "OTLP" else "llm_proxy_http"]
    headers = {"authorization": f"Bearer {key}", "content-type": _KINDS.get(kind, "text/plain")}
    from yarl import URL

    url = URL(f"http://127.0.0.1:{port}" + path.encode("ascii", "ignore").decode(), encoded=True)
    try:
        async with (
            asyncio.timeout(LIMIT_S),
            world.http.request(
                "POST" if method == "OTLP" else method, url, data=body, headers=headers, allow_redirects=False
            ) as answer,
        ):
            return answer.status, await answer.read()
    except (ValueError, UnicodeError):
        return 0, b""  # what this client does not send


async def _raw(world: LiveWorld, body: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", world.ports["llm_proxy_http"])
    received = b""
    try:
        writer.write(body)
        writer.write_eof()
        async with asyncio.timeout(RAW_S):
            received = await reader.read(65536)
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    words = received[:64].split(b" ")
    return (int(words[1]) if len(words) > 1 and words[1].isdigit() else 0), received


TARGET = LiveTarget(seeds=seeds, mutate=mutate, send=send, services=("llm_proxy", "store"), workers=24)
