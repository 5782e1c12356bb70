"""Makes deploy/.env: the secrets of a deployment with Docker Compose. Needs nothing but Python.

Run it once: `python3 deploy/make_env.py`. It never overwrites a file, since the old keys would be lost with it.
The tokens are the service kit's own format (JWT, RFC 7519, HS256); a test checks that the services accept them.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import json
import os
import secrets
import sys
import time
from pathlib import Path

SECRET_BYTES = 48
DEFAULT_DAYS = 365
SECONDS_PER_DAY = 86_400
# The services and the administrator serve every project.
ALL_PROJECTS = "projects/*"
TOKEN_ROLES = {"FULMEN_SERVICE_TOKEN": "service", "FULMEN_RUNNER_TOKEN": "runner", "FULMEN_TOKEN": "admin"}


def sign_token(signing_key: str, role: str, *, days: int) -> str:
    """Signs a token of a role, good for so many days."""
    now = int(time.time())
    claims = {
        "iss": "fulmen",
        "sub": f"compose-{role}",
        "role": role,
        "prj": ALL_PROJECTS,
        "iat": now,
        "exp": now + days * SECONDS_PER_DAY,
    }
    signed = f"{_segment({'alg': 'HS256', 'typ': 'JWT'})}.{_segment(claims)}"
    signature = hmac.new(signing_key.encode(), signed.encode(), hashlib.sha256).digest()
    return f"{signed}.{_base64(signature)}"


def environment(*, days: int) -> dict[str, str]:
    """Makes every secret that the Compose file asks for."""
    signing_key = secrets.token_urlsafe(SECRET_BYTES)
    return {
        "FULMEN_SIGNING_KEY": signing_key,
        "FULMEN_DATABASE_PASSWORD": secrets.token_urlsafe(SECRET_BYTES),
        "FULMEN_ENGINE_TOKEN": secrets.token_urlsafe(SECRET_BYTES),
        **{name: sign_token(signing_key, role, days=days) for name, role in TOKEN_ROLES.items()},
    }


def main() -> int:
    """Writes the file; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / ".env")
    parser.add_argument("--days", type=int, default=DEFAULT_DAYS, help="how long the tokens are good")
    arguments = parser.parse_args()
    lines = ["# Secrets of this deployment. FULMEN_TOKEN is what people's tools use."]
    lines += [f"{name}={value}" for name, value in environment(days=arguments.days).items()]
    try:
        descriptor = os.open(arguments.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        sys.stderr.write(f"error: {arguments.output} exists; remove it to make new keys\n")
        return 1
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    sys.stdout.write(f"wrote {arguments.output}\n")
    return 0


def _segment(content: dict[str, object] | dict[str, str]) -> str:
    return _base64(json.dumps(content, separators=(",", ":")).encode())


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
