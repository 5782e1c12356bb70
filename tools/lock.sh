#!/usr/bin/env bash
# Rewrites constraints.txt: the newest compatible versions, resolved in a separate environment.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
make_environment "$folder/venv"
install_torch "$folder/venv"
install_distributions "$folder/venv"
# Local version parts (+cpu) name a build for one machine, and nvidia-* and triton come with it: both are dropped.
"$uv" pip freeze --quiet --exclude-editable --python "$folder/venv/bin/python" |
  sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*$/\1/p' | grep -vE '^(nvidia-|cuda-|triton==|uv==|pip==)' > "$folder/constraints.txt"
mv "$folder/constraints.txt" constraints.txt
echo "lock: $(wc -l < constraints.txt) versions in constraints.txt"
