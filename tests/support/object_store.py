"""A double of S3 that speaks its protocol over a socket; or, for what asks for a `bucket`, another server.

With `FULMEN_TEST_S3_URL` tests that use `bucket` run against that server, such as `moto_server`, in buckets of their own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from xml.etree import ElementTree

import aiohttp
import pytest
from aiohttp import web

from fulmen.ids import uuid7

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
WHEN = "Sat, 01 Jan 2022 00:00:00 GMT"


class S3:
    """As much of S3 as is asked for: put, get, list, and the removal of one or many."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_broken = False
        self.breaks_at = ""
        """Part of the name of objects that cannot be written."""

    async def answer(self, request: web.Request) -> web.Response:
        """Answers one request; the bucket is the first part of the path."""
        key = request.path.removeprefix("/bucket").lstrip("/")
        if self.is_broken:
            return web.Response(status=403)
        if request.method == "PUT" and self.breaks_at and self.breaks_at in key:
            return web.Response(status=403)
        match request.method:
            case "PUT":
                self.objects[key] = await request.read()
                return web.Response(headers={"etag": '"x"'})
            case "POST":
                named = [each.text or "" for each in ElementTree.fromstring(await request.read()).iter() if each.text]
                for name in named:
                    self.objects.pop(name, None)
                deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in named)
                text = f'<DeleteResult xmlns="{NAMESPACE}">{deleted}</DeleteResult>'
                return web.Response(text=text, content_type="application/xml")
            case "GET" if "list-type" in request.query:
                return web.Response(text=self._listed(request.query["prefix"]), content_type="application/xml")
            case "HEAD" if key in self.objects:
                size = {"content-length": str(len(self.objects[key]))}
                return web.Response(headers={"etag": '"x"', "last-modified": WHEN, **size})
            case "GET" if key in self.objects:
                return self._read(key, request.headers.get("range", ""))
            case _:
                return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")

    def _read(self, key: str, asked: str) -> web.Response:
        content, headers = self.objects[key], {"etag": '"x"', "last-modified": WHEN}
        if not asked:
            return web.Response(body=content, headers=headers)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = content[int(first) : int(last) + 1]
        headers["content-range"] = f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}"
        return web.Response(status=206, body=part, headers=headers)

    def _listed(self, prefix: str) -> str:
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2022-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>x</ETag><Size>{len(content)}</Size></Contents>"
            for key, content in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        return f'<ListBucketResult xmlns="{NAMESPACE}"><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>'


@pytest.fixture
async def s3(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[S3]:
    """Yields an S3 that the environment points at."""
    double = S3()
    application = web.Application(client_max_size=2**26)
    application.router.add_route("*", "/{path:.*}", double.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    point_at(f"http://127.0.0.1:{runner.addresses[0][1]}", monkeypatch)
    yield double
    await runner.cleanup()


def point_at(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment for a server of S3."""
    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["folder", "s3"])
async def bucket(request: pytest.FixtureRequest, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Returns the URL of an empty storage of each kind."""
    if request.param == "folder":
        return f"file://{tmp_path}/blobs"
    server = os.environ.get("FULMEN_TEST_S3_URL")
    if not server:
        return "s3://bucket/of/fulmen"
    name = f"b{uuid7().hex}"
    async with aiohttp.ClientSession() as session, session.put(f"{server}/{name}") as answer:
        answer.raise_for_status()
    point_at(server, monkeypatch)
    return f"s3://{name}/of/fulmen"
