# `make demo` and `make test` each do everything that is needed on a machine with Python 3.11 or newer.
PYTHON ?= python3
DEVICE ?= cpu# or cuda: which requirements/*.txt is installed

BIN := .venv/bin
LOCK := requirements/$(DEVICE).txt
STAMP := .venv/.installed-$(DEVICE)
PIP_INSTALL := $(BIN)/pip -qq --disable-pip-version-check install# errors only
CODE := $(wildcard vllm_omni tests benchmarks examples training)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: install demo serve test faults browser format lint types clean help

install: $(STAMP)  ## make .venv and install the locked packages into it

demo: export TRANSFORMERS_VERBOSITY = error
demo: export TORCH_CPP_LOG_LEVEL = ERROR
demo: $(STAMP)  ## draw three pictures into out/ with the embedded model
	$(BIN)/python examples/three_pictures.py out
	@echo 'Next: $(BIN)/vllm-omni generate "a small green circle" -o out/mine.png, or $(BIN)/vllm-omni doctor'

serve: $(STAMP)  ## serve the embedded model, with the page: http://127.0.0.1:8000/ui
	$(BIN)/vllm-omni serve --ui

test: export HF_HUB_OFFLINE = 1
test: lint types browser  ## check format, lint and types, then run the tests
	$(BIN)/pytest

faults: export HF_HUB_OFFLINE = 1
faults: $(STAMP)  ## do everything to servers that can happen to them; takes an hour
	$(BIN)/pytest tests/faults -m '' --record benchmarks/results/faults
	$(BIN)/pytest tests/entrypoints/cli -m faults
	SCHEMA_CASES=20000 $(BIN)/pytest --timeout=5000 -rP tests/entrypoints/openai/test_schema.py

browser:  ## install Chromium for the tests of the page, where that is allowed
	@command -v chromium >/dev/null || \
		{ command -v apt-get >/dev/null && test "$$(id -u)" = 0 && apt-get -qq update && \
		apt-get -qq install --yes --no-install-recommends chromium >/dev/null; } || \
		echo 'No Chromium here: the tests of the page are skipped. To run them: apt-get install chromium'

format: $(STAMP)  ## rewrite the code in the house format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

lint: $(STAMP)  ## check format and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)  ## check types
	$(BIN)/mypy $(CODE)

clean:  ## remove what was built and cached, but not .venv
	rm -rf build dist out *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -name __pycache__ -prune -exec rm -rf {} +

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' Makefile | expand -t 10
	@echo 'DEVICE=cpu (default) or cuda; PYTHON=python3 (default) or the path of another one'

# The newest of these decides: a changed lock or pyproject.toml installs again, nothing else does.
$(STAMP): $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo '$(PYTHON) is not Python 3.11 or newer: set PYTHON, as in make PYTHON=python3.12' >&2; exit 1; }
	@for stamp in $(filter-out $(STAMP),$(wildcard .venv/.installed-*)); do \
		echo ".venv was installed for another DEVICE ($$stamp): remove .venv first" >&2; exit 1; done
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	@echo 'Installing $(LOCK) into .venv; the first time takes minutes'
	@$(PIP_INSTALL) --no-deps --requirement $(LOCK)
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@
