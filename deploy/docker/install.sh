#!/bin/sh
# Installs into /opt/fulmen, in the build stage of deploy/docker/Dockerfile, in /src with constraints.txt:
#
#   install.sh base SERVICE      the environment, and what a service needs that changes rarely: a compiler, torch, vLLM
#   install.sh service SERVICE   the service and its libraries as wheels, with dependencies at the pinned versions
#
# A wheel of torch in /wheels is used if present; otherwise the build TORCH_BACKEND (cpu, cu128, ...) is downloaded.
# PIP_INDEX_URL and PIP_CERT are honoured.
set -eu
step=$1 service=$2
environment=/opt/fulmen
export SSL_CERT_FILE="${PIP_CERT:-${SSL_CERT_FILE:-}}" UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1
[ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
[ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX="$PIP_INDEX_URL"

make_environment() { /opt/uv/bin/uv venv --quiet --clear --python "$(command -v python)" "$1"; }
install() { /opt/uv/bin/uv pip install --quiet --python "$environment/bin/python" "$@"; }

# Prints the pinned version of the distribution $1 with its digests, as a requirement.
pinned() { awk -v name="$1==" 'index($0, name) == 1 {found = 1} found {print; if ($0 !~ /\\$/) exit}' constraints.txt; }

# The wheels of the gradient exchange and of the proxy compile their native libraries. The compiler stays in the build stage,
# and is installed from the same index as everything else. The target is named so that the code does not depend on the processor
# of the build machine.
install_compiler() {
  command -v c++ >/dev/null && return
  make_environment /opt/zig
  pinned ziglang | /opt/uv/bin/uv pip install --quiet --python /opt/zig/bin/python --require-hashes --requirement -
  cat > /usr/local/bin/c++ <<'SCRIPT'
#!/bin/sh
exec /opt/zig/bin/python -m ziglang cc -x c++ -nostdlib++ -target "$(uname -m)-linux-gnu.2.28" "$@"
SCRIPT
  chmod +x /usr/local/bin/c++
}

install_torch() {
  torch=$(grep '^torch==' constraints.txt)
  if ls /wheels/torch-*.whl >/dev/null 2>&1; then install --find-links /wheels "$torch"
  else install --torch-backend "${TORCH_BACKEND:-cpu}" "$torch"; fi
}

# In an environment of its own, since vLLM pins other versions than Fulmen does.
install_vllm() {
  mkdir -p /opt/vllm
  [ -n "${VLLM_VERSION:-}" ] || return 0
  make_environment /opt/vllm
  /opt/uv/bin/uv pip install --quiet --python /opt/vllm/bin/python --torch-backend "$TORCH_BACKEND" "vllm==$VLLM_VERSION"
}

if [ "$step" = base ]; then
  python -m venv /opt/uv
  pinned uv | /opt/uv/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps --requirement /dev/stdin
  make_environment "$environment"
  case "$service" in algorithm | llm_proxy) install_compiler ;; esac
  if [ "$service" = algorithm ]; then
    install_torch
    install_vllm
  fi
else
  libraries="./sdk/python ./libs/service_kit"
  case "$service" in
    store) distribution="./services/store[blobs]" ;;
    runner)
      # Agents that are commands call `fulmen emit`.
      libraries="$libraries ./cli"
      distribution="./services/runner[agents,docker,kubernetes]"
      ;;
    algorithm)
      libraries="$libraries ./libs/gradient_exchange[server]"
      distribution="./services/algorithm[kubernetes]"
      ;;
    llm_proxy) distribution="./services/llm_proxy[cache]" ;;
    *) distribution="./services/$service" ;;
  esac
  install --constraint constraints.txt --build-constraint constraints.txt $libraries "$distribution"
  [ "$service" = algorithm ] || python slim.py "$environment"
fi
