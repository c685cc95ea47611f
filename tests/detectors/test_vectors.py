import math

import pytest
import torch

from elsa.detectors.inputs import hold_out
from elsa.detectors.vectors import KNNDetector, LogisticDetector
from elsa.errors import UserError

N, D = 101, 7


def cloud(number=N, features=D, seed=0):
    return 1 + torch.randn(number, features, generator=torch.Generator().manual_seed(seed))


def cosine_distance(a, b):
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return 1 - dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b))


@pytest.mark.parametrize("metric", ["cosine", "euclidean"])
@pytest.mark.parametrize("k", [1, 5])
def test_knn_is_the_mean_distance_to_the_nearest_normal_and_unlabelled(metric, k):
    vectors, new = cloud(), cloud(11, seed=1)
    labels = ["anomaly" if n % 5 == 0 else "normal" if n % 5 == 1 else "" for n in range(N)]
    index = torch.tensor([n for n in range(N) if n % 5])
    train, held_out = hold_out(index, 2)
    distance = cosine_distance if metric == "cosine" else math.dist

    def by_hand(rows):
        return [sum(sorted(distance(row, vectors[n].tolist()) for n in train)[:k]) / k for row in rows.tolist()]

    detector = KNNDetector(seed=2, k=k, metric=metric).fit(vectors, labels)
    torch.testing.assert_close(detector.anomaly_score(new), torch.tensor(by_hand(new)).double(), rtol=1e-5, atol=1e-6)
    expected = torch.tensor(by_hand(vectors[held_out])).double()
    torch.testing.assert_close(detector.calibration_, expected, rtol=1e-5, atol=1e-6)


def test_knn_does_not_centre_embeddings():
    # All normal vectors point the same way, which is what tells the others apart: subtracting the mean would lose it.
    normal = torch.tensor([10.0, 0, 0]) + 0.3 * cloud(80, 3)
    detector = KNNDetector().fit(normal, [""] * 80)
    same_way, another_way = detector.anomaly_score(torch.tensor([[30.0, 1, 1], [1.0, 10, 1]])).tolist()
    assert same_way < 0.01 < 0.5 < another_way


def test_knn_compares_pixels_by_euclidean_distance_and_vectors_by_cosine():
    dark = torch.randint(10, 30, (60, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    detector = KNNDetector().fit(dark, [""] * 60)
    assert detector.metric_ == "euclidean"
    assert (detector.anomaly_score(dark * 8) > detector.calibration_.max()).all()  # same direction, much brighter
    vectors = dark.flatten(1).float()
    detector = KNNDetector().fit(vectors, [""] * 60)
    assert detector.metric_ == "cosine"
    torch.testing.assert_close(detector.anomaly_score(vectors * 8), detector.anomaly_score(vectors))


def test_knn_with_fewer_images_than_neighbours_uses_those_there_are():
    vectors = cloud(4)
    train, _ = hold_out(torch.arange(4), 0)
    expected = torch.tensor([sum(cosine_distance(vectors[0].tolist(), vectors[n].tolist()) for n in train) / 2])
    torch.testing.assert_close(KNNDetector(k=5).fit(vectors, [""] * 4).anomaly_score(vectors[:1]), expected.double())


def problem():
    vectors = cloud()
    vectors[:20] += 2
    return vectors, ["anomaly"] * 20 + ["normal"] * 21 + [""] * (N - 41)


def test_logistic_learns_from_labels_alone():
    vectors, labels = problem()
    new = cloud(13, seed=1)
    scores = LogisticDetector().fit(vectors, labels).anomaly_score(new)
    moved = vectors.clone()
    moved[41:] -= 50
    assert torch.equal(LogisticDetector().fit(moved, labels).anomaly_score(new), scores)
    assert torch.equal(LogisticDetector().fit(vectors[:41], labels[:41]).anomaly_score(new).isfinite(), scores > -99)


def test_logistic_log_odds_satisfy_the_equations_of_the_optimum():
    vectors, labels = problem()
    detector = LogisticDetector(strength=0.7).fit(vectors, labels)
    x, is_anomaly = vectors[:41].double(), torch.arange(41) < 20
    weight = torch.where(is_anomaly, 41 / (2 * 20), 41 / (2 * 21)).double()  # both kinds count the same in total
    error = weight * (torch.sigmoid(detector.anomaly_score(vectors[:41])) - is_anomaly.double())
    coefficients = torch.from_numpy(detector.model_.coef_[0])
    torch.testing.assert_close(x.T @ error, -coefficients / 0.7, atol=1e-2, rtol=1e-2)
    assert error.sum().abs() < 1e-2


def test_logistic_calibrates_on_the_unlabelled_images():
    vectors, labels = problem()
    detector = LogisticDetector().fit(vectors, labels)
    assert torch.equal(detector.calibration_, detector.anomaly_score(vectors[41:]))


def test_logistic_without_unlabelled_images_holds_normals_back_from_training():
    vectors, labels = problem()
    detector = LogisticDetector(seed=4).fit(vectors[:41], labels[:41])
    train, held_out = hold_out(torch.arange(20, 41), 4)
    assert torch.equal(detector.calibration_, detector.anomaly_score(vectors[held_out]))
    moved = vectors[:41].clone()
    moved[held_out] += 9
    again = LogisticDetector(seed=4).fit(moved, labels[:41])
    assert torch.equal(again.anomaly_score(vectors), detector.anomaly_score(vectors))
    assert len(train) == 11


@pytest.mark.parametrize(("word", "counts"), [("normal", "5 are 'normal' and 0"), ("anomaly", "0 are 'normal' and 5")])
def test_logistic_needs_both_kinds(word, counts):
    with pytest.raises(UserError, match=f"{counts} 'anomaly'; label some of both kinds"):
        LogisticDetector().fit(cloud(), [word] * 5 + [""] * (N - 5))


@pytest.mark.parametrize(
    ("detector_class", "setting"),
    [(KNNDetector, {"k": 0}), (KNNDetector, {"metric": "manhattan"}), (LogisticDetector, {"strength": 0.0})],
)
def test_settings_that_mean_nothing_are_refused(detector_class, setting):
    (name, value), *_ = setting.items()
    with pytest.raises(UserError, match=f"{name}={value!r}"):
        detector_class(**setting)
