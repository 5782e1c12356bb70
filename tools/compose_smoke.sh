#!/usr/bin/env bash
# Builds and starts the containers, trains a short form of the arithmetic example through the published ports while
# containers are killed, and removes everything, volumes included. Works with any reachable Docker engine.
# A running deployment is not affected: this one has its own project, keys and tags, and free ports. If this machine has
# Prometheus, it monitors the run from a separate container.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/distributions.sh

docker info >/dev/null 2>&1 ||
  { echo "compose-smoke: no Docker engine answers (\`docker info\`): start one, or set DOCKER_HOST" >&2; exit 1; }
docker compose version >/dev/null 2>&1 || { echo "compose-smoke: Docker Compose v2 is missing" >&2; exit 1; }

unset "${!FULMEN_@}"
folder=$(mktemp -d)
# The build uses the host's network: some engines give containers no network access.
export FULMEN_BUILD_NETWORK=host FULMEN_TAG=smoke
files=(--file deploy/docker-compose.yml)
compose() {
  docker compose --project-name fulmen-smoke "${files[@]}" --env-file "$folder/env" "$@" </dev/null
}
reason="a command failed"
fail() { reason=$*; exit 1; }

finish() {
  local status=$?
  if [ "$status" -ne 0 ]; then
    compose ps --all || true
    compose logs --no-color --tail 60 || true
  fi
  [ -z "${training:-}" ] || kill "$training" 2>/dev/null || true
  compose --profile monitoring down --volumes --remove-orphans --timeout 15 >"$folder/down.log" 2>&1 || cat "$folder/down.log"
  rm -rf "$folder"
  [ "$status" -eq 0 ] || echo "compose-smoke: $reason" >&2
  exit "$status"
}

# The build uses a local wheel of torch instead of a download.
for links in $(find_links .venv); do
  for wheel in "$links"/torch-*.whl; do [ ! -e "$wheel" ] || cp -u "$wheel" deploy/wheels/; done
done

.venv/bin/python deploy/make_env.py --output "$folder/env" --secrets-dir "$folder/secrets"
.venv/bin/python tools/free_ports.py FULMEN_{{STORE,STORE_2,ALGORITHM,LLM_PROXY,LLM_PROXY_2}{,_METRICS},{STORE,LLM_PROXY}{,_2}_HTTP,PROMETHEUS}_PORT \
  >> "$folder/env"
trap finish EXIT
# A stand-in for PostgreSQL's image, on machines without a registry, may read its password from the environment only.
if ! docker run --rm --entrypoint sh postgres:17 -c 'grep -q FILE "$(command -v docker-entrypoint.sh)"'; then
  printf 'services: {postgres: {environment: {POSTGRES_PASSWORD: "%s"}}}\n' "$(cat "$folder/secrets/database_password")" > "$folder/postgres.yml"
  files+=(--file "$folder/postgres.yml")
fi
# Profiles that cannot be started here are at least parsed.
compose --file deploy/docker-compose.gpu.yml --profile monitoring config --quiet
begun=$SECONDS
compose build --quiet
echo "compose-smoke: built in $((SECONDS - begun)) s"
for image in store llm-proxy runner algorithm; do
  echo "compose-smoke: fulmen-$image $(($(docker image inspect --format '{{.Size}}' "fulmen-$image:smoke") / 1000000)) MB"
done
begun=$SECONDS
compose up --detach --wait --wait-timeout 240 --quiet-pull
echo "compose-smoke: up in $((SECONDS - begun)) s"
[ "$(compose ps --quiet runner | wc -l)" -eq 2 ] || fail "there are not two runners"
compose exec -T --env FULMEN_EXCHANGE_KERNELS=native --env PATH=/opt/fulmen/bin algorithm \
  python -c 'import torch; from fulmen_exchange import kernels; kernels.threshold_of(torch.ones(2), 0.5)' ||
  fail "the image of the algorithm service has no compiled kernels"

set -a
. "$folder/env"
set +a

# Builds an image with this machine's Prometheus, so no third-party image is needed.
watch_by_prometheus() {
  mkdir "$folder/prometheus"
  cp "$(command -v prometheus)" "$folder/prometheus/"
  printf 'FROM python:3.11-slim\nCOPY prometheus /bin/prometheus\nENTRYPOINT ["/bin/prometheus"]\n' > "$folder/prometheus/Dockerfile"
  docker build --quiet --tag fulmen-smoke-prometheus "$folder/prometheus" >/dev/null
  FULMEN_PROMETHEUS_IMAGE=fulmen-smoke-prometheus compose up --detach --no-deps --quiet-pull prometheus
}

# Prints the number of targets of a job that are up in Prometheus.
answering() {
  curl --silent --fail "http://127.0.0.1:$FULMEN_PROMETHEUS_PORT/api/v1/query" --data-urlencode "query=sum(up{job=\"$1\"})" |
    sed -n 's/.*"value":\[[^,]*,"\([0-9]*\)"].*/\1/p'
}

# Waits until Prometheus has this number of targets of a job.
await_targets() {
  local tries=0
  until [ "$(answering "$1")" = "$2" ]; do
    tries=$((tries + 1))
    [ $tries -lt 60 ] || fail "Prometheus finds $(answering "$1") of $1, not $2"
    sleep 1
  done
}

if command -v prometheus >/dev/null; then
  watch_by_prometheus
  for job in store:2 llm_proxy:2 runner:2 algorithm:1 console:1; do await_targets "${job%:*}" "${job#*:}"; done
  echo "compose-smoke: Prometheus scrapes all of them"
fi

stores=(--store-target "ipv4:127.0.0.1:$FULMEN_STORE_PORT,127.0.0.1:$FULMEN_STORE_2_PORT")
.venv/bin/fulmen doctor "${stores[@]}" --algorithm-target "127.0.0.1:$FULMEN_ALGORITHM_PORT" \
  --llm-proxy-target "127.0.0.1:$FULMEN_LLM_PROXY_PORT,127.0.0.1:$FULMEN_LLM_PROXY_2_PORT" || fail "the doctor finds something wrong"

begun=$SECONDS
timeout 1200 .venv/bin/fulmen train examples/arithmetic/train.toml "${stores[@]}" \
  --algorithm-target "127.0.0.1:$FULMEN_ALGORITHM_PORT" --llm-proxy-target "127.0.0.1:$FULMEN_LLM_PROXY_2_PORT" \
  --report-dir "$folder/report" --set sft.steps=400 --set grpo.steps=6 --set grpo.warmup_steps=4 "$@" > "$folder/train.log" 2>&1 &
training=$!
until grep -q "^grpo: step [1-6]/" "$folder/train.log"; do
  kill -0 "$training" 2>/dev/null || { cat "$folder/train.log"; fail "training ended before its second stage"; }
  sleep 0.2
done
# A store and a runner with its attempts are killed for good, a proxy and the algorithm service are restarted.
compose kill --signal SIGKILL store_1 llm_proxy_1 algorithm
docker kill --signal SIGKILL "$(compose ps --quiet runner | head -n 1)" >/dev/null
grep -q "^grpo: step 6/6" "$folder/train.log" && fail "the run was over before anything was killed"
compose start llm_proxy_1 algorithm
echo "compose-smoke: killed one of each service at \"$(grep "^grpo: step" "$folder/train.log" | tail -n 1)\""
wait "$training" || { cat "$folder/train.log"; fail "training failed"; }
training=
cat "$folder/train.log"
! grep -q "validation rollouts failed" "$folder/train.log" || fail "rollouts failed, which kills must not cause"
last=$(tail -n 1 "$folder/train.log")
[[ $last =~ ^"validation accuracy "[01]\.[0-9]+" -> "[01]\.[0-9]+$ ]] || fail "the last line is not the accuracy: $last"
echo "compose-smoke: trained in $((SECONDS - begun)) s"
