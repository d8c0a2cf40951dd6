"""How large each attack is: one form runs with every test, the other takes minutes. The code is the same."""

from __future__ import annotations

from dataclasses import dataclass

from photon_grpc import demo


@dataclass(frozen=True, slots=True)
class Size:
    """Counts, bytes and seconds of every attack."""

    name: str
    #: Directory of the model that is attacked: the embedded one, or its smaller draft, which is sooner done.
    model: str
    #: Of each method: calls whose messages are broken. The long form makes 100,000 and more.
    mutations: int
    #: Requests with two fields at a limit.
    pairs: int
    #: The longest text that a field is given.
    text_bytes: int
    #: How deep JSON is nested.
    depths: tuple[int, ...]
    #: One hostile chat.
    chat_bytes: int
    #: Connections that come and vanish, calls that are cancelled, calls whose deadline is too short, streams that
    #: nobody reads.
    vanishing: int
    cancels: int
    deadlines: int
    unread: int
    #: Requests on each multiplexed stream.
    multiplexed: int
    #: How often a process is killed.
    kills: int
    #: Calls that are refused while nobody reads the log.
    refused: int
    #: Requests that must equal their solo runs.
    requests: int
    #: What eight hostile callers send, in how many processes, for how long.
    flood_bytes: tuple[int, ...]
    flood_processes: int
    flood_s: float
    #: Calls of each connection whose headers are made to cost.
    header_calls: int
    #: Calls of each kind that are held open in silence; messages of 31 MiB that lack their last byte.
    silent: int
    held: int
    #: Outputs that are continued under a dear schema; outputs whose lexers one or two of them fill.
    walks: int
    lexers: int
    #: Of mixed traffic, unless --soak says.
    soak_s: float
    #: How long a neighbour's one-token Generate may wait.
    neighbour_s: float = 5.0
    #: Between the messages that a slow reader takes.
    slowness_s: float = 0.05


SHORT = Size(
    name="short",
    model=str(demo.DRAFT),
    mutations=40,
    pairs=120,
    text_bytes=1 << 16,
    depths=(10, 700, 20_000),
    chat_bytes=1 << 16,
    vanishing=60,
    cancels=60,
    deadlines=60,
    unread=4,
    multiplexed=40,
    kills=1,
    refused=600,
    requests=60,
    flood_bytes=(1 << 20,),
    flood_processes=2,
    flood_s=2.0,
    header_calls=200,
    silent=260,
    held=3,
    walks=8,
    lexers=8,
    soak_s=2.0,
    # It runs beside other tests, on machines that are busy: only one that waits for the end of an attack is too late.
    neighbour_s=60.0,
    slowness_s=0.01,
)

LONG = Size(
    name="long",
    model=str(demo.TARGET),
    mutations=6_000,
    pairs=4_000,
    text_bytes=1 << 22,
    depths=(10, 100, 500, 700, 990, 1_000, 10_000, 100_000),
    chat_bytes=1 << 20,
    vanishing=1_000,
    cancels=800,
    deadlines=1_000,
    unread=32,
    multiplexed=1_000,
    kills=5,
    refused=20_000,
    requests=250,
    flood_bytes=(1 << 20, 32 << 20),
    flood_processes=8,
    flood_s=15.0,
    header_calls=2_000,
    silent=4_200,
    held=64,
    walks=400,
    lexers=200,
    soak_s=120.0,
)

SIZES = {size.name: size for size in (SHORT, LONG)}
