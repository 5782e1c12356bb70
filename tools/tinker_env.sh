#!/usr/bin/env bash
# Creates an environment with the tinker package and tinker-cookbook, whose recipes tests run as they are: .venv-frameworks/tinker, or
# the folder that is named, with the versions and digests of tools/tinker.txt, and torch for the CPU. It is not one of
# framework_envs.sh because of torch. Does nothing if it is up to date; concurrent runs do the work once.
# With --lock the versions are resolved again from tools/tinker.in.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

pins=tools/tinker.txt
lock=/tmp/fulmen-tinker-env-$(id -u).lock
# Uses the main environment's uv where there is one.
PATH=$PWD/.venv/bin:$PATH
locking=
[ "${1:-}" != --lock ] || { locking=yes; shift; }
folder=${1:-.venv-frameworks/tinker}
stamp=$folder/.setup-stamp

# Installs torch: a wheel from pip's find-links if set, otherwise from PyTorch's own index.
install_cpu_torch() {
  local links=() link
  for link in $(find_links "$folder"); do links+=(--find-links "$link"); done
  [ ${#links[@]} -gt 0 ] || links=(--torch-backend cpu)
  "$uv" pip install --quiet --python "$folder/bin/python" "${links[@]}" "torch==$torch_version" ||
    fail "torch $torch_version could not be installed; see above"
}

exec 9>"$lock"
flock 9 || fail "another tinker_env.sh holds $lock"
mkdir -p "$(dirname "$folder")"
if [ -n "$locking" ]; then
  make_environment "$folder"
  { echo "# The versions of tinker's environment, written by tools/tinker_env.sh --lock."
    "$uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate --no-emit-index-url \
      --no-emit-package torch --override tools/tinker-overrides.txt tools/tinker.in
  } > "$folder/resolved.txt" || fail "the versions could not be resolved; see above"
  mv "$folder/resolved.txt" $pins
fi
wanted=$(cat $pins tools/tinker_env.sh tools/distributions.sh | cksum)
[ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ] || exit 0

begun=$SECONDS
rm -rf "$folder"
make_environment "$folder"
install_cpu_torch
"$uv" pip install --quiet --python "$folder/bin/python" --no-deps --require-hashes --requirement $pins ||
  fail "the packages of tinker could not be installed; see above"
echo "$wanted" > "$stamp"
echo "tinker: $folder done in $((SECONDS - begun)) s"
