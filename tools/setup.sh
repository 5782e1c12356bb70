#!/usr/bin/env bash
# Creates .venv with everything that the repository needs, at the versions of constraints.txt. Does nothing if it is up
# to date. Needs Python 3.11 or newer with pip and venv; takes under a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

stamp=.venv/.setup-stamp
wanted=$(cat constraints.txt pyproject.toml sdk/python/pyproject.toml cli/pyproject.toml libs/*/pyproject.toml services/*/pyproject.toml \
  tools/setup.sh tools/distributions.sh | cksum)
[ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ] && exit 0

make_environment .venv
echo "setup: installing into .venv (torch $torch_version and about a hundred packages)"
install_torch .venv
install_distributions .venv --constraint constraints.txt --build-constraint constraints.txt
echo "$wanted" > "$stamp"
echo "setup: done in $SECONDS s"
