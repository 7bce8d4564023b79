# Fissile. Two commands for a newcomer: `make run` and `make test`. `make help` explains the others.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# A prerequisite that is never up to date.
FORCE:

.PHONY: help setup run test test-slow test-fresh test-long test-peers client-table chaos lint sanitize protos docs wheel check-wheel lock bench bench-router check-fresh clean

# The interpreter that makes .venv; empty picks one (scripts/setup.sh says how).
PYTHON ?=
# For `make run`: a Hugging Face checkpoint folder (default: the demo model), and further options of `fissile serve`.
MODEL ?=
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
RUN_STAMP := $(VENV)/.installed-run
ALL_STAMP := $(VENV)/.installed-all

help: ## Explain the targets (the default)
	@echo "Fissile serves large language models over gRPC."
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)$$/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'
	@echo
	@echo "  make run MODEL=/path/to/checkpoint   serves a Hugging Face checkpoint folder (docs/reference/models.md: which)"
	@echo "  make run ARGS=--once                 ends after the first answer"
	@echo "  make setup PYTHON=python3.12         makes .venv with that interpreter (3.11 or newer)"

# A change of the dependencies installs again; everything else about .venv is kept.
$(RUN_STAMP): pyproject.toml protos/pyproject.toml requirements/tests.lock scripts/setup.sh $(if $(PYTHON),FORCE)
	@PYTHON="$(PYTHON)" scripts/setup.sh run

$(ALL_STAMP): pyproject.toml protos/pyproject.toml requirements/tests.lock scripts/setup.sh $(if $(PYTHON),FORCE)
	@PYTHON="$(PYTHON)" scripts/setup.sh all

# Compiles the CPU kernels again when their sources have changed, or the library is not there. Without a compiler PyTorch's serve; one that fails ends make.
NATIVE_STAMP := $(VENV)/.native
$(NATIVE_STAMP): $(wildcard kernels/cpu/native/*) kernels/cpu/build.py $(if $(wildcard kernels/cpu/*.so),,FORCE)
	@$(BIN)/python -m kernels.cpu.build
	@touch $@

setup: $(ALL_STAMP) $(NATIVE_STAMP) ## Make .venv with everything in it: service, tests, linters, generators of the stubs
	@echo "$(VENV) is ready"

run: $(RUN_STAMP) $(NATIVE_STAMP) ## Serve the demo model (or MODEL=folder) with one router and one worker, and ask it something
	@exec $(BIN)/fissile serve --http-port 8000 $(if $(MODEL),--model "$(MODEL)") $(ARGS)

# Parts of tests/. Each test is of one tier: those that `make test` runs, `slow`, or `long`.
TESTS := unit sim kernels parity e2e deploy chaos

test: $(ALL_STAMP) $(NATIVE_STAMP) ## Run tests of every part, in seven minutes: unit, sim, kernels, parity, e2e, deploy, chaos
	@scripts/test.sh $(TESTS)

test-slow: $(ALL_STAMP) $(NATIVE_STAMP) ## Run the tests that CI runs beside those: more cases, models, processes and faults
	@PYTEST_MARK="slow and not long" scripts/test.sh $(TESTS)

test-fresh: $(ALL_STAMP) $(NATIVE_STAMP) ## Try fresh examples for four minutes, others for each commit (SEED=n: those of n)
	@scripts/test_fresh.sh $(SEED)

test-long: $(ALL_STAMP) $(NATIVE_STAMP) ## Run the tests that take minutes each
	@PYTEST_MARK=long scripts/test.sh $(TESTS)

# Tests marked `client`; programs that have an environment of their own are downloaded.
client-table: $(ALL_STAMP) $(NATIVE_STAMP) ## Run the tests of other projects' clients, and write docs/reference/clients.md
	@$(BIN)/python -m pytest -q -m client --timeout 600 --junitxml build/clients.xml tests/e2e tests/peers || true
	@$(BIN)/python -m scripts.client_table build/clients.xml

# They install other projects' programs from PyPI, each into an environment of its own under build/peers.
test-peers: $(ALL_STAMP) $(NATIVE_STAMP) ## Run real routers of other projects over Fissile's workers (downloads them)
	@$(BIN)/python -m pytest -q -m long --timeout 600 tests/peers

chaos: $(ALL_STAMP) $(NATIVE_STAMP) ## Run the chaos tests alone, with full times and numbers, and print what they measured
	@CHAOS_SCALE=full PYTEST_MARK="not long" scripts/test.sh chaos

lint: $(ALL_STAMP) ## Check style, format, types, prose, sizes and imports of everything
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy .
	@$(BIN)/python scripts/check_prose.py
	@$(BIN)/python scripts/check_sizes.py
	@$(BIN)/python scripts/check_imports.py
	@$(BIN)/python -m scripts.house_figures --check
	@$(BIN)/python -m scripts.contract_table --check
	@$(BIN)/python -m scripts.client_table --check
	@$(BIN)/python -m scripts.option_reference --check

sanitize: $(ALL_STAMP) ## Run the native kernels under sanitizers of memory and threads, and clang-tidy over their sources (a quarter to half an hour)
	@$(BIN)/python scripts/tidy.py
	@$(BIN)/python scripts/sanitize.py

protos: $(ALL_STAMP) ## Make the stubs anew from protos/**/*.proto, and the descriptor set for Envoy
	@scripts/protos.sh protos
	@PYTHONPATH=protos $(BIN)/python scripts/descriptor_set.py

DOCS_STAMP := .venv-docs/.installed
$(DOCS_STAMP): requirements/docs.lock scripts/setup.sh
	@scripts/setup.sh docs

docs: $(DOCS_STAMP) ## Build the documentation as a site: build/docs/site/index.html
	@.venv-docs/bin/python scripts/build_docs.py
	@echo "build/docs/site/index.html is ready; its search works over HTTP alone: python3 -m http.server --directory build/docs/site --bind 127.0.0.1 8000"

wheel: ## Build the wheels: dist/fissile-*.whl, for any x86-64 processor with this or a newer glibc, and dist/fissile_client-*.whl
	@scripts/wheel.sh dist

check-wheel: wheel ## Install each wheel into a new environment without a compiler, serve the demo model and call it
	@PYTHON="$(PYTHON)" scripts/check_wheel.sh

lock: ## Renew requirements/*.lock, the versions that setup installs
	@scripts/lock.sh

bench: $(ALL_STAMP) $(NATIVE_STAMP) ## Run the benchmarks (docs/reference/performance.md has figures)
	@$(BIN)/python -m tests.bench.scheduler_cost
	@$(BIN)/python -m tests.bench.decode_step

bench-router: $(ALL_STAMP) ## Run the router's benchmarks (8 minutes, on a quiet machine)
	@$(BIN)/python -m tests.bench.router.all

check-fresh: ## Clone HEAD into a new folder, make a new .venv there, run `make run ARGS=--once` and `make test`
	@PYTHON="$(PYTHON)" scripts/check_fresh.sh

clean: ## Remove everything that make has made
	@rm -rf kernels/cpu/*.so .venv .venv-protos .venv-deploy .venv-docs build dist node_modules .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
