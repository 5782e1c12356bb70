"""A second implementation of the part of the model proxy that runners and agents use, over real sockets.

Its answers are the name of the attempt whose key the request carried, so that a test sees whose key that was.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import grpc.aio
from aiohttp import web

from fulmen.errors import TokenInvalid
from fulmen.llm_proxy.v1 import capture_service_pb2 as messages
from fulmen.llm_proxy.v1 import capture_service_pb2_grpc
from fulmen_service_kit.security.tokens import TokenVerifier


class ProxyDouble(capture_service_pb2_grpc.CaptureServiceServicer):
    """The double.

    Attributes:
        calls: Model calls by attempt.
        holding: While true, model calls wait for `release`.
        infra_failures: How many failed calls are reported for every attempt.
        throttled: How many calls without room are reported for every attempt.
        confirming: While false, no attempt is reported as flushed.
        lost: Whether captures of first attempts are reported as lost.
    """

    def __init__(self, *, signing_key: str) -> None:
        self.calls: Counter[str] = Counter()
        self.traceparents: dict[str, str] = {}
        self.holding = False
        self._news = asyncio.Condition()
        self.infra_failures = 0
        self.throttled = 0
        self.confirming = True
        self.lost = False
        self.flush_call_count = 0
        self._verifier = TokenVerifier(signing_key)
        self._waiting: list[asyncio.Future[None]] = []
        self._server: grpc.aio.Server | None = None
        self._runner: web.AppRunner | None = None
        self.grpc_port = 0
        self.url = ""

    async def start(self) -> None:
        """Serves both protocols on free ports."""
        await self.start_grpc()
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/messages", self._messages)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def start_grpc(self) -> None:
        """Serves gRPC, on the same port as before if there was one."""
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(self, self._server)
        self.grpc_port = self._server.add_insecure_port(f"127.0.0.1:{self.grpc_port}")
        await self._server.start()

    async def until_waiting(self, count: int, deadline_s: float = 60.0) -> None:
        """Waits until so many model calls wait together."""
        async with asyncio.timeout(deadline_s), self._news:
            await self._news.wait_for(lambda: len(self._waiting) >= count)

    def release(self) -> None:
        """Releases the held calls, and holds no more."""
        self.holding = False
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    async def stop_grpc(self) -> None:
        """Stops gRPC at once."""
        if self._server is not None:
            await self._server.stop(grace=None)
            self._server = None

    async def close(self) -> None:
        """Stops both."""
        await self.stop_grpc()
        if self._runner is not None:
            await self._runner.cleanup()

    async def FlushCaptures(self, request: messages.FlushCapturesRequest, context: Any) -> Any:
        self.flush_call_count += 1
        summaries = [
            messages.CaptureSummary(
                attempt=attempt,
                flushed=self.confirming,
                call_count=self.calls[attempt],
                infra_failure_count=self.infra_failures,
                throttled_count=self.throttled,
                lost=self.lost and attempt.endswith("/attempts/1"),
            )
            for attempt in request.attempts
        ]
        return messages.FlushCapturesResponse(summaries=summaries, instance_id="double")

    async def _chat(self, request: web.Request) -> web.Response:
        try:
            caller = self._verifier.verify(request.headers.get("Authorization", "").removeprefix("Bearer "))
        except TokenInvalid as error:
            return web.json_response({"error": {"message": str(error)}}, status=401)
        body = await request.json()
        attempt = caller.subject
        await self._arrived(attempt, request)
        message = {"role": "assistant", "content": attempt}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response(
            {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        )

    async def _messages(self, request: web.Request) -> web.Response:
        try:
            caller = self._verifier.verify(request.headers.get("x-api-key", ""))
        except TokenInvalid as error:
            return web.json_response({"error": {"message": str(error)}}, status=401)
        await self._arrived(caller.subject, request)
        return web.json_response({"content": [{"type": "text", "text": caller.subject}]})

    async def _arrived(self, attempt: str, request: web.Request) -> None:
        self.calls[attempt] += 1
        self.traceparents[attempt] = request.headers.get("traceparent", "")
        if self.holding:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            async with self._news:
                self._news.notify_all()
            await future
