"""Every HTTP call: its key, its id, its deadline, its error, its count."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from photon_grpc import errors
from photon_grpc.access.key_ring import KeyRing
from photon_grpc.core.generation import Start
from photon_grpc.gateway.openai.answers import head_of
from tests.frontend.fake_engine import frontend, served
from tests.gateway.in_memory import in_memory
from tests.server.fake_frontend import FakeFrontend, for_ever
from tests.server.keys import SECRETS, write_keys

PROMPT = {"prompt": "a"}
COMPLETIONS = "/v1/completions"


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    return KeyRing(str(write_keys(tmp_path / "keys.toml")))


@pytest.mark.parametrize(
    ("method", "path", "scopes"),
    [
        ("POST", COMPLETIONS, {"gen", "all"}),
        ("POST", "/v1/chat/completions", {"gen", "all"}),
        ("GET", "/v1/models", {"gen", "mod", "all"}),
        ("GET", "/v1/models/demo", {"gen", "mod", "all"}),
        ("POST", "/tokenize", {"gen", "mod", "all"}),
        ("POST", "/detokenize", {"gen", "mod", "all"}),
        ("GET", "/metrics", {"adm", "all"}),
    ],
)
async def test_a_path_needs_a_key_with_its_scope(method: str, path: str, scopes: set[str], keys: KeyRing) -> None:
    server = in_memory(FakeFrontend(), keys=keys)
    for name, secret in SECRETS.items():
        answer = await server.client.request(method, path, json={}, headers={"authorization": f"Bearer {secret}"})
        assert (answer.status_code == 403) == (name not in scopes), name
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {SECRETS['all']}"}):
        answer = await server.client.request(method, path, json={}, headers=headers)
        assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_key_may_come_as_anthropics_clients_send_it(keys: KeyRing) -> None:
    server = in_memory(FakeFrontend(), keys=keys)
    answer = await server.client.post(COMPLETIONS, json=PROMPT, headers={"x-api-key": SECRETS["gen"]})
    assert answer.status_code == 200
    both = {"x-api-key": SECRETS["gen"], "authorization": f"Bearer {SECRETS['adm']}"}
    assert (await server.client.post(COMPLETIONS, json=PROMPT, headers=both)).status_code == 401


@pytest.mark.parametrize("path", ["/v1", "/v1/completions/", "/v1//completions", "/V1/models"])
async def test_unknown_paths_need_a_key_before_they_are_unknown(path: str, keys: KeyRing) -> None:
    server = in_memory(FakeFrontend(), keys=keys)
    assert (await server.client.get(path)).status_code == 401
    answer = await server.client.get(path, headers={"authorization": f"Bearer {SECRETS['mod']}"})
    assert answer.status_code == 404
    assert server.counts.calls[-1] == ("unknown", "GET", 404)


async def test_health_is_exempt_as_the_flag_says(keys: KeyRing) -> None:
    assert (await in_memory(FakeFrontend(), keys=keys).client.get("/health")).text == "SERVING\n"
    assert (await in_memory(FakeFrontend(), keys=keys, exempt=()).client.get("/health")).status_code == 401


async def test_the_owner_of_the_key_is_that_of_the_request(keys: KeyRing) -> None:
    frontend = FakeFrontend()
    headers = {"authorization": f"Bearer {SECRETS['gen']}"}
    await in_memory(frontend, keys=keys).client.post(COMPLETIONS, json=PROMPT, headers=headers)
    (ask,) = frontend.asks
    assert (ask.origin.owner, ask.origin.caller, ask.origin.method) == ("gen", "gen", COMPLETIONS)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
async def test_another_method_is_told_which_one_is_right(method: str) -> None:
    answer = await in_memory(FakeFrontend()).client.request(method, COMPLETIONS)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert method == "HEAD" or answer.json()["error"]["code"] == "METHOD_NOT_ALLOWED"
    assert bool(answer.content) == (method != "HEAD")


async def test_a_wrong_method_is_told_before_a_wrong_type_of_its_body() -> None:
    answer = await in_memory(FakeFrontend()).client.post(
        "/health", content=b"x", headers={"content-type": "text/plain"}
    )
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {"content-encoding": "gzip"}])
async def test_a_path_that_is_not_there_is_told_before_a_wrong_type_of_a_body(
    method: str, headers: dict[str, str]
) -> None:
    answer = await in_memory(FakeFrontend()).client.request(method, "/v1/none", content=b"x", headers=headers)
    assert answer.status_code == 404


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "application/json; charset=UTF-8"])
async def test_json_is_read(kind: str) -> None:
    headers = {"content-type": kind, "content-encoding": "Identity"}
    answer = await in_memory(FakeFrontend()).client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "kinds",
    [
        [],
        [""],
        ["text/plain"],
        ["application/x-www-form-urlencoded"],
        ["multipart/form-data; boundary=x"],
        ["text/plain; application/json"],
        ["application/json-patch"],
        ["application/json; charset=latin-1"],
        ["application/json", "text/plain"],
    ],
)
async def test_other_bodies_are_refused(kinds: list[str]) -> None:
    """A page may send these across origins without asking first."""
    headers = [("content-type", kind) for kind in kinds]
    answer = await in_memory(FakeFrontend()).client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


@pytest.mark.parametrize("encodings", [["gzip"], ["br"], ["identity, gzip"], ["identity", "zstd"]])
async def test_compressed_bodies_are_refused(encodings: list[str]) -> None:
    headers = [("content-type", "application/json"), *[("content-encoding", each) for each in encodings]]
    answer = await in_memory(FakeFrontend()).client.post(COMPLETIONS, content=b"x", headers=headers)
    assert (answer.status_code, answer.headers["accept-encoding"]) == (415, "identity")
    assert "Content-Encoding" in answer.json()["error"]["message"]


async def test_a_request_id_is_taken_and_returned() -> None:
    frontend = FakeFrontend()
    answer = await in_memory(frontend).client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "abc"})
    assert (answer.headers["x-request-id"], answer.headers["x-photon-replica"]) == ("abc", "replica-1")
    assert frontend.asks[0].origin.request_id == "abc" and answer.json()["id"] == "cmpl-abc"
    wrong = await in_memory(frontend).client.post(COMPLETIONS, json=PROMPT, headers={"x-request-id": "a" * 200})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "x-request-id"


async def test_every_answer_names_the_numerics_of_the_engine() -> None:
    frontend = FakeFrontend()
    for body in (PROMPT, PROMPT | {"stream": True}, {"prompt": 3}):
        frontend.numerics_version = "0a1b2c3d4e5f6071"
        answer = await in_memory(frontend).client.post(COMPLETIONS, json=body)
        assert answer.headers["x-photon-numerics"] == "0a1b2c3d4e5f6071"
        frontend.numerics_version = ""
        answer = await in_memory(frontend).client.post(COMPLETIONS, json=body)
        assert "x-photon-numerics" not in answer.headers


@pytest.mark.parametrize(("version", "told"), [("0a1b", "0.1.0-0a1b"), ("", "0.1.0")])
def test_the_fingerprint_changes_with_the_numerics(version: str, told: str) -> None:
    start = Start("r-1", "demo", 7, 1.0, release="0.1.0", numerics_version=version)
    assert head_of("cmpl-1", "text_completion", start)["system_fingerprint"] == told


async def test_a_deadline_ends_the_call() -> None:
    frontend = FakeFrontend()
    frontend.script = (for_ever,)
    headers = {"x-request-timeout-ms": "50"}
    answer = await in_memory(frontend).client.post(COMPLETIONS, json=PROMPT | {"stream": True}, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "DEADLINE_PASSED")
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "99999999999", "0" * 12 + "9" * 400, "1" * 5000])
async def test_a_wrong_deadline_is_refused(value: str) -> None:
    answer = await in_memory(FakeFrontend()).client.post(
        COMPLETIONS, json=PROMPT, headers={"x-request-timeout-ms": value}
    )
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "x-request-timeout-ms"


async def test_a_routers_time_for_the_first_token_bounds_the_wait_in_the_queue() -> None:
    frontend = FakeFrontend()
    await in_memory(frontend).client.post(COMPLETIONS, json=PROMPT, headers={"x-llm-d-slo-ttft-ms": "250"})
    assert frontend.asks[0].scheduling.max_queue_duration_s == 0.25


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry"),
    [
        (errors.QueueFull("full", retry_after_s=2.5), 429, "rate_limit_error", "true"),
        (errors.QuotaExceeded("over", retry_after_s=2.5), 429, "rate_limit_error", "true"),
        (errors.ModelLoading("loading"), 503, "server_error", "true"),
        (errors.Draining("draining"), 503, "server_error", "true"),
        (errors.FeatureNotSupported("no", field="chat"), 400, "invalid_request_error", "false"),
        (errors.PromptTooLong("long", field="text", needed=9, limit=8), 400, "invalid_request_error", "false"),
        (errors.KVCapacity("large", needed=9, limit=8), 400, "invalid_request_error", "false"),
        (errors.DuplicateRequestId("twice"), 409, "invalid_request_error", "false"),
        (errors.DeadlineUnreachable("late"), 504, "server_error", "false"),
        (errors.NumericFailure("NaN"), 500, "server_error", "false"),
        (RuntimeError("a prompt"), 500, "server_error", "false"),
    ],
)
async def test_a_refusal_has_its_status_and_says_whether_to_try_again(
    error: Exception, status: int, kind: str, retry: str
) -> None:
    frontend = FakeFrontend()
    frontend.refusals = [error]
    server = in_memory(frontend)
    answer = await server.client.post(COMPLETIONS, json=PROMPT | {"stream": True})
    body: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, body["type"], answer.headers["x-should-retry"]) == (status, kind, retry)
    assert body["code"] == getattr(error, "reason", "INTERNAL_FAILURE") and "a prompt" not in answer.text
    assert (body.get("needed"), body.get("limit")) == (getattr(error, "needed", None), getattr(error, "limit", None))
    if retry == "true":
        delay_s = getattr(error, "retry_after_s", None) or 1.0
        assert float(answer.headers["retry-after-ms"]) == delay_s * 1000
        assert int(answer.headers["retry-after"]) >= delay_s
    assert server.counts.calls == [(COMPLETIONS, "POST", status)]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
    ],
)
async def test_an_empty_object_is_a_wrong_request(path: str) -> None:
    with frontend(served(template="{{ messages[0].content }}")) as (real, _):
        answer = await in_memory(real).client.post(path, json={})
    assert answer.status_code == 400 and answer.json()["error"]["code"] != "INTERNAL_FAILURE"


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"echo": True}])
@pytest.mark.parametrize(
    ("prompt", "place", "needed", "limit"),
    [
        ([1, 512], "prompt[1]", 512, 511),
        ([[1], [2, -2]], "prompt[1][1]", -2, 0),
        ([[1] * 128], "prompt[0]", 129, 128),
    ],
)
async def test_a_wrong_prompt_is_named_by_its_place(
    prompt: list[Any], place: str, needed: int, limit: int, more: dict[str, Any]
) -> None:
    with frontend(served()) as (real, _):
        answer = await in_memory(real).client.post(COMPLETIONS, json={"prompt": prompt, **more})
    body = answer.json()["error"]
    assert (answer.status_code, body["param"], body["needed"], body["limit"]) == (400, place, needed, limit)


async def test_tools_that_the_template_cannot_write_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    body = {"messages": [{"role": "user", "content": "a"}], "tools": [tool]}
    with frontend(served(template="{{ messages[0].content }}")) as (real, _):
        answer = await in_memory(real).client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")


async def test_an_error_that_others_hold_is_left_as_it_is() -> None:
    shared = errors.InvalidConstraint("structured_output.regex: is wrong", field="structured_output.regex")
    fake = FakeFrontend()
    fake.refusals = [shared]
    answer = await in_memory(fake).client.post(COMPLETIONS, json=PROMPT | {"guided_regex": "("})
    assert answer.json()["error"]["param"] == "guided_regex"
    assert (shared.field, shared.message) == ("structured_output.regex", "structured_output.regex: is wrong")


async def test_prompts_of_a_call_wait_for_the_places_that_others_of_it_hold() -> None:
    """Each is refused while two run; the call as a whole has a result."""
    fake = Crowded()
    answer = await in_memory(fake).client.post(COMPLETIONS, json={"prompt": ["a"] * 6})
    assert answer.status_code == 200 and len(answer.json()["choices"]) == 6 and fake.most <= 2


async def test_prompts_that_never_began_are_recorded_when_the_call_fails() -> None:
    fake = FakeFrontend()
    fake.script = (for_ever,)
    headers = {"x-request-timeout-ms": "200"}
    await in_memory(fake).client.post(COMPLETIONS, json={"prompt": ["a"] * 40}, headers=headers)
    assert len(fake.asks) + len(fake.refused_requests) == 40


class Crowded(FakeFrontend):
    """A front end with two places."""

    num_running = most = 0

    async def generate(self, ask: Any, write: Any = None) -> Any:
        if self.num_running == 2:
            raise errors.QuotaExceeded("2 requests run; the limit of this key is 2")
        self.num_running += 1
        self.most = max(self.most, self.num_running)
        await asyncio.sleep(0.01)
        self.num_running -= 1
        return await super().generate(ask, write)


async def test_a_failure_after_output_is_an_event_without_done() -> None:
    frontend = FakeFrontend()
    frontend.script = (*frontend.script[:1], errors.EngineFailure("lost"))
    answer = await in_memory(frontend).client.post(COMPLETIONS, json=PROMPT | {"stream": True})
    *_, last = answer.text.strip().split("\n\n")
    assert answer.status_code == 200 and "ENGINE_FAILURE" in last and "[DONE]" not in answer.text


async def test_a_caller_that_leaves_cancels_its_request() -> None:
    frontend = FakeFrontend()
    frontend.script = (*frontend.script[:1], for_ever)
    server = in_memory(frontend)
    connection = Connected()
    app = server.client._transport.app  # type: ignore[attr-defined]
    call = asyncio.create_task(app(connection.scope(), connection.receive, connection.send))
    await asyncio.wait_for(connection.has_output.wait(), 120)
    connection.leave()
    await asyncio.wait_for(call, 120)
    assert frontend.streams[0].closed.is_set() and server.counts.calls == [(COMPLETIONS, "POST", 499)]


class Connected:
    """The connection of one streaming call, which can be lost."""

    def __init__(self) -> None:
        self.has_output = asyncio.Event()
        self._callbacks: list[Any] = []

    def on_lost(self, callback: Any) -> None:
        self._callbacks.append(callback)

    def free_body(self) -> None:
        pass

    def leave(self) -> None:
        for callback in self._callbacks:
            callback()

    def scope(self) -> dict[str, Any]:
        return {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 4711),
            "extensions": {"photon.connection": self},
        }

    async def receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b'{"prompt": "a", "stream": true}', "more_body": False}

    async def send(self, message: Any) -> None:
        if message.get("body"):
            self.has_output.set()
