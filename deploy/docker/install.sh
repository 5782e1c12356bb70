#!/bin/sh
# Used by the build stage of every service's Dockerfile, in /src with constraints.txt:
#   install.sh compiler        makes `c++` known, where it is not: the algorithm service's wheel compiles its kernels
#   install.sh torch           makes /opt/fulmen with torch
#   install.sh vllm            makes /opt/vllm with the version VLLM_VERSION of vLLM, or empty where that is
#   install.sh DISTRIBUTION... installs our distributions, as wheels, with what they need at the pinned versions
# A wheel of torch in deploy/wheels is taken if there is one; otherwise the build
# TORCH_BACKEND (cpu, cu128, ...) is downloaded. PIP_INDEX_URL and PIP_CERT are honoured.
set -eu
environment=/opt/fulmen
export SSL_CERT_FILE="${PIP_CERT:-${SSL_CERT_FILE:-}}" UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
[ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="$PIP_INDEX_URL"

if [ ! -x "$environment/bin/python" ]; then
  python -m venv /opt/uv
  /opt/uv/bin/pip install --quiet --disable-pip-version-check "uv>=0.9,<1"
  /opt/uv/bin/uv venv --quiet --python "$(command -v python)" "$environment"
fi
install() { /opt/uv/bin/uv pip install --quiet --python "$environment/bin/python" "$@"; }

if [ "$1" = compiler ]; then
  command -v c++ >/dev/null && exit 0
  # From the index that everything else comes from; it stays in the build stage. The target is named so that nothing of
  # the processor that builds is taken for granted.
  /opt/uv/bin/uv venv --quiet --python "$(command -v python)" /opt/zig
  /opt/uv/bin/uv pip install --quiet --python /opt/zig/bin/python "ziglang==0.17.1"
  cat > /usr/local/bin/c++ <<'SCRIPT'
#!/bin/sh
exec /opt/zig/bin/python -m ziglang cc -x c++ -nostdlib++ -target "$(uname -m)-linux-gnu.2.28" "$@"
SCRIPT
  chmod +x /usr/local/bin/c++
elif [ "$1" = torch ]; then
  torch=$(grep '^torch==' constraints.txt)
  if ls /wheels/torch-*.whl >/dev/null 2>&1; then install --find-links /wheels "$torch"
  else install --torch-backend "${TORCH_BACKEND:-cpu}" "$torch"; fi
elif [ "$1" = vllm ]; then
  mkdir -p /opt/vllm
  [ -n "${VLLM_VERSION:-}" ] || exit 0
  # Of its own, since vLLM pins other versions than Fulmen does.
  /opt/uv/bin/uv venv --quiet --clear --python "$(command -v python)" /opt/vllm
  /opt/uv/bin/uv pip install --quiet --python /opt/vllm/bin/python --torch-backend "$TORCH_BACKEND" "vllm==$VLLM_VERSION"
else
  install --constraint constraints.txt --build-constraint constraints.txt "$@"
fi
