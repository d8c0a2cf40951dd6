"""What `serve` runs with: flag beats variable beats default; what is wrong is named with what is allowed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon_grpc.config import flags
from photon_grpc.config import settings as catalogue
from photon_grpc.config.flag_field import NumberRange, flag
from photon_grpc.config.flags import ServeConfig, ServerConfig
from photon_grpc.config.resolve import is_model_id, resolve, split_address
from photon_grpc.config.settings import Setting, settings
from photon_grpc.errors import ConfigError


def value_of(config: ServeConfig, setting: Setting) -> object:
    return getattr(getattr(config, setting.section), setting.name)


def another(setting: Setting) -> str:
    """Return a text for a value other than the default."""
    if setting.name == "admin_listen":
        return "unix:/run/photon-admin.sock"
    if setting.name in ("listen", "metrics_listen", "http_listen"):
        return "127.0.0.1:1234"
    if setting.name == "http_allowed_origin":
        return "https://chat.example.org"
    if setting.name == "otlp_endpoint":
        return "https://collector:4317"
    if setting.name == "model":
        return "organisation/name"
    if setting.name == "speculative_model":
        return "grammar"
    if setting.choices:
        default = setting.default if setting.many else (setting.default,)
        return next(choice for choice in setting.choices if choice not in default)
    texts = {
        bool: str(not setting.default).lower(),
        int: str(setting.bounds.at_most or 2345),
        float: "0.5",
        str: "word",
    }
    return texts[setting.kind]


def test_unset_settings_have_their_defaults() -> None:
    resolved = resolve({}, {})
    assert resolved.config == ServeConfig()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.warnings == ()


@pytest.mark.parametrize("address", ["unix:/run/photon.sock", "9090", "host:http"])
def test_metrics_are_served_at_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--metrics-listen: .*(HOST:PORT|not a port)"):
        resolve({"metrics_listen": address}, {})


@pytest.mark.parametrize("address", ["unix:/run/photon.sock", "8000", "host:http"])
def test_the_http_server_is_at_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--http-listen: .*(HOST:PORT|not a port)"):
        resolve({"http_listen": address}, {})


HOSTS = ["llm.example.org", "LLM", "10.0.0.7", "[2001:db8::1]", "my_host"]
ORIGINS = [
    "https://chat.example.org",
    "http://localhost:3000",
    "https://[::1]:8443",
    "vscode-webview://a1b2",
    "http://h:443",
]


def test_hosts_and_web_pages_that_may_call_are_taken_as_they_are_written() -> None:
    given_ = {"http_listen": "h:1", "http_allowed_host": HOSTS, "http_allowed_origin": ORIGINS}
    server = resolve(given_, {}).config.server
    assert (list(server.http_allowed_host), list(server.http_allowed_origin)) == (HOSTS, ORIGINS)
    assert server.has_metrics


@pytest.mark.parametrize("host", ["https://h", "h:8000", "h/x", "*", "*.example.org", "a b", "-h", "[::1"])
def test_a_host_is_a_name_alone(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--http-allowed-host: .* is not a host name"):
        resolve({"http_listen": "h:1", "http_allowed_host": [host]}, {})


@pytest.mark.parametrize(
    ("origin", "why"),
    [
        ("*", "every web page"),
        ("https://*.example.org", "every web page"),
        ("null", "sandboxed"),
        ("chat.example.org", "not an origin"),
        ("https://h/", "not an origin"),
        ("https://h/chat", "not an origin"),
        ("https://H", "lower case"),
        ("https://u@h", "not an origin"),
        ("https://h:443", "write https://h"),
        ("http://h:80", "write http://h"),
        ("http://h:70000", "above 65535"),
        ("http://h:", "not an origin"),
        ("file://", "not an origin"),
    ],
)
def test_a_web_page_is_named_as_its_browser_does(origin: str, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"--http-allowed-origin: .*{why}"):
        resolve({"http_listen": "h:1", "http_allowed_origin": [origin]}, {})


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"num_speculative_tokens": "3"}, "--num-speculative-tokens: has no effect without --speculative-model"),
        ({"speculation_control": "fixed"}, "--speculation-control: has no effect without --speculative-model"),
        ({"speculative_model": "nope"}, "--speculative-model: nope is none of ngram, grammar, and no directory"),
        *(
            ({"speculative_model": "ngram", "num_speculative_tokens": wrong}, f"one of 1, 3, 5, 7; got '{wrong}'")
            for wrong in ("0", "2", "8", "three")
        ),
    ],
)
def test_settings_that_cannot_draft_are_refused(given: dict[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        resolve(given, {})


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_every_field_can_be_set_by_variable_and_by_flag(setting: Setting) -> None:
    # Neither goes without the other, nor a grace without an age, a label without metrics, a host without a server, a
    # number of drafts without a drafter.
    beside = {"PHOTON_TLS_CERT": "server.pem", "PHOTON_TLS_KEY": "server.key", "PHOTON_MAX_CONNECTION_AGE": "9"}
    beside |= {"PHOTON_METRICS_LISTEN": "127.0.0.1:9", "PHOTON_HTTP_LISTEN": "127.0.0.1:8"}
    beside |= {"PHOTON_SPECULATIVE_MODEL": "ngram"}
    by_variable = resolve({}, beside | {setting.variable: another(setting)})
    by_flag = resolve({setting.name: [another(setting)] if setting.many else another(setting)}, beside)
    assert value_of(by_variable.config, setting) == value_of(by_flag.config, setting) != setting.default
    assert by_variable.origins[setting.name] == setting.variable
    assert by_flag.origins[setting.name] == setting.flag


def test_a_new_field_needs_no_further_line(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = make_dataclass(
        "Grown",
        [("warp_factor", "int | None", flag(None, "How fast.", bounds=NumberRange(at_least=1)))],
        bases=(ServerConfig,),
        frozen=True,
    )
    monkeypatch.setattr(flags, "ServerConfig", grown)
    for cached in (catalogue.settings, catalogue.by_name):
        cached.cache_clear()
    try:
        resolved = resolve({}, {"PHOTON_WARP_FACTOR": "9"})
        assert resolved.config.server.warp_factor == 9  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match=r"--warp-factor: must be .* at least 1; got '0'"):
            resolve({"warp_factor": "0"}, {})
    finally:
        for cached in (catalogue.settings, catalogue.by_name):
            cached.cache_clear()


def test_names_of_settings_are_unique_over_the_sections() -> None:
    names = [setting.name for setting in settings()]
    assert len(names) == len(set(names)) == len(catalogue.by_name())
    assert len(names) == sum(len(fields(catalogue.section_class(section))) for section in fields(ServeConfig))


def test_a_flag_overrides_a_variable() -> None:
    resolved = resolve({"max_num_seqs": "8"}, {"PHOTON_MAX_NUM_SEQS": "9", "PHOTON_BLOCK_SIZE": "32"})
    assert resolved.config.scheduler.max_num_seqs == 8
    assert resolved.config.cache.block_size == 32
    assert resolved.origins["max_num_seqs"] == "--max-num-seqs"
    assert resolved.origins["block_size"] == "PHOTON_BLOCK_SIZE"


def test_a_variable_holds_several_values_between_commas() -> None:
    resolved = resolve({}, {"PHOTON_LISTEN": "127.0.0.1:1, unix:/run/photon.sock,"})
    assert resolved.config.server.listen == ("127.0.0.1:1", "unix:/run/photon.sock")


def test_an_empty_variable_counts_as_unset() -> None:
    resolved = resolve({}, {"PHOTON_SEED": "", "PHOTON_LISTEN": " "})
    assert resolved.config == ServeConfig()


@pytest.mark.parametrize("text", ["1", "true", "YES", "On"])
def test_switches_in_the_environment(text: str) -> None:
    assert resolve({}, {"PHOTON_ENFORCE_EAGER": text}).config.device.enforce_eager is True


def test_python_callers_give_values_instead_of_texts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    config = resolve({"model": tmp_path, "max_num_seqs": 3, "enable_prefix_caching": False}, {}).config
    assert config.model.model == str(tmp_path)
    assert config.scheduler.max_num_seqs == 3
    assert config.cache.enable_prefix_caching is False


def test_a_directory_without_weights_is_refused_unless_they_are_random(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no \*\.safetensors; --load-format dummy"):
        resolve({"model": tmp_path}, {})
    assert resolve({"model": tmp_path, "load_format": "dummy"}, {}).config.model.model == str(tmp_path)


def test_port_0_may_be_given_more_than_once() -> None:
    given_ = {"listen": ("h:0", "h:0"), "metrics_listen": "h:0"}
    assert resolve(given_, {}).config.server.listen == ("h:0", "h:0")


@pytest.mark.parametrize(
    ("given_", "environ", "told"),
    [
        ({"max_num_seqs": "0"}, {}, ["--max-num-seqs", "'0'", "at least 1"]),
        ({"max_num_seqs": "many"}, {}, ["--max-num-seqs", "'many'", "whole number"]),
        ({"max_num_seqs": 2.5}, {}, ["--max-num-seqs", "2.5", "whole number"]),
        ({"seed": True}, {}, ["--seed", "True"]),
        ({"seed": str(2**64)}, {}, ["--seed", "at most 18446744073709551615"]),
        ({"gpu_memory_utilization": "0"}, {}, ["--gpu-memory-utilization", "above 0", "at most 1"]),
        ({"gpu_memory_utilization": "nan"}, {}, ["--gpu-memory-utilization", "'nan'"]),
        ({}, {"PHOTON_FRONTENDS": "0"}, ["PHOTON_FRONTENDS", "'0'", "at least 1"]),
        ({}, {"PHOTON_BLOCK_SIZE": "-1"}, ["PHOTON_BLOCK_SIZE", "'-1'", "at least 1"]),
        ({}, {"PHOTON_ENFORCE_EAGER": "perhaps"}, ["PHOTON_ENFORCE_EAGER", "'perhaps'", "true or false"]),
        ({"dtype": "float8"}, {}, ["--dtype", "'float8'", "auto, float32, bfloat16, float16"]),
        ({"model": "/no/such/directory"}, {}, ["--model", "/no/such/directory"]),
        ({}, {"PHOTON_MODEL": "/no/such/directory"}, ["PHOTON_MODEL", "/no/such/directory"]),
        ({"listen": ["localhost"]}, {}, ["--listen", "'localhost'", "HOST:PORT"]),
        ({"listen": ["a..b:5000"], "frontends": "2"}, {}, ["--listen", "'a..b'", "not a host name"]),
        ({"metrics_listen": "a..b:9000"}, {}, ["--metrics-listen", "'a..b'", "not a host name"]),
        ({"listen": ["127.0.0.1:70000"]}, {}, ["--listen", "'70000'", "65535"]),
        ({}, {"PHOTON_LISTEN": "unix:"}, ["PHOTON_LISTEN", "unix:PATH"]),
        ({}, {"PHOTON_LISTEN": ","}, ["PHOTON_LISTEN", "at least one"]),
        ({"listen": ["h:1", "h:2", "h:1"]}, {}, ["--listen", "h:1 is given more than once"]),
        ({"listen": ["h:1"], "metrics_listen": "h:1"}, {}, ["--metrics-listen", "h:1 is given more than once"]),
        ({"listen": ["unix:/s"]}, {"PHOTON_ADMIN_LISTEN": "unix:/s"}, ["--admin-listen", "unix:/s is given more"]),
        ({"metrics_label": ["team"]}, {}, ["--metrics-label", "without --metrics-listen or --http-listen"]),
        ({"http_allowed_host": ["h"]}, {}, ["--http-allowed-host", "without --http-listen"]),
        ({"http_allowed_origin": ["http://h"]}, {}, ["--http-allowed-origin", "without --http-listen"]),
        ({"listen": ["h:1"], "http_listen": ["h:1"]}, {}, ["--http-listen", "h:1 is given more than once"]),
        ({"metrics_label": ["Team"], "metrics_listen": "h:1"}, {}, ["--metrics-label", "Team", "a-z, 0-9 and _"]),
        (
            {"metrics_label": [f"k{number}" for number in range(17)], "metrics_listen": "h:1"},
            {},
            ["--metrics-label", "17 labels", "16 are allowed"],
        ),
        ({"max_num_sequences": 3}, {}, ["max_num_sequences", "did you mean max_num_seqs"]),
    ],
)
def test_an_invalid_value_is_named_with_the_allowed_ones(
    given_: dict[str, object], environ: dict[str, str], told: list[str]
) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve(given_, environ)
    assert all(word in str(raised.value) for word in told), str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_tilde_without_a_home_is_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="no directory ~/models/mine"):
        resolve({"model": "~/models/mine"}, {})


def test_a_directory_without_config_json_and_a_file_have_different_errors(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ConfigError, match=r"holds no .*config\.json"):
        resolve({"model": str(tmp_path)}, {})
    with pytest.raises(ConfigError, match="is a file"):
        resolve({"model": str(file)}, {})


def test_an_existing_directory_is_no_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_model_id("organisation/name")
    (tmp_path / "organisation" / "name").mkdir(parents=True)
    assert not is_model_id("organisation/name")
    assert not is_model_id("a/b/c")
    assert not is_model_id("../name")


def test_an_unknown_variable_is_warned_about_with_the_nearest_name() -> None:
    resolved = resolve({}, {"PHOTON_MAX_NUM_SEQ": "3", "PHOTON_TARGET": "127.0.0.1:1", "HOME": "/"})
    assert resolved.warnings == (
        "PHOTON_MAX_NUM_SEQ in the environment is not a setting; did you mean PHOTON_MAX_NUM_SEQS?",
    )
    assert resolved.config == ServeConfig()


@pytest.mark.parametrize("variable", ["PHOTON_NOPE", "PHOTON_FOO", "PHOTON_X", "PHOTON_"])
def test_an_unknown_variable_that_resembles_none_is_warned_about_without_a_suggestion(variable: str) -> None:
    assert resolve({}, {variable: "1"}).warnings == (f"{variable} in the environment is not a setting",)


def service_links(service: str, port_name: str) -> dict[str, str]:
    """Return the variables that a kubelet sets in every pod for a Service (kubernetes/pkg/kubelet/envvars)."""
    url, link = "tcp://10.96.7.3:50051", f"{service}_PORT_50051_TCP"
    return {
        f"{service}_SERVICE_HOST": "10.96.7.3",
        f"{service}_SERVICE_PORT": "50051",
        f"{service}_SERVICE_PORT_{port_name}": "50051",
        f"{service}_PORT": url,
        link: url,
        f"{link}_PROTO": "tcp",
        f"{link}_PORT": "50051",
        f"{link}_ADDR": "10.96.7.3",
    }


@pytest.mark.parametrize("service", ["PHOTON", "PHOTON_GRPC", "PHOTON_METRICS_LISTEN"])
def test_variables_that_kubernetes_sets_for_a_service_are_ignored(service: str) -> None:
    resolved = resolve({}, service_links(service, "GRPC_WEB"))
    assert (resolved.config, resolved.warnings) == (ServeConfig(), ())


def test_no_setting_has_the_name_of_a_variable_that_kubernetes_sets() -> None:
    """Whatever the Service is called: a setting `model` and a Service photon-model would not meet."""
    invented = ("_SERVICE_HOST", "_SERVICE_PORT", "_PORT", "_TCP")
    assert not [setting.variable for setting in settings() if setting.variable.endswith(invented)]


def test_a_port_set_by_a_person_is_warned_about() -> None:
    (warning,) = resolve({}, {"PHOTON_PORT": "8080"}).warnings
    assert warning.startswith("PHOTON_PORT in the environment is not a setting")


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:50051", ("127.0.0.1", 50051)),
        ("localhost:0", ("localhost", 0)),
        ("[::]:50051", ("[::]", 50051)),
        ("unix:/run/photon.sock", ("unix:/run/photon.sock", 0)),
    ],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", ":", ":1", "::1:1", "host:", "host:-1", "host:１", "unix:", "unix://"])
def test_invalid_addresses_are_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        split_address(address)


@given(st.dictionaries(st.sampled_from([setting.variable for setting in settings()]), st.text(max_size=12)))
def test_no_environment_raises_anything_but_config_error(environ: dict[str, str]) -> None:
    with suppress(ConfigError):
        resolved = resolve({}, environ)
        for setting in settings():
            said = bool(environ.get(setting.variable, "").strip())
            assert (resolved.origins[setting.name] == setting.variable) == said
