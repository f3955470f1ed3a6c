import pytest
import torch


@pytest.fixture
def one_thread():
    """Small tensors gain nothing from threads, and lose much where other processes want the cores too."""
    torch.set_num_threads(1)
