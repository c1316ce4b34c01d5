"""Signals that end a run, held back while it forks."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tito_audit.signals import DeferredSignals


def test_a_signal_that_another_thread_gets_comes_after_the_fork() -> None:
    ready, done = threading.Event(), threading.Event()
    went_on = False

    def other() -> None:
        ready.set()
        done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    ready.wait(30)
    before = signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        with pytest.raises(KeyboardInterrupt), DeferredSignals() as signals:  # noqa: PT012
            signal.pthread_kill(thread.ident or 0, signal.SIGINT)
            ends = time.monotonic() + 30
            while not signals.received and time.monotonic() < ends:
                time.sleep(0.001)
            went_on = True
    finally:
        done.set()
        thread.join()
    assert went_on
    assert (signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, ())) == before


def test_a_forked_process_leaves_interrupts_to_its_parent() -> None:
    with DeferredSignals() as signals:
        pid = os.fork()
        if not pid:
            signals.restore_in_child()
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_no_signal_changes_nothing() -> None:
    before = signal.getsignal(signal.SIGINT)
    with DeferredSignals():
        pass
    assert signal.getsignal(signal.SIGINT) == before
