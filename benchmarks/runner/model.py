"""A model that takes its time: `python -m benchmarks.runner.model PORT SECONDS`.

Answers chat completions after so long, any number at once; `GET /most` tells how many were answered at once at most
since this was last asked.
"""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "slow",
    "choices": [
        {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "It is 42, I think."}}
    ],
    "usage": {"prompt_tokens": 20, "completion_tokens": 6, "total_tokens": 26},
}


class Model:
    """Counts the calls that it answers at once."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now = self._most = 0

    async def answer(self, request: web.Request) -> web.Response:
        """Answers after a while."""
        self._now += 1
        self._most = max(self._most, self._now)
        try:
            await request.read()
            await asyncio.sleep(self._seconds)  # what a model does, seen from outside
        finally:
            self._now -= 1
        return web.json_response(ANSWER)

    async def most(self, _: web.Request) -> web.Response:
        """Returns the maximum, and resets it."""
        most, self._most = self._most, self._now
        return web.json_response({"most": most})


def main() -> None:
    """Serves until it is terminated."""
    model = Model(float(sys.argv[2]))
    app = web.Application()
    app.router.add_post("/v1/chat/completions", model.answer)
    app.router.add_get("/most", model.most)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)


if __name__ == "__main__":
    main()
