"""What was served is counted, and Prometheus can read it; the page and its headers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving import tiny
from tests.serving.serving import Served, serving
from tests.serving.tiny import spec

pytestmark = pytest.mark.usefixtures("warm_workers")


@pytest.fixture(scope="module")
def served(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec(2.0, answer=tiny.answer)}) as found:
        yield found


def test_metrics_are_what_prometheus_reads(served: Served) -> None:
    served.ask("/answer", {"text": "1 2"})
    served.ask("/answer", {})
    lines = served.ask("/metrics").body.decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values['shoestring_requests_total{model="tiny",door="answer",status="200"}'] >= 1
    assert values['shoestring_requests_total{model="tiny",door="answer",status="400"}'] >= 1
    assert values['shoestring_replicas{model="tiny"}'] == 1 and values['shoestring_queue_length{model="tiny"}'] == 0
    for name in ("request_seconds", "batch_tokens"):
        buckets = [value for key, value in values.items() if key.startswith(f'shoestring_{name}_bucket{{model="tiny"')]
        assert buckets == sorted(buckets) and buckets[-1] == values[f'shoestring_{name}_count{{model="tiny"}}'] > 0
    families = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(families) == len(set(families)) == 8


def test_the_page_carries_strict_headers_and_what_it_runs_is_named_in_them(served: Served) -> None:
    found = served.ask("/")
    policy = found.headers["content-security-policy"]
    assert found.status == 200 and "default-src 'none'" in policy and "script-src 'sha256-" in policy
    assert b"unsafe-inline" not in found.body and found.headers["x-content-type-options"] == "nosniff"
    assert found.headers["date"].endswith("GMT") and served.ask("/healthz").json == {"live": True}
