#!/usr/bin/env bash
# Runs the whole suite in two processes; tests that need the machine to themselves run in one of them, one by one.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"
