#!/usr/bin/env bash
# Creates an environment for each agent framework that Fulmen is tested with, or for the named ones:
# .venv-frameworks/NAME, with the versions in tools/frameworks/NAME.txt. Their versions conflict with Fulmen's and with
# each other's. Skips environments that are up to date; concurrent runs do the work once.
# With --lock the versions are resolved again from tools/frameworks/NAME.in. Large ones are in tools/frameworks/large: they are made
# only if they are named, and the tests that need one are skipped without it. `harnesses` has programs of npm instead, at the versions of
# examples/harnesses/package-lock.json.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

lists=tools/frameworks
home=.venv-frameworks
lock=/tmp/fulmen-framework-envs-$(id -u).lock
# Uses the main environment's uv, which saves 60 MB in each environment.
PATH=$PWD/.venv/bin:$PATH

# Prints the file with the wishes for an environment, without its ending.
list_of() { if [ -e "$lists/large/$1.in" ]; then echo "$lists/large/$1"; else echo "$lists/$1"; fi; }

resolve() {
  local name=$1 list
  list=$(list_of "$name")
  { echo "# The versions of the environment for $name, written by tools/framework_envs.sh --lock $name."
    "$uv" pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header --no-annotate "$list.in"
  } > "$home/$name.txt" || fail "the versions for $name could not be resolved; see above"
  mv "$home/$name.txt" "$list.txt"
}

# Installs exactly the pinned distributions.
make_one() {
  local name=$1 folder=$home/$1 begun=$SECONDS list wanted
  list=$(list_of "$name")
  wanted=$(cat "$list.txt" tools/framework_envs.sh tools/distributions.sh | cksum)
  [ "$(cat "$folder/.setup-stamp" 2>/dev/null || true)" != "$wanted" ] || return 0
  rm -rf "$folder"
  make_environment "$folder"
  "$uv" pip install --quiet --python "$folder/bin/python" --no-deps --requirement "$list.txt" ||
    fail "$name could not be installed; see above"
  echo "$wanted" > "$folder/.setup-stamp"
  echo "frameworks: $name done in $((SECONDS - begun)) s"
}

# Installs exactly the pinned programs of npm.
make_harnesses() {
  local folder=$home/harnesses pins=examples/harnesses begun=$SECONDS wanted
  wanted=$(cat $pins/package.json $pins/package-lock.json tools/framework_envs.sh | cksum)
  [ "$(cat "$folder/.setup-stamp" 2>/dev/null || true)" != "$wanted" ] || return 0
  rm -rf "$folder"
  mkdir -p "$folder"
  cp $pins/package.json $pins/package-lock.json "$folder"
  npm ci --prefix "$folder" --ignore-scripts --no-audit --no-fund --loglevel=error || fail "harnesses could not be installed; see above"
  # The package's own script, which puts the program for this machine in its place, without a download.
  node "$folder/node_modules/@anthropic-ai/claude-code/install.cjs" || fail "Claude Code could not be installed; see above"
  echo "$wanted" > "$folder/.setup-stamp"
  echo "frameworks: harnesses done in $((SECONDS - begun)) s"
}

locking=
[ "${1:-}" != --lock ] || { locking=yes; shift; }
names=("$@")
[ $# -gt 0 ] || mapfile -t names < <(basename --suffix .in $lists/*.in; echo harnesses)
for name in "${names[@]}"; do
  [ "$name" = harnesses ] || [ -e "$(list_of "$name").in" ] || fail "there is no framework '$name'; there are: $(basename --suffix .in $lists/*.in $lists/large/*.in | xargs) harnesses"
done

exec 9>"$lock"
flock 9 || fail "another framework_envs.sh holds $lock"
mkdir -p $home
for name in "${names[@]}"; do
  if [ "$name" = harnesses ]; then
    make_harnesses
    continue
  fi
  if [ -n "$locking" ]; then
    make_environment "$home/$name"
    resolve "$name"
  fi
  make_one "$name"
done
