"""The stack of the browser tests: all services on free ports. Prints one line of JSON when they are ready; stops when its input ends.

    {"url": "http://127.0.0.1:…", "tokens": {"admin": "…", "client": "…", "reader": "…"}, "folder": "…", "control": 12345}

`admin` is the token of all projects that `fulmen up` makes; the other two are of `projects/default`. At the port `control` it takes
lines `kill NAME` and `start NAME` of a service, and answers each when it is done.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

from fulmen.rpc.services import connect
from fulmen.store.v1.project_service_pb2 import TOKEN_ROLE_CLIENT, TOKEN_ROLE_READER, IssueTokenRequest
from fulmen_cli.local.stack import LocalStack
from tests.support.stack import running_stack, stack_targets

ROLES = {"client": TOKEN_ROLE_CLIENT, "reader": TOKEN_ROLE_READER}


async def main() -> None:
    """Runs the stack until the input ends."""
    # A short path, for PostgreSQL's socket.
    with tempfile.TemporaryDirectory(prefix="fulmen-", dir="/tmp") as folder:
        async with running_stack(Path(folder)) as stack:
            tokens = {"admin": stack.client_token}
            async with connect(stack_targets(stack), token=stack.client_token) as services:
                for name, role in ROLES.items():
                    request = IssueTokenRequest(project="projects/default", role=role, subject=f"Ann ({name})")
                    tokens[name] = (await services.projects.IssueToken(request)).token
            control = await asyncio.start_server(partial(obey, stack), "127.0.0.1", 0)
            port = control.sockets[0].getsockname()[1]
            ready = {"url": stack.targets["console_http"], "tokens": tokens, "folder": folder, "control": port}
            print(json.dumps(ready), flush=True)
            await asyncio.to_thread(sys.stdin.read)
            control.close()


async def obey(stack: LocalStack, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carries out the lines of a connection."""
    while line := (await reader.readline()).decode().split():
        match line:
            case ["kill", name]:
                await stack.kill_service(name)
            case ["start", name]:
                await stack.start_service(name)
            case _:
                raise ValueError(f"unknown: {line}")
        writer.write(b"done\n")
        await writer.drain()
    writer.close()


if __name__ == "__main__":
    asyncio.run(main())
