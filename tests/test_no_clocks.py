"""No test depends on time, on chance or on other programs: none sleeps or looks at a clock, ends a wait after seconds of its own, draws
without a seed or writes to a place that all share; nor does a program that a test holds as text. They wait by tests/waiting.py, and what is
tested is handed a clock that counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.time_uses import uses_in

TESTS = Path(__file__).parent
NEVER_COMES = "what is waited for never comes, so it may be waited for as shortly as one likes"
SIMULATED = "seconds of simulated devices"
COUNTED = "by a clock that the test hands over"
ALLOWED = {
    ("waiting.py", "clock"): "the one place that waits",
    ("show/made_runs.py", "clock"): "events bear the hour, and pages say how long ago the last one was",
    ("golden/job.py", "clock"): "its bytes are those of the job that golden runs were begun with",
    ("golden/make.py", "shared"): "it stands in the files of golden runs; no test calls it",
    ("browser/test_compression_page.py", "shared"): "words on a page",
    ("core/test_exactness.py", "chance"): "a model that draws other weights in every process is what is refused there",
    ("training/thread_links.py", "patience"): "it looks again, until the others are gone",
    ("training/data_parallel/parameter_server/test_asynchronous.py", "patience"): NEVER_COMES,
    ("training/links/test_mailbox.py", "patience"): NEVER_COMES,
    ("training/links/test_shared_memory_link.py", "patience"): NEVER_COMES,
    ("training/links/test_sums.py", "patience"): NEVER_COMES,
    ("federated/techniques/behaviour/test_missing.py", "patience"): SIMULATED,
    ("processes/group/test_launch.py", "patience"): COUNTED,
    ("processes/test_kill_stages.py", "patience"): COUNTED,
}


def test_no_test_depends_on_time_or_chance() -> None:
    files = [path.relative_to(TESTS) for path in sorted(TESTS.rglob("*.py"))]
    found = {
        (str(path), use.kind): f"{path}:{use.line}: {use.what}"
        for path in files
        if path.name != Path(__file__).name and "version-" not in str(path)  # the examples below; runs as they were
        for use in uses_in((TESTS / path).read_text())
    }
    assert found.keys() - ALLOWED.keys() == set(), [found[one] for one in found.keys() - ALLOWED.keys()]
    assert ALLOWED.keys() - found.keys() == set(), "what is allowed is also used"


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("clock", "import time\ntime.sleep(1)"),
        ("clock", "import time\nbegun = time.perf_counter()"),
        ("clock", "import time as t\nt.sleep(1)"),
        ("clock", "import time\ntimed(clock=time.process_time)"),
        ("clock", "from time import monotonic\nmonotonic()"),
        ("clock", "from time import sleep as rest\nrest(1)"),
        ("clock", "from datetime import datetime\ndatetime.now()"),
        ("clock", "import asyncio\nasyncio.sleep(1)"),
        ("clock", "from threading import Timer\nTimer(1, end).start()"),
        ("clock", "import timeit\ntimeit.timeit(work)"),
        ("clock", "JOB = 'import time\\ntime.sleep(0.1)'"),
        ("clock", "JOB = 'import time as t\\nfor one in range({count}):\\n    t.sleep(one)'"),
        ("clock", "JOB = f'''\n    import time as t\n    t.sleep({seconds})\n'''"),
        ("clock", "JOB = 'import time\\n%s\\ntime.sleep(1) and this is no Python'"),
        ("clock", "run(['sh', '-c', 'sleep 1; echo done'])"),
        ("patience", "event.wait(0.2)"),
        ("patience", "process.communicate(timeout=5)"),
        ("patience", "worker.join(10)"),
        ("patience", "import signal\nsignal.alarm(60)"),
        ("patience", "link.deadline = 0.5"),
        ("patience", "from datetime import timedelta\ntimedelta(seconds=1)"),
        ("patience", "from hypothesis import settings\nsettings(deadline=200)"),
        ("patience", "JOB = 'import subprocess\\nsubprocess.run(words, timeout=3)'"),
        ("chance", "import numpy as np\nnp.random.default_rng()"),
        ("chance", "from random import Random\nRandom()"),
        ("chance", "import os\nos.urandom(8)"),
        ("shared", "Path('/tmp/place')"),
        ("shared", "f'/dev/shm/{name}'"),
    ],
)
def test_every_way_to_time_and_chance_is_seen(kind: str, source: str) -> None:
    assert kind in {use.kind for use in uses_in(source)}


@pytest.mark.parametrize(
    "source",
    [
        "clock()\nprobe.time\n'seconds of time'",
        "import time\ntime.strftime('%H', time.localtime(kept))",
        "from tests.waiting import HUNG\nprocess.communicate(timeout=HUNG)\nsignal.alarm(0)",
        "', '.join(words)\nevent.wait()\nEarlyStopping(patience=3)\nsettings(deadline=None)",
        "import numpy as np\nnp.random.default_rng(0)",
        "TEXT = 'import what you need, at a time.'",
    ],
)
def test_what_does_not_depend_on_them_is_none(source: str) -> None:
    assert not uses_in(source)
