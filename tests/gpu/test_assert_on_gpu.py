"""A kernel's assert loses the device to the engine's process.

The request that caused it is found among those computed with it, and refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import grpc
import pytest
from tokenizers import Tokenizer

from tests.service.running import RunningService, client, started
from tests.service.test_quarantine import check_engine_dies_of, failure_of
from tests.service.tiny import write_tiny_model

pytestmark = pytest.mark.gpu

_LAUNCH = (
    "import asyncio, sys\n"
    "from photon_grpc.config.resolve import resolve\n"
    "from photon_grpc.service.logs.log_pipe import log_to_stderr\n"
    "from photon_grpc.service.supervisor import Supervisor\n"
    "given = dict(model=sys.argv[1], load_format='dummy', device='cuda', listen=['127.0.0.1:0'], num_blocks=2048)\n"
    "config = resolve(given | dict(max_num_seqs=8), {}).config\n"
    "log_to_stderr('info')\n"
    "service = Supervisor(config, engine='tests.service.stand_ins.asserting_engine')\n"
    "sys.exit(asyncio.run(service.run()))\n"
)
_POISON, _INNOCENT = "zzz", ("def", "class", "import")
_READY_S = 150.0


@pytest.fixture
def service(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningService]:
    model = write_tiny_model(tmp_path_factory.mktemp("assert") / "tiny")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    monkeypatch.setenv("ASSERT_BY", " ".join(map(str, tokenizer.encode(_POISON).ids)))
    with started([sys.executable, "-c", _LAUNCH, str(model)]) as service:
        yield service


@pytest.mark.timeout(500)
def test_an_assert_costs_two_engines_and_then_its_request_is_refused(service: RunningService) -> None:
    with client(service.wait_ready(limit_s=_READY_S)[0]) as call:
        expected = {text: call.generate(text, 8).outputs[0].text for text in _INNOCENT}
        for death in (1, 2):
            engine = service.children()["engine"]
            # As their clients try them again.
            check_engine_dies_of(call, _POISON, beside=_INNOCENT)
            service.wait_ready(death + 1, limit_s=_READY_S)
            assert service.children()["engine"] != engine
        for _ in range(3):
            assert failure_of(call, _POISON) == (grpc.StatusCode.INTERNAL, "REQUEST_QUARANTINED")
        assert {text: call.generate(text, 8).outputs[0].text for text in _INNOCENT} == expected
        assert service.children()["engine"] != engine
