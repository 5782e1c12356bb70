"""Stands for an engine's program: says on which GPUs it is as its port, and runs until its input ends."""

from __future__ import annotations

import json
import os
import sys

if __name__ == "__main__":
    print(json.dumps({"port": int(os.environ["CUDA_VISIBLE_DEVICES"].replace(",", ""))}), flush=True)
    sys.stdin.read()
