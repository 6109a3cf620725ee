# Every target makes the environment first, if it is absent or its settings changed.
#
#   make demo                      the travel planner on a real model
#   make demo ARGS="--cities 6"    with options of its own (ARGS="--help" lists them)
#   make test                      the tests, real models included
#   make test ARGS="-k prune -x"   some of them
#
# PYTHON=... chooses the interpreter; else the first of PYTHONS that is 3.11 or newer.

VENV ?= .venv
ARGS ?=
PYTHON ?=
PYTHONS := $(if $(PYTHON),$(PYTHON),python3.11 python3.12 python3.13 python3 python)
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test lint types format check clean

help:  ## say what there is
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1 - \2/p' Makefile

setup: $(STAMP)  ## make the environment and install into it

$(STAMP): pyproject.toml constraints.txt
	@found=; \
	for python in $(PYTHONS); do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=$$python; break; \
	  fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "sidequest-langchain needs Python 3.11 or newer; looked for: $(PYTHONS)." >&2; \
	  echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; \
	  exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$found" --version); the first time takes minutes." >&2; \
	"$$found" -m venv "$(VENV)" || { \
	  echo "$$found makes no virtual environment; on Debian: apt-get install python3-venv" >&2; \
	  exit 1; \
	}
	@"$(BIN)/python" -m pip install --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch "$@"

demo: $(STAMP)  ## run the travel planner; fetches the default model the first time
	@"$(BIN)/sidequest" demo $(ARGS)

test: $(STAMP)  ## run all tests; fetches the two models they need the first time
	@"$(BIN)/sidequest" pull smollm2-135m
	@"$(BIN)/sidequest" pull qwen2.5-coder-0.5b
	@SIDEQUEST_REQUIRE_MODELS=1 "$(BIN)/python" -m pytest $(ARGS)

lint: $(STAMP)  ## check style
	@"$(BIN)/ruff" check .
	@"$(BIN)/ruff" format --check .

types: $(STAMP)  ## check types
	@"$(BIN)/mypy"

format: $(STAMP)  ## lay the code out, and fix what can be fixed
	@"$(BIN)/ruff" check --fix-only --quiet .
	@"$(BIN)/ruff" format .

check: lint types test  ## all of the checks above

clean:  ## remove the environment and every cache in this folder
	@rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
