"""What every detector promises, whatever is inside: this file knows nothing but names and two methods."""

import importlib.util

import pytest
import torch

from elsa.detectors import DETECTORS, build
from elsa.errors import UserError
from elsa.saved import SAVED_CLASSES, open_model, save_model
from elsa.trust.metrics import auroc

# Two epochs of a tiny set learn something only in small steps at a high rate.
EPOCHS = {"preset": "cpu", "pretrain_epochs": 2, "finetune_epochs": 2}
QUICK = EPOCHS | {"finetune_batch": 8, "finetune_lr": 3e-3, "num_prototypes": 8}
DEEP_SAD = {"autoencoder_epochs": 8, "epochs": 8, "lr": 1e-3, "batch": 16}
SETTINGS = {
    "elsa": QUICK,
    "elsa+": QUICK,
    "csi": EPOCHS,
    "simclr": EPOCHS,
    "deep-sad": DEEP_SAD,
    "deep-svdd": DEEP_SAD,
    "goad": {"epochs": 1, "width": 1, "lr": 3e-2, "norm_weight": 0},
    # with Kingma's weight the two classes of the generative model may well be something else than the labels' two
    "ss-dgm": {"hidden": 32, "latent": 5, "epochs": 10, "batch": 16, "lr": 1e-3, "classification_weight": 1e3},
}
TAKES_VECTORS_ALONE = {"elsa-head"}  # until it is given an encoder
LOOKS_72_TIMES = {"goad"}  # so it looks at a quarter of each image
TRAIN, TEST = 67, 29


def toy(number: int, seed: int, vectors: bool):
    """Dark images, and bright ones last; as vectors, the two kinds also point in different directions."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 90, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
    bright = number // 4
    images[-bright:] += 160
    is_anomaly = torch.arange(number) >= number - bright
    if vectors:
        signed = torch.ones(32 * 32).index_fill(0, torch.arange(0, 32 * 32, 2), -1.0)
        return images[:, 0].flatten(1).float() / 255 * torch.where(is_anomaly[:, None], 1.0, signed), is_anomaly
    return images, is_anomaly


def inputs(name: str):
    vectors = name in TAKES_VECTORS_ALONE
    train, is_anomaly = toy(TRAIN, 0, vectors)
    labels = ["anomaly" if anomaly else "normal" if n % 3 == 0 else "" for n, anomaly in enumerate(is_anomaly.tolist())]
    test, is_anomaly = toy(TEST, 1, vectors)
    if name in LOOKS_72_TIMES:
        train, test = train[:, :, :16, :16], test[:, :, :16, :16]
    return train, labels, test, is_anomaly


@pytest.fixture(scope="module", params=DETECTORS)
def name(request):
    module = DETECTORS[request.param].partition(":")[0]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not written yet")
    return request.param


@pytest.fixture(scope="module")
def fitted(name):
    images, labels, _, _ = inputs(name)
    return build(name, seed=3, **SETTINGS.get(name, {})).fit(images, labels)


def test_one_finite_score_per_image(name, fitted):
    _, _, test, _ = inputs(name)
    for images in (test, test[:1], test[:0]):
        scores = fitted.anomaly_score(images)
        assert scores.shape == (len(images),)
        assert scores.is_floating_point()
        assert scores.device.type == "cpu"
        assert not scores.requires_grad
        assert scores.isfinite().all()


def test_anomalies_score_higher(name, fitted):
    _, _, test, is_anomaly = inputs(name)
    assert auroc(fitted.anomaly_score(test), is_anomaly) > 0.99


def test_scores_do_not_depend_on_the_rest_of_the_batch(name, fitted):
    _, _, test, _ = inputs(name)
    together = fitted.anomaly_score(test)
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    # The head counts in standard deviations of normal images, which this toy makes tiny: its scores reach 1,300.
    close = {"rtol": 1e-5, "atol": 1e-5 * max(1.0, together.std().item())}
    torch.testing.assert_close(fitted.anomaly_score(test[order]), together[order], **close)
    alone = torch.cat([fitted.anomaly_score(test[n : n + 1]) for n in range(5)])
    torch.testing.assert_close(alone, together[:5], **close)


@pytest.fixture(scope="module")
def again(name, fitted):
    """A second fit with the same seed, and copies of its input from before."""
    images, labels, test, _ = inputs(name)
    copies = images.clone(), list(labels), test.clone()
    torch.manual_seed(12345)  # the global state must not matter
    detector = build(name, seed=3, **SETTINGS.get(name, {}))
    returned = detector.fit(images, labels)
    scores = detector.anomaly_score(test)
    return detector, returned, scores, (images, labels, test), copies


def test_fit_returns_the_detector_and_leaves_its_input_alone(again):
    detector, returned, _, (images, labels, test), copies = again
    assert returned is detector
    assert torch.equal(images, copies[0])
    assert labels == copies[1]
    assert torch.equal(test, copies[2])


def test_same_seed_same_scores_to_the_bit(again, fitted):
    detector, _, scores, (_, _, test), _ = again
    assert torch.equal(scores, fitted.anomaly_score(test))
    assert torch.equal(detector.anomaly_score(test), scores)
    assert torch.equal(detector.calibration_, fitted.calibration_)


def test_calibration_holds_scores_of_normal_looking_images(name, fitted):
    assert fitted.calibration_.ndim == 1
    assert fitted.calibration_.isfinite().all()
    _, _, test, is_anomaly = inputs(name)
    assert fitted.calibration_.median() < fitted.anomaly_score(test)[is_anomaly].min()


def test_a_saved_detector_scores_as_it_did(name, fitted, tmp_path):
    _, _, test, _ = inputs(name)
    if type(fitted).__name__ not in SAVED_CLASSES:
        pytest.skip(f"the command does not save {name}")
    save_model(fitted, tmp_path / "model", {"seed": 3})
    opened, _ = open_model(tmp_path / "model")
    assert type(opened) is type(fitted)
    assert torch.equal(opened.anomaly_score(test), fitted.anomaly_score(test))
    assert torch.equal(opened.calibration_, fitted.calibration_)


def test_labels_as_numbers_are_refused(name):
    images, labels, _, _ = inputs(name)
    with pytest.raises(UserError, match="is a number"):
        build(name, **SETTINGS.get(name, {})).fit(images, [1 if label == "normal" else 0 for label in labels])


@pytest.mark.parametrize("change", [lambda labels: labels[:-1], lambda labels: [*labels, ""]])
def test_labels_of_another_length_are_refused(name, change):
    images, labels, _, _ = inputs(name)
    with pytest.raises(UserError, match=str(TRAIN)):
        build(name, **SETTINGS.get(name, {})).fit(images, change(labels))


@pytest.mark.parametrize("number", [0, TRAIN])
def test_training_images_that_are_all_anomalies_or_none_at_all_are_refused(name, number):
    images, _, _, _ = inputs(name)
    with pytest.raises(UserError):
        build(name, **SETTINGS.get(name, {})).fit(images[:number], ["anomaly"] * number)
