# Two commands: `make run` shows the whole loop on this machine, `make test` runs every check.
# Python >= 3.11 (3.11 first: CPU builds of torch are had for it most often); pip's own index settings are honoured.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
SCENARIO ?= scenarios/quickstart.yaml
OUT ?= out/quickstart

.PHONY: run test test-all lint clean install

install: $(VENV)/.runtime

run: install
	$(BIN)/planner data movielens --or-synthetic
	$(BIN)/planner calibrate $(SCENARIO) --if-needed
	$(BIN)/planner search $(SCENARIO) -o $(OUT)
	$(BIN)/planner run $(OUT)

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu"

test-all: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/lint-imports

$(VENV)/.venv:
	@test -n "$(PYTHON)" || { echo "Python >= 3.11 is needed and none was found; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.venv pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[runtime]'
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[runtime,test]'
	@touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
