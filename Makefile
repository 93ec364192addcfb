# Everything runs in .venv of this clone. torch is installed first and alone: the pin takes the CPU build.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-browser lint check bench clean

.venv/torch: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch==2.13.0
	@touch $@

.venv/run: .venv/torch pyproject.toml
	$(BIN)/pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/test: .venv/run
	$(BIN)/pip install --quiet -c constraints.txt -e '.[test,lint]'
	@touch $@

.venv/browser: .venv/test
	$(BIN)/pip install --quiet -c constraints.txt -e '.[browser]'
	@touch $@

.venv/bench: .venv/test
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

demo: .venv/run
	$(BIN)/shoestring train gpt --memory 550MiB --report report.html

# Each process gets tests that stand together, so that what a file prepares is prepared once; who is done first takes over from the other
test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not browser"

# The pages in Chromium. Where there is none and it can't be installed, these tests are skipped and say so.
test-browser: .venv/browser
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || true
	$(BIN)/python -m pytest -m browser -rs tests/browser

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test-browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not browser"

bench: .venv/bench
	for script in benchmarks/*/run.py; do $(BIN)/python $$script || exit 1; done

clean:
	rm -rf .venv runs report.html
