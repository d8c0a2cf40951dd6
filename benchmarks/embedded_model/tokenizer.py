"""The byte-level BPE tokenizer of the embedded models, its special tokens and its chat form.

Every text round-trips: all 256 bytes are in the vocabulary and nothing is normalised.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, EOS, PAD, END = "<|bos|>", "<|eos|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, END, "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
BOS_ID, EOS_ID, PAD_ID, END_ID = range(4)

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{- raise_exception('unknown role: ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def render_document(text: str) -> str:
    """A source text as the models see it."""
    return f"{BOS}{text}{EOS}"


def render_chat(messages: Iterable[Mapping[str, str]]) -> str:
    """A finished conversation as the models see it: what CHAT_TEMPLATE renders, and the end of the document."""
    turns = "".join(f"<|{message['role']}|>{message['content'].strip()}{END}" for message in messages)
    return f"{BOS}{turns}{EOS}"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE with GPT-2's word pattern: an indented line costs one token for its line break and indent."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS}:1 $B:1", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[np.ndarray]:
    """Rendered documents → uint16 ids each; the special tokens written in them are parsed."""
    # An encoding holds several times more than its ids: only some are alive at a time.
    parts = (documents[start : start + 20_000] for start in range(0, len(documents), 20_000))
    return [
        np.asarray(encoding.ids, dtype=np.uint16)
        for part in parts
        for encoding in tokenizer.encode_batch_fast(part, add_special_tokens=False)
    ]


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": SPECIAL_TOKENS[3:],
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
