#!/usr/bin/env bash
# Installs the missing tools for the tests of deploy/prometheus from Debian's package `prometheus`: promtool, and for
# `make compose-smoke` Prometheus itself. No server is started or enabled.
set -euo pipefail
command -v promtool >/dev/null && command -v prometheus >/dev/null && exit 0
command -v apt-get >/dev/null ||
  { echo "monitoring_toolchain: promtool is missing; it comes with Prometheus (https://prometheus.io/download)" >&2; exit 1; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi; }
as_root apt-get update -qq
# Only the programs: installing the package would start a server.
chmod 755 "$folder"
(cd "$folder" && apt-get download -qq prometheus && dpkg -x prometheus_*.deb .)
as_root install -m 755 "$folder/usr/bin/promtool" "$folder/usr/bin/prometheus" /usr/local/bin
promtool --version | head -1
