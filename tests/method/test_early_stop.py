import pytest
import torch
from sklearn.metrics import roc_auc_score

from elsa.config import method_config
from elsa.early_stop import (
    GROUP,
    MOST,
    early_stop_copies,
    early_stop_score,
    looked_at,
    pairwise_auroc,
    rotation_summed_energy,
)
from elsa.energy import energy
from elsa.nets import build_net
from elsa.seeds import generator

CONFIG = method_config("elsa+", "cpu", num_prototypes=8)


def photos(count, seed=0):
    noise = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    return (torch.nn.functional.interpolate(noise, (32, 32), mode="bilinear") * 255).to(torch.uint8)


def test_pairwise_auroc_equals_scikit_learn_with_ties():
    g = torch.Generator().manual_seed(0)
    normal, anomalous = torch.randint(0, 9, (17,), generator=g), torch.randint(3, 12, (13,), generator=g)
    expected = roc_auc_score([0] * 17 + [1] * 13, torch.cat([normal, anomalous]))
    assert pairwise_auroc(normal.float(), anomalous.float()).item() == pytest.approx(expected)


@pytest.mark.parametrize("count", [1, MOST - 1, MOST, MOST + 1, 10 * MOST + 3])
def test_of_very_many_images_evenly_spread_ones_are_looked_at(count):
    places = torch.arange(7, 7 + count)
    chosen = looked_at(places)
    assert min(count, MOST / 2) <= len(chosen) <= MOST
    assert chosen[0] == 7
    assert len(set(chosen.diff().tolist())) <= 1
    if count <= MOST:
        assert torch.equal(chosen, places)


def test_copies_are_drawn_once_for_a_seed():
    first, again = (early_stop_copies(photos(7), CONFIG, 3) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], early_stop_copies(photos(7), CONFIG, 4)[0])
    assert (first[0] - first[1]).abs().mean() > 0.1  # the strong copy is far from the weak one
    many = early_stop_copies(photos(64), CONFIG, 3)
    assert many[1].mean() < 0.8 * many[0].mean()  # and comes second: strong operations darken


def test_the_score_is_the_mean_over_groups_and_high_when_strong_copies_have_high_energy(monkeypatch):
    count = GROUP + 6
    weak_energy = torch.randn(count, generator=torch.Generator().manual_seed(0))
    strong_energy = weak_energy + 1
    answers = iter([weak_energy, strong_energy])
    monkeypatch.setattr("elsa.early_stop.rotation_summed_energy", lambda *_: next(answers))
    net = build_net("tiny", "auto", 3, 32, 4, generator(0, "w"))
    got = early_stop_score(net, torch.empty(0), (weak_energy, strong_energy), CONFIG)
    groups = [
        roc_auc_score([0] * (b - a) + [1] * (b - a), torch.cat([weak_energy[a:b], strong_energy[a:b]]))
        for a, b in ((0, GROUP), (GROUP, count))
    ]
    assert got == pytest.approx(sum(groups) / 2)
    assert got > 0.5


def test_energy_of_an_image_is_summed_over_its_own_rotations():
    net = build_net("tiny", "auto", 3, 32, 4, generator(0, "w")).eval()
    p = torch.nn.functional.normalize(torch.randn(8, 128, generator=torch.Generator().manual_seed(1)), dim=1)
    x = photos(5).float() / 255
    got = rotation_summed_energy(net, p, x, CONFIG)
    with torch.no_grad():
        for image, total in zip(x, got, strict=True):
            parts = [
                energy(torch.nn.functional.normalize(net(torch.rot90(image, k, (1, 2))[None])[0], dim=1), p, 0.5)
                for k in range(4)
            ]
            assert total.item() == pytest.approx(sum(part.item() for part in parts), rel=1e-5)
