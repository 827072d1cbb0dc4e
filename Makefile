# make demo: trains, evaluates and samples a small GPT on what this machine has.
# make test: everything CI checks.
# make campaign: the campaigns of docs/reliability.md, in about an hour; it resumes where it was interrupted.
# make campaign-quick: a part of each, in at most 90 seconds.
# Both build .venv from constraints.txt; PYTHON=… chooses the Python, and keeps a torch it already has.
PYTHON ?= python3
BIN := .venv/bin
INGREDIENTS := pyproject.toml constraints.txt tools/make_venv.py

.PHONY: demo test campaign campaign-quick clean
demo: .venv/has-train
	$(BIN)/fitgpt demo

test: .venv/has-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadgroup

campaign: .venv/has-dev
	$(BIN)/python -m tests.campaign $(ARGS)

campaign-quick: .venv/has-dev
	$(BIN)/python -m tests.campaign --quick

.venv/has-train: $(INGREDIENTS)
	@echo "Installing into .venv (torch is large: the first time takes a few minutes) …"
	$(PYTHON) tools/make_venv.py train
	@touch $@

.venv/has-dev: $(INGREDIENTS)
	@echo "Installing into .venv (torch is large: the first time takes a few minutes) …"
	$(PYTHON) tools/make_venv.py train,parquet,dev
	@touch $@ .venv/has-train

clean:
	rm -rf .venv build dist
