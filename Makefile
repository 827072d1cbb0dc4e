# make demo: trains, evaluates and samples a small GPT on what this machine has.
# make test: what CI checks first (.ci/run has all).
# make site: builds site/, the page as static files (docs/site.md); make test-site tests it.
# make campaign: the campaigns of docs/reliability.md, in about half an hour; it resumes where it was interrupted.
# make campaign-quick: a part of each, in about 90 seconds.
# All but site build .venv from constraints.txt; PYTHON=… chooses the Python, and keeps a torch it already has.
PYTHON ?= python3
BIN := .venv/bin
INGREDIENTS := pyproject.toml constraints.txt tools/make_venv.py

.PHONY: demo test site test-site campaign campaign-quick clean
demo: .venv/has-train
	$(BIN)/fitgpt demo

test: .venv/has-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist loadgroup

site:
	PYTHONPATH=src $(PYTHON) tools/static_site/build.py

test-site: .venv/has-dev
	FITGPT_PAGE=site $(BIN)/python -m pytest -m "not served" tests/web/test_page.py tests/web/test_site.py

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
	rm -rf .venv build dist site
