"""A command on a pseudo-terminal: type, interrupt, wait for what it shows."""

import os
import pty
import select
import signal
import subprocess
import time

from tests.cli.tiny import ENVIRONMENT, command


class Terminal:
    """The command line on a terminal of 80 by 24."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            command(*arguments), stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def type(self, text):
        os.write(self._master, text.encode())

    def interrupt(self, after=0.0):
        """Ctrl-C, `after` some seconds: between showing a prompt and waiting for a line, input() is deaf."""
        time.sleep(after)
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text, seconds=60):
        """Read until `text` shows up after what was waited for before; returns what came before it."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if not self._read():
                break
        before, found, self.seen = self.seen.partition(text)
        assert found, f"no {text!r} in {before!r}"
        return before

    def ends_with(self, seconds=30):
        """The exit code. What the command still writes is read, or it could not end."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read()
        return self.process.poll()

    def close(self):
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def _read(self):
        """Read what is there; False at the end."""
        if select.select([self._master], [], [], 0.1)[0]:
            try:
                self.seen += os.read(self._master, 65536).decode(errors="replace")
            except OSError:
                return False
        return True
