"""Run by the fork server in tests: says what it was given, and obeys what it reads."""

import json
import os
import sys
from pathlib import Path

import fulmen_service_kit.forks

if __name__ == "__main__":
    said = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "descriptors": sorted(int(name.name) for name in Path("/proc/self/fd").iterdir()),
        "parent": os.getppid(),
        "leads": os.getsid(0) == os.getpid() == os.getpgrp(),
        "loaded": "json.tool" in sys.modules,
        "connected": fulmen_service_kit.forks.ForkServer.inherited() is not None,
    }
    print(json.dumps(said), flush=True)
    sys.exit(int(sys.stdin.readline() or 7))
