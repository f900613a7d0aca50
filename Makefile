# `make` lists the targets. KVCLIFF_BUILD=cpu or gpu overrides what nvidia-smi says.

# Tried in this order until one runs: a launcher on PATH may belong to a version that is not there.
# scripts/setup.py looks further by itself when the one that runs is too old, too new or lacks venv.
PYTHON ?= python3 python3.11 python3.12 python3.13
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test versions

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1  \2/p' Makefile

setup: ## install the engines, kvcliff and its tools into .venv; silent when nothing changed
	@for python in $(PYTHON); do \
	  $$python -IS scripts/setup.py; code=$$?; \
	  case $$code in 126|127) ;; *) exit $$code ;; esac; \
	done; \
	echo "setup: error: no Python 3 that runs; tried: $(PYTHON)" >&2; \
	echo "setup: remedy: install Python 3.11, 3.12 or 3.13 with venv, or: make PYTHON=/path/to/it" >&2; \
	exit 3

demo: setup ## set-up, then the main job: both arms on the real engines, and the result table
	@$(BIN)/kvcliff run demo

test: setup ## set-up, then lint, format check, types and every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest --numprocesses 2 -m "not alone"
	$(BIN)/pytest -m alone

versions: setup ## compare the simulator with several vLLM versions; writes results/versions.json
	@$(BIN)/python scripts/versions.py
