#!/usr/bin/env bash
# Checks the contracts: buf's lint and format, no breaking changes since the latest release, stubs up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=node_modules/.bin/buf

"$buf" lint protos
"$buf" format --diff --exit-code protos
release=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null || true)
if [ -n "$release" ]; then
  "$buf" breaking protos --against ".git#ref=$(git rev-parse "$release^{commit}"),subdir=protos"
else
  echo "no release tag (v*): breaking changes were not checked"
fi
tools/generate_stubs.sh --check
