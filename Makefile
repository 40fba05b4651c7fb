# `make repro` and `make test` do their own set-up on a machine with Python 3.11 or newer and git.
PYTHON ?= python3
UI_PORT ?= 5000
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: repro test test-journeys engines test-engines setup lock-check ui

setup: $(VENV)/ready

# torch first: asked for by another package it may come as another build of several GB
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "redraft needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt torch
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf,dev]'
	touch $@

repro: setup
	dvc repro
	@head -n 1 report.md
	@echo "report: $(CURDIR)/report.md"

# two workers of one thread each; a file stays with one of them, so that what it shares is made once
test: setup
	ruff check .
	ruff format --check .
	mypy
	OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile -m 'not engine and not journey'

# the tutorial as it is typed, experiments, clusters
test-journeys: setup
	OMP_NUM_THREADS=1 pytest -n 2 --dist loadfile -m journey

# the real SGLang and vLLM on a machine without a GPU, see tests/engines/README.md: once per machine, 8 GB
engines: setup
	python tests/engines/build.py sglang
	python tests/engines/build.py vllm

test-engines: engines
	pytest -m engine

# fails if a stage would run; needs no data
lock-check: setup
	@out=$$(dvc repro --dry --allow-missing 2>&1); rc=$$?; echo "$$out"; \
		test $$rc -eq 0 && ! echo "$$out" | grep -v "Running stage .machine." | grep -q "Running stage"

# compare runs: http://127.0.0.1:5000 (or make ui UI_PORT=…), "Model training"; a server of your team serves its own
ui: setup
	@case "$$MLFLOW_TRACKING_URI" in \
	http://*|https://*) echo "MLflow is there already: $$(echo "$$MLFLOW_TRACKING_URI" | sed 's|//[^/@]*@|//|')" ;; \
	databricks*) echo "MLflow is there already: see the experiments of your Databricks workspace" ;; \
	*) PYTHONWARNINGS=ignore MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui --host 127.0.0.1 --port $(UI_PORT) --workers 1 \
		--backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$(CURDIR)/.store/mlflow.db}" ;; \
	esac
