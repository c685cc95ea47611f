import math

import pytest
import torch
import torch.nn.functional as F

from elsa.energy import energy
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.losses import energy_loss, nt_xent, rotation_loss

B, K, D, TAU = 7, 11, 5, 0.5
LABELS = torch.tensor([ANOMALY, UNLABELLED, NORMAL, ANOMALY, UNLABELLED, UNLABELLED, NORMAL], dtype=torch.int8)


def unit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def some_energy():
    return energy(unit(B, D), unit(K, D, seed=1), TAU)


def test_energy_loss_in_closed_form_at_the_middle_of_the_range():
    # S = log K for a feature orthogonal to all prototypes: normals pay 1 / log K, anomalies 1 / (1 / tau)
    middle = torch.full((2,), -math.log(K), dtype=torch.float64)
    labels = torch.tensor([NORMAL, ANOMALY])
    assert energy_loss(middle[:1], labels[:1], K, TAU).item() == pytest.approx(1 / math.log(K))
    assert energy_loss(middle[1:], labels[1:], K, TAU).item() == pytest.approx(TAU)


def test_energy_loss_matches_the_paper_term_by_term():
    scores = (-some_energy()).tolist()
    largest = math.log(K) + 1 / TAU
    terms = [1 / (largest - s) if label == ANOMALY else 1 / s for s, label in zip(scores, LABELS.tolist(), strict=True)]
    assert energy_loss(some_energy(), LABELS, K, TAU).item() == pytest.approx(sum(terms) / B)


def test_unlabelled_and_normal_images_pay_the_same():
    swapped = torch.where(LABELS == ANOMALY, ANOMALY, NORMAL)
    assert energy_loss(some_energy(), LABELS, K, TAU) == energy_loss(some_energy(), swapped, K, TAU)


def test_energy_loss_ignores_the_order_of_the_batch():
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    torch.testing.assert_close(
        energy_loss(some_energy()[order], LABELS[order], K, TAU), energy_loss(some_energy(), LABELS, K, TAU)
    )


def test_energy_loss_has_the_right_gradient_and_pulls_each_kind_its_way():
    e = some_energy().detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda e: energy_loss(e, LABELS, K, TAU), (e,))
    energy_loss(e, LABELS, K, TAU).backward()
    assert (e.grad[LABELS == ANOMALY] < 0).all()  # a step downhill raises an anomaly's energy
    assert (e.grad[LABELS != ANOMALY] > 0).all()


def test_the_pull_is_strongest_on_the_image_that_is_most_wrong():
    e = torch.tensor([-4.0, -1.0], dtype=torch.float64, requires_grad=True)
    energy_loss(e, torch.tensor([NORMAL, NORMAL]), K, TAU).backward()
    assert e.grad[1] > e.grad[0]


def test_nt_xent_of_parallel_views_is_log_of_the_number_of_others():
    n = 5
    z = unit(1, D).expand(2 * n, D)
    assert nt_xent(z, TAU).item() == pytest.approx(math.log(2 * n - 1), abs=1e-6)


def nt_xent_by_hand(z, tau):
    count, total = len(z), 0.0
    for i in range(count):
        partner = (i + count // 2) % count
        similar = [math.exp(sum(a * b for a, b in zip(z[i], z[j], strict=True)) / tau) for j in range(count)]
        total -= math.log(similar[partner] / sum(s for j, s in enumerate(similar) if j != i))
    return total / count


@pytest.mark.parametrize("tau", [0.1, 0.5])
def test_nt_xent_matches_a_triple_loop(tau):
    z = unit(2 * 7, D)
    assert nt_xent(z, tau).item() == pytest.approx(nt_xent_by_hand(z.tolist(), tau), rel=1e-6)


def test_nt_xent_ignores_the_order_of_instances_and_of_views():
    z = unit(2 * 7, D)
    first, second = z.chunk(2)
    order = torch.tensor([3, 1, 6, 0, 5, 2, 4])
    torch.testing.assert_close(nt_xent(torch.cat([first[order], second[order]]), TAU), nt_xent(z, TAU))
    torch.testing.assert_close(nt_xent(torch.cat([second, first]), TAU), nt_xent(z, TAU))


def test_nt_xent_falls_when_pairs_come_together():
    first, second = unit(7, D), unit(7, D, seed=1)
    assert nt_xent(torch.cat([first, first]), TAU) < nt_xent(torch.cat([first, second]), TAU)


def test_nt_xent_has_the_right_gradient():
    # the loss is computed in fp32 for stability, so the check's step is coarse
    z = unit(6, D).requires_grad_()
    nt_xent(z, TAU).backward()
    step, direction = 1e-3, unit(6, D, seed=3)
    with torch.no_grad():
        slope = (nt_xent(z + step * direction, TAU) - nt_xent(z - step * direction, TAU)) / (2 * step)
    assert (z.grad * direction).sum().item() == pytest.approx(slope.item(), rel=2e-2)


def test_rotation_loss_leaves_labelled_anomalies_out():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    rotation = torch.tensor([0, 1, 2, 3, 0, 1, 2])
    loss = rotation_loss(logits, rotation, LABELS)
    kept = LABELS != ANOMALY
    by_hand = [
        math.log(sum(math.exp(value) for value in row)) - row[turn]
        for row, turn, k in zip(logits.tolist(), rotation.tolist(), kept.tolist(), strict=True)
        if k
    ]
    assert loss.item() == pytest.approx(sum(by_hand) / len(by_hand))
    loss.backward()
    assert (logits.grad[~kept] == 0).all()
    assert (logits.grad[kept] != 0).any(dim=1).all()


def test_rotation_loss_of_a_batch_of_anomalies_is_zero():
    assert rotation_loss(torch.randn(3, 4), torch.tensor([0, 1, 2]), torch.full((3,), ANOMALY)) == 0
