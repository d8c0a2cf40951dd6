"""All settings, each as a field of a frozen dataclass.

A field is a flag (`max_num_seqs` → `--max-num-seqs`), an environment variable (`PHOTON_MAX_NUM_SEQS`) and a line of
`doctor`. Durations are seconds, sizes bytes. Settings are read once, to choose objects, and never later.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from photon_grpc.config.flag_field import NumberRange, flag
from photon_grpc.config.quantization import FORMATS, HEADS

LOAD_FORMATS = "auto", "safetensors", "dummy"
#: The value of --admin-listen that turns AdminService off.
NO_ADMIN = "none"


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """Model."""

    model: str = flag(
        "",
        "Hugging Face model directory, or an id to download before the start. Unset: the embedded demo model.",
        metavar="DIR_OR_ID",
    )
    revision: str = flag("", "Branch, tag or commit of a downloaded model. Unset: its main branch.", metavar="REV")
    served_model_name: tuple[str, ...] = flag(
        (), "Name that requests use; repeat it for aliases. Unset: the directory's name.", many=True, metavar="NAME"
    )
    dtype: str = flag(
        "auto",
        "Type of weights and activations. auto: the type in config.json.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = flag(
        "auto",
        "Format of linear layers. auto: that of the checkpoint. Others quantize a 16-bit checkpoint at load: "
        "int8 by rows or groups of columns, int4, fp8; w8a8, fp8 and fp8-block also quantize activations to 8 bits.",
        choices=("auto", *FORMATS),
    )
    quantization_head: str = flag(
        "none", "Format of the output head (lm_head). int8: by rows, 16-bit activations.", choices=tuple(HEADS)
    )
    quantization_embedding: str = flag(
        "none",
        "Format of the embedding. int8: by rows; set both flags if the head is tied to it.",
        choices=tuple(HEADS),
    )
    max_model_len: int | None = flag(
        None,
        "Longest prompt + output in tokens. Unset: the length in config.json.",
        metavar="TOKENS",
        bounds=NumberRange(at_least=2, at_most=2**24),
    )
    load_format: str = flag(
        "auto", "auto: safetensors files. dummy: random weights for any config.json.", choices=LOAD_FORMATS
    )
    seed: int = flag(
        0,
        "Seed of dummy weights, and of the seeds for requests without one. 0: request seeds differ at every start.",
        bounds=NumberRange(at_least=0, at_most=2**64 - 1),
    )


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """Device."""

    device: str = flag("auto", "Where the model runs.", choices=("auto", "cpu", "cuda"))
    kernels: str = flag("auto", "auto: Triton kernels on CUDA, torch elsewhere.", choices=("auto", "torch", "triton"))
    gpu_memory_utilization: float = flag(
        0.9,
        "Share of the device's memory for weights, activations and KV cache.",
        metavar="SHARE",
        bounds=NumberRange(above=0, at_most=1),
    )
    enforce_eager: bool = flag(False, "Launch kernels one by one instead of replaying CUDA graphs.")
    numerics: str = flag(
        "strict",
        "strict: the bits of a result depend only on its own request, where docs/numerics.md promises it. fast: no "
        "promise; the matrix library may split sums by the number of rows.",
        choices=("strict", "fast"),
    )


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Several GPUs."""

    tensor_parallel_size: int = flag(
        1,
        "Number of GPUs (on a CPU: processes) that split the weights of every layer and the KV cache. docs/scaling.md "
        "says when to use it.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=64),
    )
    expert_parallel_size: int = flag(
        1,
        "Number of GPUs over which whole experts are distributed; other weights are split as by "
        "--tensor-parallel-size. With both flags the number of GPUs is their product.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=64),
    )
    pipeline_parallel_size: int = flag(
        1,
        "Number of stages, each with a share of the layers, that compute one after the other: saves memory, not time. "
        "The number of GPUs is the product of this and the other two flags.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=64),
    )

    @property
    def num_ranks(self) -> int:
        """The processes that compute the model together."""
        return self.tensor_parallel_size * self.expert_parallel_size * self.pipeline_parallel_size

    @property
    def cuts(self) -> str:
        """The way in which ranks cut sums, a part of the numerics. Stages cut none."""
        size = self.tensor_parallel_size * self.expert_parallel_size
        ranks = f"{size} ranks" if size > 1 else ""
        return f"{ranks}, experts by {self.expert_parallel_size}" if self.expert_parallel_size > 1 else ranks


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """KV cache."""

    block_size: int | None = flag(
        None,
        "Tokens per KV block. Unset: 16 on a CPU, 64 on CUDA.",
        metavar="TOKENS",
        bounds=NumberRange(at_least=1, at_most=1024),
    )
    num_blocks: int | None = flag(
        None,
        "KV blocks for requests. Unset: measured on CUDA; on a CPU enough for max-num-seqs × max-model-len, "
        "at most 1 GiB. A model with sliding windows uses one block per group of its layers.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=2**22),
    )
    kv_layout: str = flag(
        "paged",
        "paged: allocate blocks as a sequence grows. contiguous: reserve one run of blocks for its whole context at "
        "admission (no shared prefixes; not for models with sliding windows).",
        choices=("paged", "contiguous"),
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Type of keys and values in the KV cache. auto: the type of activations. fp8: e4m3, half of its memory and "
        "reads, with constant scales of the checkpoint, of kv-calibration, or 1.",
        choices=("auto", "fp8"),
    )
    kv_calibration: str = flag(
        "",
        "File of scales for kv-cache-dtype fp8, as photon-grpc calibrate writes it. Unset: the checkpoint's scales, "
        "else kv_scales.json in the model directory, else 1.",
        metavar="FILE",
    )
    enable_prefix_caching: bool = flag(True, "Keep computed blocks and share them among requests with the same prefix.")

    @property
    def shares_prefixes(self) -> bool:
        return self.enable_prefix_caching and self.kv_layout == "paged"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Scheduling."""

    max_num_seqs: int | None = flag(
        None,
        "Sequences computed at a time. Unset: 64 on a CPU, 256 on CUDA.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=4096),
    )
    max_num_batched_tokens: int | None = flag(
        None,
        "Tokens computed per step. Unset: 2048 on a CPU, 8192 on CUDA.",
        metavar="TOKENS",
        bounds=NumberRange(at_least=1, at_most=2**20),
    )
    enable_chunked_prefill: bool = flag(
        True, "Split long prompts over steps. Off: compute a prompt in one step, alone if it exceeds the budget."
    )
    scheduling_policy: str = flag(
        "priority",
        "priority: higher first; waiting slowly raises it. fcfs: by arrival. deadline: earliest first. static: admit a "
        "batch when the previous one is done. All but the first refuse requests that set a priority.",
        choices=("priority", "fcfs", "deadline", "static"),
    )
    max_queue_size: int = flag(
        1024,
        "Requests that may wait; more are refused with QUEUE_FULL.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=2**20),
    )
    max_queued_tokens: int = flag(
        1_048_576,
        "Prompt tokens that may wait; more are refused with QUEUE_FULL.",
        metavar="TOKENS",
        bounds=NumberRange(at_least=1, at_most=2**32),
    )
    step_trace: str = flag(
        "",
        "File for one line of JSON per step, with its rows and blocks (photon-grpc trace converts it for Perfetto). At "
        "most 128 MiB, in FILE.1 and FILE. Unset: none.",
        metavar="FILE",
    )
    async_depth: int | None = flag(
        None,
        "Steps launched before the last one is read. Unset: 0 on a CPU, 1 on CUDA.",
        metavar="STEPS",
        bounds=NumberRange(at_least=0, at_most=2),
    )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Speculation."""

    speculative_model: str = flag(
        "",
        "Source of draft tokens, several of which the model verifies in one step; answers do not change. ngram: "
        "earlier text of the same sequence. grammar: only text that the request's constraint determines; the other "
        "sources draft it, too. A directory: an EAGLE-3 head for the model, or a smaller model with the same "
        "vocabulary. Unset: no speculation.",
        metavar="WHAT",
    )
    num_speculative_tokens: int | None = flag(
        None,
        "Most draft tokens per sequence and step, of a --speculative-model. Unset: 3.",
        metavar="N",
        choices=("1", "3", "5", "7"),
    )
    speculation_control: str = flag(
        "auto",
        "auto: measured acceptance and step times choose how many tokens are drafted, none where it does not pay. "
        "fixed: as many as --num-speculative-tokens and the number of sequences allow.",
        choices=("auto", "fixed"),
    )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Server."""

    listen: tuple[str, ...] = flag(
        ("127.0.0.1:50051",),
        "Address of the gRPC services, HOST:PORT (port 0: any free one) or unix:PATH; repeatable.",
        many=True,
        metavar="ADDR",
    )
    http_listen: tuple[str, ...] = flag(
        (),
        "Address of the HTTP server, HOST:PORT (port 0: any free one): OpenAI's and Anthropic's APIs, /metrics, "
        "/health and a page at /; repeatable. It needs the extra http. Unset: no HTTP.",
        many=True,
        metavar="ADDR",
    )
    http_allowed_host: tuple[str, ...] = flag(
        (),
        "Further name that HTTP callers may use for this server (the header Host, without a port), such as "
        "that of a proxy; repeatable. Always allowed: the addresses of --http-listen and localhost.",
        many=True,
        metavar="NAME",
    )
    http_allowed_origin: tuple[str, ...] = flag(
        (),
        "Web page that may call the HTTP server from a browser (CORS), as scheme://host[:port]; repeatable. "
        "Unset: only the server's own page.",
        many=True,
        metavar="ORIGIN",
    )
    frontends: int = flag(
        1,
        "Front-end processes that share the engine and the ports.",
        metavar="N",
        bounds=NumberRange(at_least=1, at_most=64),
    )
    drain_timeout: float = flag(
        30.0,
        "Seconds for running requests to finish after SIGTERM or Ctrl-C.",
        metavar="SECONDS",
        bounds=NumberRange(at_least=0, at_most=86_400),
    )
    max_message_size: int = flag(
        33_554_432,
        "Largest message accepted or sent, in bytes.",
        metavar="BYTES",
        bounds=NumberRange(at_least=1024, at_most=2_147_483_647),
    )
    max_connection_age: float | None = flag(
        None,
        "Seconds, give or take a tenth, after which a connection takes no new calls, so that clients reconnect and a "
        "connection (L4) balancer spreads them. Unset: no limit.",
        metavar="SECONDS",
        bounds=NumberRange(at_least=0.1, at_most=86_400),
    )
    max_connection_age_grace: float | None = flag(
        None,
        "Seconds for running calls of such a connection to finish, at least the longest generation. Unset: no limit.",
        metavar="SECONDS",
        bounds=NumberRange(at_least=0.1, at_most=86_400),
    )
    api_keys_file: str = flag(
        "",
        "TOML file of valid API keys (photon-grpc keys new); read again when it changes. Unset: no key is needed.",
        metavar="FILE",
    )
    api_keys_exempt: tuple[str, ...] = flag(
        ("health",),
        "Service that needs no API key; repeatable. Kubernetes' probes cannot send one.",
        many=True,
        choices=("health", "reflection", "load-reports", "none"),
    )
    tls_cert: str = flag(
        "",
        "PEM certificate chain: TLS on all ports. Certificates and keys are read again when they change. "
        "Unset: clear text.",
        metavar="FILE",
    )
    tls_key: str = flag("", "PEM private key of --tls-cert.", metavar="FILE")
    tls_client_ca: str = flag(
        "", "PEM certificates of the authority that must have signed a client's certificate (mTLS).", metavar="FILE"
    )
    admin_listen: str = flag(
        "",
        "Address of AdminService: unix:PATH (mode 0660), or HOST:PORT, which requires a key with the scope admin. "
        "none: not served. Unset: a separate Unix socket for every server, logged at start.",
        metavar="ADDR",
    )
    service: tuple[str, ...] = flag(
        (),
        "FileDescriptorSet (buf build -o, protoc --include_imports --include_source_info) whose services the model "
        "answers under their own names, or one service of it; repeatable. A .proto file needs grpcio-tools. "
        "docs/guides/services.md. Unset: none.",
        many=True,
        metavar="FILE[:SERVICE]",
    )
    proto_path: tuple[str, ...] = flag(
        (),
        "Directory in which .proto files of --service look for their imports, before their own; repeatable.",
        many=True,
        metavar="DIR",
    )
    service_skip: bool = flag(
        False, "Leave out methods of --service that cannot be served, instead of refusing to start."
    )
    replica_id: str = flag(
        "",
        "Name of this replica in metadata x-photon-replica of answers. Unset: the host's name and the server's pid.",
        metavar="NAME",
    )
    otlp_endpoint: str = flag(
        "",
        "Collector of OpenTelemetry spans (OTLP over gRPC): http://HOST:PORT in clear text, https://HOST:PORT. "
        "Unset: no spans.",
        metavar="URL",
    )
    metrics_listen: str = flag(
        "",
        "HOST:PORT of plain HTTP: /metrics for Prometheus, /healthz and /readyz for probes. Unset: not served, except "
        "by the HTTP server (--http-listen).",
        metavar="ADDR",
    )
    metrics_label: tuple[str, ...] = flag(
        (),
        "Label of requests to count by in metrics, which have the first 64 of its values in each front end and the "
        "rest as `other`; repeatable. Unset: labels are only in the request log and in spans.",
        many=True,
        metavar="KEY",
    )
    log_requests: bool = flag(False, "Write a JSON line to stderr for every request that ends, without its text.")
    log_level: str = flag("info", "Lowest level written to stderr.", choices=("debug", "info", "warning", "error"))
    log_format: str = flag(
        "text",
        "text: lines for people, with the time of day. json: every line is an object with date and time in UTC.",
        choices=("text", "json"),
    )

    @property
    def has_metrics(self) -> bool:
        """Whether something serves /metrics, so that calls and requests are counted."""
        return bool(self.metrics_listen or self.http_listen)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All settings, as `serve` resolves them."""

    model: ModelFlags = field(default_factory=ModelFlags)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
