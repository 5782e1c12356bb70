"""Makes the secrets of a deployment with Docker Compose: a folder deploy/secrets, and deploy/.env. Needs nothing but Python.

Run it once: `python3 deploy/make_env.py`. It never overwrites a file, since the old keys would be lost with it. Each service
gets the files that it needs; deploy/.env has the administrator's token, for people's tools.
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
SERVICE_ROLES = ("service", "runner")
# Where the engines of the algorithm service are; no other host gets their key.
ENGINE_HOSTS = ["algorithm"]


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


def secret_files(signing_key: str, *, days: int) -> dict[str, str]:
    """Makes every secret of the Compose file."""
    password, engine_token = secrets.token_urlsafe(SECRET_BYTES), secrets.token_urlsafe(SECRET_BYTES)
    return {
        "signing_key": signing_key,
        "attempt_key_secret": _base64(derived(signing_key, "fulmen attempt keys")),
        "database_password": password,
        "database_url": f"postgresql://fulmen:{password}@postgres:5432/fulmen",
        "engine_token": engine_token,
        "backend_keys": json.dumps({"engine": {"key": engine_token, "hosts": ENGINE_HOSTS}}),
        **{f"{role}_token": sign_token(signing_key, role, days=days) for role in SERVICE_ROLES},
    }


def main() -> int:
    """Writes the files; returns the exit status."""
    here = Path(__file__).parent.absolute()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=here / ".env", help="file of variables")
    parser.add_argument("--secrets-dir", type=Path, default=here / "secrets", help="folder of secrets")
    parser.add_argument("--days", type=int, default=DEFAULT_DAYS, help="validity of the tokens, days")
    arguments = parser.parse_args()
    folder: Path = arguments.secrets_dir.absolute()
    for path in (arguments.output, folder):
        if path.exists():
            sys.stderr.write(f"error: {path} exists; remove it to make new keys\n")
            return 1
    signing_key = secrets.token_urlsafe(SECRET_BYTES)
    folder.mkdir(mode=0o700, parents=True)
    for name, value in secret_files(signing_key, days=arguments.days).items():
        # Compose mounts each file with its mode, for a user of the container: others must be able to read the file, but not
        # to reach it.
        _write(folder / name, value, 0o444)
    lines = (
        "# FULMEN_TOKEN is the administrator's, for people's tools. The services' secrets are in FULMEN_SECRETS_DIR.",
        f"FULMEN_TOKEN={sign_token(signing_key, 'admin', days=arguments.days)}",
        f"FULMEN_SECRETS_DIR={folder}",
    )
    _write(arguments.output, "\n".join(lines) + "\n", 0o600)
    sys.stdout.write(f"wrote {arguments.output} and {folder}\n")
    return 0


def _write(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, mode)
        file.write(text)


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
