# Two commands do all set-up on a machine with python3 and make:
#   make demo    a real MoE rollout, through the store, to the trainer's tensors
#   make test    tests, TransferQueue's suites, ruff, mypy --strict and the docs, by tox
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --quiet --constraint constraints.txt

.PHONY: demo test clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[demo,bench]'
	touch $@

$(VENV)/.tox: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) tox
	touch $@

demo: $(VENV)/.demo
	$(BIN)/tq-fs demo

test: $(VENV)/.tox
	$(BIN)/tox run

clean:
	rm -rf $(VENV) .tox
