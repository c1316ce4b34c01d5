# make demo    install into .venv and scan the example logs
# make test    everything a change has to pass
# make bench   how fast a scan is
# make lint    style and types only

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

.PHONY: demo test bench lint

demo: $(VENV)/.installed
	@echo "Example logs of every format, made by hand, with faults planted in them:"
	@echo "a finding below is the tool at work, not something broken here."
	@echo
	@$(BIN)/tito-audit scan fixtures/formats --tokenizer fixtures/tokenizers/toy_bpe --fail-on never

test: lint
	@for kind in rollouts recorded; do \
		found=$$(ls -d ../shared/$$kind/*/ ../shared/$$kind/*.json 2>/dev/null | xargs -rn1 basename | xargs); \
		echo "real $$kind beside the checkout: $${found:-none, so their tests are skipped}"; \
	done
	@real=$$(tests/real_tokenizers.sh); \
		found=$$(test -n "$$real" && ls -d "$$real"/*/ | xargs -rn1 basename | xargs); \
		echo "real tokenizers: $${found:-none, so their tests are skipped}"; \
		TITO_AUDIT_TOKENIZERS="$$real" $(BIN)/python -m pytest -q -rs

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python benchmarks/bench_scan.py

# Each stamp is older than pyproject.toml exactly when the dependencies may have changed.
$(VENV)/.installed: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV) ..."
	@$(PIP) install -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml
	@$(MAKE) --no-print-directory venv
	@echo "Installing into $(VENV), with what tests need ..."
	@$(PIP) install -e '.[dev]'
	@touch $(VENV)/.installed $@

.PHONY: venv
venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "tito-audit needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name another one: make PYTHON=python3.12 ..." >&2; \
		exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
