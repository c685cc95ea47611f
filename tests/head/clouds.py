"""Vectors to learn from: clouds around directions of an embedding space, and plain unit vectors."""

import torch
from torch.nn.functional import normalize

D = 7  # features of a unit vector, a prime
FEATURES = 61  # of a cloud


def unit(count, features=D, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(count, features, generator=generator, dtype=dtype), dim=1)


def cloud(count, direction, generator, spread=1.0):
    """Vectors around a direction of the embedding space, so long that the direction is shared by all of them."""
    middle = torch.zeros(FEATURES)
    middle[0], middle[direction] = 3.0, 3.0
    return middle + spread * torch.randn(count, FEATURES, generator=generator)


def problem(seed=0, normals=20, anomalies=20, hidden=30, unlabelled=300, kinds=(3, 5, 7)):
    """Unlabelled vectors around direction 1 that hide others around `kinds`, labels of both sorts, and a test."""
    generator = torch.Generator().manual_seed(seed)

    def others(count):
        return torch.cat(
            [cloud(1, kinds[n % len(kinds)], generator) for n in range(count)] or [torch.empty(0, FEATURES)]
        )

    train = [cloud(normals, 1, generator), cloud(unlabelled - hidden, 1, generator), others(hidden), others(anomalies)]
    labels = ["normal"] * normals + [""] * unlabelled + ["anomaly"] * anomalies
    test = torch.cat([cloud(100, 1, generator), others(99)])
    return torch.cat(train), labels, test, torch.arange(199) >= 100
