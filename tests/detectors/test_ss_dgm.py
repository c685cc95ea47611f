import math

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence

from elsa.detectors.ss_dgm import M2, SSDGMConfig, SSDGMDetector, evidence_bound, log_odds, m2_loss, step_loss
from elsa.errors import UserError
from elsa.trust.metrics import auroc

B, D, H, Z = 7, 11, 5, 3


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def images(number, seed=0, side=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, 1, side, side), dtype=torch.uint8, generator=generator)


LABELS = torch.tensor([0, 1, -1, 0, -1, 1, 0], dtype=torch.int8)


def test_the_bound_is_likelihood_minus_divergence():
    x, logits, mean, log_variance = draws(B, D).sigmoid().round(), draws(B, D), draws(B, Z), draws(B, Z, seed=1)
    likelihood = Bernoulli(logits=logits).log_prob(x).sum(dim=1)
    posterior = Normal(mean, (log_variance / 2).exp())
    divergence = kl_divergence(posterior, Normal(torch.zeros_like(mean), torch.ones_like(mean))).sum(dim=1)
    torch.testing.assert_close(evidence_bound(x, logits, mean, log_variance), likelihood - divergence)


def test_a_posterior_equal_to_the_prior_costs_nothing():
    bound = evidence_bound(torch.ones(2, D), torch.zeros(2, D), torch.zeros(2, Z), torch.zeros(2, Z))
    assert bound.tolist() == pytest.approx([-D * math.log(2)] * 2)


def loss_by_hand(bounds, logits, labels, weight):
    unlabelled, labelled = [], []
    for (normal, anomaly), (a, b), label in zip(bounds, logits, labels, strict=True):
        q = [math.exp(a) / (math.exp(a) + math.exp(b)), math.exp(b) / (math.exp(a) + math.exp(b))]
        if label == 0:
            entropy = -sum(p * math.log(p) for p in q)
            unlabelled.append(-(q[0] * normal + q[1] * anomaly + entropy))
        else:
            known = 1 if label == -1 else 0
            labelled.append(-(normal, anomaly)[known] - weight * math.log(q[known]))
    return sum(unlabelled) / len(unlabelled) + sum(labelled) / len(labelled)


@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_the_loss_is_its_definition(weight):
    bounds, logits = draws(B, 2), draws(B, 2, seed=1)
    by_hand = loss_by_hand(bounds.tolist(), logits.tolist(), LABELS.tolist(), weight)
    assert m2_loss(bounds, logits, LABELS, weight).item() == pytest.approx(by_hand)


def test_the_gradient_of_the_loss_is_right():
    bounds, logits = draws(B, 2).requires_grad_(), draws(B, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda b, q: m2_loss(b, q, LABELS, 2.0), (bounds, logits))


def test_an_unlabelled_image_pays_least_where_q_is_the_posterior():
    """With q(y|x) proportional to exp(bound), what is left is -log sum exp(bound)."""
    bounds, unlabelled = draws(B, 2), torch.zeros(B, dtype=torch.int8)
    best = m2_loss(bounds, bounds, unlabelled, 1.0)
    torch.testing.assert_close(best, -torch.logsumexp(bounds, dim=1).mean())
    assert best < m2_loss(bounds, bounds + draws(B, 2, seed=2), unlabelled, 1.0)


def test_a_step_tries_both_classes_with_their_priors():
    net = M2((1, 8, 8), H, Z).eval()
    batch, noise, label = images(B), torch.randn(2, B, Z), LABELS
    x = batch.flatten(1) / 255
    bounds = []
    for kind in (0, 1):
        y = torch.zeros(B, 2)
        y[:, kind] = 1
        mean, log_variance = net.encoder(torch.cat([x, y], 1)).split(Z, dim=1)
        z = mean + torch.exp(0.5 * log_variance) * noise[kind]
        logits = net.decoder(torch.cat([z, y], 1))
        bounds.append(evidence_bound(x, logits, mean, log_variance) + math.log((0.7, 0.3)[kind]))
    expected = m2_loss(torch.stack(bounds, 1), net.classifier(batch / 255), label, 2.0)
    torch.testing.assert_close(step_loss(net, batch, label, noise, (math.log(0.7), math.log(0.3)), 2.0), expected)


def test_the_score_ranks_as_the_probability_of_an_anomaly():
    net = M2((1, 8, 8), H, Z).eval()
    probability = net.classifier(images(B) / 255).softmax(dim=1)[:, 1]
    torch.testing.assert_close(log_odds(net, images(B)).sigmoid(), probability)


def test_the_few_labelled_images_weigh_as_much_as_all_others_and_none_cost_nothing():
    bounds, logits = draws(B, 2), draws(B, 2, seed=1)
    unlabelled = LABELS == 0
    apart = [m2_loss(bounds[one], logits[one], LABELS[one], 2.0) for one in (unlabelled, ~unlabelled)]
    torch.testing.assert_close(m2_loss(bounds, logits, LABELS, 2.0), apart[0] + apart[1])


def test_the_published_settings_are_the_defaults():
    config = SSDGMConfig()
    assert (config.hidden, config.latent, config.epochs, config.batch) == (512, 128, 150, 128)
    assert (config.lr, config.weight_decay, config.classification_weight) == (1e-3, 1e-6, 0.1)
    net = M2((3, 32, 32), config.hidden, config.latent)
    shapes = [tuple(layer.weight.shape) for layer in (*net.encoder, *net.decoder) if isinstance(layer, torch.nn.Linear)]
    assert shapes == [(512, 3074), (256, 512), (256, 256), (256, 130), (512, 256), (3072, 512)]


def test_it_learns_the_class_from_few_labels():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 80, (200, 1, 8, 8), generator=generator)
    x[::4, :, :4] += 120  # the upper half of an anomaly is bright, and of the others the lower one
    x[torch.arange(200) % 4 > 0, :, 4:] += 120
    is_anomaly = torch.arange(200) % 4 == 0
    labels = ["anomaly" if n in (0, 4, 8, 12) else "normal" if n in (1, 2, 3, 5, 6, 7, 9) else "" for n in range(100)]
    detector = SSDGMDetector(epochs=40, hidden=20, latent=Z, lr=3e-3, batch=32, classification_weight=10.0)
    scores = detector.fit(x[:100].to(torch.uint8), labels).anomaly_score(x[100:].to(torch.uint8))
    assert auroc(scores, is_anomaly[100:]) > 0.95


@pytest.mark.parametrize("labels", [["normal"] * 5 + [""] * 45, ["anomaly"] * 5 + [""] * 45, [""] * 50])
def test_labels_of_one_kind_are_refused(labels):
    with pytest.raises(UserError, match="ss-dgm learns two classes"):
        SSDGMDetector().fit(images(50), labels)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_labelled_normal_is_never_held_out(seed):
    detector = SSDGMDetector(epochs=1, hidden=H, latent=Z, seed=seed)
    from elsa.detectors.ss_dgm import _hold_out

    codes = torch.zeros(60, dtype=torch.int8)
    codes[0], codes[1] = 1, -1
    train, held_out = _hold_out(codes, seed)
    assert 0 in train
    assert 1 not in train
    assert not set(train.tolist()) & set(held_out.tolist())
    assert detector.fit(images(60), ["normal", "anomaly"] + [""] * 58).calibration_.isfinite().all()


@pytest.mark.parametrize("setting", [{"hidden": 0}, {"anomaly_prior": 1.0}, {"lr": 0.0}, {"latents": 3}])
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        SSDGMDetector(**setting)
