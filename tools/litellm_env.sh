#!/usr/bin/env bash
# Creates an environment with LiteLLM, through which the LLM proxy calls vendors whose API it does not speak itself: .venv-litellm, or
# the folder that is named, with the versions and digests of tools/litellm.txt. It is separate because the proxy's process never has
# LiteLLM, and its versions conflict with Fulmen's. Does nothing if it is up to date; concurrent runs do the work once.
# With --lock the versions are resolved again from tools/litellm.in.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

pins=tools/litellm.txt
lock=/tmp/fulmen-litellm-env-$(id -u).lock
# Uses the main environment's uv where there is one.
PATH=$PWD/.venv/bin:$PATH
locking=
[ "${1:-}" != --lock ] || { locking=yes; shift; }
folder=${1:-.venv-litellm}
stamp=$folder/.setup-stamp

exec 9>"$lock"
flock 9 || fail "another litellm_env.sh holds $lock"
if [ -n "$locking" ]; then
  make_environment "$folder"
  { echo "# The versions of LiteLLM's environment, written by tools/litellm_env.sh --lock."
    "$uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
      tools/litellm.in
  } > "$folder/resolved.txt" || fail "the versions could not be resolved; see above"
  mv "$folder/resolved.txt" $pins
fi
wanted=$(cat $pins tools/litellm_env.sh tools/distributions.sh | cksum)
[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0

begun=$SECONDS
rm -rf "$folder"
make_environment "$folder"
"$uv" pip install --quiet --compile-bytecode --python "$folder/bin/python" --require-hashes --requirement $pins ||
  fail "LiteLLM could not be installed; see above"
echo "$wanted" > "$stamp"
echo "litellm: $folder done in $((SECONDS - begun)) s"
