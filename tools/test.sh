#!/usr/bin/env bash
# Runs the whole suite but tests/frameworks in two processes; tests that need the machine to themselves run in one of
# them, one by one. The frameworks have environments of their own: `make test-frameworks`.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
exec .venv/bin/python -m pytest -n 2 --dist loadgroup --ignore tests/frameworks "$@"
