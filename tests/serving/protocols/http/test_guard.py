"""Who may ask: under a name of ours, from a page of ours, with the token where others than this machine can come."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from shoestring.core.errors import Mistake
from shoestring.serving.protocols.http.config import ServerConfig
from shoestring.serving.protocols.http.server import serve
from tests.serving.serving import Served, serving
from tests.serving.tiny import spec
from tests.waiting import HUNG

pytestmark = pytest.mark.usefixtures("warm_workers")
PEM = str(Path(__file__).with_name("localhost.pem"))


@pytest.fixture(scope="module")
def local(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec()}, hosts=("models.example",)) as found:
        yield found


@pytest.fixture(scope="module")
def open_to_all(warm_workers: None) -> Iterator[Served]:
    with serving({"tiny": spec()}, host="0.0.0.0") as found:
        yield found


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:80"}, 200),
        ({"Host": "models.example"}, 200),
        ({"Host": "evil.example"}, 403),
        ({"Host": "models.example.evil"}, 403),
        ({"Origin": "http://localhost:1234"}, 200),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://["}, 403),
    ],
)
def test_on_this_machine_a_name_of_ours_is_enough(local: Served, headers: dict[str, str], status: int) -> None:
    assert local.ask("/v2", **headers).status == status
    assert local.ask("/v2/repository/index", {}, **headers).status == status
    assert local.ask("/v2/health/live", **headers).status == 200, "a proxy that checks our health says no name"


def test_beyond_this_machine_the_token_is_needed(open_to_all: Served) -> None:
    token = open_to_all.server.token
    assert len(token) > 20 and open_to_all.server.url.endswith(f"/?token={token}")
    for headers in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {token}x"},
        {"Authorization": f"Basic {token}"},
    ):
        found = open_to_all.ask("/v2", **headers)
        assert (
            found.status == 401
            and found.headers["www-authenticate"] == "Bearer"
            and found.json["field"] == "authorization"
        )
    assert open_to_all.ask("/v2", Authorization=f"Bearer {token}").status == 200
    assert open_to_all.ask("/v2/health/ready").status == 200
    assert open_to_all.ask("/v2", Authorization=f"Bearer {token}", Host="evil.example").status == 403
    page = open_to_all.ask(f"/?token={token}")
    cookie = page.headers["set-cookie"]
    assert page.status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert open_to_all.ask("/metrics", Cookie=cookie.partition(";")[0]).status == 200
    refused = open_to_all.ask("/?token=wrong")
    assert refused.status == 401 and "set-cookie" not in refused.headers, (
        "a wrong token is not answered with the right one"
    )


def test_openai_s_doors_refuse_in_openai_s_words(open_to_all: Served) -> None:
    assert open_to_all.ask("/v1/models").json["error"]["param"] == "authorization"


def test_a_certificate_makes_it_tls() -> None:
    with serving({"tiny": spec()}, certificate=PEM, key=PEM) as served:
        context = ssl.create_default_context(cafile=PEM)
        line = HTTPSConnection("localhost", served.port, context=context, timeout=HUNG)
        line.request("GET", "/v2")
        assert line.getresponse().status == 200 and served.server.url.startswith("https://")
        line.close()


def test_mistakes_are_told_before_anything_is_loaded(local: Served, tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=f"port {local.port} .*: give another --port"):
        serve({"tiny": spec()}, ServerConfig(port=local.port))
    (tmp_path / "no.pem").write_text("nothing")
    no = str(tmp_path / "no.pem")
    with pytest.raises(Mistake, match="are no certificate and its key"):
        serve({"tiny": spec()}, ServerConfig(port=0, certificate=no, key=no))
    with pytest.raises(Mistake, match="TLS needs a certificate and its key"):
        ServerConfig(key=no)
    with pytest.raises(Mistake, match="no model is to be served"):
        serve({}, ServerConfig(port=0))
