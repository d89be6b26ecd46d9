"""Processes that tests fork and kill leave nothing locked."""

from __future__ import annotations

import os
import signal

from transformers.utils import logging


def test_a_process_that_is_killed_while_it_draws_a_bar_stops_no_other() -> None:
    logging.tqdm([]).close()  # makes the lock
    read, write = os.pipe()
    process = os.fork()
    if not process:
        with logging.tqdm.get_lock():
            os.write(write, b".")
            signal.pause()
    os.read(read, 1)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(read)
    os.close(write)
    locks = logging.tqdm.get_lock().locks
    taken = [lock.acquire(timeout=5) for lock in locks]
    for lock, had in zip(locks, taken, strict=True):
        if had:
            lock.release()
    assert taken and all(taken)
