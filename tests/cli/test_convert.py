"""`convert`: the ids are those of SentencePiece itself, nothing wrong is written, nothing of the directory runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from photon_grpc import demo
from photon_grpc.frontend.input.tokenizer import Tokenizer

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sentencepiece") is None, reason="needs sentencepiece")

TEXT = Path(__file__).read_text() * 3 + "Ein Fuchs, größer als ein Hase; нет; 世界 " * 20
OTHERS = ("the quick   brown fox\n\n  jumps", "x = [1, 2, 3]\t# ok", "ß 世界 нет \U0001f600")


#: Trains, converts and encodes as it is told, a line each. Amid a long session of tests SentencePiece has aborted the
#: process it was loaded in.
CHILD = """
import contextlib, io, json, sys
import sentencepiece
from photon_grpc.cli import main
for line in sys.stdin.buffer:
    what, *told = json.loads(line)
    out, err, result = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if what == "convert":
            result = main.main(["convert", *told])
        elif what == "encode":
            pieces = sentencepiece.SentencePieceProcessor(told[0])
            result = [pieces.encode(text) for text in told[1]]
        else:
            with open(told[0], "wb") as file:
                options = {"sentence_iterator": iter(told[1].splitlines()), "model_writer": file, **told[2]}
                sentencepiece.SentencePieceTrainer.train(**options)
    print(json.dumps([result, out.getvalue(), err.getvalue()]), flush=True)
"""


class Child:
    """A process that has SentencePiece loaded."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", CHILD]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def told(self, *what: Any) -> tuple[Any, str, str]:
        """Return the result of a call, and its stdout and stderr."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(what), file=self.process.stdin, flush=True)
        result, out, err = json.loads(self.process.stdout.readline())
        return result, out, err

    def model_dir(self, directory: Path, **trainer: object) -> Path:
        """Make a directory with a SentencePiece vocabulary like Llama 2's."""
        llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
        options = {"model_type": "bpe", "vocab_size": 500, "minloglevel": 2, **llama, **trainer}
        self.told("train", str(directory / "tokenizer.model"), TEXT, options)
        (directory / "config.json").write_bytes((demo.TARGET / "config.json").read_bytes())
        names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
        (directory / "tokenizer_config.json").write_text(json.dumps(names))
        return directory


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    child = Child()
    yield child
    child.process.kill()
    child.process.wait()


def test_a_tokenizer_model_becomes_a_tokenizer_json_of_the_same_ids(child: Child, tmp_path: Path) -> None:
    directory = child.model_dir(tmp_path)
    code, out, _ = child.told("convert", str(directory))
    assert code == 0 and "tokenizer.json: 500 tokens" in out
    ours = Tokenizer.from_file(directory / "tokenizer.json")
    texts = [*map(str.strip, TEXT.splitlines()[:40]), *OTHERS]
    reference, _, _ = child.told("encode", str(directory / "tokenizer.model"), texts)
    assert [list(ours.encode(text, add_special_tokens=False)) for text in texts] == reference
    code, _, err = child.told("convert", str(directory))
    assert code == 2 and "--force replaces it" in err


def test_ids_that_would_differ_are_not_written(child: Child, tmp_path: Path) -> None:
    directory = child.model_dir(tmp_path, normalization_rule_name="nmt_nfkc_cf", remove_extra_whitespaces=True)
    code, _, err = child.told("convert", str(directory))
    assert code == 2 and "not written" in err
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\x80\x04no vocabulary", "cannot read the tokenizer"), (None, "nothing to convert")],
)
def test_an_invalid_vocabulary_is_reported_in_one_line(
    child: Child, tmp_path: Path, content: bytes | None, told: str
) -> None:
    directory = child.model_dir(tmp_path)
    if content is None:
        (directory / "tokenizer.model").unlink()
    else:
        (directory / "tokenizer.model").write_bytes(content)
    code, _, err = child.told("convert", str(directory))
    assert code == 2 and told in err
    assert not (directory / "tokenizer.json").exists()


def test_code_of_the_directory_is_not_run(child: Child, tmp_path: Path) -> None:
    directory = child.model_dir(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    child.told("convert", str(directory))
    assert not (tmp_path / "ran").exists()
