"""What a result says about where it was measured."""

import json
import os
import subprocess
import sys
import time

import pytest

from draftsmith.bench.environment import MachineLoad, git_revision, hardware, versions


def test_hardware_and_versions_are_plain_json():
    found = hardware(threads=3)
    assert found["threads"] == 3
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 1 << 28
    known = versions()
    assert known["torch"].startswith("2.")
    assert known["python"] == ".".join(map(str, sys.version_info[:3]))
    json.dumps([found, known])


def test_git_revision_is_a_commit_or_nothing():
    revision = git_revision()
    assert revision is None or len(revision.split("+")[0]) == 40


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not tell")
def test_work_of_others_is_seen_and_our_own_is_not():
    def spin(seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        load = MachineLoad()
        time.sleep(1.0)
        beside = load.others()
    finally:
        burner.kill()
        burner.wait()
    assert beside > 0.3
    load = MachineLoad()
    own_began = time.monotonic()
    spin(0.5)
    elapsed = time.monotonic() - own_began
    cores = os.cpu_count()
    assert load.others() < cores - 0.5 / elapsed + 0.3


def test_it_is_unknown_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr("draftsmith.bench.environment._seconds_of_others", lambda: None)
    assert MachineLoad().others() is None
