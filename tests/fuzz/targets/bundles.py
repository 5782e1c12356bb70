"""Bundles of agents: tar archives, unpacked as the runner does. An input is the tar file, packed for each run."""

from __future__ import annotations

import gzip
import io
import os
import random
import tarfile
import tempfile
from pathlib import Path

from fulmen_runner.agents.bundles import unpack_bundle
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_service_kit.isolation.trees import delete_tree
from tests.fuzz.mutation import mutate_bytes
from tests.fuzz.target import Leak, PureTarget

_MEMORY = Path("/dev/shm")
_PLACE = (_MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"fuzz-bundles-{os.getpid()}"
_NAMES = (
    "a.py",
    "dir/b.py",
    "../out",
    "/abs",
    "dir/../../out",
    "nul\\0",
    "x" * 300,
    "d/" * 150 + "f",
    ".",
    "..",
    "",
    "é",
)


def run(data: bytes) -> None:
    """Unpacks a bundle and looks for anything outside its folder."""
    inside = _PLACE / "inside"
    inside.mkdir(parents=True, exist_ok=True)
    archive = data[1:] if data[:1] == b"z" else gzip.compress(data[1:], 1)
    try:
        unpack_bundle(archive, "b", inside)
    except AgentFailed as refusal:
        if str(_PLACE) in str(refusal):
            raise Leak(str(refusal)) from None
        raise
    finally:
        others = [path for path in _PLACE.iterdir() if path.name != "inside"]
        left = [path for path in inside.iterdir() if path.name != "bundle-b"]
        delete_tree(_PLACE)
        assert not others, others
        assert not left, left


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes bytes, or makes another archive of odd members."""
    if rng.random() < 0.5:
        return data[:1] + mutate_bytes(data[1:], rng)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=rng.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT))) as tar:
        for _ in range(rng.randrange(5)):
            member = tarfile.TarInfo(rng.choice(_NAMES) + rng.choice(("", "/x", str(rng.randrange(3)))))
            member.type = rng.choice(
                (
                    tarfile.REGTYPE,
                    tarfile.REGTYPE,
                    tarfile.DIRTYPE,
                    tarfile.SYMTYPE,
                    tarfile.LNKTYPE,
                    tarfile.FIFOTYPE,
                    tarfile.CHRTYPE,
                    tarfile.GNUTYPE_SPARSE,
                )
            )
            member.linkname = rng.choice(_NAMES)
            member.mode = rng.choice((0o644, 0o777, 0o4755, 0, 0o10644))
            member.mtime = rng.choice((0, 1, 2**40))
            content = rng.randbytes(rng.choice((0, 1, 700)))
            member.size = len(content) if member.type == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(content) if member.size else None)
    return b"t" + packed.getvalue()[: rng.choice((10**6, 10**6, 700))]


def _seed() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name in ("agent.py", "pkg/x.py"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"x=1"))
    return packed.getvalue()[:3072]


TARGET = PureTarget(
    run=run,
    seeds=[b"t" + _seed(), b"z" + gzip.compress(_seed(), mtime=0), b"z"],
    mutate=mutate,
    refusals=(AgentFailed,),
)
