"""A model of lm-evaluation-harness that asks a photon-grpc server over gRPC.

Every request is a call of its own and many run at a time, so that the server makes the batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from photon_grpc.cli.terminal.connection import connection
from photon_grpc.client import SyncClient

#: A context and a continuation as lm_eval passes them: as text, then as ids.
Pair = tuple[tuple[str, str] | None, list[int], list[int]]
#: Tokens of a request beyond its prompt: a score costs one of output.
_OUTPUT = 1
_NOT_OURS = ("do_sample", "until", "max_gen_toks")


@register_model("photon")
class PhotonLM(TemplateLM):
    """`--model photon --model_args target=HOST:PORT`. Key and certificates come from the environment, as in the CLI."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        model: str = "",
        concurrency: int = 64,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        **_of_other_models: Any,
    ) -> None:
        """Connect. Unset, BOS is added as the tokenizer does it, and is the prefix; without BOS, EOS is."""
        super().__init__()
        self._client = SyncClient(target, **connection())
        self._facts = self._client.model(model)
        self._pool = ThreadPoolExecutor(int(concurrency))
        self._max_gen_toks = int(max_gen_toks)
        self._around = around = self._added()
        self._adds_bos = bool(around) if add_bos_token is None else add_bos_token
        self._prefix = prefix_token_id if prefix_token_id is not None else (*around, *self._facts.eos_token_ids)[0]
        self._bos = self._text(around[:1]) if around else ""
        self._ids = lru_cache(1 << 14)(self._tokenized)  # choices share their context

    @property
    def eot_token_id(self) -> int:
        return self._facts.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    @property
    def max_length(self) -> int:
        return self._facts.max_context_tokens

    @property
    def tokenizer_name(self) -> str:
        return f"{self._facts.name}@{self._facts.revision}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None:
            # A rendered chat has its BOS.
            add_special_tokens = self._adds_bos and not (self._bos and string.startswith(self._bos))
        if not string:  # the server refuses an empty text
            return list(self._around) if add_special_tokens else []
        return list(self._ids(string, add_special_tokens))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text that the server's template makes."""
        if not add_generation_prompt:
            raise NotImplementedError("the server's template always begins the answer")
        return self._text(self._client.tokenize(chat_history, model=self._facts.name))

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        score = super().loglikelihood
        return self._map("loglikelihood", requests, lambda request: score([request], disable_tqdm=True)[0])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return self._map("loglikelihood_rolling", requests, lambda request: self._rolling(*request.args))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        return self._map("generate_until", requests, lambda request: self._generated(*request.args))

    def _map(self, kind: str, requests: Sequence[Any], ask: Callable[[Any], Any]) -> list[Any]:
        """Ask for all at a time; the order of the answers is that of the requests."""
        answers = []
        for request, answer in zip(requests, tqdm(self._pool.map(ask, requests), kind, len(requests)), strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
            answers.append(answer)
        return answers

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        return [self._scored(context, continuation) for _, context, continuation in requests]

    def _scored(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        prompt = (context + continuation)[-(self.max_length - _OUTPUT) :]
        found = self._client.generate(
            prompt, model=self._facts.name, prompt_logprobs=0, max_tokens=_OUTPUT, temperature=0
        )
        scores = found.prompt_scores[len(prompt) - len(continuation) :]
        return sum((score.logprob or 0.0 for score in scores), 0.0), all(score.rank == 1 for score in scores)

    def _rolling(self, string: str) -> float:
        windows = utils.get_rolling_token_windows(
            self.tok_encode(string), self.prefix_token_id, self.max_length - _OUTPUT - 1, context_len=1
        )
        return sum(self._scored(*utils.make_disjoint_window(window))[0] for window in windows)

    def _generated(self, context: str, gen_kwargs: dict[str, Any]) -> str:
        wanted = normalize_gen_kwargs(gen_kwargs, self._max_gen_toks)
        options = {"temperature": 0.0} | {name: value for name, value in wanted.items() if name not in _NOT_OURS}
        max_tokens = wanted["max_gen_toks"]
        prompt = self.tok_encode(context)[-(self.max_length - max_tokens) :]
        stops = [stop for stop in wanted["until"] if stop]
        return self._client.generate(
            prompt, model=self._facts.name, max_tokens=max_tokens, stop_strings=stops, **options
        ).text

    def _added(self) -> list[int]:
        """Return the ids that the tokenizer puts around a text."""
        text = self._tokenized("a", False)
        return [id for id in self._tokenized("a", True) if id not in text]

    def _tokenized(self, string: str, add_special_tokens: bool) -> tuple[int, ...]:
        return self._client.tokenize(
            string, model=self._facts.name, parse_special_tokens=True, add_special_tokens=add_special_tokens
        )

    def _text(self, ids: Sequence[int]) -> str:
        return self._client.detokenize(ids, model=self._facts.name, skip_special_tokens=False)
