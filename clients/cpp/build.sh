#!/usr/bin/env bash
# Generates the stubs, compiles, and leaves the program as build/client. What did not change is not compiled again.
set -euo pipefail
cd "$(dirname "$0")"

../../node_modules/.bin/buf generate
if ! diff -rq build/fresh build/gen >/dev/null 2>&1; then
  rm -rf build/gen
  mv build/fresh build/gen
fi
cmake -S . -B build >/dev/null
cmake --build build --parallel "$(nproc)"
