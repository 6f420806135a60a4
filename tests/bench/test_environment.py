"""What a result says about where it was measured."""

import json
import os
import subprocess
import sys
import time

import pytest

from draftsmith.bench.environment import MachineLoad, Settling, git_revision, hardware, versions


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


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the system does not tell")
def test_processes_of_the_measurement_are_not_others():
    """Every benchmark beside another engine used to warn of a busy machine: the engine itself."""
    used = (
        "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\nprint()\ntime.sleep(60)"
    )
    worker = subprocess.Popen([sys.executable, "-c", used], stdout=subprocess.PIPE)
    try:
        both = MachineLoad(), MachineLoad(lambda: [worker.pid])
        worker.stdout.read(1)
        strange, own = (load.others() * (time.monotonic() - load._began) for load in both)
        assert strange - own > 0.4
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    # It is a child of this process now, and no other's work.
    ended = both[0].others() * (time.monotonic() - both[0]._began)
    assert strange - ended > 0.4


def test_settling_waits_for_the_load_of_others_to_go(monkeypatch):
    loads = iter([1.0, 0.5, 0.1, *[1.0] * 1000])
    monkeypatch.setattr(MachineLoad, "others", lambda self: next(loads))
    monkeypatch.setattr(Settling, "_WINDOW", 0.001)
    monkeypatch.setattr(Settling, "_LIMIT", 0.02)
    settling = Settling()
    settling.wait()
    assert next(loads) == 1.0  # the fourth: it stopped at the third
    waited = [settling.wait() for _ in range(5)]
    assert all(seconds > 0.02 for seconds in waited[:3]) and all(seconds < 0.001 for seconds in waited[3:])


def test_it_is_unknown_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr("draftsmith.bench.environment._seconds_of_others", lambda own=(): None)
    assert MachineLoad().others() is None
    assert Settling().wait() < 1.0
