"""What an empty call costs with each version of grpcio: CPU time of server and client, asyncio over uvloop.

    python -m benchmarks.grpcio_versions                             # the pinned version and the newest
    python -m benchmarks.grpcio_versions 1.75.1 1.78.2 1.85.1 --turns 9

Method: for each version a server process and a client process on the loopback interface, 32 calls at a time, unary, and
messages of 32 streams, without TLS or protobuf; the versions take turns. Each is installed into a temporary folder. Prints the
median of the turns, in microseconds per call, and the lowest and highest; and how often the threads of gRPC's event engine woke up per call.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

IN_FLIGHT = 32
WARM_UP = 500
KINDS = ("unary", "stream")
SERVICE, UNARY, STREAM = "bench.Empty", "Unary", "Stream"


async def _next_line() -> str:
    return await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)


async def serve() -> None:
    """Serves until standard input ends; prints the port."""
    import grpc

    async def unary(_request: bytes, _context: object) -> bytes:
        return b""

    async def stream(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        async for _ in requests:
            yield b""

    server = grpc.aio.server()
    handlers = {
        UNARY: grpc.unary_unary_rpc_method_handler(unary),
        STREAM: grpc.stream_stream_rpc_method_handler(stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    await _next_line()


async def call(port: int, kind: str, count: int) -> None:
    """Makes calls when a line comes; prints the CPU seconds that they took."""
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        make: dict[str, Callable[[int], Awaitable[None]]] = {
            "unary": lambda times: _unary(channel.unary_unary(f"/{SERVICE}/{UNARY}"), times),
            "stream": lambda times: _stream(channel.stream_stream(f"/{SERVICE}/{STREAM}")(), times),
        }
        await asyncio.gather(*(make[kind](WARM_UP // IN_FLIGHT) for _ in range(IN_FLIGHT)))
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await _next_line()
        before = time.process_time()
        await asyncio.gather(*(make[kind](count // IN_FLIGHT) for _ in range(IN_FLIGHT)))
        sys.stdout.write(f"{time.process_time() - before}\n")
        sys.stdout.flush()


async def _unary(method: Any, times: int) -> None:
    for _ in range(times):
        await method(b"")


async def _stream(stream: Any, times: int) -> None:
    for _ in range(times):
        await stream.write(b"")
        await stream.read()
    await stream.done_writing()
    await stream.read()


def _used(pid: int) -> tuple[float, int]:
    """Returns the CPU seconds of a process, and how often the threads of its event engine have woken up."""
    ticks, woken = 0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        name, _, rest = (task / "stat").read_text().rpartition(")")
        ticks += sum(map(int, rest.split()[11:13]))
        if "event_engine" in name:
            status = (task / "status").read_text()
            woken += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return ticks / os.sysconf("SC_CLK_TCK"), woken


def turn(folder: Path, kind: str, count: int) -> tuple[float, float, float]:
    """Returns CPU microseconds per call of server and client, and wake-ups per call of the server's event engine."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            stderr=subprocess.DEVNULL,
        )

    with start("serve") as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        with start("call", port, kind, str(count)) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            client.stdout.readline()
            before = _used(server.pid)
            client.stdin.write("\n")
            client.stdin.flush()
            spent_s = float(client.stdout.readline())
            after = _used(server.pid)
        server.kill()
    return (after[0] - before[0]) / count * 1e6, spent_s / count * 1e6, (after[1] - before[1]) / count


def install(name: str, folder: Path) -> None:
    """Installs a version of grpcio, `newest` for the newest, into a folder."""
    wanted = "grpcio" if name == "newest" else f"grpcio=={name}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), wanted]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    """Measures the versions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grpcio_versions", description=__doc__)
    parser.add_argument("versions", nargs="*", default=[version("grpcio"), "newest"], help="versions of grpcio")
    parser.add_argument("--turns", type=int, default=5, help="turns of each version (5)")
    parser.add_argument("--calls", type=int, default=16_000, help="calls per turn (16000)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="grpcio-") as text:
        for name in options.versions:
            install(name, Path(text) / name)
        for kind in KINDS:
            taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in options.versions}
            for _ in range(options.turns):
                for name, turns in taken.items():
                    turns.append(turn(Path(text) / name, kind, options.calls))
            for name, turns in taken.items():
                server, client, woken = zip(*turns, strict=True)
                shown = ", ".join(
                    f"{what} {statistics.median(values):.0f} us ({min(values):.0f} to {max(values):.0f})"
                    for what, values in (("server", server), ("client", client))
                )
                print(f"{kind:7} {name:8} {shown}, woken {statistics.median(woken):.2f} times per call", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            import uvloop

            uvloop.run(serve())
        case ["call", port, kind, count]:
            import uvloop

            uvloop.run(call(int(port), kind, int(count)))
        case _:
            main()
