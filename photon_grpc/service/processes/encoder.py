"""An encoder process, for inputs too large for a front end's threads: each job in a fork of its own. No torch, no gRPC.

Started by a front end. A Link brings the socket of one job: it comes as one frame, its answer goes back as one, and
closing the other end ends the job. A fork starts in milliseconds with the tokenizer loaded, may be killed at any
moment, and gives back all of its memory.
"""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from photon_grpc.bridge.codec import FrameReader, encode, max_frame_bytes
from photon_grpc.bridge.control import ControlMessage, Link
from photon_grpc.compose.served_model import read_served_model
from photon_grpc.frontend.constraints.trial import byte_tokenizer
from photon_grpc.frontend.encoder import JOB, Answer, Job, TryOut, excess, perform, refusal
from photon_grpc.frontend.model import ServedModel
from photon_grpc.service.processes.child import ChildContext, die_with, enter_child

#: Processor time of one job. Text takes 0.3 to 1.3 s per MiB.
MAX_CPU_S = 10.0
#: Of trying a grammar out, and the stack for it: less than the threads have that walk it afterwards.
MAX_TRIAL_CPU_S = 0.08
#: Of a large one: receiving and parsing it has taken its share of what a caller waits for a refusal.
MAX_LARGE_TRIAL_CPU_S = 0.05
_LARGE_TRIAL_BYTES = 2**17
_TRIAL_STACK_BYTES = 2**20
#: A job up to so long is small, and gets less memory. Text takes 100 to 300 times its bytes while it is encoded.
SMALL_JOB_BYTES = 2**20
MAX_SMALL_MEMORY_BYTES = 2**29
MAX_MEMORY_BYTES = 2**31

#: Behind everything that answers callers.
_NICE = 10
_MAX_WATCH_INTERVAL_MS = 100
#: After so long work in Python lets the one look that watches it.
_SWITCH_S = 0.0005
#: First to go where memory is short.
_OOM_SCORE = "1000"


def main(argv: list[str]) -> int:
    """Return the exit code: 0 when the front end is gone."""
    context = enter_child(argv)
    os.nice(_NICE)
    # The library's threads would not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A fork is not waited for: the system forgets it when it ends.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    model = read_served_model(context.begin.config)
    byte_tokenizer()
    if model.tokenizer is not None:
        # Kept by the forks: it takes long.
        _ = model.tokenizer.max_token_bytes
    gc.freeze()
    with contextlib.suppress(EOFError):
        _fork_for_ever(context, model)
    return 0


def max_memory_bytes(num_bytes: int) -> int:
    """Memory that a job of so many bytes may use beyond what it starts with."""
    return MAX_SMALL_MEMORY_BYTES if num_bytes <= SMALL_JOB_BYTES else MAX_MEMORY_BYTES


def max_cpu_s(job: Job, num_bytes: int) -> float:
    """Processor time that a job of so many bytes may take."""
    if not isinstance(job, TryOut):
        return MAX_CPU_S
    return MAX_TRIAL_CPU_S if num_bytes <= _LARGE_TRIAL_BYTES else MAX_LARGE_TRIAL_CPU_S


def _fork_for_ever(context: ChildContext, model: ServedModel) -> NoReturn:
    said: list[ControlMessage] = context.said
    parent = os.getpid()
    while True:
        for _ in filter(lambda message: isinstance(message, Link), said):
            with context.control.take_socket() as sock:
                if os.fork() == 0:
                    # With it the sockets of the jobs behind this one, which are not this fork's to hold open.
                    context.control.close()
                    _live(parent, sock, max_frame_bytes(context.begin.config.server.max_message_size), model)
        said = context.control.receive()


def _live(parent: int, sock: socket.socket, max_bytes: int, model: ServedModel) -> NoReturn:
    """All of a fork's life: one job. Ends without an answer where memory is short or the job is cancelled."""
    try:
        die_with(parent)
        # A library that ends the process for want of memory says so on stderr.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        job, num_bytes = _receive(sock, max_bytes)
        reply = _AnswerOnce(sock)
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=_watch, args=(sock, job, reply, max_cpu_s(job, num_bytes)), daemon=True).start()
        _limit_memory(max_memory_bytes(num_bytes))
        if isinstance(job, TryOut):
            threading.stack_size(_TRIAL_STACK_BYTES)
            trial = threading.Thread(target=lambda: reply.send(perform(job, model)))
            trial.start()
            trial.join()
        else:
            reply.send(perform(job, model))
    finally:
        os._exit(1)


class _AnswerOnce:
    """One answer, by whichever thread has one first; with it the process ends."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, answer: Answer) -> NoReturn:
        with self._lock:
            self._socket.sendall(encode(answer))
            os._exit(0)


def _receive(sock: socket.socket, max_bytes: int) -> tuple[Job, int]:
    """Return the job and its bytes. Raise EOFError where none comes."""
    reader = FrameReader(JOB, max_bytes=max_bytes)
    num_bytes = 0
    while received := sock.recv_into(reader.room()):
        num_bytes += received
        for job in reader.advance(received):
            return job, num_bytes
    raise EOFError


def _watch(sock: socket.socket, job: Job, reply: _AnswerOnce, max_cpu_s: float) -> None:
    """End the process when its time is over or the other end is closed."""
    hung_up = select.poll()
    hung_up.register(sock, select.POLLIN)
    # The thread that works takes no more processor time than time goes by.
    while (left_s := max_cpu_s - time.process_time()) > 0:
        if hung_up.poll(max(1, min(_MAX_WATCH_INTERVAL_MS, left_s * 1000))):
            os._exit(1)
    try:
        reply.send(refusal(excess(job, f"takes more than {max_cpu_s:g} s of processor time")))
    finally:  # the other end was closed meanwhile
        os._exit(1)


def _limit_memory(num_bytes: int) -> None:
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE)
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (present + num_bytes,) * 2)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
