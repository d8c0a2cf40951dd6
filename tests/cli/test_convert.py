"""`convert`: the ids are those of SentencePiece itself, nothing wrong is written, nothing of the directory runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from photon_grpc import demo
from photon_grpc.cli import main
from photon_grpc.frontend.tokenizer import Tokenizer

spm = pytest.importorskip("sentencepiece")

TEXT = Path(__file__).read_text() * 3 + "Ein Fuchs, größer als ein Hase; нет; 世界 " * 20
OTHERS = ("the quick   brown fox\n\n  jumps", "x = [1, 2, 3]\t# ok", "ß 世界 нет \U0001f600")


#: In a process of its own: amid a long session of tests the library's trainer has ended the process.
TRAIN = """
import json, sys, sentencepiece
options = json.load(sys.stdin)
with open(sys.argv[1], "wb") as file:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(options.pop("text").splitlines()), model_writer=file, **options
    )
"""


def model_dir(tmp_path: Path, **trainer: object) -> Path:
    """A directory with a SentencePiece vocabulary as Llama 2 has one."""
    llama = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
    options = {"text": TEXT, "model_type": "bpe", "vocab_size": 500, "minloglevel": 2, **llama, **trainer}
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "tokenizer.model")]
    subprocess.run(command, input=json.dumps(options), text=True, check=True)
    (tmp_path / "config.json").write_bytes((demo.TARGET / "config.json").read_bytes())
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    return tmp_path


def test_a_tokenizer_model_becomes_a_tokenizer_json_of_the_same_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = model_dir(tmp_path)
    assert main.main(["convert", str(directory)]) == 0
    assert "tokenizer.json: 500 tokens" in capsys.readouterr().out
    ours = Tokenizer.from_file(directory / "tokenizer.json")
    reference = spm.SentencePieceProcessor(str(directory / "tokenizer.model"))
    for text in (*map(str.strip, TEXT.splitlines()[:40]), *OTHERS):
        assert list(ours.encode(text, add_special_tokens=False)) == reference.encode(text)
    assert main.main(["convert", str(directory)]) == 2
    assert "--force replaces it" in capsys.readouterr().err


def test_ids_that_would_differ_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = model_dir(tmp_path, normalization_rule_name="nmt_nfkc_cf", remove_extra_whitespaces=True)
    assert main.main(["convert", str(directory)]) == 2
    assert "not written" in capsys.readouterr().err
    assert sorted(file.name for file in directory.iterdir()) == [
        "config.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\x80\x04no vocabulary", "cannot read the tokenizer"), (None, "nothing to convert")],
)
def test_a_vocabulary_that_is_none_is_one_line(
    tmp_path: Path, content: bytes | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = model_dir(tmp_path)
    if content is None:
        (directory / "tokenizer.model").unlink()
    else:
        (directory / "tokenizer.model").write_bytes(content)
    assert main.main(["convert", str(directory)]) == 2
    assert told in capsys.readouterr().err
    assert not (directory / "tokenizer.json").exists()


def test_code_of_the_directory_is_not_run(tmp_path: Path) -> None:
    directory = model_dir(tmp_path)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    main.main(["convert", str(directory)])
    assert not (tmp_path / "ran").exists()
