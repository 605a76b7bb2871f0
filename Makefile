# make retrain and make test do everything on a fresh machine; both can be called again at any time.
PYTHON ?= python3
PIP_ARGS ?=
PORT ?= 5000
TEST_PROCESSES ?= logical
export PREFECT_SERVER_ANALYTICS_ENABLED = false
export DO_NOT_TRACK = 1

BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help install data retrain smoke compare test check doctor decisions bench-numerics bench-memory test-device ui clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-15s %s\n", $$1, $$2}'

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "halfstep needs Python 3.11 or newer, found %s; set PYTHON=..." % sys.version.split()[0])'
	@echo "installing into .venv (once; a few minutes)"
	@$(PYTHON) -m venv .venv
	@start=$$(date +%s); $(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[test]' \
	  && echo "installed in $$(( $$(date +%s) - start )) s" && mkdir -p state/prefect && touch $@

install: $(INSTALLED) ## create .venv and install

data: install ## build base model and dataset (dvc repro; nothing is rebuilt that is up to date)
	@echo "base model and dataset (dvc repro)"
	@mkdir -p state/prefect
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m dvc repro --quiet

retrain: data ## the main job: train, evaluate, version and log (params/retrain.yaml)
	@$(BIN)/python -m flows.retrain

smoke: install ## the whole pipeline on a tiny model, about a minute
	@$(BIN)/python -m flows.retrain --params params/smoke.yaml

compare: install ## bf16, fp16 and fp32 on the same work, with a verdict (params/compare.yaml)
	@$(BIN)/python -m flows.compare

test: install ## the test suite, a process for each core up to four (as many as TEST_PROCESSES says)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --maxprocesses 4

bench-memory: data ## predicted against measured peaks of training, about 20 minutes (FULL=1: the whole grid, hours)
	@$(BIN)/python -m tests.bench.memory $(if $(FULL),--full)

test-device: install ## the training program's tests on the GPU at hand
	@$(BIN)/python -m pytest -m 'gpu or device'

check: install ## ruff and mypy
	@$(BIN)/python -m ruff check . && $(BIN)/python -m ruff format --check . && $(BIN)/python -m mypy

doctor: install ## what this machine offers and what is missing
	@$(BIN)/python -m pip check
	@home="$${HALFSTEP_HOME:-$(CURDIR)}"; mkdir -p "$$home/runs" "$$home/state" && test -w "$$home/runs" -a -w "$$home/state" \
	  || { echo "no write access to runs/ and state/ in $$home"; exit 1; }
	@df -Pm "$${HALFSTEP_HOME:-$(CURDIR)}" \
	  | awk 'NR == 2 { print $$4 " MB of disk free, a SmolLM2-135M run needs 5665 MB"; exit $$4 < 5665 }'
	@echo "base model and dataset (dvc status):" && $(BIN)/python -m dvc status
	@$(BIN)/python -m flows.retrain --plan

decisions: install ## what is decided on every recorded machine, beside two common rules
	@$(BIN)/python -m tests.bench.decisions

bench-numerics: data ## errors and speed of fp16 and bf16 on SmolLM2-135M, about 6 minutes
	@$(BIN)/python -m tests.bench.numerics

ui: install ## MLflow on http://127.0.0.1:5000
	@echo "MLflow on http://127.0.0.1:$(PORT) (Ctrl-C ends it)"
	@MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false MLFLOW_DISABLE_TELEMETRY=true $(BIN)/python -m mlflow server \
	  --host 127.0.0.1 --port $(PORT) --workers 1 \
	  --backend-store-uri "$${MLFLOW_TRACKING_URI:-sqlite:///$${HALFSTEP_HOME:-$(CURDIR)}/state/mlflow.db}"

clean: ## remove .venv and caches; never state/ (checkpoints, MLflow) nor runs/ (training states)
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find flows tasks tests -name __pycache__ -type d -prune -exec rm -rf {} +
