import pytest
import torch
import torch.nn.functional as F

from elsa.detectors.deep_sad import (
    Autoencoder,
    DeepSADConfig,
    DeepSADDetector,
    DeepSVDDDetector,
    LeNet,
    centre_of,
    deep_sad_loss,
    reconstruction_loss,
    squared_distance,
)
from elsa.detectors.inputs import hold_out
from elsa.errors import UserError

QUICK = {"autoencoder_epochs": 1, "epochs": 1, "batch": 16}


def images(number, seed=0, side=16, channels=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, channels, side, side), dtype=torch.uint8, generator=generator)


def loss_by_hand(distances, labels, eta):
    paid = {0: lambda d: d, 1: lambda d: eta * (d + 1e-6), -1: lambda d: eta / (d + 1e-6)}
    return sum(paid[label](d) for d, label in zip(distances, labels, strict=True)) / len(labels)


@pytest.mark.parametrize("eta", [1.0, 0.3])
def test_the_loss_is_its_definition(eta):
    distance = torch.rand(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    label = torch.tensor([0, -1, 1, 0, -1, 1, 1], dtype=torch.int8)
    by_hand = loss_by_hand(distance.tolist(), label.tolist(), eta)
    assert deep_sad_loss(distance, label, eta).item() == pytest.approx(by_hand, rel=1e-12)


def test_the_loss_pulls_everything_in_but_anomalies():
    distance = torch.tensor([2.0, 2.0, 2.0], requires_grad=True)
    deep_sad_loss(distance, torch.tensor([0, 1, -1]), 3.0).backward()
    assert distance.grad.tolist() == pytest.approx([1 / 3, 1.0, -1 / 4], rel=1e-4)


def test_the_gradient_of_the_loss_is_right():
    distance = (torch.rand(5, dtype=torch.float64) + 0.5).requires_grad_()
    label = torch.tensor([0, 1, -1, 0, -1])
    assert torch.autograd.gradcheck(lambda d: deep_sad_loss(d, label, 0.7), distance)


def test_the_centre_is_the_mean_but_never_near_zero():
    embedding = torch.tensor([[1.0, 0.02, -0.06, -3.0, 0.0], [2.0, 0.04, -0.02, -5.0, 0.0]])
    assert centre_of(embedding).tolist() == pytest.approx([1.5, 0.1, -0.1, -4.0, 0.1])


def test_the_net_is_lenet_without_biases():
    net = LeNet(3, 32, 32)
    assert [tuple(p.shape) for p in net.parameters()] == [
        (32, 3, 5, 5), (64, 32, 5, 5), (128, 64, 5, 5), (128, 128 * 4 * 4),
    ]  # fmt: skip
    assert net.eval()(torch.rand(2, 3, 32, 32)).shape == (2, 128)
    assert net(torch.zeros(1, 3, 32, 32)).abs().max() == 0  # no bias, no affine norm: black maps to zero


def test_a_layer_is_convolution_norm_leaky_relu_and_max_pool():
    net = LeNet(1, 8, 8).eval()
    for norm in net.norms:
        norm.running_mean.fill_(0.3)
        norm.running_var.fill_(2.0)
    x = torch.rand(3, 1, 8, 8)
    y = x
    for convolution in net.convolutions:
        y = F.conv2d(y, convolution.weight, padding=2)
        y = (y - 0.3) / (2.0 + 1e-4) ** 0.5
        y = torch.where(y > 0, y, 0.01 * y)
        y = y.unfold(2, 2, 2).unfold(3, 2, 2).amax(dim=(4, 5))
    torch.testing.assert_close(net(x), y.flatten(1) @ net.linear.weight.T)


@pytest.mark.parametrize(("height", "width"), [(8, 8), (28, 28), (32, 32), (33, 47)])
def test_the_decoder_mirrors_any_size(height, width):
    autoencoder = Autoencoder(LeNet(1, height, width), 1)
    y = autoencoder(torch.rand(2, 1, height, width))
    assert y.shape == (2, 1, height, width)
    assert ((y > 0) & (y < 1)).all()
    assert [c.weight.shape[:2] for c in autoencoder.convolutions] == [(128, 8), (64, 128), (32, 64), (1, 32)]


def test_reconstruction_is_the_squared_error_per_pixel():
    autoencoder = Autoencoder(LeNet(3, 16, 16), 3).eval()
    batch = images(5)
    expected = (autoencoder(batch / 255) - batch / 255).square().sum() / batch.numel()
    torch.testing.assert_close(reconstruction_loss(autoencoder, batch), expected)


def test_the_score_is_the_squared_distance_to_the_centre():
    detector = DeepSADDetector(**QUICK).fit(images(40), [""] * 40)
    embedding = detector.net_(images(7, 1) / 255)
    expected = torch.stack([sum((e - c) ** 2 for e, c in zip(z, detector.centre_D_, strict=True)) for z in embedding])
    torch.testing.assert_close(detector.anomaly_score(images(7, 1)).float(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(squared_distance(detector.net_, detector.centre_D_, images(7, 1)), expected)


def test_the_calibration_is_scored_on_images_that_were_not_trained_on():
    labels = ["normal" if n % 3 else "" for n in range(100)]
    detector = DeepSADDetector(**QUICK, seed=4).fit(images(100), labels)
    held_out = hold_out(torch.arange(100), 4)[1]
    torch.testing.assert_close(detector.calibration_, detector.anomaly_score(images(100)[held_out]))
    changed = images(100)
    changed[held_out] = 255 - changed[held_out]
    again = DeepSADDetector(**QUICK, seed=4).fit(changed, labels)
    assert torch.equal(again.centre_D_, detector.centre_D_)
    assert torch.equal(again.anomaly_score(images(9, 2)), detector.anomaly_score(images(9, 2)))


def test_deep_svdd_never_looks_at_labelled_anomalies_and_deep_sad_does():
    batch, new = images(60), images(9, 2)
    labels = ["anomaly" if n % 4 == 0 else "normal" if n % 4 == 1 else "" for n in range(60)]
    changed = batch.clone()
    changed[::4] = 255 - changed[::4]
    for detector_class, same in ((DeepSVDDDetector, True), (DeepSADDetector, False)):
        before, after = (detector_class(**QUICK).fit(x, labels).anomaly_score(new) for x in (batch, changed))
        assert torch.equal(before, after) is same


def test_deep_svdd_is_deep_sad_without_labels():
    batch, new = images(40), images(9, 2)
    labels = ["normal" if n % 2 else "" for n in range(40)]
    unlabelled = DeepSADDetector(**QUICK, eta=5.0).fit(batch, [""] * 40).anomaly_score(new)
    assert torch.equal(DeepSVDDDetector(**QUICK, eta=5.0).fit(batch, labels).anomaly_score(new), unlabelled)
    assert not torch.equal(DeepSADDetector(**QUICK, eta=5.0).fit(batch, labels).anomaly_score(new), unlabelled)


def test_it_learns_what_labels_say_about_images_that_look_alike():
    """Stripes one way are normal, stripes the other way are not, and the pile holds both."""
    generator = torch.Generator().manual_seed(0)

    def stripes(number):
        x = torch.randint(0, 60, (number, 1, 16, 16), generator=generator)
        is_anomaly = torch.arange(number) % 2 == 0
        wave = 120 * (torch.arange(16) % 4 < 2)
        x += torch.where(is_anomaly[:, None, None, None], wave[:, None], wave)
        return x.to(torch.uint8), is_anomaly

    train, is_anomaly = stripes(160)
    labels = ["anomaly" if a and n % 8 == 0 else "" for n, a in enumerate(is_anomaly.tolist())]
    test, truth = stripes(80)
    settings = {"autoencoder_epochs": 2, "epochs": 15, "lr": 1e-3, "batch": 32}

    def contrast(eta):
        scores = DeepSADDetector(**settings, eta=eta).fit(train, labels).anomaly_score(test)
        return scores[truth].median() / scores[~truth].median()

    assert contrast(1.0) > 2 * contrast(0.0)
    assert contrast(1.0) > 4


def test_the_rate_falls_to_a_tenth_at_its_epoch_in_both_stages(monkeypatch):
    rates = []
    real = torch.optim.Adam.step
    monkeypatch.setattr(
        torch.optim.Adam,
        "step",
        lambda self, *a, **k: (rates.append(self.param_groups[0]["lr"]), real(self, *a, **k))[1],
    )
    settings = {"autoencoder_epochs": 3, "epochs": 4, "slower_from": 2, "lr": 1e-3, "batch": 64}
    DeepSADDetector(**settings).fit(images(60), [""] * 60)
    assert rates == pytest.approx([1e-3, 1e-3, 1e-4, 1e-3, 1e-3, 1e-4, 1e-4])


def test_progress_names_both_stages():
    seen = []
    DeepSADDetector(**QUICK, progress=lambda *report: seen.append(report[:3])).fit(images(40), [""] * 40)
    assert ("autoencoder", 1, 1) in seen
    assert ("train", 1, 1) in seen


def test_the_decoder_starts_as_published_and_the_encoder_as_pytorch_does():
    detector = DeepSADDetector(autoencoder_epochs=0, epochs=0)
    seen = []
    detector._train = lambda stage, net, *_: seen.append(net)
    detector.fit(images(40), [""] * 40)
    convolutions = seen[0].convolutions
    for convolution in convolutions:
        fan_in, fan_out = (25 * size for size in (convolution.weight.shape[1], convolution.weight.shape[0]))
        bound = (2 / (1 + 0.01**2)) ** 0.5 * (6 / (fan_in + fan_out)) ** 0.5
        assert 0.95 * bound < convolution.weight.abs().max() <= bound
    assert detector.net_.convolutions[0].weight.abs().max() <= 75**-0.5


def test_the_centre_is_that_of_all_training_images_with_the_labelled_anomalies():
    labels = ["anomaly" if n < 10 else "" for n in range(40)]
    detector = DeepSADDetector(autoencoder_epochs=1, epochs=0, batch=16).fit(images(40), labels)
    train = torch.cat([hold_out(torch.arange(10, 40), 0)[0], torch.arange(10)])
    with torch.no_grad():
        expected = centre_of(detector.net_(images(40)[train] / 255))
    torch.testing.assert_close(detector.centre_D_, expected)


def test_the_published_settings_are_the_defaults():
    config = DeepSADConfig()
    assert (config.autoencoder_epochs, config.epochs, config.slower_from, config.batch) == (150, 150, 50, 128)
    assert (config.lr, config.weight_decay, config.autoencoder_weight_decay, config.eta) == (1e-4, 5e-7, 5e-4, 1.0)
    assert config.precision == "fp32"


@pytest.mark.parametrize(
    "setting", [{"lr": 0.0}, {"lr": float("nan")}, {"eta": -1.0}, {"batch": 1}, {"epochs": -1}, {"eat": 1}]
)
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        DeepSADDetector(**setting)


def test_vectors_small_images_and_other_shapes_are_refused():
    with pytest.raises(UserError, match="vectors given: deep-sad"):
        DeepSADDetector().fit(torch.rand(40, 5), [""] * 40)
    with pytest.raises(UserError, match="7x7 px given: deep-svdd needs at least 8"):
        DeepSVDDDetector().fit(images(40, side=7), [""] * 40)
    detector = DeepSADDetector(**QUICK).fit(images(40), [""] * 40)
    with pytest.raises(UserError, match=r"\[3, 24, 24\] given, the model was fitted on \[3, 16, 16\]"):
        detector.anomaly_score(images(2, side=24))
