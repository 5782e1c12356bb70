"""Writes the digests of the third-party images of the Compose files to deploy/images.env, for reproducible deployments.

    python tools/image_digests.py
    docker compose -f deploy/docker-compose.yml --env-file deploy/.env --env-file deploy/images.env up --build --wait

The registry is asked through `docker buildx imagetools`; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
FILES: Final = ("docker-compose.yml", "docker-compose.gpu.yml")
IMAGE: Final = re.compile(r"\$\{(FULMEN_\w+_IMAGE):-([^}]+)\}")
DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
LIMIT_S: Final = 120


def images() -> dict[str, str]:
    """Returns the default of each variable of an image."""
    texts = [(ROOT / "deploy" / name).read_text(encoding="utf-8") for name in FILES]
    return dict(sorted(found for text in texts for found in IMAGE.findall(text)))


def digest_of(image: str) -> str:
    """Returns the digest of an image, of all platforms together.

    Raises:
        SystemExit: If the registry does not answer.
    """
    command = ["docker", "buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}", image]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"image_digests: {image}: {error}")
    digest = done.stdout.strip()
    if done.returncode or not DIGEST.fullmatch(digest):
        sys.exit(f"image_digests: {image}: {done.stderr.strip() or 'the registry names no digest'}")
    return digest


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "deploy/images.env")
    arguments = parser.parse_args()
    # All are asked before anything is written.
    lines = [f"{variable}={image}@{digest_of(image)}\n" for variable, image in images().items()]
    arguments.output.write_text("".join(lines), encoding="utf-8")
    print(f"image_digests: {len(lines)} images in {arguments.output}")


if __name__ == "__main__":
    main()
