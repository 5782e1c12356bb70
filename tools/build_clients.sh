#!/usr/bin/env bash
# Builds the clients of clients/, each into clients/LANGUAGE/build/client; does nothing for those that are up to date.
#
#   tools/build_clients.sh              every language whose toolchain is there; says which ones are not
#   tools/build_clients.sh LANGUAGE...  these; exits with 3 if the toolchain of one is missing
set -uo pipefail
cd "$(dirname "$0")/.."

# What a build needs: a command, or a file if it has a slash.
needs_of() {
  case $1 in
    node) echo node node_modules/.bin/buf node_modules/.bin/tsc node_modules/.bin/protoc-gen-ts_proto ;;
    go) echo node_modules/.bin/buf go protoc-gen-go protoc-gen-go-grpc /usr/share/gocode/src/google.golang.org/grpc ;;
    java) echo node_modules/.bin/buf javac protoc grpc_java_plugin /usr/share/java/{grpc-netty,protobuf,gson,guava,netty-tcnative}.jar ;;
    cpp) echo node_modules/.bin/buf g++ cmake protoc grpc_cpp_plugin /usr/include/{grpcpp/grpcpp.h,nlohmann/json.hpp} ;;
    *) echo "no such language: $1" >&2; return 2 ;;
  esac
}

missing_of() {
  local need
  for need in $(needs_of "$1"); do
    case $need in
      */*) [ -e "$need" ] || echo "$need" ;;
      *) command -v "$need" >/dev/null || echo "$need" ;;
    esac
  done
}

# Everything that the program is made of: if none of it changed, there is nothing to do.
inputs_of() {
  find protos clients/protos "clients/$1" -path "clients/$1/build" -prune -o \( -name '*.proto' -o -path "clients/$1/*" \) \
    -type f ! -name '*.md' -print0 | sort -z | xargs -0 cksum
}

build() {
  local language=$1 log=clients/$1/build/log begun=$SECONDS wanted
  wanted=$(inputs_of "$language")
  [ -x "clients/$language/build/client" ] && [ "$(cat "clients/$language/build/inputs" 2>/dev/null)" = "$wanted" ] && return
  mkdir -p "clients/$language/build"
  if "clients/$language/build.sh" >"$log" 2>&1; then
    echo "$wanted" >"clients/$language/build/inputs"
    echo "clients: $language: built in $((SECONDS - begun)) s"
  else
    cat "$log" >&2
    echo "clients: $language: FAILED" >&2
    return 1
  fi
}

status=0 asked=$#
[ $# -gt 0 ] || set -- node go java cpp
for language; do
  missing=$(missing_of "$language") || exit 2
  if [ -n "$missing" ]; then
    echo "clients: $language: not built, for want of" $missing >&2
    echo "clients: $language: Debian has it: apt-get install $(tools/client_toolchains.sh --list "$language"); then \`npm install\`" >&2
    [ "$asked" -eq 0 ] || status=3
  else
    build "$language" || status=1
  fi
done
exit $status
