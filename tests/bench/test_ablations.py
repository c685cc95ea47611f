"""The ladder of elsa/ablations.py: closed form, float64 by hand, invariance, gradients, and that each learns."""

import math

import pytest
import torch
import torch.nn.functional as F

from elsa.ablations import (
    LEAST,
    LOSSES,
    SCORES,
    ablated_energy,
    ablated_loss,
    contrastive_energy,
    contrastive_score_of_batch,
    highest_score,
    loss_of_scores,
    uniformity,
)
from elsa.energy import energy
from elsa.labels import ANOMALY, NORMAL, UNLABELLED
from elsa.losses import energy_loss

B, K, D = 7, 11, 5
LABELS = torch.tensor([ANOMALY, UNLABELLED, NORMAL, ANOMALY, UNLABELLED, UNLABELLED, NORMAL])


def unit(number, features=D, seed=0):
    drawn = torch.randn(number, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return F.normalize(drawn, dim=1)


def dot(a, b):
    return sum(p * q for p, q in zip(a, b, strict=True))


def score_by_hand(x, others, score, tau):
    if score == "cosine":
        return 1 + max(dot(x, p) for p in others)
    return math.log(sum(math.exp(dot(x, p) / (tau if score == "prototypes" else 1)) for p in others))


def loss_by_hand(z, prototypes, labels, score, loss, tau):
    paid = []
    for n, (x, label) in enumerate(zip(z, labels, strict=True)):
        others = [other for m, other in enumerate(z) if m != n] if score == "contrastive" else prototypes
        s = score_by_hand(x, others, score, tau)
        highest = {"cosine": 2, "prototypes": math.log(len(others)) + 1 / tau, "contrastive": math.log(len(others)) + 1}
        if label == ANOMALY:
            paid.append(s if loss == "naive" else 1 / (highest[score] - s))
        else:
            paid.append(1 / s if loss in ("inverse", "clamped") else -s)
    return sum(paid) / len(paid)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_match_their_definition(score, loss):
    z, prototypes = unit(B), unit(K, seed=1)
    expected = loss_by_hand(z.tolist(), prototypes.tolist(), LABELS.tolist(), score, loss, 0.7)
    assert ablated_loss(z, prototypes, LABELS, score, loss, 0.7).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_energies_match_their_definition(score):
    z, prototypes = unit(B), unit(K, seed=1)
    expected = [-score_by_hand(x, prototypes.tolist(), score, 0.7) for x in z.tolist()]
    torch.testing.assert_close(ablated_energy(z, prototypes, 0.7, score), torch.tensor(expected, dtype=torch.float64))


def test_the_unablated_ones_are_elsas_own():
    z, prototypes = unit(B), unit(K, seed=1)
    own = energy_loss(energy(z, prototypes, 0.5), LABELS, K, 0.5)
    torch.testing.assert_close(ablated_loss(z, prototypes, LABELS, "prototypes", "inverse", 0.5), own)
    torch.testing.assert_close(ablated_energy(z, prototypes, 0.5, "prototypes"), energy(z, prototypes, 0.5))


@pytest.mark.parametrize("score", SCORES)
def test_the_highest_score_is_reached_where_all_coincide_and_nowhere_exceeded(score):
    same = unit(1).expand(B, D)
    count = B - 1 if score == "contrastive" else B
    reached = contrastive_score_of_batch(same) if score == "contrastive" else -ablated_energy(same, same, 0.5, score)
    assert reached.tolist() == pytest.approx([highest_score(score, count, 0.5)] * B)
    anywhere = -ablated_energy(unit(101), unit(B, seed=2), 0.5, score)
    assert anywhere.max() < highest_score(score, B, 0.5)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_order_of_images_and_prototypes_does_not_matter(score, loss):
    z, prototypes = unit(B), unit(K, seed=1)
    order = torch.randperm(B, generator=torch.Generator().manual_seed(3))
    expected = ablated_loss(z, prototypes, LABELS, score, loss, 0.5)
    torch.testing.assert_close(ablated_loss(z[order], prototypes.flip(0), LABELS[order], score, loss, 0.5), expected)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_right(score, loss):
    prototypes = unit(K, seed=1)
    z = unit(B).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: ablated_loss(z, prototypes, LABELS, score, loss, 0.5), (z,))


@pytest.mark.parametrize("loss", LOSSES)
def test_a_single_prototype_and_cosines_at_their_ends_stay_finite(loss):
    prototype = unit(1)
    z = torch.cat([prototype, -prototype]).requires_grad_()
    for labels in ([ANOMALY, UNLABELLED], [UNLABELLED, ANOMALY]):
        # Elsa's own is not clamped: its settings refuse prototypes so few that it would need to be
        for score in ("cosine",) if loss == "inverse" else ("cosine", "prototypes"):
            value = ablated_loss(z, prototype, torch.tensor(labels), score, loss, 0.5)
            assert value.isfinite()
            assert value <= 1 / LEAST
            [gradient] = torch.autograd.grad(value, z)
            assert gradient.isfinite().all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("loss", LOSSES)
def test_it_learns_to_give_anomalies_the_higher_energy(score, loss):
    prototypes = unit(K, seed=1)
    raw = torch.randn(B, D, generator=torch.Generator().manual_seed(2)).double().requires_grad_()
    optimizer = torch.optim.Adam([raw], lr=0.05)
    for _ in range(200):
        z = F.normalize(raw, dim=1)
        value = ablated_loss(z, prototypes, LABELS, score, loss, 0.5)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    z = F.normalize(raw.detach(), dim=1)
    learned = -contrastive_score_of_batch(z) if score == "contrastive" else ablated_energy(z, prototypes, 0.5, score)
    assert learned[LABELS == ANOMALY].min() > learned[LABELS != ANOMALY].max()


def test_what_each_form_pays_in_closed_form():
    scores, labels = torch.tensor([1.0, 2.0]), torch.tensor([ANOMALY, UNLABELLED])
    assert loss_of_scores(scores, labels, 3.0, "inverse").item() == pytest.approx((1 / 2 + 1 / 2) / 2)
    assert loss_of_scores(scores, labels, 3.0, "naive").item() == pytest.approx((1 - 2) / 2)
    assert loss_of_scores(scores, labels, 3.0, "deep-sad").item() == pytest.approx((1 / 2 - 2) / 2)


def test_uniformity_and_energy_of_the_theory_by_hand():
    z = unit(B)
    rows = z.tolist()
    pairs = [(x, y) for n, x in enumerate(rows) for m, y in enumerate(rows) if n != m]
    by_hand = math.log(
        sum(math.exp(-2 * sum((p - q) ** 2 for p, q in zip(*pair, strict=True))) for pair in pairs) / len(pairs)
    )
    assert uniformity(z).item() == pytest.approx(by_hand)
    others = [[y for m, y in enumerate(rows) if m != n] for n in range(B)]
    energies = [
        -math.log(sum(math.exp(dot(x, y) / 0.5) for y in rest) / len(rest))
        for x, rest in zip(rows, others, strict=True)
    ]
    torch.testing.assert_close(contrastive_energy(z, z, 0.5, within=True), torch.tensor(energies).double())
    training = unit(K, seed=1)
    outside = [-math.log(sum(math.exp(dot(x, y) / 0.5) for y in training.tolist()) / K) for x in rows]
    torch.testing.assert_close(contrastive_energy(z, training, 0.5), torch.tensor(outside).double())


def test_even_embeddings_are_more_uniform_and_have_the_higher_energy():
    angles = torch.arange(12) * math.tau / 12
    even = torch.stack([angles.cos(), angles.sin()], dim=1).double()
    bunched = F.normalize(even * torch.tensor([1.0, 0.1]) + torch.tensor([3.0, 0.0]), dim=1)
    assert uniformity(even) < uniformity(bunched)
    assert (
        contrastive_energy(even, even, 0.5, within=True).mean()
        > contrastive_energy(bunched, bunched, 0.5, within=True).mean()
    )
    assert uniformity(bunched[:1].expand(5, 2)).item() == pytest.approx(0)
