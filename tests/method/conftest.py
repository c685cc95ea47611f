import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Toy fits are too small to share between threads, and the bits of a sum depend on how it is shared."""
    torch.set_num_threads(1)
