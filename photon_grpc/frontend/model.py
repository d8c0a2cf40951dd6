"""The served model: tokenizer, template, names, defaults, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from photon_grpc.config.experts import ExpertSpec
from photon_grpc.config.model_dir import TOKENIZER_FILE, ModelConfig
from photon_grpc.config.quantization import WeightBytes
from photon_grpc.core.ask import ChatInput, ConstraintAsk, IdsInput, SamplingAsk, TextInput
from photon_grpc.core.fields import NEUTRAL
from photon_grpc.core.frames import Facts
from photon_grpc.core.numerics import NO_NUMERICS, Numerics
from photon_grpc.frontend.constraints import constraint
from photon_grpc.frontend.constraints.tools import required_calls
from photon_grpc.frontend.input.chat import ChatTemplate
from photon_grpc.frontend.input.tokenizer import Tokenizer
from photon_grpc.frontend.output.answer import PLAIN, AnswerFormat, AnswerParser
from photon_grpc.frontend.output.call_ids import CallIds
from photon_grpc.frontend.output.logprobs import no_bytes

MAX_NUM_OUTPUTS = 64
MAX_LOGPROBS = 20
#: Ids at the end of a prompt that are searched for a mark of reasoning.
_PROMPT_END = 16


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request."""

    max_num_outputs: int = MAX_NUM_OUTPUTS
    #: Of `logprobs`, `prompt_logprobs` and the number of `score_token_ids`.
    max_logprobs: int = MAX_LOGPROBS
    max_stop_strings: int = 64
    #: In UTF-8.
    max_stop_string_bytes: int = 1024
    max_logit_bias: int = 1024
    max_constraint_bytes: int = 2**20
    max_message_bytes: int = 2**25


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model for callers.

    Until an engine is ready, the numbers that the engine decides come from the model directory.
    """

    name: str
    aliases: tuple[str, ...]
    #: Prompt and output together.
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    #: Values of unset options; seed and num_outputs are unset.
    default_sampling: SamplingAsk
    #: Names of the API's Feature enum without their prefix.
    features: tuple[str, ...]
    limits: RequestLimits
    revision: str
    dtype: str
    quantization: str
    #: Variables that a chat may set (`template_args_json`).
    template_arguments: frozenset[str] = frozenset()
    #: Whether the chat template writes tools into the prompt.
    takes_tools: bool = True
    numerics: Numerics = NO_NUMERICS
    #: None until an engine is ready, and where weights are not quantized.
    weight_bytes: WeightBytes | None = None
    #: None for a model without experts.
    experts: ExpertSpec | None = None
    #: The shares of the experts on ranks, of which one is counted.
    expert_shares: int = 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as the front end needs it, read from its directory without torch."""

    #: Its own name, then its aliases.
    names: tuple[str, ...]
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    #: None for a model that takes ids only.
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    #: How the model writes its answers, as its template shows.
    answers: AnswerFormat = PLAIN
    #: Values of unset sampling parameters: those of generation_config, then the neutral ones.
    defaults: Mapping[str, Any] = field(default_factory=lambda: NEUTRAL)
    revision: str = ""
    dtype: str = ""
    max_message_bytes: int = 2**25
    #: Whether prompts with the same beginning share its KV blocks.
    shares_prefixes: bool = True
    #: Whether the scheduling policy uses priorities.
    obeys_priority: bool = True
    experts: ExpertSpec | None = None
    expert_shares: int = 1

    @classmethod
    def from_config(
        cls,
        model_config: ModelConfig,
        names: tuple[str, ...] = (),
        *,
        max_model_len: int | None = None,
        max_message_bytes: int = 2**25,
        shares_prefixes: bool = True,
        obeys_priority: bool = True,
    ) -> ServedModel:
        """Return the model in `model_config.path`, by default named like the directory; read its tokenizer.

        Raise ModelLoadError naming the file.
        """
        token_names = dict(model_config.special_tokens)
        file, source = model_config.path / TOKENIZER_FILE, model_config.chat_template
        tokenizer = Tokenizer.from_file(file, token_names) if model_config.has_tokenizer else None
        template = ChatTemplate(source, token_names) if tokenizer and source else None
        return cls(
            names=names or (model_config.path.resolve().name,),
            max_context_tokens=max_model_len or model_config.max_position_embeddings,
            vocab_size=model_config.vocab_size,
            eos_token_ids=model_config.eos_token_ids,
            tokenizer=tokenizer,
            template=template,
            answers=AnswerFormat.of(template.source, tokenizer.markers.texts) if tokenizer and template else PLAIN,
            defaults=_defaults(model_config),
            revision=model_config.revision,
            dtype=model_config.dtype,
            max_message_bytes=max_message_bytes,
            shares_prefixes=shares_prefixes,
            obeys_priority=obeys_priority,
            experts=model_config.experts,
        )

    def facts(self, engine: Facts | None) -> ModelFacts:
        """Return what callers may know; `engine` is None until an engine is ready."""
        max_num_seqs = MAX_NUM_OUTPUTS if engine is None else engine.max_num_seqs
        return ModelFacts(
            name=self.names[0],
            aliases=self.names[1:],
            max_context_tokens=self.max_context_tokens if engine is None else engine.max_model_len,
            vocab_size=self.vocab_size if engine is None else engine.vocab_size,
            eos_token_ids=self.eos_token_ids,
            default_sampling=SamplingAsk(**self.defaults),
            features=self._features(
                self.tokenizer is not None if engine is None else engine.has_grammars,
                has_speculation=engine is not None and engine.max_drafts > 0,
            ),
            limits=RequestLimits(
                max_num_outputs=min(MAX_NUM_OUTPUTS, max_num_seqs),
                max_logprobs=min(MAX_LOGPROBS, self.vocab_size if engine is None else engine.vocab_size),
                max_message_bytes=self.max_message_bytes,
            ),
            revision=self.revision if engine is None or not engine.revision else engine.revision,
            dtype=self.dtype if engine is None else engine.dtype,
            quantization="" if engine is None else engine.quantization,
            template_arguments=frozenset() if self.template is None else self.template.arguments,
            takes_tools=self.template is not None and self.template.takes_tools,
            numerics=NO_NUMERICS if engine is None else engine.numerics,
            weight_bytes=None if engine is None else engine.weight_bytes,
            experts=self.experts,
            expert_shares=self.expert_shares,
        )

    @property
    def token_bytes(self) -> Callable[[int], bytes]:
        """The bytes of a token; empty without a tokenizer."""
        return no_bytes if self.tokenizer is None else self.tokenizer.token_bytes

    def has_parts(self, input: TextInput | IdsInput | ChatInput | None) -> bool:
        """Return whether outputs have reasoning, content and tool calls beside their text."""
        return self.answers.has_parts and isinstance(input, ChatInput)

    def answer_parser(
        self, input: TextInput | IdsInput | ChatInput | None, prompt_ids: Sequence[int], call_ids: CallIds
    ) -> AnswerParser | None:
        """Return a parser for one output, None if its text has no parts."""
        if self.tokenizer is None or not self.answers.has_parts or not isinstance(input, ChatInput):
            return None
        return self.answers.parser(input, self._end(prompt_ids), call_ids)

    def tool_calls(
        self, input: TextInput | IdsInput | ChatInput | None, prompt_ids: Sequence[int]
    ) -> ConstraintAsk | None:
        """Return the constraint by which a checked input's tool_choice is met, None if it sets none."""
        if not isinstance(input, ChatInput) or input.tool_choice is None:
            return None
        return required_calls(input, self.answers.call_form(self._end(prompt_ids)))

    def _end(self, prompt_ids: Sequence[int]) -> str:
        """Return the text of a prompt's last ids, "" without a tokenizer."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt_ids[-_PROMPT_END:], skip_special_tokens=False)

    def _features(self, has_grammars: bool, *, has_speculation: bool) -> tuple[str, ...]:
        features = ["TEXT"] if self.tokenizer is not None else []
        if self.template is not None:
            features.append("CHAT")
        if self.answers.has_reasoning:
            features.append("REASONING")
        if self.answers.calls is not None:
            features.append("TOOL_CALLS")
        if has_grammars:
            features += dict.fromkeys(constraint.FEATURES.values())
        features += ["LOGPROBS", "PROMPT_LOGPROBS", "NUM_OUTPUTS", "PENALTIES", "LOGIT_BIAS", "CONTINUE_FROM"]
        if self.shares_prefixes:
            features.append("PREFIX_CACHE")
        if self.obeys_priority:
            features.append("PRIORITY")
        if has_speculation:
            features.append("SPECULATION")
        return tuple(features)


def _defaults(model_config: ModelConfig) -> Mapping[str, Any]:
    values = {name: getattr(model_config.generation, name, None) for name in NEUTRAL}
    if values["top_k"] is not None and values["top_k"] < 1:
        values["top_k"] = None  # transformers writes 0 for "off"
    return NEUTRAL | {name: value for name, value in values.items() if value is not None}
