#!/usr/bin/env bash
# Creates .venv-docs with what builds the documentation's site and checks files against public schemas, at the versions and digests of
# tools/docs-requirements.txt. Does nothing if it is up to date; concurrent runs do the work once. With --lock the versions are
# resolved again from tools/docs-requirements.in.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

folder=.venv-docs
stamp=$folder/.setup-stamp
lock=/tmp/fulmen-docs-env-$(id -u).lock
# Uses the main environment's uv.
PATH=$PWD/.venv/bin:$PATH

exec 9>"$lock"
flock 9 || fail "another docs_env.sh holds $lock"
if [ "${1:-}" = --lock ]; then
  make_environment $folder
  "$uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
    tools/docs-requirements.in --output-file tools/docs-requirements.txt || fail "the versions could not be resolved; see above"
fi
wanted=$(cat tools/docs-requirements.txt tools/docs_env.sh tools/distributions.sh | cksum)
[ "$(cat $stamp 2>/dev/null || true)" != "$wanted" ] || exit 0

begun=$SECONDS
make_environment $folder
"$uv" pip install --quiet --python $folder/bin/python --require-hashes --requirement tools/docs-requirements.txt ||
  fail "what builds the documentation could not be installed; see above"
echo "$wanted" > $stamp
echo "docs: environment done in $((SECONDS - begun)) s"
