import math

import pytest
import torch
import torch.nn.functional as F

from elsa.energy import energy, energy_range, ensemble_of_projections, ensemble_of_scores

B, K, D, V, R = 7, 11, 5, 3, 2  # distinct primes: no axis can stand in for another


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def energy_by_hand(z, prototypes, tau):
    return [
        -math.log(sum(math.exp(sum(a * b for a, b in zip(x, p, strict=True)) / tau) for p in prototypes)) for x in z
    ]


def test_energy_of_a_feature_equal_to_all_prototypes_is_the_lowest_possible():
    z = unit(1, D)
    lowest, highest = energy_range(K, 0.5)
    assert energy(z, z.expand(K, D), 0.5).item() == pytest.approx(-(math.log(K) + 2))
    assert energy(z, z.expand(K, D), 0.5).item() == pytest.approx(lowest)
    assert energy(z, -z.expand(K, D), 0.5).item() == pytest.approx(highest)


@pytest.mark.parametrize("tau", [0.1, 0.5, 2.0])
def test_energy_matches_its_definition(tau):
    z, p = unit(B, D), unit(K, D, seed=1)
    torch.testing.assert_close(energy(z, p, tau), torch.tensor(energy_by_hand(z.tolist(), p.tolist(), tau)).double())


def test_energy_survives_a_temperature_that_overflows_exp():
    z, p = unit(B, D).float(), unit(K, D, seed=1).float()
    assert (z @ p.T / 1e-3).exp().sum(1).isinf().any()  # the naive formula fails here
    assert energy(z, p, 1e-3).isfinite().all()


def test_higher_energy_is_farther_from_the_prototypes():
    p = unit(1, D).expand(K, D)
    near, far = F.normalize(p[:1] + 0.1, dim=1), -p[:1]
    assert energy(far, p, 0.5) > energy(near, p, 0.5)


def test_energy_ignores_the_order_of_prototypes_and_of_the_batch():
    z, p = unit(B, D), unit(K, D, seed=1)
    torch.testing.assert_close(energy(z, p.flip(0), 0.5), energy(z, p, 0.5))
    torch.testing.assert_close(energy(z.flip(0), p, 0.5), energy(z, p, 0.5).flip(0))


def test_energy_has_the_right_gradient():
    z, p = unit(B, D).requires_grad_(), unit(K, D, seed=1)
    assert torch.autograd.gradcheck(lambda z: energy(z, p, 0.5), (z,))


def test_ensemble_of_projections_averages_raw_views_first_and_sums_the_rotations():
    raw, p = 3 * torch.randn(V, R, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), unit(K, D)
    expected = []
    for b in range(B):
        total = 0.0
        for r in range(R):
            mean = [sum(raw[v, r, b, d].item() for v in range(V)) / V for d in range(D)]
            norm = math.sqrt(sum(m * m for m in mean))
            total += energy_by_hand([[m / norm for m in mean]], p.tolist(), 0.5)[0]
        expected.append(total)
    torch.testing.assert_close(ensemble_of_projections(raw, p, 0.5), torch.tensor(expected).double())


def test_ensemble_of_scores_averages_energies_of_unit_views():
    raw, p = 3 * torch.randn(V, R, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2)), unit(K, D)
    views = [F.normalize(raw[v, r], dim=1) for v in range(V) for r in range(R)]
    expected = sum(torch.tensor(energy_by_hand(z.tolist(), p.tolist(), 0.5)).double() for z in views) / (V * R)
    torch.testing.assert_close(ensemble_of_scores(raw, p, 0.5), expected)


def test_equal_views_make_the_two_ensembles_agree_up_to_the_number_of_rotations():
    raw = unit(1, R, B, D).expand(V, R, B, D)
    p = unit(K, D, seed=1)
    torch.testing.assert_close(ensemble_of_projections(raw, p, 0.5), R * ensemble_of_scores(raw, p, 0.5))
