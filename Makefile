# Everything runs in a virtual environment of its own (.venv) that the first target makes; nothing else is touched.
#
#   make run     the service on 127.0.0.1:50051 with the embedded model, one generation, then a server until Ctrl-C
#   make demo    the same on a free port, and ends after the generation
#   make test    the tests that every change must pass: about eight minutes on two cores
#   make test-all  every test that needs no GPU, with all examples of hypothesis: about 25 minutes on two cores
#   make attack  the attacks of that suite in their long form, on a service of their own: minutes, and a table of figures
#   make soak    mixed traffic for half an hour, and what it left
#
# ARGS passes flags on:        make run ARGS="--listen 127.0.0.1:6000 --max-num-seqs 8"
# PIP_ARGS goes to pip:        PyTorch's default wheels for Linux bring CUDA (about 5 GB on disk). On a machine without
#                              a GPU, pip's options can choose a CPU wheel instead (pytorch.org lists where they are);
#                              one that is already installed in .venv is kept.
# PYTHON names an interpreter: make run PYTHON=python3.12

VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
PIP_ARGS ?=
PYTHON ?=
# How many processes run tests, each a file at a time. Most of them wait for services that they have started, so there is
# one more than there are cores; each takes up to 2 GB with its services.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); [ $$cores -lt 6 ] && echo $$((cores + 1)) || echo 6)
IN_PARALLEL = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Of hundreds of processes that tests start, the first compiles what all import.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run demo setup setup-dev test test-all test-gpu attack audit soak bench protos lint format clients clean

help:
	@sed -n 's/^#  *\(make .*\)/  \1/p' Makefile
	@echo "  also: test-gpu, bench, audit, lint, format, protos, clients, clean"

run: setup
	@exec $(BIN)/photon-grpc run $(ARGS)

demo: setup
	@exec $(BIN)/photon-grpc run --once $(ARGS)

# With the linters what .ci/run runs.
test: setup-dev
	$(BIN)/python -m pytest -m "not gpu and not full" --hypothesis-profile=quick $(IN_PARALLEL) $(ARGS)

test-all: setup-dev
	@echo "── Every test that needs no GPU: about 25 minutes on two cores; compiling Go's and Java's clients for the first"
	@echo "   time adds about five."
	$(BIN)/python -m pytest -m "not gpu" $(IN_PARALLEL) $(ARGS)

test-gpu: setup-dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

attack: setup-dev
	$(BIN)/python -m pytest tests/attack --attack long $(ARGS)

soak: setup-dev
	$(BIN)/python -m pytest tests/attack/test_soak.py --attack long --soak 1800 $(ARGS)

bench: setup-dev
	$(BIN)/python -m benchmarks $(or $(ARGS),--short)

# The generated files are in git; this is for those who change a .proto (commit what it writes). Go's stubs need Go.
protos: setup-dev
	$(BIN)/buf lint protos
	$(BIN)/python protos/generate.py
	clients/go/generate.sh

# Asks PyPI for known vulnerabilities (ARGS="--vulnerability-service osv": OSV). A mirror of packages alone does not know
# them: --strict fails then, and says so.
audit: setup-dev
	$(PIP_INSTALL) "pip-audit>=2.10"
	$(BIN)/pip-audit --strict --no-deps --disable-pip --requirement constraints.txt $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The clients of every language whose tools are installed, and grpcurl and ghz (go install puts them into ~/go/bin), against
# servers of their own.
clients: setup-dev
	PATH="$$PATH:$$HOME/go/bin" $(BIN)/python -m pytest tests/clients $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# Set-up: done again only when the dependencies change. ---------------------------------------------------------------

setup: $(VENV)/.serve
setup-dev: $(VENV)/.dev

$(BIN)/python:
	@python="$(PYTHON)"; \
	for candidate in $${python:-python3 python3.13 python3.12 python3.11 python}; do \
	  if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "photon_grpc needs Python 3.11 or newer, and none was found (tried: $${python:-python3, python3.13, python3.12, python3.11})."; \
	  echo "Install one, or name it: make run PYTHON=/path/to/python3.12"; exit 1; \
	fi; \
	echo "── Making a virtual environment in $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "That Python cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"; exit 1; }

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@if [ $(VENV)/.dev -nt pyproject.toml ] && [ $(VENV)/.dev -nt constraints.txt ]; then touch $@; else \
	  echo "── Installing photon_grpc and what it serves with. The first time PyTorch is downloaded (with CUDA some 3 GB,"; \
	  echo "   minutes; without, 200 MB). Later runs start at once."; \
	  $(PIP_INSTALL) -e ".[serve]" && touch $@; fi

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "── Installing photon_grpc, what it serves with and the tools for its tests. The first time PyTorch is"
	@echo "   downloaded (with CUDA some 3 GB, minutes; without, 200 MB). Later runs start at once."
	@$(PIP_INSTALL) -e ".[serve,otel,dev]" && touch $@ $(VENV)/.serve
