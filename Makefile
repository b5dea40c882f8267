# Everything runs inside .venv, which `make env` makes from envs/$(ENV).txt and leaves alone while that lock is unchanged.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# A shell may export ENV as the name of its start-up file; only cpu and cuda are meant for us.
ifeq ($(origin ENV),environment)
  ifeq ($(filter cpu cuda,$(ENV)),)
    override ENV := cpu
  endif
endif
ifeq ($(origin ENV),undefined)
  ENV := $(shell cat .venv/.kind 2>/dev/null || echo cpu)
endif
PYTHON ?= python3.11
ENV_CACHE ?=
TORCH_INDEX ?=
CORES ?= all
SNAKEMAKE_ARGS ?=
PYTEST_ARGS ?=

activate := . .venv/bin/activate
later_tests := $(foreach part,workflow crash parity $(if $(filter cuda,$(ENV)),gpu),$(if $(wildcard tests/$(part)/test_*.py tests/$(part)/*/test_*.py),tests/$(part)))

.PHONY: help env test test-fast compare bench lint clean

help: ## this text
	@awk -F ':[^#]*## ' '/^[a-z%_-]+:.*## / { sub("%", "MODEL", $$1); printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'Variables (make TARGET NAME=VALUE):'
	@echo '  ENV=cpu         the lock to install: cpu or cuda (default: what .venv was made from, else cpu)'
	@echo '  PYTHON=...      the Python 3.11 to build .venv with (python3.11)'
	@echo '  TORCH_INDEX=... one more package index, where torch has a CPU build (default: what pip is configured with)'
	@echo '  ENV_CACHE=...   a folder that keeps finished environments; .venv becomes a quick copy of one'
	@echo '  CORES=all  SNAKEMAKE_ARGS=...  PYTEST_ARGS=...'

env: ## make .venv from the lock; does nothing while the lock is unchanged
	@RLHF_ENV='$(ENV)' PYTHON='$(PYTHON)' ENV_CACHE='$(ENV_CACHE)' TORCH_INDEX='$(TORCH_INDEX)' bash envs/make_env.sh

%_final: env ## train and report a model of the configuration, for example: make ppo_final
	@$(activate) && snakemake --cores $(CORES) $(SNAKEMAKE_ARGS) $@

test: env ## all tests: the fast ones, then those that run the workflow
	@$(activate) && python -m pytest tests/unit $(PYTEST_ARGS)
	@$(if $(later_tests),$(activate) && python -m pytest $(later_tests) $(PYTEST_ARGS))

test-fast: env ## the fast tests alone
	@$(activate) && python -m pytest tests/unit $(PYTEST_ARGS)

compare: env ## every method of the paper from the same sft and data, in one table
	@$(activate) && snakemake --cores $(CORES) $(SNAKEMAKE_ARGS) compare

bench: env ## our speed beside TRL's, planning and restoring: ratios and seconds, benchmarks/results/*.json
	@$(activate) && python benchmarks/planning.py && python benchmarks/restore.py && python benchmarks/compare_trl.py

lint: env ## ruff over the tree
	@$(activate) && ruff check .

clean: ## remove results/ (all runs, checkpoints and reports), and nothing else
	@echo 'make clean: removing results/ only; .venv, data/ and config/ stay'
	@rm -rf results
