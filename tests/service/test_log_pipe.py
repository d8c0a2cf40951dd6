"""What is written to stderr never makes anybody wait, whoever reads it."""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time

import pytest

from photon_grpc.service.logs import log_pipe
from photon_grpc.service.logs.log_lines import formatter
from photon_grpc.service.logs.log_pipe import LogLines, LogPipe, PipeStream, log_bare_lines, log_to_stderr


@pytest.fixture(autouse=True)
def root_logger_as_before():
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:], root.level = before, level


@pytest.fixture
def target():
    """Yield both ends of a stand-in for stderr: (to read, to write); closed when no pump writes to it any more.

    A pump that is left would write into whatever gets the same descriptor next.
    """
    before = set(threading.enumerate())
    reader, writer = os.pipe()
    yield reader, writer
    pumps = {thread for thread in threading.enumerate() if thread.name == "log"} - before
    deadline = time.monotonic() + 60
    while any(pump.is_alive() for pump in pumps) and time.monotonic() < deadline:
        if select.select((reader,), (), (), 0.01)[0]:
            os.read(reader, 1 << 20)
    os.close(reader)
    os.close(writer)


def read_some(fd: int) -> str:
    return os.read(fd, 1 << 20).decode()


def lines_logger(fd: int) -> logging.Logger:
    logger = logging.Logger("lines")
    logger.addHandler(LogLines(fd))
    return logger


def until_it_fits(logger: logging.Logger, line: str) -> None:
    logger.warning(line)
    while logger.handlers[0]._num_dropped:
        logger.warning(line)


def test_what_is_written_comes_out_in_order(target, monkeypatch):
    # A second may not do on a machine that is busy.
    monkeypatch.setattr(log_pipe, "_FLUSH_S", 60.0)
    reader, writer = target
    pipe = LogPipe(writer)
    logger = lines_logger(pipe.fd)
    for number in range(100):
        logger.info("line %d", number)
    pipe.close()
    assert read_some(reader).splitlines() == [f"line {number}" for number in range(100)]


def test_nobody_reads(target):
    """A reader that comes back is told how many lines it has missed; what it gets is whole lines in order."""
    reader, writer = target
    pipe = LogPipe(writer)
    logger = lines_logger(pipe.fd)
    num_lines = 4000
    for number in range(num_lines):
        logger.warning("%d %s", number, "é" * 400)
    read: list[str] = []
    thread = threading.Thread(target=lambda: read.append(drained(reader)), daemon=True)
    thread.start()
    # Says that the lines before are lost once there is room again.
    while not read:
        logger.warning("END")
        thread.join(0.01)
    pipe.close()
    text = read[0]
    numbers = [int(match) for match in re.findall(r"^(\d+) é{400}$", text, re.MULTILINE)]
    assert numbers == sorted(set(numbers))
    lost = sum(map(int, re.findall(r"^(\d+) lines were dropped$", text, re.MULTILINE)))
    assert 0 < len(numbers) < num_lines
    assert len(numbers) + lost >= num_lines


def drained(reader: int) -> str:
    data = b""
    while b"END\n" not in data:
        data += os.read(reader, 1 << 16)
    return data.decode()


def test_a_stuck_stderr_does_not_keep_the_program(target, monkeypatch):
    monkeypatch.setattr(log_pipe, "_FLUSH_S", 0.05)
    pipe = LogPipe(target[1])
    logger = lines_logger(pipe.fd)
    for _ in range(4000):
        logger.warning("x" * 1000)
    pipe.close()
    assert read_some(target[0])


@pytest.mark.parametrize("error", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF])
def test_a_stderr_that_fails_loses_text_and_nothing_else(monkeypatch, target, error):
    """A terminal that is gone, a full disk; where it works again, lines come again."""
    reader, writer = target
    write, fails = os.write, [True]

    def failing(fd: int, data: bytes) -> int:
        if fd == writer and fails[0]:
            raise OSError(error, "no")
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)
    pipe = LogPipe(writer)
    logger = lines_logger(pipe.fd)
    for _ in range(4000):
        logger.warning("x" * 1000)
    until_it_fits(logger, "empty again")
    fails[0] = False
    until_it_fits(logger, "END")
    assert drained(reader)
    pipe.close()


def test_a_stderr_that_does_not_block_is_waited_for(target):
    reader, writer = target
    os.set_blocking(writer, False)
    pipe = LogPipe(writer)
    logger = lines_logger(pipe.fd)
    for number in range(400):
        logger.info("%d %s", number, "x" * 1000)
    data = b""
    while b"399 x" not in data:
        data += os.read(reader, 1 << 16)
    pipe.close()
    assert [int(line.split()[0]) for line in data.decode().splitlines()] == list(range(400))


def test_a_long_traceback_is_not_mixed_with_other_lines(target):
    reader, writer = target
    pipe = LogPipe(writer)
    loggers = [lines_logger(pipe.fd) for _ in range(4)]
    page = "\n".join(f"frame {number} {'-' * 80}" for number in range(30))
    threads = [
        threading.Thread(target=lambda logger=logger: [logger.info(page) for _ in range(5)]) for logger in loggers
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    loggers[0].info("END")
    assert drained(reader) == (page + "\n") * 20 + "END\n"
    pipe.close()


PROGRAM = """
import faulthandler, os, sys, warnings
os.write(2, b"native\\n")
warnings.warn("python")
for _ in range(5000):
    try:
        os.write(2, b"x" * 1000)
    except BlockingIOError:
        break
else:
    sys.exit("the pipe takes everything")
warnings.warn("dropped")
faulthandler.dump_traceback(file=2)
os.abort()
"""


def test_what_a_child_writes_by_itself_neither_waits_nor_is_lost_with_it(target):
    reader, writer = target
    pipe = LogPipe(writer)
    code = subprocess.run([sys.executable, "-c", PROGRAM], stderr=pipe.fd).returncode
    assert code < 0
    text = read_some(reader)
    while "UserWarning: python" not in text and len(text) < 10_000:
        text += read_some(reader)
    assert text.startswith("native\n")
    assert "UserWarning: python" in text
    os.close(reader)
    pipe.close()
    # For the fixture.
    os.dup2(writer, reader)


def test_a_process_logs_to_what_it_has_as_stderr(capfd):
    log_to_stderr("info", "engine")
    logging.getLogger("x").info("héllo \udc80")
    assert re.fullmatch(r"\d\d:\d\d:\d\d engine: héllo \\udc80\n", capfd.readouterr().err)


def test_bare_lines_stand_alone_whatever_the_level_and_wait_for_no_reader(target):
    reader, writer = target
    os.set_blocking(writer, False)
    log_to_stderr("error", "front end 0", fd=writer)
    log_bare_lines("bare", fd=writer)
    logger = logging.getLogger("bare")
    logger.info('{"a": 1}')
    assert read_some(reader) == '{"a": 1}\n'
    for _ in range(4000):
        logger.info("x" * 1000)
    assert read_some(reader)
    until_it_fits(logger, "END")
    assert re.search(r"^\d+ lines were dropped$", drained(reader), re.MULTILINE)


def test_a_line_names_the_process_and_what_is_not_mere_information():
    record = logging.LogRecord("x", logging.WARNING, "", 0, "hot %d", (3,), None)
    text = formatter("text", "engine").format(record)
    assert text.endswith(" WARNING engine: hot 3")


def test_what_is_drawn_where_nobody_reads_is_not_waited_for():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = PipeStream(writer)
    text = "▰" * 10_000
    for _ in range(20):
        assert stream.write(text) == len(text)
    assert os.read(reader, 3) == "▰".encode()
    os.close(reader)
    os.close(writer)
