"""Frames over the bridge.

Down: Add, Abort, Control, Watch. Up: Facts once, one StepFrame per engine step, Load on change, Reply, EnginePicture
while the front end watches. A handle stands for one output of a front end's request and is never reused. A request with
n outputs takes n consecutive handles, of which `Add.handle` is the first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from photon_grpc.config.quantization import WeightBytes
from photon_grpc.core.engine_picture import EnginePicture
from photon_grpc.core.fault import Fault
from photon_grpc.core.kv import KVPlan
from photon_grpc.core.numerics import NO_NUMERICS, Numerics
from photon_grpc.core.request import FinishReason, Request
from photon_grpc.core.stats import Load
from photon_grpc.errors import PhotonError

#: The commands of an operator.
Verb = Literal["reset_prefix_cache", "abort_requests", "list_quarantine", "clear_quarantine"]


class Add(msgspec.Struct, frozen=True, array_like=True, tag=1):
    handle: int
    request: Request


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Ends outputs. Unknown handles are ignored, and nothing is sent back."""

    handles: tuple[int, ...]
    #: True: they ended at a stop string and count as finished. False: they were cancelled.
    by_stop_string: bool = False


class Control(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A command of an operator, answered by a Reply with the same id."""

    id: int
    verb: Verb
    #: Request ids for abort_requests, fingerprints for clear_quarantine. Empty means all.
    names: tuple[str, ...] = ()


class Watch(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Whether the front end wants an EnginePicture, at most ten times a second, from now on."""

    is_on: bool


class Facts(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The engine's limits and device, sent once and first, so that a front end can refuse requests on its own."""

    max_model_len: int
    vocab_size: int
    kv: KVPlan
    #: Blocks that requests may use, without the reserved one.
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue_size: int
    max_queued_tokens: int
    device: str
    dtype: str
    #: Digest of weights and configuration.
    revision: str = ""
    kernels: str = ""
    quantization: str = ""
    #: Whether outputs can be constrained.
    has_grammars: bool = False
    #: Most tokens that a step drafts for an output; 0: none.
    max_drafts: int = 0
    #: What decides the bits of its results.
    numerics: Numerics = NO_NUMERICS
    #: None where weights are not quantized.
    weight_bytes: WeightBytes | None = None


class Started(msgspec.Struct, frozen=True, array_like=True):
    """The start of one output, sent with its first token, since an output that a stop string ends gets no Finished."""

    handle: int
    num_cached_prompt: int
    #: From arrival to the first step.
    queue_s: float


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The end of one output, after the tokens of the same frame."""

    handle: int
    reason: FinishReason
    num_generated: int
    num_cached_prompt: int
    #: From arrival to the first step.
    queue_s: float


class Failed(msgspec.Struct, frozen=True, array_like=True):
    """The refusal or failure of one output."""

    handle: int
    fault: Fault

    @classmethod
    def of(cls, handle: int, error: PhotonError) -> Failed:
        return cls(handle, Fault.of(error))


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Everything that one engine step has for one front end. Tokens are read before `finished`."""

    step: int
    handles: tuple[int, ...]
    #: `ids[i]` is the next id of `handles[i]`. With speculation a handle may occur several times.
    ids: tuple[int, ...]
    finished: tuple[Finished, ...]
    failed: tuple[Failed, ...]
    load: Load
    started: tuple[Started, ...] = ()
    #: Outputs that were preempted and will be recomputed, each handle once per preemption.
    preempted: tuple[int, ...] = ()
    #: The newest `Add.handle` of this front end that `load` counts; 0 if none came in this step.
    newest_added: int = 0
    #: Handle -> the RECORDs of its ids, in their order (core.logprobs), where the request asks for them.
    logprobs: dict[int, bytes] = {}
    #: Handle -> the RECORDs of further prompt positions; all of them arrive before the request's first id.
    prompt_logprobs: dict[int, bytes] = {}
    #: Handle -> tokens drafted for it, and those of them that are among its ids here.
    drafts: dict[int, tuple[int, int]] = {}


class Suspect(msgspec.Struct, frozen=True, array_like=True):
    """A request that crashed an engine, or may have."""

    #: In hex.
    fingerprint: str
    #: True: it is refused. False: it computes alone once.
    is_quarantined: bool
    num_crashes: int
    #: Unix seconds.
    crashed_at_s: float
    #: Seconds until it is forgotten.
    left_s: float
    #: Id of its newest attempt since it became a suspect.
    request_id: str = ""
    owner: str = ""


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """The answer to a Control: `value` counts freed blocks, `names` lists aborted requests or cleared fingerprints."""

    id: int
    value: int = 0
    names: tuple[str, ...] = ()
    suspects: tuple[Suspect, ...] = ()


Down = Add | Abort | Control | Watch
Up = Facts | StepFrame | Load | Reply | EnginePicture
