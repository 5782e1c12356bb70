#!/usr/bin/env bash
# Builds the containers, brings them up, trains a short form of the arithmetic example through the published ports, and
# takes everything down again, volumes included. Works with any Docker engine that answers. Nothing of a deployment
# that runs already is touched: its own project, its own keys, free ports.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

docker info >/dev/null 2>&1 ||
  { echo "compose-smoke: no Docker engine answers (\`docker info\`): start one, or set DOCKER_HOST" >&2; exit 1; }
docker compose version >/dev/null 2>&1 || { echo "compose-smoke: Docker Compose v2 is missing" >&2; exit 1; }

unset "${!FULMEN_@}"
folder=$(mktemp -d)
# The build uses the machine's own network: some engines give containers no way out of theirs.
export FULMEN_BUILD_NETWORK=host
compose() { docker compose --project-name fulmen-smoke --file deploy/docker-compose.yml --env-file "$folder/env" "$@"; }

finish() {
  local status=$?
  if [ "$status" -ne 0 ]; then
    compose ps --all || true
    compose logs --no-color --tail 60 || true
  fi
  compose down --volumes --remove-orphans --timeout 15 >"$folder/down.log" 2>&1 || cat "$folder/down.log"
  rm -rf "$folder"
  exit "$status"
}

# A wheel of torch that is at hand need not be downloaded by the build.
for links in $(find_links .venv); do
  for wheel in "$links"/torch-*.whl; do [ ! -e "$wheel" ] || cp -u "$wheel" deploy/wheels/; done
done

.venv/bin/python deploy/make_env.py --output "$folder/env"
.venv/bin/python tools/free_ports.py FULMEN_{STORE,STORE_METRICS,LLM_PROXY,LLM_PROXY_HTTP,ALGORITHM,ALGORITHM_METRICS}_PORT >> "$folder/env"
trap finish EXIT
begun=$SECONDS
compose build --quiet
echo "compose-smoke: built in $((SECONDS - begun)) s"
begun=$SECONDS
compose up --detach --wait --wait-timeout 240 --quiet-pull
echo "compose-smoke: up in $((SECONDS - begun)) s"
[ "$(compose ps --quiet runner | wc -l)" -eq 2 ] || { echo "compose-smoke: there are not two runners" >&2; exit 1; }
compose exec -T --env FULMEN_ALGORITHM_KERNELS=native --env PATH=/opt/fulmen/bin algorithm \
  python -c 'import torch; from fulmen_algorithm.exchange import kernels; kernels.threshold_of(torch.ones(2), 0.5)' ||
  { echo "compose-smoke: the image of the algorithm service has no compiled kernels" >&2; exit 1; }

set -a
. "$folder/env"
set +a
begun=$SECONDS
FULMEN_TOKEN=$FULMEN_TOKEN timeout 600 .venv/bin/fulmen train examples/arithmetic/train.toml \
  --store-target "127.0.0.1:$FULMEN_STORE_PORT" --algorithm-target "127.0.0.1:$FULMEN_ALGORITHM_PORT" \
  --llm-proxy-target "127.0.0.1:$FULMEN_LLM_PROXY_PORT" --report-dir "$folder/report" \
  --set grpo.steps=3 --set grpo.warmup_steps=4 "$@" | tee "$folder/train.log"
last=$(tail -n 1 "$folder/train.log")
[[ $last =~ ^"validation accuracy "[01]\.[0-9]+" -> "[01]\.[0-9]+$ ]] ||
  { echo "compose-smoke: the last line is not the accuracy: $last" >&2; exit 1; }
echo "compose-smoke: trained in $((SECONDS - begun)) s"
