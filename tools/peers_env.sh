#!/usr/bin/env bash
# Creates benchmarks/.peers/queues with the job queues that the store is measured beside, at the versions and digests of
# tools/peers/queues.txt and tools/peers/package-lock.json. Does nothing if it is up to date; concurrent runs do the work once. With
# --lock the versions are resolved again from tools/peers/queues.in and tools/peers/package.json. Oban needs Python 3.12 or newer and
# is left out if there is none; Graphile Worker needs Node.js.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

lists=tools/peers
folder=benchmarks/.peers/queues
stamp=$folder/.setup-stamp
lock=/tmp/fulmen-peers-env-$(id -u).lock
# Uses the main environment's uv.
PATH=$PWD/.venv/bin:$PATH

# Prints the first interpreter that Oban runs on, otherwise nothing.
new_python() {
  local candidate
  for candidate in python3.14 python3.13 python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python; do
    "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 && { echo "$candidate"; return; }
  done
  return 0
}

exec 9>"$lock"
flock 9 || fail "another peers_env.sh holds $lock"
PYTHON=${PYTHON:-$(new_python)}
mkdir -p "$(dirname $folder)"
if [ "${1:-}" = --lock ]; then
  make_environment $folder
  "$uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
    $lists/queues.in --output-file $lists/queues.txt || fail "the versions could not be resolved; see above"
  npm --prefix $lists install --package-lock-only --omit-lockfile-registry-resolved --ignore-scripts --silent ||
    fail "the Node.js versions could not be resolved; see above"
fi
wanted=$(cat $lists/queues.txt $lists/package-lock.json tools/peers_env.sh tools/distributions.sh | cksum)
[ "$(cat $stamp 2>/dev/null || true)" != "$wanted" ] || exit 0

begun=$SECONDS
rm -rf $folder
make_environment $folder
"$uv" pip install --quiet --python $folder/bin/python --require-hashes --requirement $lists/queues.txt ||
  fail "the queues could not be installed; see above"
cp $lists/package.json $lists/package-lock.json $folder/
npm --prefix $folder ci --ignore-scripts --no-audit --no-fund --silent || fail "Graphile Worker could not be installed; see above"
echo "$wanted" > $stamp
echo "peers: environment done in $((SECONDS - begun)) s"
