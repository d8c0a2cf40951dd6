"""A model directory by somebody who wants to run code: nothing of it runs, nothing is asked of the network."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc import demo

#: Python itself tells of whatever is done below it: a pickle, a process, a connection; a file of the directory that is
#: compiled, run, loaded or written to. What libraries do when they are imported is theirs.
PROGRAM = """
import os
import pickle
import sys
import photon_grpc.compose.assemble
from photon_grpc import LLM

directory, seen = sys.argv[1], []
anywhere = {"pickle.find_class", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork",
            "socket.connect", "socket.getaddrinfo", "urllib.Request"}
within = {"compile", "exec", "import", "ctypes.dlopen"}

def watch(event, arguments):
    told = f"{event} {arguments[:3]}"
    is_written = event == "open" and set(str(arguments[1])) & set("wax+")
    if event in anywhere or (directory in told and (event in within or is_written)):
        seen.append(told)

sys.addaudithook(watch)
with LLM(directory, max_model_len=64, num_blocks=8) as llm:
    print(len(llm.generate("def fib(n):", max_tokens=4, temperature=0)[0].text))
    print(len(llm.generate("hi", chat=True, max_tokens=2)[0].text))
print(seen)
print(os.path.exists(sys.argv[2]))
with open(f"{directory}/model.pt", "rb") as file:
    pickle.load(file)
print(seen)
"""

HOSTILE = "import pathlib; pathlib.Path({marker!r}).touch()\n"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "it-ran"


@pytest.fixture
def directory(tmp_path: Path, marker: Path) -> Path:
    """Yield the embedded model, and the list of everything in it that a loader has run."""
    path = tmp_path / "model"
    shutil.copytree(demo.DRAFT, path)
    code = HOSTILE.format(marker=str(marker))
    for name in ("__init__", "modeling_evil", "configuration_evil", "tokenization_evil", "sitecustomize", "conftest"):
        (path / f"{name}.py").write_text(code)
    # A pickle that calls: what torch.load would do.
    pickled = f"cos\nsystem\n(S'touch {marker}'\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl", "training_args.bin", "adapter_model.bin"):
        (path / name).write_bytes(pickled)
    classes = {
        "AutoConfig": "configuration_evil.Config",
        "AutoModelForCausalLM": "modeling_evil.Model",
        "AutoTokenizer": ["tokenization_evil.Tokenizer", None],
    }
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        written = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(written | {"auto_map": classes}))
    return path


def test_nothing_of_it_runs(directory: Path, marker: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(directory), str(marker)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory.parent)
    assert done.returncode == 0, done.stderr
    plain, chat, seen, has_run, noticed = done.stdout.splitlines()
    assert int(plain) and int(chat)
    assert seen == "[]"
    assert has_run == "False"
    # What a loader of pickles does with such a directory is seen.
    assert "pickle.find_class" in noticed and "os.system" in noticed
    assert marker.exists()
