"""Builds what is published into dist/, with SHA256SUMS: `make dist`.

python tools/dist.py [python] [chart] [npm] [go] [--output dist]

- python: a wheel and an sdist of every distribution
- chart: fulmen-VERSION.tgz, the Helm chart
- npm: fulmen-client-VERSION.tgz, the package @fulmen/client
- go: fulmen-go-VERSION.zip, the module fulmen.dev/client with its stubs, laid out as a module proxy serves it

Everything is made of the files that git tracks, of clients that tools/build_clients.sh has built, and the licence. The same commit
and the same tools make the same bytes: times are those of the commit, or SOURCE_DATE_EPOCH. The variable REPOSITORY is the URL of
the source that packages name; npm wants it for provenance.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[1]
LICENCE = ROOT / "LICENSE"
PYTHON = ("sdk/python", "cli", "libs/*", "services/*")
GO_MODULE = "fulmen.dev/client"
LIMIT_S = 600
FIRST_ZIP_TIME = 315_532_800  # 1980-01-01


def ran(command: list[str], folder: Path = ROOT) -> str:
    """Runs a command; returns what it printed. Its failure ends this program."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch())} if command[0] != "git" else None
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        sys.exit(f"dist: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


@functools.cache
def epoch() -> int:
    """Returns the time of everything that is built, in seconds since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH") or ran(["git", "log", "-1", "--format=%ct"]))


@functools.cache
def version() -> str:
    """Returns the version of everything."""
    return ran([sys.executable, "tools/version.py"]).strip()


def tracked(folder: str) -> dict[str, Path]:
    """Returns the files of a folder that git tracks, by their paths in it."""
    names = ran(["git", "ls-files", "-z", "--", folder]).split("\0")
    files = {str(Path(name).relative_to(folder)): ROOT / name for name in names if name}
    return {name: path for name, path in sorted(files.items()) if path.exists()}


def stage(files: dict[str, Path], target: Path) -> None:
    """Copies files and the licence, with modes that do not depend on who checked them out."""
    for name, source in {**files, LICENCE.name: LICENCE}.items():
        copy = target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        copy.chmod(0o755 if source.stat().st_mode & 0o100 else 0o644)


def python(output: Path, scratch: Path) -> None:
    """Builds wheels and sdists with hatchling, each from a copy of its folder alone."""
    for folder in (each for pattern in PYTHON for each in sorted(ROOT.glob(f"{pattern}/pyproject.toml"))):
        copy = scratch / folder.parent.name
        stage(tracked(str(folder.parent.relative_to(ROOT))), copy)
        if url := os.environ.get("REPOSITORY"):
            with (copy / "pyproject.toml").open("a", encoding="utf-8") as file:
                file.write(f'\n[project.urls]\nSource = "{url}"\n')
        ran(
            [
                sys.executable,
                "-m",
                "hatchling",
                "build",
                "--target",
                "sdist",
                "--target",
                "wheel",
                "--directory",
                str(output),
            ],
            copy,
        )


def chart(output: Path, _: Path) -> None:
    """Packs the chart as `helm package` does."""
    files = {f"fulmen/{name}": path.read_bytes() for name, path in tracked("deploy/helm/fulmen").items()}
    files["fulmen/LICENSE"] = LICENCE.read_bytes()
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(content), epoch(), 0o644
            archive.addfile(entry, BytesIO(content))
    (output / f"fulmen-{version()}.tgz").write_bytes(gzip.compress(packed.getvalue(), mtime=epoch()))


def npm(output: Path, scratch: Path) -> None:
    """Packs the compiled TypeScript client; npm itself gives every file the same time."""
    ran(["tools/build_clients.sh", "node"])
    copy = scratch / "npm"
    stage({name: ROOT / "clients/node" / name for name in ("package.json", "README.md")}, copy)
    shutil.copytree(ROOT / "clients/node/build/js", copy / "build/js")
    package = json.loads((copy / "package.json").read_text(encoding="utf-8"))
    # What only builds it needs.
    package.pop("devDependencies")
    if url := os.environ.get("REPOSITORY"):
        package["repository"] = {"type": "git", "url": f"git+{url}.git"}
    (copy / "package.json").write_text(json.dumps(package, indent=2) + "\n", encoding="utf-8")
    ran(["npm", "pack", "--ignore-scripts", "--pack-destination", str(output)], copy)


def go(output: Path, _: Path) -> None:
    """Packs the Go client and its stubs as a module."""
    ran(["tools/build_clients.sh", "go"])
    stubs = ROOT / "clients/go/build/gopath/src" / GO_MODULE
    own = {name: path for name, path in tracked("clients/go").items() if path.suffix in (".go", ".md", ".mod", ".sum")}
    generated = {str(path.relative_to(stubs)): path for path in stubs.rglob("*.go")}
    prefix = f"{GO_MODULE}@v{version()}"
    when = time.gmtime(max(FIRST_ZIP_TIME, epoch()))[:6]
    with zipfile.ZipFile(output / f"fulmen-go-{version()}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in sorted({**own, **generated, LICENCE.name: LICENCE}.items()):
            entry = zipfile.ZipInfo(f"{prefix}/{name}", when)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, path.read_bytes())


PARTS = {"python": python, "chart": chart, "npm": npm, "go": go}


def write_digests(output: Path, files: Iterable[Path]) -> None:
    """Writes SHA256SUMS as `sha256sum --check` reads it."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files)]
    (output / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")


def main() -> int:
    """Builds the parts that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    arguments = parser.parse_args()
    if unknown := {*arguments.parts} - PARTS.keys():
        parser.error(f"unknown part: {', '.join(sorted(unknown))}; the parts are {', '.join(PARTS)}")
    output = arguments.output.resolve()
    with tempfile.TemporaryDirectory(prefix="fulmen-dist-") as scratch:
        built = Path(scratch) / "built"
        built.mkdir()
        for name in arguments.parts or PARTS:
            PARTS[name](built, Path(scratch) / name)
        output.mkdir(parents=True, exist_ok=True)
        # Of an earlier version nothing is left to be published by mistake.
        for old in (each for kind in ("*.whl", "*.tar.gz", "*.tgz", "*.zip") for each in output.glob(kind)):
            old.unlink()
        files = [Path(shutil.move(path, output / path.name)) for path in sorted(built.iterdir())]
    write_digests(output, files)
    print("\n".join(f"{path.stat().st_size / 1000:8.0f} kB  {path.name}" for path in files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
