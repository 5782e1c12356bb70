"""The stack of the browser tests: all services on free ports. Prints one line of JSON when they are ready; stops when its input ends.

    {"url": "http://127.0.0.1:…", "tokens": {"admin": "…", "client": "…", "reader": "…"}, "folder": "…"}

`admin` is the token of all projects that `fulmen up` makes; the other two are of `projects/default`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from fulmen.rpc.services import connect
from fulmen.store.v1.project_service_pb2 import TOKEN_ROLE_CLIENT, TOKEN_ROLE_READER, IssueTokenRequest
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
            ready = {"url": stack.targets["console_http"], "tokens": tokens, "folder": folder}
            print(json.dumps(ready), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
