"""An encoder process for inputs too large for a front end's threads, with a fork for each job and no torch or gRPC.

A front end starts it. A Link brings the socket of one job: the job comes as one frame, its answer goes back as one, and
closing the other end cancels the job. A fork starts in milliseconds with the tokenizer loaded, may be killed at any
time, and returns all of its memory.
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
from photon_grpc.frontend.encoder_jobs import JOB, Answer, Job, TryConstraint, excess, perform, refusal
from photon_grpc.frontend.model import ServedModel
from photon_grpc.service.processes.child import ChildContext, die_with, enter_child

#: Processor time of one job. Text takes 0.3 to 1.3 s per MiB.
MAX_CPU_S = 10.0
#: Processor time for trying a grammar, and the stack for it: smaller than that of the threads that use it afterwards.
MAX_TRIAL_CPU_S = 0.08
#: The same for a large grammar, whose transfer and parsing have already taken part of the time until a refusal.
MAX_LARGE_TRIAL_CPU_S = 0.05
_LARGE_TRIAL_BYTES = 2**17
_TRIAL_STACK_BYTES = 2**20
#: Jobs up to this size have less memory. Text takes 100 to 300 times its bytes while it is encoded.
SMALL_JOB_BYTES = 2**20
MAX_SMALL_MEMORY_BYTES = 2**29
MAX_MEMORY_BYTES = 2**31

#: Lower priority than all processes that answer callers.
_NICE = 10
_MAX_WATCH_INTERVAL_MS = 100
#: Interval after which Python code yields to the thread that watches it.
_SWITCH_S = 0.0005
#: Killed first if memory is short.
_OOM_SCORE = "1000"


def main(argv: list[str]) -> int:
    """Run jobs until the front end is gone; return the exit code, 0."""
    context = enter_child(argv)
    os.nice(_NICE)
    # The library's threads would not survive a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # The system reaps ended forks, so that nothing waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    model = read_served_model(context.begin.config)
    byte_tokenizer()
    if model.tokenizer is not None:
        # Computed here once, since it takes long; the forks inherit it.
        _ = model.tokenizer.max_token_bytes
    gc.freeze()
    with contextlib.suppress(EOFError):
        _fork_for_jobs(context, model)
    return 0


def max_memory_bytes(num_bytes: int) -> int:
    """Return the memory that a job of `num_bytes` may use in addition to that at its start."""
    return MAX_SMALL_MEMORY_BYTES if num_bytes <= SMALL_JOB_BYTES else MAX_MEMORY_BYTES


def max_cpu_s(job: Job, num_bytes: int) -> float:
    """Return the processor time that a job of `num_bytes` may take."""
    if not isinstance(job, TryConstraint):
        return MAX_CPU_S
    return MAX_TRIAL_CPU_S if num_bytes <= _LARGE_TRIAL_BYTES else MAX_LARGE_TRIAL_CPU_S


def _fork_for_jobs(context: ChildContext, model: ServedModel) -> NoReturn:
    messages: list[ControlMessage] = context.messages
    parent = os.getpid()
    while True:
        for _ in filter(lambda message: isinstance(message, Link), messages):
            with context.control.take_socket() as sock:
                if os.fork() == 0:
                    # Also closes the sockets of later jobs, which this fork must not hold open.
                    context.control.close()
                    _run_job(parent, sock, max_frame_bytes(context.begin.config.server.max_message_size), model)
        messages = context.control.receive()


def _run_job(parent: int, sock: socket.socket, max_bytes: int, model: ServedModel) -> NoReturn:
    """Do one job in a fork and exit, without an answer if memory is short or the job is cancelled."""
    try:
        die_with(parent)
        # Discards the output of libraries that abort when memory is short.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        job, num_bytes = _receive(sock, max_bytes)
        reply = _AnswerOnce(sock)
        sys.setswitchinterval(_SWITCH_S)
        threading.Thread(target=_watch, args=(sock, job, reply, max_cpu_s(job, num_bytes)), daemon=True).start()
        _limit_memory(max_memory_bytes(num_bytes))
        if isinstance(job, TryConstraint):
            threading.stack_size(_TRIAL_STACK_BYTES)
            trial = threading.Thread(target=lambda: reply.send(perform(job, model)))
            trial.start()
            trial.join()
        else:
            reply.send(perform(job, model))
    finally:
        os._exit(1)


class _AnswerOnce:
    """The only answer of a fork, by the first thread that has one; sending it ends the process."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._lock = threading.Lock()

    def send(self, answer: Answer) -> NoReturn:
        with self._lock:
            self._socket.sendall(encode(answer))
            os._exit(0)


def _receive(sock: socket.socket, max_bytes: int) -> tuple[Job, int]:
    """Return the job and its size in bytes. Raise EOFError if none comes."""
    reader = FrameReader(JOB, max_bytes=max_bytes)
    num_bytes = 0
    while received := sock.recv_into(reader.room()):
        num_bytes += received
        for job in reader.advance(received):
            return job, num_bytes
    raise EOFError


def _watch(sock: socket.socket, job: Job, reply: _AnswerOnce, max_cpu_s: float) -> None:
    """End the process when its processor time is used up or the other end is closed."""
    hung_up = select.poll()
    hung_up.register(sock, select.POLLIN)
    # One thread works, so the processor time grows no faster than the wall clock.
    while (left_s := max_cpu_s - time.process_time()) > 0:
        if hung_up.poll(max(1, min(_MAX_WATCH_INTERVAL_MS, left_s * 1000))):
            os._exit(1)
    try:
        reply.send(refusal(excess(job, f"takes more than {max_cpu_s:g} s of processor time", max_cpu_s)))
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
