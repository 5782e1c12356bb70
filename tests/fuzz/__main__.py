"""Runs the fuzzer: `python -m tests.fuzz [TARGET …]`; see docs/fuzzing.md."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.fuzz.target import CORPUS, Finding, input_name, kept_inputs, live_targets, load, pure_targets

MAX_KEPT_BYTES = 1024
MAX_KEPT = 12
_MIB = 1024 * 1024


def main() -> None:
    """Runs targets, or one input; exits with 1 if anything was found."""
    options = _options()
    known = [*pure_targets(), *live_targets()]
    names = options.targets or known
    if unknown := sorted(set(names) - set(known)):
        sys.exit(f"No such target: {', '.join(unknown)}. There are: {', '.join(known)}.")
    if options.reproduce:
        _reproduce(names[0], options.reproduce.read_bytes())
        return
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    print(f"SEED={seed}")
    print(f"{'target':12} {'engine':7} {'inputs':>9} {'per s':>7} {'slowest':>8}  memory, MB at input")
    findings: list[Finding] = []
    for name in (name for name in names if name in pure_targets()):
        findings += _run_pure(name, options, seed)
    live = [name for name in names if name in live_targets()]
    if live:
        findings += _run_live(live, options, seed)
    for finding in findings:
        _report(finding, seed)
    print(f"{len(findings)} findings")
    sys.exit(1 if findings else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="targets; all by default")
    parser.add_argument("--seconds", type=float, default=30, help="time of each target (30)")
    parser.add_argument("--runs", type=int, default=10**9, help="inputs of each target, if they are fewer")
    parser.add_argument("--seed", type=int, help="seed; a random one by default")
    parser.add_argument("--engine", choices=("guided", "plain"), help="guided by coverage if atheris is installed")
    parser.add_argument("--keep", action="store_true", help="add inputs that reach new code to the corpus")
    parser.add_argument("--reproduce", type=Path, metavar="FILE", help="run one input of the first target")
    return parser.parse_args()


def _run_pure(name: str, options: argparse.Namespace, seed: int) -> Iterable[Finding]:
    engine = options.engine or ("guided" if find_spec("atheris") else "plain")
    with tempfile.TemporaryDirectory(prefix="fuzz-") as text:
        folder = Path(text)
        order = {"target": name, "engine": engine, "seed": seed, "seconds": options.seconds, "runs": options.runs}
        command = [sys.executable, "-m", "tests.fuzz.pure", json.dumps(order | {"folder": text})]
        with (folder / "log").open("wb") as log:
            status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        if not (folder / "result.json").exists():
            return [_crash(name, status, folder)]
        result = json.loads((folder / "result.json").read_bytes())
        _print_row(name, engine, result, {"": result["rss_bytes"]})
        if options.keep and engine == "guided":
            _keep(name, folder / "made")
    return [Finding(**{**each, "data": bytes.fromhex(each["data"])}) for each in result["findings"]]


def _crash(name: str, status: int, folder: Path) -> Finding:
    """Returns the finding of a process that died, with the input that it was reading."""
    data = b""
    if (folder / "current").exists():
        held = (folder / "current").read_bytes()
        data = held[8 : 8 + int.from_bytes(held[:8], "big")]
    log = (folder / "log").read_text(errors="replace")[-1500:]
    return Finding(target=name, where=f"process ended with {status}", what=log, data=data)


def _run_live(names: list[str], options: argparse.Namespace, seed: int) -> Iterable[Finding]:
    from tests.fuzz.live_run import run_live  # imports the services

    for run in asyncio.run(run_live(names, seed=seed, seconds=options.seconds, runs=options.runs)):
        result = {"count": run.count, "seconds": run.seconds, "slowest_s": run.slowest_s}
        _print_row(run.name, "live", result, run.rss_bytes)
        yield from run.findings.values()


def _print_row(name: str, engine: str, result: dict[str, Any], memory: dict[str, dict[Any, int]]) -> None:
    rate = result["count"] / max(result["seconds"], 0.001)
    shown = []
    for service, samples in memory.items():
        counts = sorted({int(count): value for count, value in samples.items()}.items())
        kept = [pair for pair in counts if pair[0] in (10_000, 100_000, counts[-1][0]) or pair[0] % 10**6 == 0]
        shown.append(f"{service} " + ", ".join(f"{value / _MIB:.0f} at {count:,}" for count, value in kept))
    head = f"{name:12} {engine:7} {result['count']:>9,} {rate:>7.0f} {result['slowest_s']:>7.3f}s"
    print(f"{head}  {'; '.join(shown).strip()}", flush=True)


def _report(finding: Finding, seed: int) -> None:
    """Keeps the input in the corpus, so that it is tried in every later run, and says how to reproduce it."""
    file = CORPUS / finding.target / input_name(finding.data)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(finding.data)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    print(f"\n{finding.target} (seed {seed}): {finding.where}\n  {finding.what.strip()}")
    print(f"  python -m tests.fuzz {finding.target} --reproduce {shown}")


def _reproduce(name: str, data: bytes) -> None:
    if name in live_targets():
        from tests.fuzz.live_run import reproduce_live

        asyncio.run(reproduce_live(name, data))
    else:
        load(name).try_input(data)
    print(f"{name}: nothing was found")


def _keep(name: str, made: Path) -> None:
    """Adds the smallest new inputs to the corpus, up to its limits."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    new = sorted(
        (path for path in made.iterdir() if not path.name.startswith("seed-")), key=lambda path: path.stat().st_size
    )
    for path in new[-(MAX_KEPT - len(kept_inputs(name))) :] if len(kept_inputs(name)) < MAX_KEPT else []:
        if path.stat().st_size <= MAX_KEPT_BYTES:
            shutil.copyfile(path, folder / input_name(path.read_bytes()))


if __name__ == "__main__":
    main()
