"""Prints `NAME=PORT` with a free port for each name; ports are held until all are chosen."""

import socket
import sys
from contextlib import ExitStack

with ExitStack() as stack:
    for name in sys.argv[1:]:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        print(f"{name}={listener.getsockname()[1]}")
