"""photon_grpc.v1.ModelService: the served models and their tokenizer."""

from __future__ import annotations

from photon_grpc.config.experts import ExpertSpec
from photon_grpc.core.admission import check_count
from photon_grpc.core.ask import ChatInput, SamplingAsk, TextInput
from photon_grpc.core.fields import NEUTRAL
from photon_grpc.core.numerics import Numerics
from photon_grpc.core.stats import Load
from photon_grpc.errors import InvalidRequest
from photon_grpc.frontend.frontend import Frontend
from photon_grpc.frontend.model import ModelFacts, RequestLimits
from photon_grpc.frontend.readiness import State
from photon_grpc.server.calls.call import current
from photon_grpc.server.calls.metadata import Context
from photon_grpc.server.wire.chat import chat_of
from photon_grpc.v1 import inference_pb2, model_pb2_grpc
from photon_grpc.v1 import model_pb2 as pb

_DEFAULT_PAGE_SIZE = 100
_MAX_PAGE_SIZE = 1000

#: Features of every model.
_OF_THE_SERVER = (pb.FEATURE_MULTIPLEX, pb.FEATURE_UNKNOWN_FIELDS_REFUSED)

_STATES = {
    State.LOADING: pb.MODEL_STATE_LOADING,
    State.SERVING: pb.MODEL_STATE_READY,
    State.RESTARTING: pb.MODEL_STATE_LOADING,
    State.DRAINING: pb.MODEL_STATE_DRAINING,
    State.FAILED: pb.MODEL_STATE_FAILED,
}


class ModelService(model_pb2_grpc.ModelServiceServicer):
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        models = self._frontend.models()
        begin = _page_begin(models, request.page_token)
        end = begin + _page_size(request.page_size)
        response = pb.ListModelsResponse(
            models=[_model_message(facts, self._frontend.state, self._frontend.load) for facts in models[begin:end]],
            next_page_token=models[end].name if end < len(models) else "",
        )
        await current().send_initial_metadata(context)
        return response

    async def GetModel(self, request: pb.GetModelRequest, context: Context) -> pb.GetModelResponse:
        facts = self._frontend.model(request.model)
        response = pb.GetModelResponse(model=_model_message(facts, self._frontend.state, self._frontend.load))
        await current().send_initial_metadata(context)
        return response

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        facts = self._frontend.model(request.model)
        caller = current().caller
        token_ids = await self._frontend.tokenize(request.model, _tokenize_input(request, facts), caller)
        response = pb.TokenizeResponse(
            token_count=len(token_ids),
            token_ids=() if request.count_only else token_ids,
            max_context_tokens=facts.max_context_tokens,
        )
        await current().send_initial_metadata(context)
        return response

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        facts = self._frontend.model(request.model)
        if not request.token_ids.ids:
            raise InvalidRequest("token_ids.ids must not be empty", field="token_ids.ids")
        check_count(len(request.token_ids.ids), facts.max_context_tokens, "token_ids.ids")
        token_ids = tuple(request.token_ids.ids)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        caller = current().caller
        response = pb.DetokenizeResponse(text=await self._frontend.detokenize(request.model, token_ids, skip, caller))
        await current().send_initial_metadata(context)
        return response


def _page_size(size: int) -> int:
    if size < 0:
        raise InvalidRequest(f"page_size must be at least 0, not {size}", field="page_size")
    return min(size or _DEFAULT_PAGE_SIZE, _MAX_PAGE_SIZE)


def _page_begin(models: tuple[ModelFacts, ...], token: str) -> int:
    """Return the index of a page's first model, whose name is the token, so it survives changes to other models."""
    if not token:
        return 0
    for index, facts in enumerate(models):
        if facts.name == token:
            return index
    raise InvalidRequest("page_token was not issued by this server", field="page_token")


def _tokenize_input(request: pb.TokenizeRequest, facts: ModelFacts) -> TextInput | ChatInput:
    match request.WhichOneof("input"):
        case "text":
            add = request.add_special_tokens if request.HasField("add_special_tokens") else True
            return TextInput(request.text, parse_special_tokens=request.parse_special_tokens, add_special_tokens=add)
        case "chat":
            return chat_of(request.chat, facts)
        case _:
            raise InvalidRequest("one of text and chat must be set", field="input")


def _model_message(facts: ModelFacts, state: State, load: Load) -> pb.Model:
    return pb.Model(
        name=facts.name,
        aliases=facts.aliases,
        state=_STATES[state],
        max_context_tokens=facts.max_context_tokens,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        default_sampling=_sampling_message(facts.default_sampling),
        features=[*(pb.Feature.Value(f"FEATURE_{name}") for name in facts.features), *_OF_THE_SERVER],
        limits=_limits_message(facts.limits),
        revision=facts.revision,
        dtype=facts.dtype,
        quantization=facts.quantization,
        numerics_version=facts.numerics.version,
        numerics=_numerics_message(facts.numerics) if facts.numerics.version else None,
        weight_bytes=None if facts.weight_bytes is None else pb.WeightBytes(**facts.weight_bytes._asdict()),
        experts=None if facts.experts is None else _experts_message(facts.experts, facts.expert_shares, load),
    )


def _experts_message(experts: ExpertSpec, shares: int, load: Load) -> pb.Experts:
    """Return the experts of all ranks; how they are reached is estimated from one rank's share of them."""
    return pb.Experts(
        count=experts.num_experts,
        per_token=experts.top_k,
        shared=experts.num_shared,
        sparse_layers=sum(experts.layers),
        reached_per_step=load.experts_reached_per_step * shares,
        imbalance=load.expert_imbalance(experts.num_experts // shares),
    )


def _numerics_message(numerics: Numerics) -> pb.Numerics:
    return pb.Numerics(**{field.name: getattr(numerics, field.name) for field in pb.Numerics.DESCRIPTOR.fields})


def _sampling_message(sampling: SamplingAsk) -> inference_pb2.SamplingParams:
    return inference_pb2.SamplingParams(**{name: getattr(sampling, name) for name in NEUTRAL})


def _limits_message(limits: RequestLimits) -> pb.Limits:
    return pb.Limits(
        max_num_outputs=limits.max_num_outputs,
        max_logprobs=limits.max_logprobs,
        max_stop_strings=limits.max_stop_strings,
        max_stop_string_bytes=limits.max_stop_string_bytes,
        max_logit_bias=limits.max_logit_bias,
        max_constraint_bytes=limits.max_constraint_bytes,
        max_message_bytes=limits.max_message_bytes,
    )
