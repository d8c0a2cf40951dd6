"""Small tokenizers of the kinds that real model directories have, trained on a few lines."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "The quick brown fox jumps over the lazy dog. Ωmega, naïve café, 日本語, 🙂🙃, 12345 67890",
    "<s> </s> system user assistant [INST] hello world, what is the time?",
]
LLAMA_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level() -> Tokenizer:
    """Train one like Llama 3's: special tokens beyond the model's vocabulary, BOS, ignore_merges."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    specials = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    bos = tokenizer.token_to_id("<|begin_of_text|>")
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", bos)]),
        ]
    )
    return tokenizer


def qwen_like() -> Tokenizer:
    """Train one with NFC, no BOS, special and ordinary added tokens, and one that strips white space to its right."""
    tokenizer = byte_level()
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = []
    spec["post_processor"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", AddedToken("<|pad|>", rstrip=True, normalized=False)]
    )
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=True), AddedToken("<tool_call>")]
    )
    return tokenizer


def llama2_like() -> Tokenizer:
    """Train a converted SentencePiece BPE: special tokens in the vocabulary, byte fallback, a space before the text."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(["▁" + text for text in TEXT], trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {piece: id for id, piece in enumerate([*pieces, *(p for p in model["vocab"] if p not in pieces)])}
    # Merges that spell a special token, as some conversions have them.
    for merge in (["<", "/s"], ["</s", ">"], ["/", "s"], ["</", "s>"]):
        for piece in (*merge, "".join(merge)):
            vocab.setdefault(piece, len(vocab))
    merges = [*(tuple(m) for m in model["merges"]), ("/", "s"), ("<", "/s"), ("</s", ">")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace_unigram() -> Tokenizer:
    """Train a SentencePiece Unigram with Metaspace whose special tokens are pieces that the model could match."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=160, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken("<|im_end|>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return tokenizer


def wordpiece() -> Tokenizer:
    """Train one like BERT's, whose decoder joins words, which no table can do."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "qwen_like": qwen_like,
    "llama2_like": llama2_like,
    "metaspace_unigram": metaspace_unigram,
    "wordpiece": wordpiece,
}


@lru_cache
def definition(kind: str) -> str:
    """Return the tokenizer.json of a kind."""
    return KINDS[kind]().to_str()
