# Every target runs in the virtual environment .venv, which the first one creates; nothing is installed elsewhere.
#
#   make run     the service with the embedded model: one generation, then gRPC on port 50051 and a page on port 8000
#   make demo    the same on free ports, which ends after the generation
#   make test    the tests that every change must pass: 9 to 18 minutes on two cores, by machine
#   make test-all  every test that needs no GPU, with all hypothesis examples: an estimated 25 minutes on two cores
#   make attack  the attack tests in their long form, against a separate service: some minutes, and a table of figures
#   make soak    half an hour of mixed traffic, and a check for leaks
#
# ARGS passes flags:           make run ARGS="--listen 127.0.0.1:6000 --max-num-seqs 8"
# PIP_ARGS passes options      PyTorch's default wheels for Linux include CUDA (about 5 GB on disk). On a machine without
# to pip:                      a GPU, an option of pip can choose a CPU wheel instead (see pytorch.org); a wheel that is
#                              already installed in .venv is kept.
# PYTHON sets the interpreter: make run PYTHON=python3.12

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_ARGS ?=
PYTHON ?=
# The number of processes that run tests, each one file at a time. They often wait for services that they have started,
# so there are two more than there are cores, or one more where memory is short: each takes up to 2 GB with its services.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); kib=$$(sed -n 's/^MemTotal: *//p' /proc/meminfo 2>/dev/null | cut -d' ' -f1); \
  more=1; [ $${kib:-0} -gt $$((3000000 * (cores + 2))) ] && more=2; [ $$cores -lt 5 ] && echo $$((cores + more)) || echo 6)
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# The tests start hundreds of processes; the first one compiles the modules for all.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run demo setup setup-dev test test-all test-gpu attack audit soak bench protos baseline lint format clients clean

help:
	@sed -n 's/^#  *\(make .*\)/  \1/p' Makefile
	@echo "  also: test-gpu, bench, audit, lint, format, protos, clients, clean"

run: setup
	@exec $(BIN)/photon-grpc run $(ARGS)

demo: setup
	@exec $(BIN)/photon-grpc run --once $(ARGS)

# .ci/run runs these tests and the linters.
test: setup-dev
	$(BIN)/python -m pytest -m "not gpu and not full" --ignore=tests/gpu --hypothesis-profile=quick $(IN_PARALLEL) $(ARGS)

test-all: setup-dev
	@echo "── Running every test that needs no GPU: an estimated 25 minutes on two cores, and about five more the first time, to"
	@echo "   compile the Go and Java clients."
	$(BIN)/python -m pytest -m "not gpu" --ignore=tests/gpu $(IN_PARALLEL) $(ARGS)

test-gpu: setup-dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

attack: setup-dev
	$(BIN)/python -m pytest tests/attack --attack long $(ARGS)

soak: setup-dev
	$(BIN)/python -m pytest tests/attack/test_soak.py --attack long --soak 1800 $(ARGS)

bench: setup-dev
	$(BIN)/python -m benchmarks $(or $(ARGS),--short)

# Run this after a change to a .proto, and commit the generated files. The stubs for Go need Go.
protos: setup-dev
	$(BIN)/buf lint protos
	$(BIN)/python protos/generate.py
	clients/go/generate.sh

# Queries PyPI for known vulnerabilities (OSV with ARGS="--vulnerability-service osv"). With --strict it fails if the
# index is a mirror without that data.
audit: setup-dev
	$(PIP_INSTALL) "pip-audit>=2.10"
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	protos/check_breaking.sh

# Makes the protos the contract that `make lint` compares with; docs/versioning.md says when.
baseline: setup-dev
	protos/check_breaking.sh --renew

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Tests the clients of every language whose tools are installed, and grpcurl and ghz (go install puts them into ~/go/bin),
# against servers that the tests start.
clients: setup-dev
	PATH="$$PATH:$$HOME/go/bin" $(BIN)/python -m pytest tests/clients $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Set-up, repeated only when the dependencies change. -----------------------------------------------------------------

setup: $(VENV)/.serve
setup-dev: $(VENV)/.dev

$(BIN)/python:
	@python="$(PYTHON)"; \
	for candidate in $${python:-python3 python3.13 python3.12 python3.11 python}; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "photon_grpc needs Python 3.11 or newer, and none was found (tried: $${python:-python3, python3.13, python3.12, python3.11})."; \
	  echo "Install one, or give its path: make run PYTHON=/path/to/python3.12"; exit 1; \
	fi; \
	echo "── Creating a virtual environment in $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "This Python cannot create virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@if [ $(VENV)/.dev -nt pyproject.toml ] && [ $(VENV)/.dev -nt constraints.txt ]; then touch $@; else \
	  echo "── Installing photon_grpc and its dependencies. The first time, PyTorch is downloaded, which takes minutes (about"; \
	  echo "   3 GB with CUDA, 200 MB without). Later runs start at once."; \
	  $(PIP_INSTALL) -e ".[serve,http]" && touch $@; fi

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "── Installing photon_grpc, its dependencies and the tools for its tests. The first time, PyTorch is downloaded,"
	@echo "   which takes minutes (about 3 GB with CUDA, 200 MB without). Later runs start at once."
	@$(PIP_INSTALL) -e ".[serve,http,otel,dev]" && touch $@ $(VENV)/.serve
