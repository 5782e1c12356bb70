"""Posts a body that fits a socket's buffer through aiohttp's connections, without what only other requests need.

`ClientSession.post` builds the same request each time, looks for cookies, redirects, proxies and middlewares, and writes the
body in a task of its own: half the cost of a small call to a backend. Here the request is made once per address, and written
in one piece. Connections, their timeouts, TLS and the parser are aiohttp's, so an answer is read as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp.helpers import TimerNoop
from aiohttp.http import StreamWriter
from multidict import CIMultiDict
from yarl import URL

MAX_AT_ONCE_BYTES: Final = 48 * 1024
"""Largest body that is written without waiting; with its headers it is less than what aiohttp writes before it waits."""

_MAX_ADDRESSES: Final = 1024
_READ_BYTES: Final = 2**16


class PromptPost:
    """Posts through a session's connections."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        """Uses the session's connector, timeouts and default headers; the session is closed by its owner."""
        connector = session.connector
        assert connector is not None
        self._session, self._connector = session, connector
        self._timeout, self._timer = session.timeout, TimerNoop()
        self._loop = asyncio.get_running_loop()
        self._requests: dict[str, aiohttp.ClientRequest] = {}

    async def post(self, address: str, body: bytes, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """Returns the response once its head has arrived; it is to be closed or read to its end. Redirects are not followed.

        Raises:
            aiohttp.ClientError, TimeoutError: as `ClientSession.post` does.
        """
        request = self._requests.get(address) or self._request(address)
        # Credentials in an address become a header, and a long body has to wait for its reader.
        if request is None or len(body) > MAX_AT_ONCE_BYTES:
            return await self._session.post(address, data=body, headers=headers, allow_redirects=False)
        try:
            connection = await self._connector.connect(request, traces=[], timeout=self._timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"Connection timeout to host {request.url}") from error
        try:
            return await self._exchange(request, connection, body, headers)
        except OSError as error:
            connection.close()
            if isinstance(error, aiohttp.ClientError | TimeoutError):
                raise
            raise aiohttp.ClientOSError(*error.args) from error
        except BaseException:
            connection.close()
            raise

    async def _exchange(
        self,
        request: aiohttp.ClientRequest,
        connection: aiohttp.connector.Connection,
        body: bytes,
        headers: Mapping[str, str],
    ) -> aiohttp.ClientResponse:
        protocol = connection.protocol
        assert protocol is not None
        protocol.set_response_params(
            timer=self._timer,
            read_until_eof=True,
            auto_decompress=self._session.auto_decompress,
            read_timeout=self._timeout.sock_read,
            read_bufsize=_READ_BYTES,
            timeout_ceil_threshold=self._timeout.ceil_threshold,
        )
        sent = CIMultiDict(request.headers)
        sent.update(headers)
        sent["Content-Length"] = str(len(body))
        writer = StreamWriter(protocol, self._loop)
        # None of these waits: the headers are kept until the body comes, and both fit the buffer.
        await writer.write_headers(f"POST {request.url.raw_path_qs} HTTP/1.1", sent)
        await writer.write(body)
        await writer.write_eof()
        protocol.start_timeout()
        response = aiohttp.ClientResponse(
            "POST",
            request.url,
            writer=None,
            continue100=None,
            timer=self._timer,
            request_info=request.request_info,
            traces=[],
            loop=self._loop,
            session=self._session,
            stream_writer=writer,
        )
        try:
            return await response.start(connection)
        except BaseException:
            response.close()
            raise

    def _request(self, address: str) -> aiohttp.ClientRequest | None:
        """Makes the request of an address, and keeps it; None for one that only the session can send."""
        try:
            url = URL(address)
        except ValueError:
            return None
        if (
            url.scheme not in ("http", "https")
            or not url.raw_host
            or url.raw_user is not None
            or url.raw_password is not None
        ):
            return None
        if len(self._requests) >= _MAX_ADDRESSES:
            self._requests.clear()
        made = self._requests[address] = aiohttp.ClientRequest(
            "POST",
            url,
            headers=self._session.headers,
            skip_auto_headers=self._session.skip_auto_headers,
            loop=self._loop,
            session=self._session,
        )
        return made
