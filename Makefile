# make demo           install into .venv, scan a log that fails, repair it and scan it again; ALL=1: logs of every format
# make test           everything a change has to pass, in a few minutes
# make deep           the same with every example; SINCE=origin/main: only for what changed since then
# make live           train a toy model and run an agent through the gateway and through a plain server; scan both logs
# make bench          scan speed; QUICK=1: a rough run of two minutes
# make bench-joining  time and memory for joining single calls into conversations; QUICK=1
# make bench-batch    time of an audit in a training loop, for each row of a batch; QUICK=1
# make bench-ray      a scan on a Ray cluster of this machine against processes; QUICK=1
# make bench-gateway  latency that the gateway adds, with 500 sessions and 200 requests in flight; QUICK=1
# make bench-large    a 50 GB Parquet file and a 20 GB JSONL.gz, scanned and repaired: memory of each process; QUICK=1: 1 GB
# make planted        scan logs with planted faults by both engines; TOKENS=200000000
# make vllm           install a real vLLM server into .cache/vllm (2 GB) and run every test that needs one
# make torture        attack every command with broken logs, kills and full disks; MUTANTS=, KILLS=, SEED=, JOBS=
# make lint           style and types only
# make package        build the wheel and the sdist into build/dist and test them; ADDRESS=https://github.com/OWNER/tito-audit
# make sizes          measure the installed sizes in docs/install.md
# make audit          ask a database of advisories about all that is installed; needs a network
# make docs           build the site, build/docs/index.html
# make pictures       draw the pictures of the README from real output; needs Chromium

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

# Only the CPU build is small enough to install for tests. Outside Linux the plain version is that build.
TORCH ?= torch==2.13.0$(if $(filter Linux,$(shell uname -s)),+cpu)

TOY := fixtures/tokenizers/toy_bpe
FAILING := fixtures/docs/first_scan.jsonl
shown = echo '$$ tito-audit $(1)' && $(BIN)/tito-audit $(1)

.PHONY: audit demo test deep vllm bench bench-joining bench-batch bench-ray bench-large planted torture lint torch docs package sizes \
	pictures

demo: $(VENV)/.installed
ifndef ALL
	@mkdir -p build
	@$(call shown,scan $(FAILING) -t $(TOY) --worst 1) || test $$? -eq 1
	@$(call shown,repair $(FAILING) -o build/repaired.jsonl --force -t $(TOY))
	@echo '$$ tito-audit scan build/repaired.jsonl -t $(TOY) | tail -1'
	@page=$$($(BIN)/tito-audit scan build/repaired.jsonl -t $(TOY)); failed=$$?; echo "$$page" | tail -1; exit $$failed
else
	@echo "Example logs of every format, written by hand, with planted faults. The findings below are those faults:"
	@echo
	@$(call shown,scan fixtures/formats -t $(TOY) --worst 3 --fail-on never)
	@echo
	@echo "Repaired: a second scan proves each row before it is written. What no repair can prove stays as it was,"
	@echo "so the command exits with 1:"
	@echo
	@$(call shown,repair fixtures/formats -o build/demo --force -t $(TOY)) || test $$? -eq 1
	@echo
	@echo "One repaired row, token by token:"
	@echo
	@$(call shown,repair fixtures/formats/nemo_gym.jsonl --with splice --unsafe --diff --worst 1 -t $(TOY) --quiet) \
		|| test $$? -eq 1
	@echo "The repaired logs, scanned again:"
	@echo
	@$(call shown,scan build/demo -t $(TOY) --worst 0 --fail-on never)
endif

# Needs no GPU, and no network except for pip: the model trains in half a minute and is kept in build/live.
live: $(VENV)/.installed-live
	@$(BIN)/python examples/live/demo.py

test: $(VENV)/.installed-dev
	@PYTHON=$(BIN)/python tests/suite.sh quick

# SINCE=origin/main: only test files that changed since that commit, or whose subject did.
deep: $(VENV)/.installed-dev
	@PYTHON=$(BIN)/python tests/suite.sh deep $(SINCE)

# Once the server is installed, `make test` runs a few of these tests. If it cannot be installed they are skipped, with
# the reason; TITO_AUDIT_VLLM=required makes that a failure.
vllm: torch
	@if [ "$$TITO_AUDIT_VLLM" = off ]; then echo "TITO_AUDIT_VLLM=off: the tests that need a vLLM server are skipped"; \
	elif PYTHON=$(BIN)/python tests/vllm/install.sh >/dev/null; then \
		TITO_AUDIT_VLLM=required TITO_AUDIT_TIER=deep $(BIN)/python -m pytest -q -rs $$(grep -l vllm_server tests/test_*.py); \
	else [ "$$TITO_AUDIT_VLLM" != required ]; fi

# Only the tests of Torch files need torch; without it they are skipped.
torch: $(VENV)/.installed-dev
	@test -z "$(TORCH)" || $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' || { \
		echo "Installing torch into $(VENV), for the tests of Torch files ..."; \
		said=$$($(PIP) install --retries 2 --timeout 30 '$(TORCH)' 2>&1) || \
			echo "$(TORCH) could not be installed, so they are skipped: $$(echo "$$said" | tail -1)"; }

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A plain run takes half an hour, BENCH="--full --huge" far longer; BENCH="--help" lists all options.
bench: $(VENV)/.installed-bench
	@tests/real_tokenizers.sh >/dev/null
	$(BIN)/python -m benchmarks $(if $(QUICK),--quick) $(BENCH)

# Builds logs of up to two million calls; BENCH="--help" lists all options.
bench-joining: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.joining $(if $(QUICK),--quick) $(BENCH)

bench-batch: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.batch $(if $(QUICK),--quick) $(BENCH)

# Needs room for two copies of the larger log: BENCH="--scratch FOLDER"; BENCH="--help" lists all options.
bench-large: $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.large $(if $(QUICK),--quick) $(BENCH)

# Starts clusters of one and two nodes on this machine.
bench-ray: $(VENV)/.installed-dev $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.ray $(if $(QUICK),--quick) $(BENCH)

# Runs three processes on this machine: clients, the gateway, and a stub of a vLLM server.
bench-gateway: $(VENV)/.installed-dev $(VENV)/.installed-bench
	$(BIN)/python -m benchmarks.gateway $(if $(QUICK),--quick) $(BENCH)

# Compares the scan's findings with those of the reference engine, on temporary logs. A stopped run resumes.
planted: $(VENV)/.installed
	@tests/real_tokenizers.sh >/dev/null
	$(BIN)/python -m benchmarks.planted --tokens $(or $(TOKENS),20000000) $(PLANTED)

# 10,000 mutants take about five minutes of one core; failures are minimised into build/torture (docs/torture.md).
torture: $(VENV)/.installed-dev
	@$(BIN)/python -m tests.torture --mutants $(or $(MUTANTS),10000) --seed $(or $(SEED),1) --jobs $(or $(JOBS),1) \
		--keep build/torture; mutants=$$?; \
	$(BIN)/python -m tests.torture.processes --kills $(or $(KILLS),100) --seed $(or $(SEED),1) --jobs $(or $(JOBS),1) \
		&& exit $$mutants

# Warnings and unresolved references are errors. Needs no network.
docs: $(VENV)/.installed-docs
	@$(BIN)/python docs/generate.py build/docs-source
	@$(BIN)/python -m sphinx -q -W --keep-going -n build/docs-source build/docs
	@echo "The documentation is build/docs/index.html"

# Checks the packages as an index would, then installs the wheel into a fresh environment and scans a log with it.
package: $(VENV)/.installed-dev
	@TITO_AUDIT_ADDRESS='$(or $(ADDRESS),$(TITO_AUDIT_ADDRESS))' $(BIN)/python -m tools.package build/dist

# Measures the installed sizes in docs/install.md.
sizes: $(VENV)/.installed-dev
	@$(BIN)/python -m tools.install_size docs/install-size.json $(if $(TORCH),'$(TORCH)')

# Without a network, or where the database cannot be reached, it says so and passes: SECURITY.md has what was known at its date.
audit: $(VENV)/.installed-dev
	@$(BIN)/python -m tools.audit

pictures: $(VENV)/.installed-dev
	@$(BIN)/python -m tools.pictures

# A stamp older than pyproject.toml means that the dependencies may have changed.
$(VENV)/.installed: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV) ..."
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV), with the test dependencies ..."
	@$(PIP) install -e '.[dev]'
	@touch $(VENV)/.installed $(VENV)/.installed-docs $@

$(VENV)/.installed-bench: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV), with the benchmark dependencies ..."
	@$(PIP) install -e '.[bench]'
	@touch $(VENV)/.installed $@

$(VENV)/.installed-live: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV), with the dependencies of models and the gateway ..."
	@$(PIP) install -e '.[serve,transformers]'
	@$(PIP) install '$(or $(TORCH),torch)' 2>/dev/null || $(PIP) install '$(or $(TORCH),torch)' \
		--extra-index-url https://download.pytorch.org/whl/cpu
	@touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV), with the documentation dependencies ..."
	@$(PIP) install -e '.[docs]'
	@touch $(VENV)/.installed $@

.PHONY: venv
venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "tito-audit needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Choose another one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
