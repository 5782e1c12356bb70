#!/usr/bin/env bash
# Generates the stubs, compiles, and leaves the program as build/client.
set -euo pipefail
cd "$(dirname "$0")"
bin=../../node_modules/.bin

"$bin/buf" generate
"$bin/tsc"
cat >build/client <<'EOF'
#!/bin/sh
exec node "$(dirname "$0")/js/src/main.js" "$@"
EOF
chmod +x build/client
