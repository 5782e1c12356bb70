#!/usr/bin/env bash
# Runs the whole suite but tests/frameworks in three processes, which keeps two cores busy: tests with real processes wait
# half of their time. Those that are marked serial run in one of the three, one by one. The frameworks have environments
# of their own: `make test-frameworks`.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# In CI two lines for each frame: what failed stands close together there, without the sources of libraries between.
exec .venv/bin/python -m pytest -n 3 --dist loadgroup --ignore tests/frameworks ${CI:+--tb=short} "$@"
