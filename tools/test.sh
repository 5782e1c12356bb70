#!/usr/bin/env bash
# Runs the suite without tests/frameworks (`make test-frameworks` runs those in separate environments) in three
# processes: tests with real processes wait half of their time, so three keep two cores busy. Tests of a module run in
# one of the three, and those marked serial one by one. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# In CI two lines per frame are enough: tracebacks without the sources of libraries.
exec .venv/bin/python -m pytest -n 3 --dist loadgroup --ignore tests/frameworks ${CI:+--tb=short} "$@"
