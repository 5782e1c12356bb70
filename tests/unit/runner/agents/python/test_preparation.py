"""One set of trusted certificates for the clients of all in-process agents; in a process of its own, which is hooked."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
from fulmen_runner.agents.python.preparation import share_tls_contexts

if {hooked}:
    share_tls_contexts()
import ssl, httpx2

def context_of(client):
    return client._transport._pool._ssl_context

own = ssl.create_default_context()
one, other = httpx2.Client(), httpx2.AsyncClient()
special = [
    httpx2.Client(verify=own),
    httpx2.Client(verify=False),
    httpx2.Client(trust_env=False),
    httpx2.Client(transport=httpx2.HTTPTransport(http2=True)),
]
print(context_of(one) is context_of(other), context_of(one).verify_mode == ssl.CERT_REQUIRED)
print(any(context_of(client) is context_of(one) for client in special), context_of(special[0]) is own)
"""


@pytest.mark.parametrize(("hooked", "shared"), [(True, "True True"), (False, "False True")])
def test_clients_share_their_certificates_unless_they_ask_for_something_else(hooked: bool, shared: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(hooked=hooked)], check=True, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.splitlines() == [shared, "False True"]
