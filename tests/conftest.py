"""One thread a process: tests run side by side, and two spinning threads on busy cores are far slower than one. Commands that tests start
have all their threads, as a user's have, but those sleep while they wait for each other: the same numbers in half the time.

And no test dies of an instruction. Tests compute in bf16 and fp16 in their own process, and on some processors that is a SIGILL
(shoestring/measure/instructions.py). So a whole session runs under the cap that shoestring starts its workers with, found as shoestring
finds it: by trying in child processes, once, kept in the user's cache, and not at all where the processor gives no reason for doubt. The
variable must be there before the first product of matrices, so it is set before torch is imported; the workers of xdist and all that tests
start inherit it.

No test depends on time (tests/waiting.py, tests/test_no_clocks.py). Hypothesis would fail an example that takes longer than a fifth of a
second, and give up drawing where that is slow: neither here. It draws the same examples in every run.

Nor on the tests that ran before it in its process, which workers of xdist deal out by time: the global generators are seeded before every
test, and before what is prepared for several. What shoestring keeps in the user's cache (what planning measured) is kept in a home of the
session, so that no other session's measurements are in it, and how fast the machine is stands there already (tests/machine.py).

Bytecode is kept even where PYTHONDONTWRITEBYTECODE is set: without it every process that a test starts compiles shoestring again, and
pytest rewrites the assertions of every file in every run. That is bytecode of shoestring and of the tests only; what tests write and
import stays as the variable says.

A shell ignores SIGINT for what it starts in the background, and `nohup` ignores SIGHUP. Commands keep to that, so tests that stop them
would wait for ever: here no signal is ignored.
"""

from __future__ import annotations

import compileall
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import shoestring
from shoestring.measure.cache import cache_folder
from shoestring.measure.instructions import cap_this_process

cap_this_process()
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("XDG_CACHE_HOME", None)  # a test that wants an empty cache sets HOME

import numpy as np  # noqa: E402
import torch  # noqa: E402

from tests.machine import believe_what_is_kept, keep_figures  # noqa: E402
from tests.slow_tests import listed  # noqa: E402

torch.set_num_threads(1)
believe_what_is_kept()
settings.register_profile(
    "shoestring", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, database=None
)
settings.load_profile("shoestring")
FROZEN_FOR: list[Path] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", metavar="FILE", help="write what every test takes (tests/slow_tests.py)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what slow.txt lists: as slow, and as listed there, so that it can be measured again."""
    slow = listed()
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
            item.add_marker("listed")


class Seconds:
    """Writes what every test takes."""

    def __init__(self, file: str) -> None:
        self.file = open(file, "w", encoding="utf-8")  # noqa: SIM115

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.file.write(json.dumps([report.nodeid, report.duration]) + "\n")
        self.file.flush()


def pytest_configure(config: pytest.Config) -> None:
    """Compile shoestring once for all processes of the session, and give them a home: a worker of xdist finds both."""
    if not hasattr(config, "workerinput"):
        if file := config.getoption("--seconds"):
            config.pluginmanager.register(Seconds(file))
        compileall.compile_dir(Path(shoestring.__file__).parent, quiet=2)
        home = Path(tempfile.mkdtemp(prefix="home"))
        config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))
        known = list(
            cache_folder().glob("dtypes-*")
        )  # what this machine can compute in stays true, and takes long to try
        os.environ["HOME"] = str(home)
        cache_folder().mkdir(parents=True)
        for path in known:
            shutil.copy(path, cache_folder())
        keep_figures()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """With the first test of a file, take what is there (torch, transformers) out of what garbage collection looks through, as the fork
    server does: looking through it takes a quarter of a second, again and again."""
    if FROZEN_FOR[:] != [item.path]:
        FROZEN_FOR[:] = [item.path]
        gc.collect()
        gc.freeze()


def seed_everything() -> None:
    random.seed(0), np.random.seed(0), torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    seed_everything()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    seed_everything()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the rewritten assertions of the test files."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = before


@pytest.fixture(scope="module")
def warm_workers() -> Iterator[None]:
    """Commands and workers that the tests of a file start are forked from a warm Python (tests/warm.py)."""
    from tests.warm import python

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", python())
        yield
