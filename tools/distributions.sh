# Sourced by the other scripts: the distributions, and functions to find uv and the interpreter. Runs from the root.

# All distributions with the extras that the repository needs, in order of dependence.
distributions=("sdk/python[local]" libs/service_kit "libs/gradient_exchange[server]" "services/store[blobs]" "services/runner[agents]" "services/llm_proxy[cache]" services/console "services/algorithm[objects]" "cli[local]")
# torch alone has no digests: which of its builds fits depends on the machine.
torch_version=$(sed -n 's/^torch==//p' constraints.txt 2>/dev/null || true)
torch_version=${torch_version:-2.13.0}

fail() { echo "setup: $*" >&2; exit 1; }

# Prints the first interpreter that is new enough. PYTHON overrides it.
find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3.11 python3.12 python3.13 python3; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$candidate"; return; }
  done
  fail "Python 3.11 or newer was not found. Install it (Debian: apt-get install python3.11 python3.11-venv), or name it: make setup PYTHON=/path/to/python3.11"
}

# Creates the virtual environment $1 and sets `uv`: from PATH, otherwise installed into the environment.
make_environment() {
  local folder=$1 python
  # A company's package index and certificates are configured for pip and the system; uv needs them, too.
  [ -z "${PIP_INDEX_URL:-}" ] || export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$PIP_INDEX_URL}
  [ -z "${PIP_CERT:-}" ] || export SSL_CERT_FILE=${SSL_CERT_FILE:-$PIP_CERT}
  [ ! -e /etc/ssl/certs/ca-certificates.crt ] || export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-1}
  if ! "$folder/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
    python=$(find_python)
    echo "setup: making $folder with $("$python" --version)"
    rm -rf "$folder"
    "$python" -m venv "$folder" || fail "$python cannot make virtual environments (Debian: apt-get install python3.11-venv)"
  fi
  uv=$(command -v uv || true)
  "$uv" --version >/dev/null 2>&1 || uv=
  [ -n "$uv" ] || uv=$folder/bin/uv
  [ -x "$uv" ] || pinned uv | "$folder/bin/python" -m pip install --quiet --require-hashes --no-deps --requirement /dev/stdin ||
    fail "pip could not install uv; see above"
}

# Prints the pinned version of the distribution $1 with its digests, as a requirement.
pinned() { awk -v name="$1==" 'index($0, name) == 1 {found = 1} found {print; if ($0 !~ /\\$/) exit}' constraints.txt; }

# Adds to the pins in the file $1 the digests of every file that the index has of them. Installing any other file fails.
add_digests() {
  local pins=$1
  "$uv" pip compile --quiet --no-deps --universal --generate-hashes --no-header --no-annotate --no-emit-index-url \
    --python-version 3.11 "$pins" --output-file "$pins.hashed" || fail "the digests of $pins could not be read; see above"
  awk '/^torch==/ {sub(/ \\$/, ""); print; skip = 1; next} /^[^ ]/ {skip = 0} !skip' "$pins.hashed" > "$pins"
  rm "$pins.hashed"
}

# Prints pip's find-links from its environment or configuration; nothing if unset. $1 is an environment.
find_links() {
  echo "${PIP_FIND_LINKS:-$("$1/bin/python" -m pip config get global.find-links 2>/dev/null || true)}"
}

# Installs torch into the environment $1: a wheel from pip's find-links if set, otherwise the build for this machine's
# accelerator (the default index would install several GB of CUDA on every machine).
install_torch() {
  local links=() link
  for link in $(find_links "$1"); do links+=(--find-links "$link"); done
  if [ ${#links[@]} -gt 0 ]; then
    "$uv" pip install --quiet --python "$1/bin/python" "${links[@]}" "torch==$torch_version"
  else
    "$uv" pip install --quiet --python "$1/bin/python" --torch-backend auto "torch==$torch_version"
  fi || fail "torch $torch_version could not be installed; see above"
}

# Installs all distributions, editable, and the development tools into the environment $1; other arguments go to uv.
install_distributions() {
  local folder=$1 arguments=() distribution
  shift
  for distribution in "${distributions[@]}"; do arguments+=(--editable "./$distribution"); done
  "$uv" pip install --quiet --python "$folder/bin/python" "$@" "${arguments[@]}" --group dev ||
    fail "the distributions could not be installed; see above"
}
