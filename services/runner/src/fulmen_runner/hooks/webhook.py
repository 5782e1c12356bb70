"""Sends signed messages to a webhook.

Invariant: a message keeps its id across retries, so that the receiver can detect duplicates.

Source: Standard Webhooks 1.0 (https://www.standardwebhooks.com): headers `webhook-id`, `webhook-timestamp` and
`webhook-signature: v1,BASE64` of HMAC-SHA256 over `id.timestamp.body`.
"""

import base64
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import httpx2

from fulmen.ids import uuid7

RETRIED_STATUSES = frozenset({408, 425, 429})
"""Statuses that are retried, besides 5xx."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message."""

    message_id: str
    body: bytes

    @classmethod
    def of(cls, content: Mapping[str, object]) -> "Message":
        """Creates a message with a new id."""
        return cls(message_id=f"msg_{uuid7().hex}", body=json.dumps(content).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """Result of one try; `final` if a retry is pointless."""

    delivered: bool
    final: bool = False
    problem: str = ""


class Webhook:
    """One receiver."""

    def __init__(
        self, *, url: str, secret: str, timeout_s: float, unix_time_s: Callable[[], float] = time.time
    ) -> None:
        self._url = url
        self._secret = secret.encode()
        self._unix_time_s = unix_time_s
        self._timeout_s = timeout_s
        self._client: httpx2.AsyncClient | None = None

    async def send(self, message: Message) -> Delivery:
        """Sends a message once."""
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=self._timeout_s)
        timestamp = str(int(self._unix_time_s()))
        headers = {
            "content-type": "application/json",
            "webhook-id": message.message_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": f"v1,{self._signature(message, timestamp)}",
        }
        try:
            answer = await self._client.post(self._url, content=message.body, headers=headers)
        except httpx2.HTTPError as error:
            return Delivery(delivered=False, problem=type(error).__name__)
        if answer.is_success:
            return Delivery(delivered=True)
        final = answer.status_code < 500 and answer.status_code not in RETRIED_STATUSES
        return Delivery(delivered=False, final=final, problem=f"HTTP {answer.status_code}")

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _signature(self, message: Message, timestamp: str) -> str:
        signed = b".".join((message.message_id.encode(), timestamp.encode(), message.body))
        return base64.b64encode(hmac.digest(self._secret, signed, hashlib.sha256)).decode()
