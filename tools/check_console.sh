#!/usr/bin/env bash
# Checks the console's pages: style, types, unit tests, and that the built files match the sources.
set -euo pipefail
cd "$(dirname "$0")/../services/console/web"
built=../src/fulmen_console/page
again=$(mktemp -d)
trap 'rm -rf "$again"' EXIT

npm run --silent generate
npm run --silent lint
npm run --silent check
npm run --silent test -- --reporter=dot --silent
npm run --silent vite -- build --logLevel warn --outDir "$again" --emptyOutDir
diff --recursive --brief "$built" "$again" || {
  echo "the built pages do not match the sources: run make console" >&2
  exit 1
}
