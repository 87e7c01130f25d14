# make train: set up .venv and train a small GPT over two processes.   make test: set up and run all checks.
# make lint: the checks without tests: ruff and mypy.
# make test-faults: what happens when ranks die, saves are cut short, files are damaged, jobs resume elsewhere: the long
# form, with a table. KILLS=80: so many drawn kills in elastic jobs, not 1,000.
# make test-long: what the tests of make test show on some models, at some stages, on all: the whole suite with
# everything that is marked long, the faults included.
# make test-torch TORCH=2.11.0 PYTHON=python3.12: the suite under another torch and Python, in a .venv of its own. PyPI's
# builds bring gigabytes of CUDA.
# make bench: set up with the peers and measure everything beside them, more than an hour; ARGS=--quick takes minutes.
# make readme: GPT mid beside the peers and two hosts (root), and from them the tables of README.md, on a quiet machine.
# make bench-memory: what mixed precision, accumulation, recompute and offload save, alone and together.
# make test-gpu: tests/gpu on one GPU, most telling first; each result is a line of build/gpu/results.jsonl. SECONDS=200:
# no test begins later. A slice of it runs on the CPU in make test.
# make bench-gpu: GPT and Llama on one GPU beside FSDP2 and plain PyTorch, within SECONDS; results as above.
# ARGS=--with-tests runs tests/gpu, too, while the first contenders compile. Both take the Python that is asked for, whose
# torch has CUDA: make bench-gpu PYTHON=python3.12. ARGS='--device cpu --tiny' shows that it runs.
# make docs: the pages of docs/ and the reference out of docstrings, as HTML in build/docs; any warning is an error, and
# so is a picture that shows other code than there is; result pages that do are named.
# make pictures: the pictures of docs/ again where they are stale, in some minutes; report.png needs chromium.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

BENCH_READY := .venv/.bench-ready
DOCS_READY := .venv/.docs-ready

.PHONY: train lint test test-faults test-long test-torch test-gpu bench readme bench-memory bench-gpu docs pictures clean

train: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 examples/train_gpt.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tests start hundreds of processes, which load the modules faster as bytecode.
test: lint
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

test-faults: export KILLS ?= 1000
test-faults: $(READY)
	$(BIN)/python -m pytest --long tests/faults tests/equivalence/test_resume.py tests/equivalence/test_resume_elsewhere.py

test-long: $(READY)
	$(BIN)/python -m pytest --long --numprocesses 2 --dist worksteal

# torch 2.11 and 2.12 want an older setuptools than the one that is pinned.
test-torch: OTHER := .venv-torch-$(TORCH)
test-torch:
	$(if $(TORCH),,$(error say which: make test-torch TORCH=2.11.0))
	$(PYTHON) -m venv $(OTHER)
	sed -e 's/^torch==.*/torch==$(TORCH)/' -e 's/^setuptools==.*/setuptools<82/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/pip install --quiet -c $(OTHER)/constraints.txt -e '.[test]'
	$(OTHER)/bin/python -m pytest --numprocesses 2 --dist worksteal

test-gpu: export PYTHONPATH := $(CURDIR)
test-gpu:
	$(PYTHON) -m pytest tests/gpu --device cuda --results build/gpu/results.jsonl --seconds $(or $(SECONDS),240) \
		--numprocesses 6 --dist load --maxschedchunk 1 $(ARGS)

bench: $(BENCH_READY)
	$(BIN)/python benchmarks/peers.py $(ARGS)

readme: $(BENCH_READY)
	$(BIN)/python benchmarks/readme.py $(ARGS)

bench-gpu: export PYTHONPATH := $(CURDIR)
bench-gpu:
	$(PYTHON) -m benchmarks.gpu --seconds $(or $(SECONDS),480) $(ARGS)

bench-memory: $(BENCH_READY)
	$(BIN)/python benchmarks/features.py $(ARGS)

docs: $(DOCS_READY)
	$(BIN)/python -m sphinx -W --keep-going -q -E -b html docs build/docs
	$(BIN)/python benchmarks/generated.py

pictures: $(READY)
	$(BIN)/python benchmarks/generated.py --make

$(DOCS_READY): $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	touch $(DOCS_READY)

# Both build with the torch that is here: isolated builds would fetch another. A peer that does not install is left out.
$(BENCH_READY): $(READY)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,bench]'
	-DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/pip install --quiet -c constraints.txt --no-build-isolation deepspeed
	-$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation fairscale
	touch $(BENCH_READY)

$(READY): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test]'
	touch $(READY)

clean:
	rm -rf .venv .venv-torch-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache runs
