#!/usr/bin/env bash
# Rewrites constraints.txt: the newest compatible versions with the digests of their files, resolved in a separate
# environment.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
make_environment "$folder/venv"
install_torch "$folder/venv"
install_distributions "$folder/venv"
# What installs the others, and compiles the kernels of images.
"$uv" pip install --quiet --python "$folder/venv/bin/python" "uv>=0.9,<1" ziglang
# Local version parts (+cpu) name a build for one machine, and nvidia-* and triton come with it: both are dropped.
"$uv" pip freeze --quiet --exclude-editable --python "$folder/venv/bin/python" |
  sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*$/\1/p' | grep -vE '^(nvidia-|cuda-|triton==|pip==)' > "$folder/constraints.txt"
add_digests "$folder/constraints.txt"
mv "$folder/constraints.txt" constraints.txt
echo "lock: $(grep -c == constraints.txt) versions in constraints.txt"
