#!/usr/bin/env bash
# Checks the contracts: buf's lint and format, no breaking change against the main branch, stubs equal to the protos.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=node_modules/.bin/buf

"$buf" lint protos
"$buf" format --diff --exit-code protos
for branch in origin/main main; do
  if git rev-parse --verify --quiet "$branch:protos/buf.yaml" >/dev/null; then
    "$buf" breaking protos --against ".git#ref=$(git rev-parse "$branch"),subdir=protos"
    break
  fi
done
tools/generate_stubs.sh --check
