# make demo     the whole story on this machine: train, kill a rank, resume bit for bit
# make test     every check and every test (about a quarter of an hour on two cores)
# make check    only the static checks
# make sim      10,000 seeds of the simulator (about seven minutes; SEEDS, SEED and JSON may be set)
# make soak     100,000 seeds of it
# make proof    the slow proofs, which `make test` leaves out
#
# Everything runs in ./.venv. Set PYTHON to choose the interpreter (3.11, 3.12 or 3.13).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
SOURCES := src tests examples $(wildcard benchmarks)
PURE := plan protocol format
comma := ,
space := $(subst ,, )

SEEDS ?= 10000
SIM := $(BIN)/python -m groupio.testing.sim

.PHONY: help demo test check sim soak proof format tools clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

$(BIN)/python:
	@python="$${PYTHON:-}"; \
	for candidate in python3.11 python3.12 python3.13 python3; do \
	    if [ -n "$$python" ]; then break; fi; \
	    if $$candidate -c '$(SUPPORTED)' >/dev/null 2>&1; then python=$$candidate; fi; \
	done; \
	if [ -z "$$python" ]; then \
	    echo "groupio needs Python 3.11, 3.12 or 3.13: install one, or say where it is with" \
	        "'make PYTHON=/path/to/python3.11 ...'" >&2; \
	    exit 2; \
	fi; \
	$$python -c '$(SUPPORTED)' || { echo "$$python is not Python 3.11 to 3.13" >&2; exit 2; }; \
	echo "making $(VENV) with $$($$python --version)"; \
	$$python -m venv $(VENV) || { rm -rf $(VENV); \
	    echo "cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2; \
	    exit 2; }

# The stamps record that this pyproject.toml and constraints.txt are installed.
$(VENV)/.torch-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --progress-bar on -c constraints.txt -e '.[torch]'
	@touch $@

$(VENV)/.dev-installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch,dev,examples,etcd,mooncake]'
	@touch $@ $(VENV)/.torch-installed

demo: $(VENV)/.torch-installed
	$(BIN)/groupio demo $(DEMO_ARGS)

# The crash tests use strace and make ext4 and xfs images on loop devices.
tools:
	@missing=""; \
	for pair in strace:strace mkfs.ext4:e2fsprogs mkfs.xfs:xfsprogs losetup:mount ip:iproute2 \
	        bindfs:bindfs; do \
	    PATH="$$PATH:/usr/sbin:/sbin" command -v "$${pair%%:*}" >/dev/null \
	        || missing="$$missing $${pair##*:}"; \
	done; \
	/sbin/ldconfig -p | grep -q libibverbs.so.1 || missing="$$missing libibverbs1"; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq; \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing; \
	else \
	    echo "without$$missing the tests that need them are skipped" >&2; \
	fi

check: $(VENV)/.dev-installed
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/test_tidy.py

# The pure core comes first, under coverage: every branch of it has to be taken, by the same examples
# each time, or it would be luck whether a rare branch is.
test: tools check
	$(BIN)/coverage run -m pytest --hypothesis-seed=0 $(PURE:%=tests/%)
	$(BIN)/coverage report --fail-under=100 --skip-covered --show-missing \
	    --include='$(subst $(space),$(comma),$(PURE:%=src/groupio/%/*))'
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PURE:%=--ignore=tests/%) \
	    --ignore=tests/test_tidy.py
	$(SIM) --seeds 500 --jobs 2 $(SEED:%=--seed %)

# Every single fault of the small world first, then fresh seeds of all sizes on all cores.
sim: $(VENV)/.dev-installed
	$(SIM) --exhaustive 1
	json="$(JSON)"; $(SIM) --seeds $(SEEDS) $(SEED:%=--seed %) --all-cells \
	    --json "$${json:-$$(mktemp --suffix=.json)}"

soak:
	$(MAKE) sim SEEDS=100000

proof: tools $(VENV)/.dev-installed
	$(BIN)/python -m pytest -m proof -o faulthandler_timeout=0

format: $(VENV)/.dev-installed
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:
	rm -rf build dist demo-output .mypy_cache .ruff_cache .pytest_cache .import_linter_cache \
	    .hypothesis .coverage .coverage.*
