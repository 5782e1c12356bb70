#!/usr/bin/env bash
# Runs all static checks, even if one fails; prints the names of the failed ones at the end.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=()
check() {
  local name=$1 begun=$SECONDS
  shift
  if "$@"; then echo "lint: $name: ok ($((SECONDS - begun)) s)"; else echo "lint: $name: FAILED"; failed+=("$name"); fi
}

check "ruff" .venv/bin/ruff check --quiet .
check "formatting" .venv/bin/ruff format --check --quiet .
check "import rules" .venv/bin/lint-imports --no-logo
check "protos" tools/check_protos.sh
check "sizes" .venv/bin/python tools/check_sizes.py
check "files of public schemas" tools/check_schemas.sh
check "the console's pages" tools/check_console.sh
check "types" make --no-print-directory types

[ ${#failed[@]} -eq 0 ] || { echo "lint: failed: ${failed[*]}" >&2; exit 1; }
