# make train: set up .venv and train a small GPT over two processes.   make test: set up and run all checks.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: train test clean

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train_gpt.py

test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $(READY)

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache runs
