import math

import numpy as np
import pytest
import torch
from sklearn.ensemble import IsolationForest
from sklearn.neighbors import KernelDensity
from sklearn.svm import OneClassSVM

from elsa.detectors import shallow
from elsa.detectors.inputs import hold_out
from elsa.detectors.shallow import (
    IsolationForestDetector,
    KDEDetector,
    OneClassSVMDetector,
    likeliest_bandwidth,
    log_density,
    median_squared_distance,
    squared_distances,
)
from elsa.errors import UserError

N, D = 101, 7
EVERY = [OneClassSVMDetector, IsolationForestDetector, KDEDetector]


def cloud(number=N, features=D, seed=0):
    return torch.randn(number, features, generator=torch.Generator().manual_seed(seed))


def kept(labels, vectors, seed=0):
    """The rows a detector should have learned from."""
    index = torch.tensor([n for n, label in enumerate(labels) if label != "anomaly"])
    return vectors[hold_out(index, seed)[0]].numpy(), vectors[hold_out(index, seed)[1]]


def labels_with_anomalies():
    return ["anomaly" if n % 5 == 0 else "normal" if n % 5 == 1 else "" for n in range(N)]


def reference(detector, train):
    if isinstance(detector, OneClassSVMDetector):
        squared = ((train[:, None].astype(float) - train[None]) ** 2).sum(axis=2)[np.triu_indices(len(train), 1)]
        model = OneClassSVM(nu=0.1, gamma=1 / np.median(squared)).fit(train)
        return lambda x: -model.decision_function(x)
    if isinstance(detector, IsolationForestDetector):
        model = IsolationForest(n_estimators=100, random_state=detector.seed).fit(train)
        return lambda x: -model.score_samples(x)
    model = KernelDensity(bandwidth=detector.bandwidth_).fit(train)
    return lambda x: -model.score_samples(x)


@pytest.mark.parametrize("detector_class", EVERY)
def test_scores_are_scikit_learns_on_everything_but_anomalies_and_the_held_out(detector_class):
    vectors, labels, new = cloud(), labels_with_anomalies(), cloud(17, seed=1)
    detector = detector_class(seed=5).fit(vectors, labels)
    train, held_out = kept(labels, vectors, seed=5)
    score = reference(detector, train)
    np.testing.assert_allclose(detector.anomaly_score(new).numpy(), score(new.numpy()), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(detector.calibration_.numpy(), score(held_out.numpy()), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("detector_class", EVERY)
def test_what_a_labelled_anomaly_looks_like_does_not_matter(detector_class):
    vectors, labels, new = cloud(), labels_with_anomalies(), cloud(17, seed=1)
    moved = vectors.clone()
    moved[::5] += 100
    before, after = (detector_class().fit(v, labels).anomaly_score(new) for v in (vectors, moved))
    assert torch.equal(before, after)


@pytest.mark.parametrize("detector_class", EVERY)
def test_settings_are_chosen_without_labels(detector_class):
    vectors, new = cloud(), cloud(17, seed=1)
    before, after = (detector_class().fit(vectors, [word] * N).anomaly_score(new) for word in ("", "normal"))
    assert torch.equal(before, after)


@pytest.mark.parametrize("detector_class", EVERY)
def test_equal_images_are_no_reason_to_fail(detector_class):
    vectors = torch.ones(40, 3)
    scores = detector_class().fit(vectors, [""] * 40).anomaly_score(torch.cat([vectors[:1], vectors[:1] + 5]))
    assert scores.isfinite().all()


@pytest.mark.parametrize("detector_class", EVERY)
def test_large_sets_are_subsampled(detector_class, monkeypatch):
    monkeypatch.setattr(shallow, "MOST_TRAINED_ON", 23)
    detector = detector_class().fit(cloud(), [""] * N)
    expected = {OneClassSVMDetector: lambda: detector.svm_.shape_fit_[0], KDEDetector: lambda: len(detector.rows_ND_)}
    if detector_class in expected:
        assert expected[detector_class]() == 23
    assert len(detector.calibration_) == 30  # calibrating on fewer would cost false-alarm rates


def test_squared_distances_by_hand_and_for_close_neighbours():
    x, y = cloud(5, 3), cloud(11, 3, seed=1)
    by_hand = [[sum((a - b) ** 2 for a, b in zip(p, q, strict=True)) for q in y.tolist()] for p in x.tolist()]
    torch.testing.assert_close(squared_distances(x, y), torch.tensor(by_hand, dtype=torch.float64))
    near = torch.full((1, 3072), 1.0)
    assert squared_distances(near, near + 1e-4).item() == pytest.approx(3072e-8, rel=1e-2)


def test_median_squared_distance_counts_each_pair_once():
    assert median_squared_distance(torch.tensor([[0.0], [1.0], [10.0]])) == 81  # 1, 81, 100
    assert median_squared_distance(torch.ones(4, 2)) == 1
    assert median_squared_distance(torch.ones(1, 2)) == 1


def test_log_density_is_that_of_the_normal_distribution():
    one = log_density(torch.tensor([[2.0]]), bandwidth=0.5, num_kernels=1, num_features=3)
    assert one.item() == pytest.approx(-1.5 * math.log(2 * math.pi * 0.25) - 2 / (2 * 0.25))
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)[:, None]
    kernels = torch.tensor([[-3.0], [0.0], [5.0]], dtype=torch.float64)
    density = log_density(squared_distances(x, kernels), 0.7, 3, 1).exp()
    assert density.sum().item() * 0.01 == pytest.approx(1, abs=1e-6)


def leave_one_out(rows, bandwidth):
    model = KernelDensity(bandwidth=bandwidth)
    return np.mean([model.fit(np.delete(rows, n, 0)).score_samples(rows[n : n + 1])[0] for n in range(len(rows))])


@pytest.mark.parametrize("features", [1, 7, 31])
def test_the_bandwidth_chosen_is_the_likeliest_by_leave_one_out(features):
    rows = cloud(53, features)
    chosen = likeliest_bandwidth(rows)
    likelihood = {factor: leave_one_out(rows.numpy(), chosen * factor) for factor in (0.33, 0.7, 0.9, 1, 1.1, 1.4, 3)}
    assert max(likelihood[0.33], likelihood[3]) < likelihood[1]
    assert likelihood[1] > max(likelihood.values()) - 0.05 * features  # the grid's step costs a little


def test_copies_do_not_draw_the_bandwidth_to_zero():
    rows = cloud(53)
    assert likeliest_bandwidth(rows.repeat(3, 1)) == pytest.approx(likeliest_bandwidth(rows), rel=0.5)


def test_bandwidth_follows_the_scale_of_the_data():
    assert likeliest_bandwidth(1000 * cloud(53)) == pytest.approx(1000 * likeliest_bandwidth(cloud(53)), rel=1e-4)


def test_settings_given_are_used():
    vectors = cloud()
    assert OneClassSVMDetector(gamma=0.3, nu=0.2).fit(vectors, [""] * N).svm_.gamma == 0.3
    assert KDEDetector(bandwidth=0.3).fit(vectors, [""] * N).bandwidth_ == 0.3
    assert len(IsolationForestDetector(num_trees=7).fit(vectors, [""] * N).forest_.estimators_) == 7


@pytest.mark.parametrize(
    ("detector_class", "setting"),
    [
        (OneClassSVMDetector, {"nu": 0.0}),
        (OneClassSVMDetector, {"nu": math.nan}),
        (OneClassSVMDetector, {"gamma": -1.0}),
        (KDEDetector, {"bandwidth": 0.0}),
        (KDEDetector, {"bandwidth": math.inf}),
        (IsolationForestDetector, {"num_trees": 0}),
    ],
)
def test_settings_that_mean_nothing_are_refused(detector_class, setting):
    (name, value), *_ = setting.items()
    with pytest.raises(UserError, match=f"{name}={value}"):
        detector_class(**setting)
