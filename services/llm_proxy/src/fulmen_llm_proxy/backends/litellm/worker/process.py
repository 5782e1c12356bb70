"""The process: reads its configuration from standard input, reports on standard output whether it serves, and serves until it
is stopped.

It ends by SIGTERM, or with its standard input, which the proxy holds open.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final, NoReturn

__all__ = ["run"]

MAX_HEADER_BYTES: Final = 64 * 1024
MAX_MEMORY_BYTES: Final = 4 * 1024**3
MAX_TEXT: Final = 500
GRACE_S: Final = 5.0
KEEP_ALIVE_S: Final = 3600.0
BEAT_S: Final = 1.0
PR_SET_DUMPABLE: Final = 4


def run() -> None:
    """Serves until it is ended."""
    _harden()
    config = json.loads(_first_line())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serving = _prepared(config)
    except ImportError as error:
        _fail("litellm_not_installed", f"{sys.executable} cannot import {error.name}")
    except ValueError as error:
        _fail("litellm_unfit", str(error))
    asyncio.run(serving)


def _prepared(config: Mapping[str, Any]) -> Any:
    """Returns the coroutine that serves.

    Raises:
        ImportError: if LiteLLM is not installed.
        ValueError: if LiteLLM does not know the vendor, or is a release that this file does not know.
    """
    from fulmen_llm_proxy.backends.litellm.worker.egress import Egress, Limits, vendor_session

    egress = Egress(config["vendor"]["base_url"], config["vendor"]["provider"])
    egress.install()
    import litellm
    from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

    from fulmen_llm_proxy.backends.litellm.worker.arguments import Vendor
    from fulmen_llm_proxy.backends.litellm.worker.server import Server

    vendor = Vendor(**config["vendor"])
    if vendor.provider not in {getattr(each, "value", each) for each in litellm.provider_list}:
        raise ValueError(f"LiteLLM does not know the vendor {vendor.provider!r}")
    session = vendor_session(egress.origins, Limits(**config["limits"]))
    AsyncHTTPHandler.create_client = lambda *_, **__: session
    if AsyncHTTPHandler().client is not session:
        raise ValueError(
            "this release of LiteLLM creates its own HTTP clients; install the release of tools/litellm.txt"
        )
    litellm.aclient_session = session
    litellm.telemetry = False
    litellm.suppress_debug_info = True
    egress.close_files(sys.prefix, sys.base_prefix)
    return _serve(Server(vendor, config["secret"]), config["socket"], config["max_request_bytes"])


async def _serve(server: Any, path: str, max_request_bytes: int) -> None:
    from aiohttp import web

    runner = web.AppRunner(
        server.app(max_request_bytes),
        handler_cancellation=True,  # a caller that leaves ends the vendor's work
        access_log=None,
        max_field_size=MAX_HEADER_BYTES,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=GRACE_S,
    )
    await runner.setup()
    await web.UnixSite(runner, path).start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    _say({"serves": True})
    beat = asyncio.create_task(_beat())
    await stop.wait()
    await runner.cleanup()
    beat.cancel()


async def _beat() -> None:
    """Shows the proxy every second that the loop turns."""
    descriptor = int(os.environ["FULMEN_HEARTBEAT_FD"])
    os.set_blocking(descriptor, False)
    while True:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(descriptor, b".")
        await asyncio.sleep(BEAT_S)


def _say(line: Mapping[str, Any]) -> None:
    """Writes the one line of standard output. What LiteLLM writes later may contain prompts and keys, and is discarded."""
    os.write(1, json.dumps(line).encode() + b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)


def _fail(kind: str, text: str) -> NoReturn:
    _say({"serves": False, "kind": kind, "text": text[:MAX_TEXT]})
    sys.exit(1)


def _harden() -> None:
    """Leaves no copy of memory to others, and bounds it. Source: prctl(2), setrlimit(2)."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n") and (more := os.read(0, 1)):
        line += more
    return line


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
