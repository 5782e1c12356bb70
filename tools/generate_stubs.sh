#!/usr/bin/env bash
# Generates the Python stubs of protos/ into the SDK, or with --check only compares them.
#
# An old toolchain on purpose: stubs of grpcio-tools 1.71 import on protobuf 5 to 7, and agents pin old versions.
set -euo pipefail
cd "$(dirname "$0")/.."
tools="grpcio-tools==1.71.2"
uv=$(command -v uv || echo .venv/bin/uv)
out=sdk/python/src
[ "${1:-}" = --check ] && out=$(mktemp -d)

mapfile -t protos < <(cd protos && find fulmen -name '*.proto' | sort)
mapfile -t services < <(cd protos && grep -lE '^service ' "${protos[@]}" | sort)
find "$out/fulmen" \( -name '*_pb2.py' -o -name '*_pb2.pyi' -o -name '*_pb2_grpc.py' \) -delete 2>/dev/null || true
mkdir -p "$out"
protoc() { "$uv" run -q --no-project --isolated --python 3.11 --with "$tools" python -m grpc_tools.protoc -Iprotos "$@"; }
protoc --python_out="$out" --pyi_out="$out" "${protos[@]/#/protos/}"
protoc --grpc_python_out="$out" "${services[@]/#/protos/}"
for package in store runner algorithm llm_proxy type errors; do
  touch "$out/fulmen/$package/v1/__init__.py"
done

if [ "${1:-}" = --check ]; then
  (cd "$out" && find fulmen -name '*_pb2*.py' -o -name '*_pb2*.pyi' | sort) | while read -r file; do
    cmp -s "$out/$file" "sdk/python/src/$file" || { echo "stub differs from its proto: $file (run \`make proto\`)" >&2; exit 1; }
  done
  [ "$(cd "$out" && find fulmen -name '*_pb2*.py' -o -name '*_pb2*.pyi' | sort)" = "$(cd sdk/python/src && find fulmen -name '*_pb2*.py' -o -name '*_pb2*.pyi' | sort)" ] ||
    { echo "stubs without a proto exist (run \`make proto\`)" >&2; exit 1; }
  echo "stubs equal the protos"
fi
