"""A health probe for containers: `python -m fulmen_service_kit.probe HOST:PORT/PATH` exits with 0 on status 200.

Tries HTTP, then HTTPS.
"""

import http.client
import ssl
import sys

_TIMEOUT_S = 3.0


def main() -> int:
    """Probes the service; returns the exit status."""
    address, slash, path = sys.argv[1].partition("/") if len(sys.argv) == 2 else ("", "", "")
    if not slash:
        sys.stderr.write("usage: python -m fulmen_service_kit.probe HOST:PORT/PATH\n")
        return 2
    # The service is in the same container: the certificate need not be verified.
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    problem = ""
    for connection in (
        http.client.HTTPConnection(address, timeout=_TIMEOUT_S),
        http.client.HTTPSConnection(address, timeout=_TIMEOUT_S, context=trusting),
    ):
        try:
            connection.request("GET", f"/{path}")
            answer = connection.getresponse()
            text = answer.read(1000).decode(errors="replace").strip()
        except (OSError, http.client.HTTPException) as error:
            problem = problem or f"does not answer: {error}"
            continue
        finally:
            connection.close()
        if answer.status == http.client.OK:
            return 0
        problem = f"answers {answer.status}: {text}"
    sys.stderr.write(f"{address}/{path} {problem}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
