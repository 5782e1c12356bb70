#!/usr/bin/env bash
# Generates the stubs, compiles, and leaves the program as build/client. Packages are Debian's, in /usr/share/gocode.
set -euo pipefail
cd "$(dirname "$0")"

../../node_modules/.bin/buf generate
GO111MODULE=off GOPATH=$PWD/build/gopath:/usr/share/gocode go build -o build/client .
