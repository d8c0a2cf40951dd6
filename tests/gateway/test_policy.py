"""Who may call: hosts, origins, pages of other sites, keys in URLs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from photon_grpc.gateway.connections.policy import HttpPolicy
from tests.gateway.echo_server import EchoApp, answer_to, get, opened, status

CLOSE = b"Connection: close\r\n"


class Answer:
    """What came back: the status, the headers, the parsed body."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body: Any = None

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = [(name.decode(), value.decode()) for name, value in message["headers"]]
        elif message["body"]:
            self.body = json.loads(message["body"])

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


async def _app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"cache-control", b"max-age=60")] if scope["path"] == "/page.js" else []
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})


def ask(
    policy: HttpPolicy, method: str = "GET", target: str = "/v1/models", **headers: str | tuple[str, ...]
) -> Answer:
    """Send a request with these headers through the policy; `host` is localhost unless it is given."""
    pairs = []
    for name, values in ({"host": "localhost:8000"} | headers).items():
        several = values if isinstance(values, tuple) else (values,)
        pairs += [(name.replace("_", "-").encode(), value.encode()) for value in several]
    path, _, query = target.partition("?")
    scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "scheme": "http"}
    answer = Answer()
    asyncio.run(policy(scope | {"headers": pairs}, None, answer.send))
    if answer.status >= 400:
        param = set() if path.startswith("/v1/messages") else {"param"}
        assert set(answer.body["error"]) == {"message", "type", "code"} | param
        assert answer.body["error"]["type"] == "invalid_request_error"
    assert answer.all("x-content-type-options") == ["nosniff"]
    assert len(answer.all("cache-control")) == 1
    return answer


def policy(*listen: str, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()) -> HttpPolicy:
    made = HttpPolicy(_app, hosts, origins)
    made.listen(listen or ("127.0.0.1:8000",))
    return made


class TestHost:
    @pytest.mark.parametrize(
        "host",
        ["localhost", "localhost:8000", "LocalHost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "localhost:9000"],
    )
    def test_this_machine_is_one_of_our_names(self, host: str) -> None:
        """On any port, which may be forwarded."""
        assert ask(policy("10.0.0.7:8000"), host=host).status == 200

    @pytest.mark.parametrize("host", ["10.0.0.7", "10.0.0.7:8000", "api.internal:8000", "[2001:db8::7]:8000"])
    def test_addresses_that_it_listens_at_are(self, host: str) -> None:
        assert ask(policy("10.0.0.7:8000", "api.internal:8000", "[2001:db8::7]:8000"), host=host).status == 200

    @pytest.mark.parametrize(
        "host",
        [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example#localhost",
            "user@localhost",
            "localhost:8000:8000",
            "localhost:",
            "localhost:x",
            "localhost.",
            "localhost/",
            "localhost, evil.example",
            "[::1",
            "::1",
            "[::ffff:127.0.0.1]",
            "127.1",
            "2130706433",
            "0.0.0.0",
            "10.0.0.8",
            "",
        ],
    )
    def test_a_foreign_or_malformed_host_is_refused(self, host: str) -> None:
        answer = ask(policy(), host=host)
        assert answer.status == 421
        assert "--http-allowed-host" in answer.body["error"]["message"]
        assert not host or host not in answer.body["error"]["message"]

    @pytest.mark.parametrize("hosts", [(), ("localhost", "localhost"), ("localhost", "evil.example")])
    def test_there_is_one_host(self, hosts: tuple[str, ...]) -> None:
        assert ask(policy(), host=hosts).status == 421

    @pytest.mark.parametrize(
        ("host", "expected"), [("chat.example", 200), ("chat.example:443", 200), ("other.example", 421)]
    )
    def test_allowed_hosts(self, host: str, expected: int) -> None:
        assert ask(policy(hosts=("Chat.Example",)), host=host).status == expected

    @pytest.mark.parametrize("allowed", ["[2001:db8::1]", "2001:DB8::1", "[2001:db8::1]:8000"])
    def test_an_allowed_host_may_be_an_address_of_ipv6(self, allowed: str) -> None:
        assert ask(policy(hosts=(allowed,)), host="[2001:db8::1]:8000").status == 200
        assert ask(policy(hosts=(allowed,)), host="[2001:db8::2]:8000").status == 421

    def test_an_allowed_host_with_a_port_is_right_at_this_port_only(self) -> None:
        assert ask(policy(hosts=("chat.example:8443",)), host="chat.example:8443").status == 200
        assert ask(policy(hosts=("chat.example:8443",)), host="chat.example").status == 421

    @pytest.mark.parametrize(
        ("host", "expected"),
        [("192.168.3.4:8000", 200), ("[2001:db8::9]", 200), ("my-machine:8000", 421), ("evil.example", 421)],
    )
    @pytest.mark.parametrize("listen", ["0.0.0.0:8000", "[::]:8000"])
    def test_everywhere_means_every_address_and_no_name(self, listen: str, host: str, expected: int) -> None:
        """A page can have its own name resolve to our address, but not an address."""
        assert ask(policy(listen), host=host).status == expected


class TestPages:
    def test_our_own_page_may_call(self) -> None:
        own = {"origin": "http://localhost:8000", "sec_fetch_site": "same-origin", "sec_fetch_mode": "cors"}
        assert ask(policy(), "POST", content_type="application/json", **own).status == 200

    def test_the_default_port_is_left_out_of_an_origin(self) -> None:
        assert ask(policy(), host="localhost:80", origin="http://localhost").status == 200

    @pytest.mark.parametrize(
        "origin",
        [
            "http://evil.example",
            "https://localhost:8000",
            "http://localhost",
            "http://localhost:8001",
            "http://localhost:8000.evil.example",
            "null",
            "",
            ("http://localhost:8000", "http://evil.example"),
        ],
    )
    @pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
    def test_a_foreign_origin_is_refused(self, method: str, origin: str | tuple[str, ...]) -> None:
        answer = ask(policy(), method, origin=origin, content_type="application/json")
        assert answer.status == 403
        assert "--http-allowed-origin" in answer.body["error"]["message"]
        assert not answer.all("access-control-allow-origin")

    @pytest.mark.parametrize("site", ["cross-site", "same-site", "Cross-Site"])
    @pytest.mark.parametrize(
        ("method", "more"),
        [
            ("POST", {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}),
            ("POST", {"sec_fetch_mode": "no-cors"}),
            ("GET", {"sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"}),
            ("GET", {"sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"}),
            ("GET", {}),
        ],
    )
    def test_what_another_site_sends_without_an_origin_is_refused(
        self, method: str, more: dict[str, str], site: str
    ) -> None:
        assert ask(policy(), method, sec_fetch_site=site, content_type="application/json", **more).status == 403

    def test_a_link_on_another_site_leads_to_the_page(self) -> None:
        visit = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
        assert ask(policy(), "GET", "/", **visit).status == 200

    @pytest.mark.parametrize("site", ["none", "same-origin"])
    def test_what_the_user_typed_is_answered(self, site: str) -> None:
        assert ask(policy(), sec_fetch_site=site, sec_fetch_mode="navigate").status == 200

    def test_clients_that_are_no_browsers_send_none_of_this(self) -> None:
        assert ask(policy(), "POST", content_type="application/json").status == 200


class TestAllowedOrigins:
    PAGE = "https://chat.example"

    def test_an_allowed_page_may_read_the_answer(self) -> None:
        answer = ask(policy(origins=(self.PAGE,)), origin=self.PAGE, sec_fetch_site="cross-site")
        assert answer.status == 200
        assert answer.all("access-control-allow-origin") == [self.PAGE]
        assert answer.all("vary") == ["Origin"]
        assert not answer.all("access-control-allow-credentials")

    def test_also_if_it_is_refused(self) -> None:
        answer = ask(policy(origins=(self.PAGE,)), target="/v1/models?api_key=x", origin=self.PAGE)
        assert answer.status == 400
        assert answer.all("access-control-allow-origin") == [self.PAGE]

    def test_it_may_ask_first(self) -> None:
        wanted = {
            "access_control_request_method": "POST",
            "access_control_request_headers": "authorization,content-type",
        }
        answer = ask(policy(origins=(self.PAGE,)), "OPTIONS", origin=self.PAGE, sec_fetch_site="cross-site", **wanted)
        assert (answer.status, answer.body) == (204, None)
        assert answer.all("access-control-allow-origin") == [self.PAGE]
        assert "POST" in answer.all("access-control-allow-methods")[0]
        assert answer.all("access-control-allow-headers") == ["authorization,content-type"]
        assert not answer.all("access-control-allow-credentials")
        assert all("*" not in value for _, value in answer.headers)

    @pytest.mark.parametrize("origin", ["https://evil.example", "https://chat.example.evil.example", "null", "*"])
    def test_others_are_still_refused(self, origin: str) -> None:
        answer = ask(policy(origins=(self.PAGE,)), origin=origin)
        assert answer.status == 403
        assert not answer.all("access-control-allow-origin")
        assert answer.all("vary") == ["Origin"]

    def test_without_allowed_origins_there_are_no_such_headers(self) -> None:
        answer = ask(policy(), origin="http://localhost:8000")
        assert not [name for name, _ in answer.headers if name.startswith("access-control") or name == "vary"]


class TestRequests:
    @pytest.mark.parametrize(
        "query", ["api_key=x", "a=b&Key=x", "token", "%61pi_key=x", "access_token=x", "api%2Dkey=x"]
    )
    def test_a_key_in_a_url_is_refused_with_the_reason(self, query: str) -> None:
        answer = ask(policy(), target=f"/v1/models?{query}")
        assert answer.status == 400
        assert answer.body["error"]["code"] == "KEY_IN_URL"
        assert "Authorization" in answer.body["error"]["message"]

    @pytest.mark.parametrize("query", ["", "limit=3", "keyboard=x", "a=key"])
    def test_other_parameters_are_left_to_the_app(self, query: str) -> None:
        assert ask(policy(), target=f"/v1/models?{query}").status == 200

    def test_a_flood_of_parameters_is_refused(self) -> None:
        assert ask(policy(), target="/?" + "&a" * 5000).status == 400

    def test_the_app_may_say_how_long_an_answer_is_kept(self) -> None:
        assert ask(policy(), target="/page.js").all("cache-control") == ["max-age=60"]
        assert ask(policy(), target="/").all("cache-control") == ["no-store"]


async def test_the_server_has_the_policy() -> None:
    app = EchoApp()
    async with opened(app, allowed_hosts=("chat.example",), allowed_origins=("https://chat.example",)) as port:
        evil = get(more=CLOSE).replace(b"localhost", b"evil.example")
        assert status(await answer_to(port, evil)) == 421
        assert status(await answer_to(port, get(more=CLOSE + b"Origin: http://evil.example\r\n"))) == 403
        allowed = get(more=CLOSE + b"Origin: https://chat.example\r\n").replace(b"localhost", b"chat.example")
        answer = await answer_to(port, allowed)
    assert status(answer) == 200
    assert b"access-control-allow-origin: https://chat.example\r\n" in answer
    assert len(app.seen) == 1
