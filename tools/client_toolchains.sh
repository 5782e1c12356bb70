#!/usr/bin/env bash
# Installs the missing toolchains of the clients in clients/. Debian or Ubuntu, as root.
#
#   tools/client_toolchains.sh                  installs for every language
#   tools/client_toolchains.sh --list LANGUAGE  prints the packages of one language
#
# Only the distribution's packages: no language's own registry is used except npm, which `make` uses anyway.
set -euo pipefail

packages_of() {
  case $1 in
    node) echo nodejs npm ;;
    go)
      echo golang-go protoc-gen-go protoc-gen-go-grpc golang-google-grpc-dev golang-google-protobuf-dev \
        golang-google-genproto-dev golang-github-golang-protobuf-1-5-dev golang-golang-x-net-dev \
        golang-golang-x-sys-dev golang-golang-x-text-dev
      ;;
    java)
      echo default-jdk-headless protobuf-compiler protobuf-compiler-grpc-java-plugin libgrpc-java libprotobuf-java \
        libnetty-java libnetty-tcnative-java libnetty-tcnative-jni libperfmark-java libgoogle-gson-java \
        libgeronimo-annotation-1.3-spec-java libguava-java
      ;;
    cpp)
      echo g++ make cmake pkg-config protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libgrpc++-dev \
        nlohmann-json3-dev
      ;;
    *) echo "no such language: $1" >&2; return 2 ;;
  esac
}

if [ "${1:-}" = --list ]; then
  packages_of "$2"
  exit
fi

missing=()
for language in go java cpp; do # Node.js is needed even without clients, and often installed from elsewhere
  for package in $(packages_of "$language"); do
    [ "$(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] ||
      missing+=("$package")
  done
done
[ ${#missing[@]} -eq 0 ] && exit
echo "client toolchains: installing ${missing[*]}"
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
