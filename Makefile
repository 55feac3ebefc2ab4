# Thin names over ordinary commands: everything here can be typed by hand.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

PLUGINS   := iaop-gpu-triton iaop-onnx-local iaop-cloud-api
PACKAGES  := iaop_core $(foreach p,$(PLUGINS),plugins/$(p)/$(subst -,_,$(p)))
PROJECTS  := pyproject.toml $(foreach p,$(PLUGINS),plugins/$(p)/pyproject.toml)
QUESTION  ?= What is the capital of France? Answer in one sentence.

.PHONY: help demo test check bench bench-triton bench-onnx alone clean

help:
	@echo "make demo    ask a real language model a question, in process (sets up $(VENV))"
	@echo "make test    run all tests, real servers and models included"
	@echo "make check   lint, types and import rules"
	@echo "make bench   what the gateway's path costs"
	@echo "make bench-triton  what gpu-triton costs against tritonclient itself, on a real Triton"
	@echo "make bench-onnx    onnx-local beside other engines, on an idle machine (40 minutes)"
	@echo "make alone   the contract suite on each plugin by itself, from wheels in clean environments"

demo: $(VENV)/demo.stamp
	$(BIN)/iaop-onnx fetch
	$(BIN)/iaop ask --backend onnx-local "$(QUESTION)"

test: $(VENV)/test.stamp
	$(BIN)/pytest

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports

bench: $(VENV)/test.stamp
	$(BIN)/python tests/bench_gateway.py

bench-triton: $(VENV)/test.stamp
	$(BIN)/python plugins/iaop-gpu-triton/bench/bench_triton.py

bench-onnx: $(VENV)/test.stamp
	$(BIN)/python plugins/iaop-onnx-local/bench $(OPTIONS)

alone:
	$(foreach p,$(PLUGINS),.ci/alone $(p) &&) true

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=python3.12 …"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade 'pip>=25.1'

$(VENV)/demo.stamp: $(VENV)/bin/pip $(PROJECTS)
	$(BIN)/pip install -e . -e 'plugins/iaop-onnx-local[cpu,import]'
	@touch $@

$(VENV)/test.stamp: $(VENV)/bin/pip $(PROJECTS)
	$(BIN)/pip install -e '.[contract,postgresql]' \
	  -e 'plugins/iaop-onnx-local[cpu,import]' -e plugins/iaop-gpu-triton -e plugins/iaop-cloud-api \
	  --group dev $(foreach p,$(PLUGINS),--group plugins/$(p)/pyproject.toml:test)
	@touch $@ $(VENV)/demo.stamp
