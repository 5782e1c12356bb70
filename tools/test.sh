#!/usr/bin/env bash
# Runs the suite without tests/frameworks (`make test-frameworks` runs those in separate environments) in four
# processes (WORKERS): tests with real processes wait half of their time, so four keep two cores busy. Tests of a module run in
# one of them, and those marked serial one by one. They run in the order of the folders: units, which are short, come last
# and fill the gaps. Arguments are passed to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
# In CI two lines per frame are enough, without the sources of libraries, and what took long is named.
exec .venv/bin/python -m pytest -n "${WORKERS:-4}" --dist loadgroup --no-loadscope-reorder --ignore tests/frameworks ${CI:+--tb=short --durations=40} "$@"
