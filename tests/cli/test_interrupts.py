"""An interrupt is never lost, wherever it falls."""

import subprocess
import sys

IN_A_FINALIZER = """
import signal, sys, time
from draftsmith.cli import app

class Dropped:
    def __del__(self):
        {fault}

def run(arguments):
    try:
        dropped = Dropped()
        del dropped
        time.sleep(2)
    except KeyboardInterrupt:
        return 130
    return 0

app.run = run
app.main([])
"""


def run_with(fault):
    return subprocess.run(
        [sys.executable, "-c", IN_A_FINALIZER.format(fault=fault)], capture_output=True, text=True, timeout=60
    )


def test_an_interrupt_in_a_finalizer_still_ends_the_command():
    result = run_with("signal.raise_signal(signal.SIGINT)")
    assert (result.returncode, result.stderr) == (130, "")


def test_any_other_error_in_a_finalizer_is_still_told():
    result = run_with("raise ValueError('from a finalizer')")
    assert result.returncode == 0
    assert "from a finalizer" in result.stderr
