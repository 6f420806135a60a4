"""Fixtures of the trainer's tests: one tiny corpus for all."""

import pytest
import torch

from tests.models.fakes import tiny_backend
from tests.training.tiny import write_data


@pytest.fixture(autouse=True)
def one_thread():
    """Bitwise equality is promised for one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Texts of the tiny target, with some to validate on."""
    return write_data(tmp_path_factory.mktemp("data") / "texts", tiny_backend(0, dtype=torch.float32))
