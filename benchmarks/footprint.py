"""What a store and a proxy take of a machine: their imports in a fresh process, each library's share, and idle processes.

RSS is what is resident, RSS of files the part of it that is mapped from files (code of libraries, shared by all processes
that map it), USS what only this process holds. CPU is user and system time. A library's share is what imports grow the
process by, without the imports of other libraries in them: who imports a shared module first has it. Least of five turns;
all modules are compiled before. Idle is 4 s after the start, when the proxy has the store's keys and routes and there
has been no call; the store is measured before the proxy starts and again with it, which sends the first token of a role.

Run `python -m benchmarks.footprint`; writes benchmarks/results/footprint.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks import outcome
from benchmarks.store.stand import Bench, cpu_seconds, running_store
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner

TURNS: Final = 5
SETTLED_S: Final = 4.0
START_LIMIT_S: Final = 60.0
KEY: Final = "a signing key of benchmarks, 32 bytes or more"
GOALS: Final = {"fulmen_store.app": (60, 0.5), "fulmen_llm_proxy.app": (65, 0.6)}
"""By module: RSS after its import, MB, and its CPU, seconds."""
SHOWN_MB: Final = 0.3

# Imports a module; with a second argument it also attributes what is resident to libraries.
IMPORTS: Final = """
import json, os, sys, time
import importlib._bootstrap as bootstrap
statm = open("/proc/self/statm")
def resident():
    statm.seek(0)
    return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
shares, inner, usual = {}, [0.0], bootstrap._load_unlocked
def load(spec):
    before = resident()
    inner.append(0.0)
    try:
        return usual(spec)
    finally:
        grown = resident() - before
        name = spec.name.partition(".")[0]
        name = "Python's own library" if name in sys.stdlib_module_names else name
        name = "stubs" if "_pb2" in spec.name else name
        shares[name] = shares.get(name, 0.0) + grown - inner.pop()
        inner[-1] += grown
if len(sys.argv) > 2:
    bootstrap._load_unlocked = load
began = time.process_time()
__import__(sys.argv[1])
spent_s = time.process_time() - began
print(json.dumps({"cpu_s": spent_s, "modules": len(sys.modules), "shares": shares, "pid": os.getpid()}), flush=True)
sys.stdin.read()
"""


def memory(pid: int) -> dict[str, float]:
    """Returns the memory of a process, in MB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kib = {name: float(size) for name, size, _ in (line.replace(":", "").split() for line in lines)}
    found = {
        "rss": kib["Rss"],
        "rss_of_files": kib["Rss"] - kib["Anonymous"],
        "uss": kib["Private_Clean"] + kib["Private_Dirty"],
    }
    return {name: round(size * 1024 / 1e6, 2) for name, size in found.items()}


def imported(module: str, *, attributed: bool = False) -> dict[str, Any]:
    """Imports a module in a fresh process; returns what it took."""
    command = [sys.executable, "-c", IMPORTS, module, *(["attributed"] if attributed else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        report = json.loads(process.stdout.readline())
        report |= memory(process.pid)
        process.communicate(timeout=START_LIMIT_S)
    return {name: value for name, value in report.items() if name != "pid"}


def shares(module: str) -> dict[str, float]:
    """Returns each library's share of what a module's import takes, in MB, the largest first."""
    found = imported(module, attributed=True)["shares"]
    large = {name: round(size, 2) for name, size in found.items() if size >= SHOWN_MB}
    rest = sum(found.values()) - sum(large.values())
    return dict(sorted(large.items(), key=lambda each: -each[1])) | {"others": round(rest, 2)}


async def idle_proxy(bench: Bench, folder: Path) -> dict[str, float]:
    """Starts a proxy; returns what it takes once it is settled, and the store beside it."""
    ready = folder / "proxy.json"
    ready.unlink(missing_ok=True)
    settings = {
        "STORE_TARGET": bench.target,
        "TOKEN": TokenSigner(KEY).issue(Role.SERVICE, subject="proxy", project="projects/*", ttl_s=3600),
        "ATTEMPT_KEY_SECRET": attempt_secrets(KEY),
        "READY_FILE": str(ready),
        "LOG_LEVEL": "warning",
        **dict.fromkeys(("PORT", "HTTP_PORT", "METRICS_PORT"), "0"),
    }
    environment = os.environ | {f"FULMEN_LLM_PROXY_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "fulmen_llm_proxy", "serve"]
    proxy = await asyncio.create_subprocess_exec(*command, env=environment)
    try:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready.exists():
                if proxy.returncode is not None:
                    raise SystemExit("the proxy ended before it served: see its log above")
                await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLED_S)
        return memory(proxy.pid) | {"cpu_s": cpu_seconds([proxy.pid])}
    finally:
        proxy.terminate()
        await proxy.wait()


async def idle(folder: Path) -> Mapping[str, dict[str, float]]:
    """Returns what idle processes take."""
    folder.mkdir(mode=0o755)
    async with running_store(folder, short=True, signing_key=KEY) as bench:
        await asyncio.sleep(SETTLED_S)
        (store,) = bench.store_pids
        alone = memory(store) | {"cpu_s": cpu_seconds([store])}
        proxy = await idle_proxy(bench, folder)
        return {"store": alone, "store beside a proxy": memory(store), "proxy": proxy}


def least(figures: list[dict[str, float]]) -> dict[str, float]:
    """Returns the least of each figure."""
    return {name: min(one[name] for one in figures) for name in figures[0]}


def main() -> None:
    """Measures in turns, and writes the results."""
    turns: dict[str, list[dict[str, Any]]] = {f"import {module}": [] for module in GOALS}
    for module in GOALS:
        imported(module)  # compiles
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch).chmod(0o755)  # PostgreSQL runs as a user of its own
        for turn in range(TURNS):
            for module in GOALS:
                found = imported(module)
                turns[f"import {module}"].append({name: found[name] for name in found if name != "shares"})
            for name, figures in asyncio.run(idle(Path(scratch) / str(turn))).items():
                turns.setdefault(f"idle {name}", []).append(figures)
    claims = []
    for module, (megabytes, seconds) in GOALS.items():
        found = least(turns[f"import {module}"])
        claims.append(outcome.claim(f"import of {module}, RSS", found["rss"], "MB", goal=megabytes, better="lower"))
        claims.append(outcome.claim(f"import of {module}, CPU", found["cpu_s"], "s", goal=seconds, better="lower"))
    raw = {"turns": turns, "shares_mb": {module: shares(module) for module in GOALS}}
    outcome.write(
        "footprint", method=__doc__ or "", raw=raw, claims=claims, least={n: least(f) for n, f in turns.items()}
    )


if __name__ == "__main__":
    main()
