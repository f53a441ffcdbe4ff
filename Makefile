# make setup | run | test | check      PYTHON=python3.13 takes another interpreter, with an environment of its own.

PYTHON = python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON),python3)
VENV := .venv
else
VENV := .venv-$(VERSION)
endif
CHECK_VENV := $(VENV)-check
PIP_INSTALL := -m pip install -qq --disable-pip-version-check --no-input

HOST = 127.0.0.1
PORT = 8000
DEMO := .cache/demo
DIST := .cache/dist

# What the second interpreter of CI runs: the tests that mirror the packages, without those marked slow.
FAST_TESTS := $(wildcard tests/checks tests/sharding tests/cache tests/model tests/serve)
# More arguments for pytest, as in: make test TESTS="tests/cache -k pages"
TESTS =

PACKAGES := $(addprefix -p rorqual.,cache model serve sharding)

.PHONY: setup run test test-fast check format
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(VENV) ($(PYTHON) is Python $(VERSION)): takes a minute or two"
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[test]'
	@touch $@

run: setup $(DEMO)/config.json
	@echo "A server for the demo checkpoint on $(HOST):$(PORT); when it is ready, try"
	@echo
	@echo "  curl http://$(HOST):$(PORT)/v1/chat/completions -H 'Content-Type: application/json' \\"
	@echo "    -d '{\"model\": \"demo\", \"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], \"max_tokens\": 32}'"
	@echo
	@exec $(VENV)/bin/rorqual serve $(DEMO) --host $(HOST) --port $(PORT) --compile-cache .cache/programs

# Written elsewhere and moved, so that an interrupted run leaves no half checkpoint behind.
$(DEMO)/config.json: | $(VENV)/.installed
	@rm -rf $(DEMO) $(DEMO).part
	@mkdir -p $(dir $(DEMO))
	@$(VENV)/bin/rorqual demo $(DEMO).part
	@mv $(DEMO).part $(DEMO)

test: setup
	@$(VENV)/bin/python -m pytest $(TESTS)

test-fast: setup
	@$(VENV)/bin/python -m pytest -m "not slow" $(FAST_TESTS) $(TESTS)

$(CHECK_VENV)/bin/pyproject-build: constraints.txt
	@$(PYTHON) -m venv --clear $(CHECK_VENV)
	@$(CHECK_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt build
	@touch $@

# Types, imports and the import contract are checked on the wheel, in an environment that holds what users get:
# mypy does not see through an editable installation, and that also hides a package which the wheel lacks.
# The wheel is built from the source archive, so that nothing stale in the tree gets into it.
check: $(CHECK_VENV)/bin/pyproject-build
	@$(PYTHON) tests/checks/check_house_rules.py
	@rm -rf $(DIST) && mkdir -p $(DIST)
	@$(CHECK_VENV)/bin/python -m build --outdir $(DIST) . > $(DIST)/build.log 2>&1 || { cat $(DIST)/build.log; exit 1; }
	@echo "Installing the wheel into $(CHECK_VENV): takes a minute or two the first time"
	@$(CHECK_VENV)/bin/python $(PIP_INSTALL) -c constraints.txt "$$(echo $(DIST)/*.whl)[dev]"
	@$(CHECK_VENV)/bin/python $(PIP_INSTALL) --no-deps --force-reinstall $(DIST)/*.whl
	@$(CHECK_VENV)/bin/ruff format --check --quiet --diff .
	@$(CHECK_VENV)/bin/ruff check --quiet .
	@echo "format, lint: clean"
	@$(CHECK_VENV)/bin/python tests/checks/import_everything.py
	@$(CHECK_VENV)/bin/mypy $(PACKAGES)
	@$(CHECK_VENV)/bin/lint-imports --no-logo

format:
	@$(CHECK_VENV)/bin/ruff check --fix --quiet .
	@$(CHECK_VENV)/bin/ruff format --quiet .
