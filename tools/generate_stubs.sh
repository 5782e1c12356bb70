#!/usr/bin/env bash
# Generates the Python stubs of protos/ in the SDK; --check only compares them.
#
# The toolchain is old on purpose: stubs of grpcio-tools 1.71 work with protobuf 5 to 7, and agents pin old versions.
set -euo pipefail
cd "$(dirname "$0")/.."
tools="grpcio-tools==1.71.2"
uv=$(command -v uv || echo .venv/bin/uv)
sdk=sdk/python/src
fresh=$(mktemp -d)   # the SDK's stubs are replaced only after all are generated: processes may be importing them
trap 'rm -rf "$fresh"' EXIT

stubs() { (cd "$1" && find fulmen \( -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' \) | sort); }
protoc() { "$uv" run -q --no-project --isolated --python 3.11 --with "$tools" python -m grpc_tools.protoc -Iprotos "$@"; }

mapfile -t protos < <(cd protos && find fulmen -name '*.proto' | sort)
mapfile -t services < <(cd protos && grep -lE '^service ' "${protos[@]}" | sort)
protoc --python_out="$fresh" --pyi_out="$fresh" "${protos[@]/#/protos/}"
protoc --grpc_python_out="$fresh" "${services[@]/#/protos/}"

if [ "${1:-}" = --check ]; then
  for file in $(printf '%s\n%s\n' "$(stubs "$fresh")" "$(stubs "$sdk")" | sort -u); do
    cmp -s "$fresh/$file" "$sdk/$file" || { echo "stub differs from its proto: $file (run \`make proto\`)" >&2; exit 1; }
  done
  echo "stubs equal the protos"
  exit
fi
for file in $(stubs "$sdk"); do
  [ -e "$fresh/$file" ] || rm "$sdk/$file"
done
for file in $(stubs "$fresh"); do
  mkdir -p "$sdk/$(dirname "$file")"
  touch "$sdk/$(dirname "$file")/__init__.py" "$sdk/$(dirname "$(dirname "$file")")/__init__.py"
  cmp -s "$fresh/$file" "$sdk/$file" || cp "$fresh/$file" "$sdk/$file"
done
