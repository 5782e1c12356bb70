#!/bin/sh
# Used by the build stage of every service's Dockerfile, in /src with constraints.txt:
#   install.sh torch           makes /opt/fulmen with torch
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

if [ "$1" = torch ]; then
  torch=$(grep '^torch==' constraints.txt)
  if ls /wheels/torch-*.whl >/dev/null 2>&1; then install --find-links /wheels "$torch"
  else install --torch-backend "${TORCH_BACKEND:-cpu}" "$torch"; fi
else
  install --constraint constraints.txt --build-constraint constraints.txt "$@"
fi
