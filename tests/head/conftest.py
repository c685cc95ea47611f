"""A MobileNetV2 with random weights through which an image makes a difference."""

import pytest
import torch

from elsa.mobilenet import MobileNetV2


@pytest.fixture(scope="session")
def net():
    """Random weights large enough for the features to stay alive, and batch norms that do something."""
    generator = torch.Generator().manual_seed(0)
    net = MobileNetV2().eval().requires_grad_(False)
    for name, value in net.state_dict().items():
        if name.endswith("running_var"):
            value.uniform_(0.5, 2, generator=generator)
        elif name.endswith(("running_mean", "bias")):
            value.normal_(0, 0.3, generator=generator)
        elif value.ndim == 1:
            value.uniform_(0.7, 1.4, generator=generator)
        elif value.ndim == 4:
            value.normal_(0, (2 / value[0].numel()) ** 0.5, generator=generator)
    return net
