#!/usr/bin/env bash
# Trains the arithmetic example through a stack on this machine, and stops the stack again if it was not running before.
# Arguments go to `fulmen train`. The last line on standard output is `validation accuracy 0.NN -> 0.NN`.
set -euo pipefail
cd "$(dirname "$0")/.."
fulmen=.venv/bin/fulmen

if ! "$fulmen" status >/dev/null 2>&1; then
  trap '"$fulmen" down >/dev/null' EXIT
  "$fulmen" up
fi
"$fulmen" train examples/arithmetic/train.toml "$@"
