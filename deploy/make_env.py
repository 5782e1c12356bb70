"""Makes deploy/.env: the secrets of a deployment with Docker Compose. Needs nothing but Python.

Run it once: `python3 deploy/make_env.py`. It never overwrites a file, since the old keys would be lost with it.
The tokens are the service kit's own format (JWT, RFC 7519, Ed25519); a test checks that the services accept them.
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
        "jti": secrets.token_urlsafe(16),
        "iat": now,
        "exp": now + days * SECONDS_PER_DAY,
    }
    seed = derived(signing_key, "fulmen role tokens")
    public = public_key(seed)
    thumbprint = hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{_base64(public)}"}}'.encode()).digest()
    signed = f"{_segment({'alg': 'EdDSA', 'kid': _base64(thumbprint), 'typ': 'JWT'})}.{_segment(claims)}"
    return f"{signed}.{_base64(ed25519(seed, public, signed.encode()))}"


def environment(*, days: int) -> dict[str, str]:
    """Makes every secret that the Compose file asks for."""
    signing_key = secrets.token_urlsafe(SECRET_BYTES)
    return {
        "FULMEN_SIGNING_KEY": signing_key,
        "FULMEN_ATTEMPT_KEY_SECRET": _base64(derived(signing_key, "fulmen attempt keys")),
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


def derived(signing_key: str, label: str) -> bytes:
    """Returns a key that is derived from the signing key for one purpose."""
    return hmac.digest(signing_key.encode(), label.encode(), "sha256")


# Ed25519 as in RFC 8032, section 6, because Python's own library has none. Slow, and not for use where somebody could
# measure its time; a test compares it with a library.
P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
ORDER = 2**252 + 27742317777372353535851937790883648493
BASE_Y = 4 * pow(5, -1, P) % P
BASE_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
Point = tuple[int, int, int, int]


def _add(a: Point, b: Point) -> Point:
    p, q = (a[1] - a[0]) * (b[1] - b[0]) % P, (a[1] + a[0]) * (b[1] + b[0]) % P
    r, s = 2 * a[3] * b[3] * D % P, 2 * a[2] * b[2] % P
    e, f, g, h = q - p, s - r, s + r, q + p
    return e * f % P, g * h % P, f * g % P, e * h % P


def _times_base(scalar: int) -> bytes:
    result, point = (0, 1, 1, 0), (BASE_X, BASE_Y, 1, BASE_X * BASE_Y % P)
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point, scalar = _add(point, point), scalar >> 1
    inverse = pow(result[2], -1, P)
    x, y = result[0] * inverse % P, result[1] * inverse % P
    return (y | (x & 1) << 255).to_bytes(32, "little")


def _scalar(seed: bytes) -> int:
    clamped = int.from_bytes(hashlib.sha512(seed).digest()[:32], "little")
    return clamped & (1 << 254) - 8 | 1 << 254


def public_key(seed: bytes) -> bytes:
    """Returns the public key of an Ed25519 seed."""
    return _times_base(_scalar(seed))


def ed25519(seed: bytes, public: bytes, message: bytes) -> bytes:
    """Signs a message."""

    def number(*parts: bytes) -> int:
        return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % ORDER

    nonce = number(hashlib.sha512(seed).digest()[32:], message)
    commitment = _times_base(nonce)
    answer = (nonce + number(commitment, public, message) * _scalar(seed)) % ORDER
    return commitment + answer.to_bytes(32, "little")


def _segment(content: dict[str, object] | dict[str, str]) -> str:
    return _base64(json.dumps(content, separators=(",", ":")).encode())


def _base64(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main())
