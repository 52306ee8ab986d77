# Every target makes the environment it needs first (.ci/setup); `make` alone lists the targets.
#   make PYTHON=/path/to/python3.12 …    the interpreter of a new environment
#   make EXTRA=cpu …                     vLLM's CPU build although there is a GPU
#   make test ARGS='tests/core -k order' what pytest gets

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
export PYTHON EXTRA PREFIX DESTDIR
unexport PYTHONDONTWRITEBYTECODE # or every process compiles torch and vLLM anew

.PHONY: help setup quickstart test lint check format bench gpu-check pins install uninstall clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do \
		printf '%-18s %s\n' "$$target" "$$text"; done

setup: ## the environment .venv, with everything in it
	@.ci/setup

quickstart: setup ## train SmolLM2 to add, export it, compare it with the start model (under 15 minutes on 2 cores)
	@$(BIN)/python -m jobs.quickstart

test: setup ## all tests
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff, pyright, the import rule
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

check: ## lint, then test
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test

format: setup ## let ruff format and mend what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup ## measure what overlap is worth here; goes on where it was interrupted
	@$(BIN)/python -m tests.bench.overlap

gpu-check: ## the tests that need a GPU
	@case "$$(nvidia-smi -L 2>/dev/null || true)" in *GPU*) ;; \
		*) echo "no GPU here: nvidia-smi lists none, so there is nothing that gpu-check could show" >&2; exit 69 ;; esac
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -m pytest -m gpu $(ARGS)

pins: setup ## write constraints.txt anew from what is installed
	@$(BIN)/python .ci/pins.py

install: ## install rlhfd and its systemd unit: as root for the system, else for you (PREFIX, DESTDIR)
	@.ci/install

uninstall: ## remove what `make install` put there; jobs and models stay
	@.ci/install --remove

clean: ## remove build products and caches; .venv stays
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
