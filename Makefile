# The commands that people type. `make` alone explains them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON_BIN := .venv/bin
NODE_READY := node_modules/.ready
COMPOSE := docker compose --file deploy/docker-compose.yml $(if $(GPU),--file deploy/docker-compose.gpu.yml) \
	$(if $(MONITORING),--profile monitoring)
# Images of containers like to set it; every process that is started would then compile torch and all else anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup vllm-env litellm-env clients demo test test-frameworks test-gpu test-long test-store lint format types house proto python-api \
	proto-check lock clean licences sbom bench bench-store bench-peers bench-runner bench-proxy bench-train bench-exchange bench-exchange-convergence audit bench-scale bench-routing bench-machines \
	console console-pictures bench-console test-console fuzz crash-matrix helm helm-settings up down compose-smoke dist dist-images bench-cli test-docs docs

help: ## Shows this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Makes .venv with everything at pinned versions (under a minute; nothing if up to date)
	@tools/setup.sh

$(NODE_READY): package.json package-lock.json $(wildcard clients/node/package.json services/console/web/package.json)
	@command -v npm >/dev/null || { echo "npm was not found: install Node.js 20.19 or newer (Debian: apt-get install nodejs npm)" >&2; exit 1; }
	npm ci --no-audit --no-fund --loglevel=error
	@touch $@

vllm-env: ## Makes .venv-vllm with vLLM for the CPU (2.1 GB), for the tests with a real engine
	@tools/vllm_env.sh

litellm-env: ## Makes .venv-litellm with LiteLLM, for backends of other vendors, and for their tests
	@tools/litellm_env.sh

clients: $(NODE_READY) ## Builds the clients in other languages, those whose toolchains are there (tools/client_toolchains.sh)
	@tools/build_clients.sh $(LANGUAGES)

demo: setup ## Trains a small model on arithmetic through the four services, on this machine
	@$(PYTHON_BIN)/python -m benchmarks.demo $(ARGS)

console: $(NODE_READY) ## Builds the console's pages into services/console/src/fulmen_console/page
	@npm run --silent build --workspace @fulmen/console

test-console: setup $(NODE_READY) ## Runs the console's tests in a browser, against a real stack (needs chromium; ARGS="home": some; SCREENS=1: pictures into build/screens)
	@node_modules/.bin/playwright test --config tests/browser $(ARGS)

test: setup $(NODE_READY) ## Runs the tests, but not those of test-long and test-frameworks (SOAK=10: ten times the examples of properties)
	@FULMEN_TEST_SOAK=$(or $(SOAK),1) tools/test.sh -m "not long" $(ARGS)

test-long: setup $(NODE_READY) ## Runs the long tests: kills, soaks, vLLM, whole matrices (SHORT=1: some; SOAK=10, SEED=1, ARGS=tests/chaos)
	@# Whole stacks with deadlines fill two cores sooner.
	@WORKERS=3 FULMEN_TEST_SOAK=$(or $(SOAK),$(if $(SHORT),1,10)) FULMEN_TEST_SEED=$(SEED) \
		tools/test.sh -v -m "$(if $(SHORT),long(short=True),long)" $(ARGS)

test-frameworks: setup $(NODE_READY) ## Runs agents on LangChain, CrewAI and others as they are (and Claude Code, Codex: 2.7 GB in .venv-frameworks; LONG=1: 5 GB, with Tinker, verifiers, OpenEnv)
	@tools/framework_envs.sh
	@$(if $(LONG),tools/framework_envs.sh verifiers openenv && tools/tinker_env.sh,true)
	OMP_NUM_THREADS=1 $(PYTHON_BIN)/python -m pytest -n 2 $(if $(CI),--durations=20) $(if $(LONG),,-m "not long") tests/frameworks

test-gpu: setup ## Runs what needs a CUDA device (all is skipped without one): bf16, NCCL, sharding
	OMP_NUM_THREADS=1 $(PYTHON_BIN)/python -m pytest -rs tests/gpu

test-docs: setup ## Runs or reads every code block of the documentation, and prints how many in which way
	@tools/test.sh tests/docs tests/contract/test_docs_toml.py tests/architecture/test_docs.py tests/e2e/test_python_api.py $(ARGS)

test-store: setup ## Runs the store's tests on one PostgreSQL: POSTGRES=container (postgres:17) or embedded; SHORT=1: fewer
	FULMEN_TEST_POSTGRES=$(POSTGRES) OMP_NUM_THREADS=1 \
		$(PYTHON_BIN)/python -m pytest -n 3 --dist loadgroup tests/conformance/store $(if $(SHORT),,tests/integration/store)

fuzz: setup ## Feeds hostile inputs to parsers and services (SECONDS=60 for each target, SEED=1, GUIDED=1: by coverage, ARGS="answers rpc")
	$(if $(GUIDED),@[ -d build/atheris ] || $(PYTHON_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps \
		--require-hashes --target build/atheris --requirement tools/fuzz-requirements.txt)
	$(if $(GUIDED),PYTHONPATH=build/atheris) $(PYTHON_BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

lint: setup $(NODE_READY) ## Checks style, import rules, contracts, stubs, types and sizes
	@tools/lint.sh

format: setup $(NODE_READY) ## Formats Python and protos
	$(PYTHON_BIN)/ruff check --fix --quiet . || true
	$(PYTHON_BIN)/ruff format .
	npx buf format --write protos

house: setup ## Prints measures of the structure of the code (ARGS="--list crumbs": the places behind one)
	@$(PYTHON_BIN)/python tools/house.py $(ARGS)

types: setup ## Checks types alone: of the code, the benchmarks, and the doubles and helpers of the tests
	$(PYTHON_BIN)/mypy $(wildcard sdk/python/src/fulmen cli/src/* libs/*/src/* services/*/src/*) benchmarks tests/support

proto: setup ## Generates the Python stubs from protos/
	tools/generate_stubs.sh

python-api: setup ## Generates the blocking Python API of the asynchronous one, its classes of algorithms, docs/train-toml.md and docs/proxy-toml.md
	$(PYTHON_BIN)/python tools/sync_client.py
	$(PYTHON_BIN)/python tools/algorithm_classes.py
	$(PYTHON_BIN)/python tools/train_toml_reference.py
	$(PYTHON_BIN)/python tools/proxy_toml_reference.py

proto-check: setup $(NODE_READY) ## Checks the protos: lint, format, breaking changes, stubs
	@tools/check_protos.sh

lock: ## Resolves constraints.txt anew
	tools/lock.sh

bench: bench-store bench-peers bench-runner bench-proxy bench-train bench-exchange ## Runs every benchmark (SHORT=1: the short form)

bench-store: setup ## Benchmarks the store: rollouts and spans per second, latency, CPU per operation
	$(PYTHON_BIN)/python -m benchmarks.store $(if $(SHORT),--short)

bench-peers: setup ## Benchmarks the store beside job queues on PostgreSQL, each in its best settings (needs Node.js; Python 3.12 for Oban)
	$(PYTHON_BIN)/python -m benchmarks.store.peers $(if $(SHORT),--short)

bench-runner: setup ## Benchmarks the runner beside Agent Lightning's: attempts per second, memory, imports
	$(PYTHON_BIN)/python -m benchmarks.runner $(if $(SHORT),--short)

bench-proxy: setup ## Benchmarks the LLM proxy beside LiteLLM, Agent Lightning and the vLLM router; faults under load
	$(PYTHON_BIN)/python -m benchmarks.proxy $(if $(SHORT),--short)

bench-train: setup ## Benchmarks training: what is learned, asynchronous against synchronous, merging, publishing
	$(PYTHON_BIN)/python -m benchmarks.train $(if $(SHORT),--short)

bench-exchange-convergence: setup ## Trains with every codec beside a dense exchange (two hours; continues where it was cut off)
	OMP_NUM_THREADS=1 $(PYTHON_BIN)/python -m benchmarks.exchange.convergence \
		$(if $(SHORT),--short,--doc docs/exchange-convergence.md)

bench-exchange: setup ## Benchmarks compressed gradient exchange beside PyTorch's hooks, on lines of a rate (root, or user namespaces)
	$(PYTHON_BIN)/python -m benchmarks.exchange.kernels $(if $(SHORT),--short,--output benchmarks/results)
	$(PYTHON_BIN)/python -m benchmarks.exchange.grpc_loopback $(if $(SHORT),--trials 2,--out benchmarks/results/exchange_grpc.json)
	$(PYTHON_BIN)/python -m benchmarks.exchange $(if $(SHORT),--quick)

bench-cli: setup ## Measures what `import fulmen` and `fulmen --help` take
	$(PYTHON_BIN)/python -m benchmarks.cli

bench-console: setup $(NODE_READY) ## Benchmarks the console in Chromium: size, paint, live updates, long lists and traces (15 minutes)
	$(PYTHON_BIN)/python -m benchmarks.console $(if $(SHORT),--short)

console-pictures: setup $(NODE_READY) ## Makes the pictures of docs/console.md: a training, photographed (five minutes; ARGS="run": some)
	@node tools/console_pictures.mjs $(ARGS)

bench-scale: setup ## Loads the whole system with 3,000 runner sessions, 1 to 8 simulated engines, and says what 128 GPUs carry
	$(PYTHON_BIN)/python -m benchmarks.scale $(if $(SHORT),--short)
	$(PYTHON_BIN)/python -m benchmarks.machines.curve $(if $(SHORT),--short)
	$(if $(SHORT),,$(PYTHON_BIN)/python -m benchmarks.scale.plan)

bench-routing: setup ## Benchmarks routing: agents over four simulated engines with prefix caches, beside an oracle (20 minutes)
	$(PYTHON_BIN)/python -m benchmarks.routing $(if $(SHORT),--short)

bench-machines: setup ## Benchmarks many machines: versions for eight engines behind slow lines, ranks on four machines and the demo on three Ray nodes, with a loss (root, Linux)
	$(PYTHON_BIN)/python -m benchmarks.machines.engines $(if $(SHORT),--short)
	$(PYTHON_BIN)/python -m benchmarks.machines.ranks
	$(PYTHON_BIN)/python -m benchmarks.machines.loss
	$(PYTHON_BIN)/python -m benchmarks.machines.demo $(if $(SHORT),--short)

crash-matrix: setup ## Kills, stops, cuts off and starves every process under a training run; cuts the power (an hour; SHORT=1, ARGS=--resume)
	@$(PYTHON_BIN)/python -m benchmarks.reliability $(if $(SHORT),--short) $(ARGS)

up: deploy/.env ## Builds and starts everything in containers (MONITORING=1: with Prometheus and Grafana; GPU=1: on GPUs)
	$(if $(MONITORING),FULMEN_OTLP_ENDPOINT=http://collector:4317) $(COMPOSE) up --build --detach --wait

down: ## Stops the containers; their data is kept
	$(COMPOSE) --profile monitoring down

dashboards: setup ## Makes Grafana's dashboards of deploy/grafana/boards, and the page of runbooks that Prometheus serves
	python3 deploy/grafana/build.py
	$(PYTHON_BIN)/python deploy/prometheus/build.py

deploy/.env:
	python3 deploy/make_env.py

compose-smoke: setup ## Builds the containers, trains the short form of the demo from outside, takes them down
	@tools/compose_smoke.sh

helm: setup ## Checks the Helm chart with Helm's own SDK: lint, and every test of what it renders
	@tools/helm_toolchain.sh
	.venv-helm/bin/python tools/helm_chart.py lint deploy/helm/fulmen
	CI=1 $(PYTHON_BIN)/python -m pytest tests/contract/test_helm_chart.py tests/contract/test_helm_settings.py \
		tests/contract/test_helm_network.py tests/contract/test_helm_docs.py tests/contract/test_helm_engines.py tests/integration/kubernetes

helm-settings: setup ## Writes into the chart's schema which settings the services have
	$(PYTHON_BIN)/python tools/helm_settings.py

audit: setup ## Checks dependencies for known vulnerabilities and licences (STRICT=1: fails if no advisory can be read)
	$(PYTHON_BIN)/python tools/audit.py $(if $(STRICT),--strict)
	$(PYTHON_BIN)/python tools/licences.py --check

licences: setup ## Lists the licences of dependencies in docs/licences.md
	$(PYTHON_BIN)/python tools/licences.py

sbom: setup ## Writes what the environment consists of into dist/fulmen.cdx.json (CycloneDX)
	mkdir -p dist
	$(PYTHON_BIN)/uv tool run --system-certs --from cyclonedx-bom==7.5.0 cyclonedx-py environment --output-reproducible \
		--output-file dist/fulmen.cdx.json $(PYTHON_BIN)/python

dist: setup $(NODE_READY) ## Builds packages of Python, npm, Go and Helm into dist/ (ARGS="python chart": some; REPOSITORY=URL of the source)
	@REPOSITORY=$(REPOSITORY) $(PYTHON_BIN)/python tools/dist.py $(ARGS)

dist-images: ## Builds the images of the four services (REGISTRY=host/path; PUSH=1: pushes and signs them)
	@REGISTRY=$(REGISTRY) PUSH=$(PUSH) tools/dist_images.sh

docs: setup $(NODE_READY) ## Builds the documentation's site into build/site; a broken link fails (SERVE=1: serves it as it is edited)
	@tools/docs_env.sh
	npx buf build protos --output - | $(PYTHON_BIN)/python tools/proto_reference.py build/protos.md
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs $(if $(SERVE),serve,build --strict)

clean: ## Removes what was built here; the state of `fulmen up` (.fulmen) is kept
	rm -rf .venv .venv-vllm .venv-frameworks .venv-litellm .venv-helm .venv-docs dist build node_modules .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache deploy/wheels/*.whl
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
