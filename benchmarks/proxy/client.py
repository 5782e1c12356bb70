"""The load: a process that keeps so many calls in flight and checks every answer, at about 30 us of CPU a call.

`python -m benchmarks.proxy.client` reads jobs as lines of JSON and answers each by lines of JSON: `{"done": N}` now and
then if the job asks for it, and the outcome (`Outcome`) at the end.

Every stream must bring its numbered tokens complete and in order, and end with `[DONE]`; every whole answer must be
JSON to its last byte. What goes wrong is counted by kind, with the first answer of each kind.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import httptools
import uvloop

from benchmarks.proxy import answers

_TOKEN = re.compile(rb'"content":\s*"tok(\d+) "')
_EXPECTED = [b"%d" % i for i in range(answers.STREAM_TOKENS)]
_RETRY_PAUSE_S = 0.05
_RETRIES = 40
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to do.

    Attributes:
        addresses: `host:port` of each replica; an agent stays with one until its connection breaks.
        identities: path and key of each attempt; an agent changes to its next after `calls_per_identity` calls.
        soft_s: no new calls after so long, if the count is not reached by then; 0: no such limit.
        limit_s: everything that is not over by then counts as a timeout.
        ramp_s: the agents begin evenly spread over so long.
        progress_every: tells after so many calls; 0: never.
    """

    addresses: list[str]
    identities: list[tuple[str, str]]
    body: str
    concurrency: int
    calls: int
    stream: bool
    calls_per_identity: int = 1_000_000
    soft_s: float = 0.0
    limit_s: float = 120.0
    ramp_s: float = 0.0
    progress_every: int = 0


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a job; times in milliseconds.

    Attributes:
        retried: calls that broke with their connection and were made again, elsewhere.
        connections: how many were opened.
        errors: what else went wrong, by kind.
        first: from the request to the first token of a stream, or the first byte of a whole answer.
    """

    calls: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    retried: int = 0
    connections: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0
    first_p50_ms: float = 0.0
    first_p99_ms: float = 0.0


class Broken(Exception):
    """The connection ended within a call."""


class Connection(asyncio.Protocol):
    """One connection to a proxy; one call at a time."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self.parts: list[bytes] = []
        self.first_at = 0.0
        self.open = True
        self._stream = False
        self._keep_alive = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, error: Exception | None) -> None:
        """Breaks the call that runs."""
        self.open = False
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(Broken(str(error or "closed")))

    def data_received(self, data: bytes) -> None:
        """Reads the answer."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._transport.abort()
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_exception(Broken(str(error)))

    def on_body(self, body: bytes) -> None:
        """Gathers the answer; notes when its first token comes."""
        if not self.first_at and (not self._stream or answers.FIRST_TOKEN in body):
            self.first_at = time.perf_counter()
        self.parts.append(body)

    def on_message_complete(self) -> None:
        """Ends the call."""
        # Known here only: the parser forgets how an answer was framed as soon as it is over.
        self._keep_alive = self._parser.should_keep_alive()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def call(self, request: bytes, *, stream: bool) -> tuple[int, bytes]:
        """Makes one call; returns its status and body.

        Raises:
            Broken: if the connection ends first.
        """
        self.parts = []
        self.first_at = 0.0
        self._stream = stream
        self._waiter = self._loop.create_future()
        self._transport.write(request)
        await self._waiter
        status = self._parser.get_status_code()
        if not self._keep_alive:
            self.close()
        return status, b"".join(self.parts)

    def close(self) -> None:
        """Closes it."""
        self.open = False
        self._transport.close()


_ENDED = (b'"finish_reason"', b'"status":"completed"')
"""What a whole answer has: of chat completions, or of the Responses API."""


def fault_of(status: int, body: bytes, *, stream: bool) -> str:
    """Names what is wrong with an answer; empty if nothing is."""
    if status != 200:
        return f"status {status}"
    if not stream:
        return "" if body[-1:] == b"}" and any(mark in body for mark in _ENDED) else "answer incomplete"
    tokens = _TOKEN.findall(body)
    if tokens != _EXPECTED:
        return "events missing" if len(tokens) != len(_EXPECTED) else "events out of order"
    return "" if body.rstrip().endswith(b"data: [DONE]") else "stream without its end"


class Load:
    """One job while it runs."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._left = job.calls
        self._ends: list[float] = []
        self._firsts: list[float] = []
        self._errors: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._retried = 0
        self._connections = 0
        self._finished = 0
        self._requests: dict[tuple[str, str], bytes] = {}
        self._stop_at = time.perf_counter() + job.soft_s if job.soft_s else float("inf")

    async def run(self) -> Outcome:
        """Makes the calls."""
        began, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.timeout(self._job.limit_s), asyncio.TaskGroup() as group:
                for number in range(self._job.concurrency):
                    group.create_task(self._agent(number), name=f"agent-{number}")
        except TimeoutError:
            self._errors["timeout"] += max(1, min(self._job.concurrency, self._job.calls - self._finished))
        ends, firsts = sorted(self._ends), sorted(self._firsts)
        return Outcome(
            calls=len(ends),
            seconds=time.perf_counter() - began,
            cpu_s=time.process_time() - cpu,
            retried=self._retried,
            connections=self._connections,
            errors=dict(self._errors),
            examples=self._examples,
            p50_ms=_share(ends, 0.5),
            p99_ms=_share(ends, 0.99),
            max_ms=_share(ends, 1.0),
            first_p50_ms=_share(firsts, 0.5),
            first_p99_ms=_share(firsts, 0.99),
        )

    async def _agent(self, number: int) -> None:
        job = self._job
        if job.ramp_s:
            await asyncio.sleep(job.ramp_s * number / job.concurrency)
        identity, made, replica = number, 0, number
        connection: Connection | None = None
        while self._left > 0 and time.perf_counter() < self._stop_at:
            self._left -= 1
            request = self._request(identity)
            for _ in range(_RETRIES):
                try:
                    if connection is None or not connection.open:
                        connection = await self._connect(replica)
                    await self._call(connection, request)
                    break
                except (Broken, OSError) as error:
                    self._retried += 1
                    self._examples.setdefault("broken", f"{type(error).__name__}: {error}"[:200])
                    connection, replica = None, replica + 1
                    await asyncio.sleep(_RETRY_PAUSE_S)
            else:
                self._errors["no connection"] += 1
            self._count()
            made += 1
            if made % job.calls_per_identity == 0:
                identity += job.concurrency
        if connection is not None:
            connection.close()

    async def _connect(self, replica: int) -> Connection:
        host, _, port = self._job.addresses[replica % len(self._job.addresses)].partition(":")
        async with asyncio.timeout(_CONNECT_S):
            self._connections += 1
            _, connection = await asyncio.get_running_loop().create_connection(Connection, host, int(port))
        return connection

    async def _call(self, connection: Connection, request: bytes) -> None:
        began = time.perf_counter()
        status, body = await connection.call(request, stream=self._job.stream)
        ended = time.perf_counter()
        fault = fault_of(status, body, stream=self._job.stream)
        if fault:
            self._errors[fault] += 1
            self._examples.setdefault(fault, body[:300].decode(errors="replace"))
        else:
            self._ends.append(ended - began)
            self._firsts.append((connection.first_at or ended) - began)

    def _count(self) -> None:
        self._finished += 1
        every = self._job.progress_every
        if every and self._finished % every == 0:
            _say({"done": self._finished})

    def _request(self, identity: int) -> bytes:
        path, key = self._job.identities[identity % len(self._job.identities)]
        made = self._requests.get((path, key))
        if made is None:
            body = self._job.body.encode()
            head = (
                f"POST {path} HTTP/1.1\r\nhost: {self._job.addresses[0]}\r\nauthorization: Bearer {key}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            made = self._requests[path, key] = head.encode() + body
        return made


def _share(ordered: list[float], share: float) -> float:
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))] * 1e3, 3)


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


async def serve() -> None:
    """Works off the jobs that standard input brings, until it ends."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 * 1024 * 1024)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    _say({"ready": True})
    while line := await reader.readline():
        _say({"outcome": asdict(await Load(Job(**json.loads(line))).run())})


if __name__ == "__main__":
    uvloop.run(serve())
