"""Hear of a signal even while the main thread waits inside an operation.

Python runs handlers of signals in the main thread, between two steps of Python code. A thread that hangs in an
operation comes to none. But the interpreter writes the number of each signal to a socket as soon as it comes, if it is
given one, and another thread can listen there.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from types import FrameType

from retrograd.core.errors import TraceError

_WOKEN = 0
_HANDLED = 0xFF
"""Bytes that stand for no signal: a listener is woken up; the handler ran."""

_HARMLESS = {
    getattr(signal, name)
    for name in ("SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGURG", "SIGWINCH", "SIGCONT", "SIGIO", "SIGINFO")
    if hasattr(signal, name)
}
"""Signals that nobody sends to end a process."""


class SignalTap:
    """Stands in the way of one signal until it is closed; whoever handled it before still does.

    Args:
        number: the signal.

    Raises:
        TraceError: this is not the main thread; the signal cannot be handled, or by default ends the process.
    """

    def __init__(self, number: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise TraceError(
                "Signals can be heard of from the main thread only.",
                repair="call rg.watch_hangs in the main thread, or leave on_signal out.",
                reason="Python lets no other thread set a handler.",
            )
        self.number = number
        self._is_closed = False
        self._unhandled = 0
        self._hear, self._tell = socket.socketpair()
        self._hear.setblocking(False)
        self._tell.setblocking(False)
        try:
            self._previous = self._set_handler()
        except BaseException:
            self._close_sockets()
            raise
        self._previous_socket = signal.set_wakeup_fd(self._tell.fileno(), warn_on_full_buffer=False)

    def wait(self, seconds: float | None) -> bool:
        """Wait for the signal; False when the time is over, or :meth:`wake` was called."""
        if not select.select([self._hear], [], [], seconds)[0]:
            return False
        heard = self._hear.recv(4096)
        came = False
        for byte in heard:
            if byte == self.number:
                self._unhandled += 1
                came = True
            elif byte == _HANDLED:
                came |= not self._unhandled  # somebody else has taken the socket's place: only the handler tells
                self._unhandled = 0
        self._pass_on(bytes(byte for byte in heard if byte not in (_WOKEN, _HANDLED)))
        return came

    def wake(self) -> None:
        """Let the thread that waits go on."""
        self._send(_WOKEN)

    def close(self) -> None:
        """Take the handler away. Outside of the main thread it stays, and only calls the one before."""
        self._is_closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self.number) == self._handle and self._previous is not None:
            signal.signal(self.number, self._previous)
        current = signal.set_wakeup_fd(-1)
        ours = current == self._tell.fileno()
        signal.set_wakeup_fd(self._previous_socket if ours else current, warn_on_full_buffer=False)
        self._close_sockets()

    def _set_handler(self) -> signal._HANDLER:
        try:
            previous = signal.getsignal(self.number)
            if previous is signal.SIG_DFL and self.number not in _HARMLESS:
                raise TraceError(
                    f"{signal.Signals(self.number).name} ends the process by default; a handler would prevent that.",
                    repair="use signal.SIGUSR1, or set a handler of your own for it before.",
                )
            return signal.signal(self.number, self._handle)
        except (OSError, ValueError, TypeError) as error:
            raise TraceError(
                f"The signal {self.number!r} cannot be handled: {error}.", repair="use signal.SIGUSR1."
            ) from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_closed:
            self._send(_HANDLED)
        if callable(self._previous):
            self._previous(number, frame)

    def _send(self, byte: int) -> None:
        with contextlib.suppress(OSError):
            self._tell.send(bytes([byte]))

    def _pass_on(self, heard: bytes) -> None:
        if heard and self._previous_socket != -1:
            with contextlib.suppress(OSError):
                os.write(self._previous_socket, heard)

    def _close_sockets(self) -> None:
        self._hear.close()
        self._tell.close()
