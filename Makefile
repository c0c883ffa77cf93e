# Everything Kev needs beyond Python >= 3.11, pip, make and git is installed into .venv by the first target that runs.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help install demo test chaos check check-quick check-static check-protos run proto format clean

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q
PACKAGES := kev common router_svc inference_svc aggregator_svc
# Containers often forbid Python to keep what it compiles; the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE
# What the protos must stay compatible with.
BASE = $(shell git rev-parse -q --verify origin/main || git rev-parse -q --verify main)
# One line per package, so that a long download is seen to go on.
PROGRESS = awk '/^ *(Downloading|Using cached|Building|Installing collected)/ { print "  " substr($$0, 1, 100); fflush() }'

help:  ## show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with Kev, its demo model and its tools

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard inference_svc/kernels/*.cpp inference_svc/kernels/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Kev needs Python 3.11 or newer; set PYTHON=..."; exit 1; }
	@echo "[1/3] virtual environment in $(VENV)"
	@# Debian without python3-venv has no ensurepip: let the system's pip put pip in.
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) > /dev/null 2>&1 \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	@echo "[2/3] torch (large; a few minutes on a slow line)"
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch==2.13.0 setuptools | $(PROGRESS)
	@echo "[3/3] Kev, the demo model and the tools"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[demo,test,dev]' | $(PROGRESS)
	@$(BIN)/python -c 'from inference_svc.kernels.library import kernels; found = kernels(); print("  native kernels:", getattr(found, "variant", found))'
	@touch $@

demo: $(STAMP)  ## answer four kinds of question on the demo model
	@$(BIN)/kev demo

run: $(STAMP)  ## serve HTTP on http://127.0.0.1:8765
	@$(BIN)/kev serve

# Some tests start whole clusters or use two threads: more processes than two need as many more cores.
WORKERS ?= 2
test: check  ## the static checks and every test
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10 -m 'not quick and not chaos'

# KEV_CHAOS_QUESTIONS, KEV_CHAOS_FAULTS, KEV_CHAOS_SECONDS, KEV_CHAOS_SEED, KEV_CHAOS_JSON: see tests/chaos/test_random_faults.py.
CHAOS ?= tests/chaos
chaos: $(STAMP)  ## break a real cluster: the fault matrix, then random faults (CHAOS=FILE, KEV_CHAOS_QUESTIONS, KEV_CHAOS_FAULTS)
	$(PYTEST) -m chaos -p no:cacheprovider --durations=10 $(CHAOS)

check: $(STAMP)  ## the static checks and the quick tests, side by side
	@$(MAKE) --no-print-directory -j2 --output-sync=target check-static check-quick

check-quick: $(STAMP)
	$(PYTEST) -m quick -n auto --maxprocesses 4 tests/unit tests/contract

check-static: $(STAMP) check-protos  ## format, lint, types, import contracts, protos
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy --no-error-summary
	$(BIN)/lint-imports --no-logo | { grep -v KEPT || true; }

check-protos: $(STAMP)
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/python protos/generate.py --check
	@if [ -n "$(BASE)" ] && git cat-file -e '$(BASE):buf.yaml' 2> /dev/null; then \
	  echo "$(BIN)/buf breaking"; $(BIN)/buf breaking --against '.git#commit=$(BASE)'; \
	else echo "no protos on main yet: nothing to stay compatible with"; fi

proto: $(STAMP)  ## generate kev/v1 from protos/
	$(BIN)/buf format --write
	$(BIN)/python protos/generate.py

format: $(STAMP)  ## format and mend what can be mended
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format --quiet .

clean:  ## remove caches and build products; .venv stays
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find $(PACKAGES) tests protos -name __pycache__ -prune -exec rm -rf {} +
