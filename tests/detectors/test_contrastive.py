import math

import pytest
import torch
import torch.nn.functional as F

from elsa.augment import draw, weak
from elsa.detectors.contrastive import CSIDetector, SimCLRDetector, csi_score, nearest_cosine
from elsa.detectors.inputs import hold_out
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.seeds import generator

R, N, B, D = 2, 11, 7, 5
QUICK = {"preset": "cpu", "pretrain_epochs": 1, "views": 3}


def unit(*shape, seed=0):
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64), dim=-1)


def images(number, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, 3, 16, 16), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope="module")
def csi():
    return CSIDetector(**QUICK, seed=3).fit(images(60), ["normal" if n % 2 else "" for n in range(60)])


@pytest.fixture(scope="module")
def simclr():
    return SimCLRDetector(**QUICK, seed=3).fit(images(60), [""] * 60)


def test_the_score_is_its_definition():
    z, bank = 3 * unit(R, B, D) + 0.1, unit(R, N, D, seed=1)
    logit, norm, mean_logit = unit(R, B, seed=2), torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0])
    for b, score in enumerate(csi_score(z, logit, bank, norm, mean_logit).tolist()):
        total = 0.0
        for r in range(R):
            length = math.sqrt(sum(v * v for v in z[r, b].tolist()))
            cosines = [
                sum(v * p for v, p in zip(z[r, b].tolist(), row, strict=True)) / length for row in bank[r].tolist()
            ]
            total += max(cosines) * length / norm[r].item() + logit[r, b].item() / mean_logit[r].item()
        assert score == pytest.approx(-total)


def test_a_training_image_itself_is_as_near_as_can_be_whatever_its_length():
    bank = unit(N, D)
    assert nearest_cosine(0.01 * bank[3:4], bank).item() == pytest.approx(1)
    assert nearest_cosine(-bank[:1], bank[:1]).item() == pytest.approx(-1)


def test_the_score_falls_with_length_and_logit():
    bank, ones = unit(R, N, D), torch.ones(R)
    z, logit = bank[:, :B], torch.zeros(R, B)
    base = csi_score(z, logit, bank, ones, ones)
    assert (csi_score(2 * z, logit, bank, ones, ones) < base).all()
    assert (csi_score(z, logit + 1, bank, ones, ones) < base).all()


def outputs_by_hand(detector, batch):
    """Mean projections and logits over the views, a rotation after the other, an image at a time."""
    config = detector.config
    views = draw(config.views, generator(detector.seed, "score"))
    rows = []
    with torch.no_grad():
        for image in batch:
            per_rotation = []
            for quarter in range(config.shifts):
                both = [
                    detector.net_(torch.rot90(weak(image[None], view[None], 0.54, 0.54), quarter, (2, 3)))
                    for view in views
                ]
                mean = [torch.stack(part).mean(dim=0)[0] for part in zip(*both, strict=True)]
                per_rotation.append((mean[0], mean[1][quarter]))
            rows.append(per_rotation)
    return rows


def test_csi_scores_the_mean_outputs_of_each_rotation(csi):
    new = images(3, 1)
    train = images(60)[hold_out(torch.arange(60), 3)[0]]
    bank, test = outputs_by_hand(csi, train), outputs_by_hand(csi, new)
    expected = []
    for row in test:
        total = 0.0
        for quarter, (z, logit) in enumerate(row):
            known = [image[quarter] for image in bank]
            near = max(F.cosine_similarity(z, other, dim=0).item() for other, _ in known)
            length = sum(other.norm().item() for other, _ in known) / len(known)
            mean_logit = sum(other.item() for _, other in known) / len(known)
            total += near * z.norm().item() / length + logit.item() / mean_logit
        expected.append(-total)
    assert csi.anomaly_score(new).tolist() == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_simclr_scores_one_minus_the_nearest_cosine(simclr):
    new = images(3, 1)
    train = images(60)[hold_out(torch.arange(60), 3)[0]]
    bank = [row[0][0] for row in outputs_by_hand(simclr, train)]
    for row, score in zip(outputs_by_hand(simclr, new), simclr.anomaly_score(new).tolist(), strict=True):
        near = max(F.cosine_similarity(row[0][0], other, dim=0).item() for other in bank)
        assert score == pytest.approx(1 - near, abs=1e-4)


def test_the_images_that_calibrate_are_not_in_the_memory(csi):
    train, held_out = hold_out(torch.arange(60), 3)
    assert csi.bank_RND_.shape == (4, len(train), 128)
    torch.testing.assert_close(csi.calibration_, csi.anomaly_score(images(60)[held_out]))


@pytest.mark.parametrize(("detector_class", "method"), [(CSIDetector, "elsa+"), (SimCLRDetector, "elsa")])
def test_pretraining_is_elsas_and_can_be_shared(detector_class, method):
    batch, labels = images(60), ["anomaly" if n % 6 == 0 else "" for n in range(60)]
    weights = Elsa(method=method, seed=3, **QUICK).pretrain(batch, labels)
    alone = detector_class(**QUICK, seed=3).fit(batch, labels)
    shared = detector_class(**{**QUICK, "pretrain_epochs": 0}, seed=3).fit(batch, labels, weights)
    assert torch.equal(alone.anomaly_score(images(5, 1)), shared.anomaly_score(images(5, 1)))
    untrained = detector_class(**{**QUICK, "pretrain_epochs": 0}, seed=3).fit(batch, labels)
    assert not torch.equal(untrained.anomaly_score(images(5, 1)), shared.anomaly_score(images(5, 1)))


def test_labelled_anomalies_are_left_out():
    batch, labels = images(60), ["anomaly" if n % 6 == 0 else "" for n in range(60)]
    changed = batch.clone()
    changed[::6] = 255 - changed[::6]
    before, after = (CSIDetector(**QUICK).fit(x, labels).anomaly_score(images(5, 1)) for x in (batch, changed))
    assert torch.equal(before, after)


def test_wrong_settings_and_sizes_are_refused(csi):
    with pytest.raises(UserError, match="there is no setting 'tua'"):
        CSIDetector(tua=1)
    with pytest.raises(UserError, match="fitted on"):
        csi.anomaly_score(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))
    with pytest.raises(UserError, match="vectors given"):
        CSIDetector().fit(torch.rand(40, 5), [""] * 40)
