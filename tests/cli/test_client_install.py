"""Every verb in an install without the extra `serve`: it works, or prints one line with what to install.

`.ci/package` runs them in a real install.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc.cli.main import cli
from photon_grpc.cli.server_libraries import HTTP_LIBRARIES, SERVER_LIBRARIES
from photon_grpc.v1 import inference_pb2 as pb
from tests.client.fake_server import message, serving_in_a_thread

#: Of the extras that a client install lacks, what the verbs could import.
LACKING = {
    *SERVER_LIBRARIES,
    *HTTP_LIBRARIES,
    "llguidance",
    "huggingface_hub",
    "uvloop",
    "triton",
    "transformers",
    "matplotlib",
}

#: Runs command lines one after the other as if LACKING were not installed; prints what became of each.
RUN = """
import contextlib, importlib.util, io, json, sys
lacking, calls = json.load(sys.stdin)
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in lacking else found(name, package)
from photon_grpc.cli.main import main
told = []
for call in calls:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(call)
        except BaseException as error:
            code = f"{type(error).__name__}: {error}"
    told.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(told))
"""

WORKS, MISSING, PROBLEMS = (0, ""), (2, "pip install '.[serve]'"), (1, "")


def test_every_verb_works_or_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('"x"\n')
    (tmp_path / "tokenizer.model").write_bytes(b"")
    step = {"step": 1, "start": 0.0}
    (tmp_path / "trace").write_text(json.dumps(step) + "\n")
    with serving_in_a_thread([message("hi", start=True, finish=pb.FINISH_REASON_EOS)]) as fake:
        at = ["--target", fake.target]
        calls = {
            "serve": (["serve"], MISSING),
            "run": (["run"], MISSING),
            "service": (["service", "explain", f"{tmp_path}/in.binpb:a.Service.Method"], MISSING),
            "doctor": (["doctor", "--listen", "127.0.0.1:0"], PROBLEMS),
            "calibrate": (["calibrate", str(tmp_path)], MISSING),
            "quantize": (["quantize", str(tmp_path), "--output", f"{tmp_path}/new"], MISSING),
            "convert": (["convert", str(tmp_path)], (2, "pip install '.[convert]'")),
            "health": (["health", *at], WORKS),
            "generate": (["generate", "x", *at], WORKS),
            "chat": (["chat", *at], WORKS),
            "batch": (["batch", f"{tmp_path}/in.jsonl", f"{tmp_path}/out.jsonl", *at], WORKS),
            "bench": (["bench", "--requests", "1", "--plot", f"{tmp_path}/p.svg", *at], (2, "pip install '.[plot]'")),
            "keys": (["keys", "new"], WORKS),
            # The stand-in has no AdminService: they come as far as its answer.
            "top": (["top", "--once", *at], (1, "FEATURE_NOT_SUPPORTED")),
            "quarantine": (["quarantine", *at], (1, "FEATURE_NOT_SUPPORTED")),
            "trace": (["trace", f"{tmp_path}/trace"], (2, "not a step trace")),
        }
        assert calls.keys() == cli.commands.keys()
        given = json.dumps([sorted(LACKING), [call for call, _ in calls.values()]])
        done = subprocess.run([sys.executable, "-c", RUN], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (verb, (_, (code, words))), told in zip(calls.items(), json.loads(done.stdout), strict=True):
        assert (verb, told[0]) == (verb, code), told
        assert words in told[2], (verb, told)
        assert code == 0 or verb == "doctor" or told[2].count("\n") == 1, (verb, told)


@pytest.mark.parametrize("verb", cli.commands)
def test_the_package_check_runs_it(verb: str) -> None:
    text = (Path(__file__).parents[2] / ".ci" / "package").read_text()
    assert f"\nruns {verb} " in text
