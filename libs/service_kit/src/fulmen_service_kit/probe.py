"""A health probe for containers: `python -m fulmen_service_kit.probe HOST:PORT/PATH` exits 0 if that answers 200.

It asks by HTTP, and by HTTPS where the port speaks that.
"""

import http.client
import ssl
import sys

_TIMEOUT_S = 3.0


def main() -> int:
    """Asks the service in this container; returns the exit status."""
    address, slash, path = sys.argv[1].partition("/") if len(sys.argv) == 2 else ("", "", "")
    if not slash:
        sys.stderr.write("usage: python -m fulmen_service_kit.probe HOST:PORT/PATH\n")
        return 2
    # Whoever asks is in the same container: there is nobody between, and no name to check.
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
