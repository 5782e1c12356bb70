"""Blobs in an object store: the same behaviour as a folder, over the protocol of S3."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fulmen.errors import BlobMissing, BlobStorageUnavailable
from fulmen_service_kit.errors import StartupError
from fulmen_store.spans.blob_refs import BlobRef
from fulmen_store.spans.blobs import Blobs, open_storage
from tests.support.object_store import S3, s3  # noqa: F401  (a fixture)
from tests.support.store.running import create, running_store
from tests.support.store.spans import append, chunk_of, stored


@pytest.fixture(params=["folder", "s3"])
def blobs(request: pytest.FixtureRequest, s3: S3, tmp_path: Path) -> Blobs:  # noqa: F811
    """Returns blobs in each kind of storage."""
    return Blobs(open_storage(f"file://{tmp_path}/blobs" if request.param == "folder" else "s3://bucket/of/fulmen"))


async def test_content_comes_back_by_its_digest(blobs: Blobs) -> None:
    content = bytes(range(256)) * 1000

    first, second = [await blobs.put(content, folder="spans/20260101/x") for _ in range(2)]

    assert first == second
    assert (first.digest, first.size_bytes) == (hashlib.sha256(content).digest(), len(content))
    assert await blobs.get(first) == content


async def test_what_is_not_there_is_missing(blobs: Blobs) -> None:
    ref = await blobs.put(b"x", folder="resources")
    with pytest.raises(BlobMissing):
        await blobs.get(BlobRef(folder="resources", digest=bytes(32), size_bytes=1))
    await blobs.remove([ref, ref, BlobRef(folder="resources", digest=bytes(32), size_bytes=1)])
    with pytest.raises(BlobMissing):
        await blobs.get(ref)


async def test_a_folder_goes_with_everything_in_it_and_with_nothing_else(blobs: Blobs) -> None:
    gone = [await blobs.put(bytes([n]), folder=f"spans/20260101/{n}") for n in range(5)]
    kept = await blobs.put(b"kept", folder="spans/20260102/x")

    await blobs.remove_folder("spans/20260101")
    await blobs.remove_folder("spans/20260101")

    for ref in gone:
        with pytest.raises(BlobMissing):
            await blobs.get(ref)
    assert await blobs.get(kept) == b"kept"


async def test_what_a_killed_writer_left_in_a_folder_goes_with_the_name(tmp_path: Path) -> None:
    blobs = Blobs(open_storage(f"file://{tmp_path}"))
    for name in ("a", "b"):
        await blobs.write(f"segments/{name}", b"x")
        (tmp_path / "segments" / f".writing-{name}-k_12z").touch()
        (tmp_path / "segments" / f".writing-{name}-k1").touch()
    await blobs.remove_keys(["segments/a"])
    assert {path.name for path in (tmp_path / "segments").iterdir()} == {"b", ".writing-b-k_12z", ".writing-b-k1"}
    await blobs.remove_keys(["segments/b"])
    assert list(tmp_path.iterdir()) == []


async def test_a_bucket_that_refuses_is_unavailable_and_tells_nobody_why(s3: S3) -> None:  # noqa: F811
    blobs = Blobs(open_storage("s3://bucket"))
    ref = await blobs.put(b"x", folder="resources")
    s3.is_broken = True
    for call in (blobs.get(ref), blobs.put(b"y", folder="resources"), blobs.remove_folder("resources")):
        with pytest.raises(BlobStorageUnavailable) as caught:
            await call
        assert "127.0.0.1" not in str(caught.value)


async def test_a_store_keeps_payloads_in_s3(s3: S3, database_url: str) -> None:  # noqa: F811
    async with running_store(database_url, blob_url="s3://bucket/p", segment_bytes=0, blob_min_bytes=1) as store:
        stubs = await store.stubs()
        (rollout,) = await create(stubs)
        chunk = chunk_of(f"{rollout}/attempts/1")
        await append(stubs, chunk)

        assert list(s3.objects.values()) == [chunk.payload]
        assert next(iter(s3.objects)).startswith("p/spans/20")
        assert [read.payload for read in await stored(stubs, rollout)] == [chunk.payload]


@pytest.mark.parametrize("url", ["ftp://x/y", "file://host/x", "file:///", "s3://", "nonsense"])
def test_a_url_of_another_kind_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(StartupError):
        open_storage(url)
