# Everything runs in .venv of this clone. torch is installed first and alone, so that no other package chooses its version. Whether pip takes
# its CPU build or its larger CUDA build depends on where pip looks; both work.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test slow-tests test-browser lint format docs check oldest bench clean

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

.venv/docs: .venv/run
	$(BIN)/pip install --quiet -c constraints.txt -e '.[docs]'
	@touch $@

.venv/bench: .venv/test
	$(BIN)/pip install --quiet -c constraints.txt -e '.[bench]'
	@touch $@

demo: .venv/run
	$(BIN)/shoestring train gpt --memory 550MiB --report report.html

# Each process gets tests that stand together, so that what a file prepares is prepared once; who is done first takes over from the other
test: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not browser"

# What every test takes, on a quiet machine, and from that the tests that `make test` leaves to `make check` (tests/slow_tests.py)
slow-tests: .venv/test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "(listed or not slow) and not browser" --seconds=.venv/seconds
	$(BIN)/python -m tests.slow_tests .venv/seconds

# The pages in Chromium. Where there is none and it can't be installed, these tests are skipped and say so.
test-browser: .venv/browser
	@command -v chromium >/dev/null || { apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || true
	$(BIN)/python -m pytest -m browser -rs tests/browser

lint: .venv/test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix-only .

# The documentation site, into site/. It is built without network, and whatever does not fit together (a link, a page) is an error.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: lint test-browser
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not browser"

# The oldest versions that pyproject.toml allows, in an environment of their own. Not transformers: its older releases are not ours to prove.
oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/pip install --quiet torch==2.9.0 numpy==1.26.0 xxhash==3.0.0 rich==13.0.0 jinja2==3.1.0 markupsafe==2.1.0 -e '.[test]'
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal -m "not slow and not browser"

# All benchmarks, one after the other: hours. What a script needs beside the extra `bench` (data of Debian or npm packages), it says.
bench: .venv/bench
	@failed=; for script in benchmarks/*/run.py; do $(BIN)/python $$script || failed="$$failed $$script"; done; \
	  test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

clean:
	rm -rf .venv .venv-oldest runs report.html site
