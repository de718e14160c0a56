# make demo     the whole story on this machine: train, kill a rank, resume bit for bit
# make test     every check and every test but the slow ones (about eleven minutes on two cores)
# make examples each of the examples trains, is resumed, and ends where it would have ended
# make check    only the static checks
# make sim      10,000 seeds of the simulator (about seven minutes; SEEDS, SEED and JSON may be set)
# make soak     100,000 seeds of it
# make proof    the slow proofs
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
LONG := crash bench e2e torch
SHORT := $(filter-out $(PURE) $(LONG) examples __pycache__,$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
comma := ,
space := $(subst ,, )

SEEDS ?= 10000
SIM := $(BIN)/python -m groupio.testing.sim

.PHONY: help demo test examples check sim soak proof format tools clean

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
	    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive \
	        apt-get install -y -qq --no-install-recommends $$missing; } \
	        || echo "without$$missing the tests that need them fail or are skipped" >&2; \
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
# each time, or it would be luck whether a rare branch is. The rest waits more than it computes; its
# files are given out one by one, the long ones first. Byte code is made because agents and ranks are
# started some thousand times, which would compile everything where PYTHONDONTWRITEBYTECODE is set.
test: tools check
	$(BIN)/python -m compileall -q src/groupio
	rm -f .coverage .coverage.*
	printf '%s\n' $(PURE) | xargs -P 2 -I{} \
	    $(BIN)/coverage run -p -m pytest -q --hypothesis-seed=0 tests/{}
	$(BIN)/coverage combine -q
	$(BIN)/coverage report --fail-under=100 --skip-covered --show-missing \
	    --include='$(subst $(space),$(comma),$(PURE:%=src/groupio/%/*))'
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	    $(addprefix tests/,$(LONG) $(SHORT)) tests/test_docs.py
	$(SIM) --seeds 500 --jobs 2 $(SEED:%=--seed %)

examples: $(VENV)/.dev-installed
	$(BIN)/python -m pytest tests/examples

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
