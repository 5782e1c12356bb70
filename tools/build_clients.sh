#!/usr/bin/env bash
# Builds the clients of clients/, each into clients/LANGUAGE/build/client; does nothing for those that are up to date.
#
#   tools/build_clients.sh              every language whose toolchain is installed; names the missing ones
#   tools/build_clients.sh LANGUAGE...  these languages; exits with 3 if a toolchain is missing
set -uo pipefail
cd "$(dirname "$0")/.."

# Requirements of a build: a command, or a file if it contains a slash.
needs_of() {
  case $1 in
    node) echo node node_modules/.bin/buf node_modules/.bin/tsc node_modules/.bin/protoc-gen-ts_proto ;;
    go) echo node_modules/.bin/buf go protoc-gen-go protoc-gen-go-grpc /usr/share/gocode/src/google.golang.org/grpc ;;
    java)
      echo node_modules/.bin/buf javac protoc grpc_java_plugin
      echo /usr/share/java/{grpc-netty,protobuf-util,gson,guava,netty-tcnative,geronimo-annotation-1.3-spec}.jar
      ;;
    cpp) echo node_modules/.bin/buf g++ cmake protoc grpc_cpp_plugin /usr/include/{grpcpp/grpcpp.h,nlohmann/json.hpp} ;;
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

# All inputs of the program; it is up to date if none has changed.
inputs_of() {
  { find protos clients/protos -name '*.proto'; find "clients/$1" -path "clients/$1/build" -prune -o -type f -print; } |
    grep -v '\.md$' | sort | xargs cksum
}

build() {
  local language=$1 log=clients/$1/build/log begun=$SECONDS wanted
  mkdir -p "clients/$language/build"
  # The lock makes concurrent runs build once.
  exec 9>"clients/$language/build/lock"
  command -v flock >/dev/null && flock 9
  wanted=$(inputs_of "$language")
  [ "$(cat "clients/$language/build/inputs" 2>/dev/null)" = "$wanted" ] && return
  rm -f "clients/$language/build/inputs"
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
  [ -e "clients/$language/build.sh" ] || { echo "clients: no such language: $language" >&2; exit 2; }
  missing=$(missing_of "$language")
  if [ -n "$missing" ]; then
    echo "clients: $language: not built, these are missing:" $missing >&2
    echo "clients: $language: on Debian: apt-get install $(tools/client_toolchains.sh --list "$language")" >&2
    echo "clients: $language: packages of node_modules: npm ci" >&2
    [ "$asked" -eq 0 ] || status=3
  else
    build "$language" || status=1
  fi
done
exit $status
