# Everything happens in .venv, which is built from pyproject.toml and constraints.txt: `make run` installs what a user
# has, `make install` all that a contributor needs.
PYTHON ?= python3
BIN := .venv/bin
USABLE := .venv/.usable
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
# Processes that run tests: one more than there are cores, as one of them mostly waits for servers and nodes.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 1)")

# Many processes are started: what the first of them has compiled serves all others.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install run test test-fast suite nightly cuda kernels soak fuzz lint docs bench clean

install: $(STAMP)

$(USABLE): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -e '.[report]'
	touch $(USABLE)

$(STAMP): $(USABLE)
	$(PIP) -e '.[dev,docs,flower,hf,onnx,plot,privacy,report,track]'
	touch $(STAMP)

run: $(USABLE)
	$(BIN)/python -m sartor.commands.demo

# Lint runs beside the tests, as most of it is one process.
test: install
	$(MAKE) -j 2 lint suite

test-fast: install
	$(MAKE) -j 2 lint suite MARKED="-m 'not slow'"

suite: install
	$(BIN)/python -m pytest -n $(WORKERS) $(MARKED)

nightly: install
	$(BIN)/python -m pytest -n auto -m nightly

# All that a GPU computes, on one; processes share its memory.
cuda: install
	$(BIN)/python -m pytest -n 8 -k 'cuda or kernels'

# What the kernels for GPUs compute, by Triton's interpreter, and how they compile; Triton is 300 MB, so only here.
kernels: install
	$(PIP) triton==3.9.0
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) tests/kernels tests/test_random.py

# A federation among strangers, for a long while: ROUNDS=60 for a short one.
ROUNDS ?= 1000
soak: install
	$(BIN)/python tests/remote/soak.py --rounds $(ROUNDS)

# Whatever may be given or arrive, damaged in 10^5 ways; `make test` tries a few of them.
fuzz: install
	SARTOR_FUZZ=5300 $(BIN)/python -m pytest -n $(WORKERS) tests/fuzz

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	$(BIN)/python docs/tables.py
	$(BIN)/mkdocs build --strict --site-dir build/site

bench: install
	$(BIN)/python bench/start.py
	$(BIN)/python bench/engines.py
	$(BIN)/python bench/central.py --large
	$(BIN)/python bench/seeds.py
	$(BIN)/python bench/evaluation.py
	$(BIN)/python bench/scale.py
	$(BIN)/python bench/rows.py
	$(BIN)/python bench/rules.py
	$(BIN)/python bench/flower.py

clean:
	rm -rf .venv build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
