"""The operator's port: `/metrics`, `/healthz` and `/readyz`.

It is separate from the agents' port, since metrics name models, routes and backends of all callers.
"""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST

from fulmen_llm_proxy.transport.http.http_app import HEALTH_PATHS, HttpApp
from fulmen_llm_proxy.transport.http.metrics_page import MetricsPage
from fulmen_service_kit.http.wire import Receive, Scope, Send, respond

_TEXT = b"text/plain; charset=utf-8"


class OperatorApp:
    """Answers HTTP requests of the operator."""

    def __init__(self, *, app: HttpApp, metrics: MetricsPage) -> None:
        """Initializes the app.

        Args:
            app: The app of the agents' port, whose health it reports.
            metrics: The page of metrics.
        """
        self._app = app
        self._metrics = metrics
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            return
        if scope["path"] in HEALTH_PATHS:
            await self._app(scope, receive, send)
        elif scope["path"] != "/metrics":
            await respond(send, 404, b"not found; try /metrics, /healthz or /readyz\n", _TEXT)
        elif scope["method"] != "GET":
            await respond(send, 405, b"only GET is allowed\n", _TEXT)
        else:
            page = await self._metrics.render(own_only=scope["query_string"] == b"own=1")
            await respond(send, 200, page, CONTENT_TYPE_LATEST.encode())
