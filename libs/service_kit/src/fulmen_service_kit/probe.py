"""A health probe for containers: `python -I -S probe.py HOST:PORT/PATH` exits with 0 on status 200.

Tries HTTP, then HTTPS. It runs every few seconds beside every service, so it is a script that imports nothing of Fulmen and
as little as possible of the standard library: `http.client` and `ssl` would double what it costs.
"""

import socket
import sys

_TIMEOUT_S = 3.0
_MAX_BYTES = 1000


def _get(host: str, port: int, path: str, *, tls: bool) -> bytes:
    """Returns the beginning of the answer, status line and headers included.

    Raises:
        OSError: if the service does not answer.
    """
    with socket.create_connection((host, port), timeout=_TIMEOUT_S) as plain:
        connection = _encrypted(plain) if tls else plain
        connection.sendall(f"GET /{path} HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        answer = b""
        while len(answer) < _MAX_BYTES and (part := connection.recv(_MAX_BYTES)):
            answer += part
    return answer


def _encrypted(connection: socket.socket) -> socket.socket:
    import ssl  # seldom needed, and costs more than the rest of the probe

    # The service is in the same container: its certificate need not be verified.
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    return trusting.wrap_socket(connection)


def main() -> int:
    """Probes the service; returns the exit status."""
    address, slash, path = sys.argv[1].partition("/") if len(sys.argv) == 2 else ("", "", "")
    host, colon, port = address.rpartition(":")
    if not (slash and colon and port.isdigit()):
        sys.stderr.write("usage: python -I -S probe.py HOST:PORT/PATH\n")
        return 2
    problem = ""
    for tls in (False, True):
        try:
            answer = _get(host, int(port), path, tls=tls)
        except OSError as error:
            problem = problem or f"does not answer: {error}"
            continue
        head, _, text = answer.partition(b"\r\n\r\n")
        version, _, status = head.partition(b"\r\n")[0].partition(b" ")
        if not version.startswith(b"HTTP/"):
            problem = problem or "does not speak HTTP"
        elif status.startswith(b"200"):
            return 0
        else:
            problem = f"answers {status.decode(errors='replace')}: {text.decode(errors='replace').strip()}"
    sys.stderr.write(f"{address}/{path} {problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
