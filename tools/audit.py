"""Checks the pinned dependencies for known vulnerabilities: `make audit`.

pip-audit queries PyPI's advisory database. Exit status 1 means that a pinned distribution is known to be vulnerable. If
the database is unreachable, this is reported, and is an error with --strict only: builds without network access must
not fail.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

PIP_AUDIT = "pip-audit==2.10.1"
ROOT = Path(__file__).parent.parent
LIMIT_S = 300


def audited(uv: Path, constraints: Path) -> list[dict[str, object]] | None:
    """Returns pip-audit's result for each pinned distribution; None if it cannot run here."""
    command = [str(uv), "tool", "run", "--system-certs", PIP_AUDIT, "--requirement", str(constraints)]
    command += ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        found: list[dict[str, object]] = json.loads(done.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, OSError):
        return None
    return found


def verdict(found: list[dict[str, object]] | None, *, strict: bool) -> tuple[int, list[str]]:
    """Returns the exit status and the lines to print."""
    known = [each for each in found or [] if "vulns" in each]
    if not known:
        return int(strict), ["audit: no advisory could be requested: run `make audit` where PyPI can be reached"]
    lines = [
        f"audit: {each['name']} {each['version']}: {one['id']}, fixed in {', '.join(one['fix_versions']) or 'nothing yet'}"
        for each in known
        for one in each["vulns"]  # type: ignore[attr-defined]
    ]
    missed = len(found or []) - len(known)
    told = [f"audit: {len(known)} distributions checked, {missed} unknown to PyPI, {len(lines)} advisories"]
    return int(bool(lines)), lines + told


def main() -> int:
    """Runs the audit; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strict", action="store_true", help="fail if no advisory can be requested")
    arguments = parser.parse_args()
    uv = Path(shutil.which("uv") or Path(sys.executable).with_name("uv"))
    found = audited(uv, ROOT / "constraints.txt")
    status, lines = verdict(found, strict=arguments.strict)
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
