import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import parametrize_with_checks

from elsa.adapters.sklearn import ElsaOutlierDetector
from elsa.errors import UserError
from elsa.trust.metrics import auroc


class WithoutLabels(ElsaOutlierDetector):
    """scikit-learn's checks hand every outlier detector numbers as y and expect them ignored; ours refuses them."""

    def fit(self, X, y=None):
        return super().fit(X)

    def fit_predict(self, X, y=None):
        return super().fit_predict(X)


# The sets in these checks are smaller than the usual number of prototypes, which the head refuses.
HEAD = WithoutLabels("elsa-head", settings={"num_prototypes": 3, "tau": 1.0})


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([WithoutLabels("knn"), WithoutLabels("oc-svm"), HEAD])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


def vectors(number=300, seed=0):
    generator = np.random.default_rng(seed)
    X = generator.normal(size=(number, 5))
    X[:, 0] += 5
    X[-number // 10 :, 0] -= 10
    return X, np.arange(number) >= number - number // 10


@pytest.mark.parametrize("detector", ["knn", "isolation-forest"])
def test_signs_are_scikit_learns(detector):
    X, is_anomaly = vectors()
    model = ElsaOutlierDetector(detector).fit(X[~is_anomaly])
    assert auroc(-model.score_samples(X), is_anomaly) > 0.9
    assert np.mean(model.predict(X)[is_anomaly] == -1) > 0.6
    assert np.mean(model.predict(X)[~is_anomaly] == 1) > 0.8
    np.testing.assert_array_equal(model.decision_function(X), model.score_samples(X) - model.offset_)
    np.testing.assert_array_equal(model.predict(X) == -1, model.decision_function(X) < 0)


def test_false_alarms_are_what_was_asked_for():
    X = np.random.default_rng(0).normal(size=(6000, 5)) + 2
    model = ElsaOutlierDetector("knn", false_alarms=0.2).fit(X[:3000])
    assert np.mean(model.predict(X[3000:]) == -1) == pytest.approx(0.2, abs=0.07)
    assert np.mean(-model.detector_.calibration_.numpy() < model.offset_) <= 0.2


def test_few_images_get_the_least_rate_they_support_unless_a_rate_is_set():
    X, _ = vectors(20)
    model = ElsaOutlierDetector().fit(X)
    assert model.offset_ == -model.detector_.calibration_.max()
    with pytest.raises(UserError, match=r"--false-alarms 0\.05 takes at least 19 images"):
        ElsaOutlierDetector(false_alarms=0.05).fit(X)
    with pytest.raises(UserError, match="false_alarms='low'"):
        ElsaOutlierDetector(false_alarms="low").fit(X)


def test_words_reach_the_detector_and_numbers_are_refused():
    X, is_anomaly = vectors()
    words = np.where(is_anomaly, "anomaly", "normal")
    model = ElsaOutlierDetector("logistic").fit(X, words)
    assert auroc(-model.score_samples(X), is_anomaly) > 0.99
    np.testing.assert_array_equal(ElsaOutlierDetector("logistic").fit_predict(X, words), model.predict(X))
    missing = words.astype(object)
    missing[~is_anomaly] = np.nan  # as pandas reads an empty cell
    ElsaOutlierDetector().fit(X, missing)
    for numbers in (np.where(is_anomaly, -1, 1), is_anomaly.astype(float), [1] * len(X)):
        with pytest.raises(UserError, match="is a number, and numbers mean different things"):
            ElsaOutlierDetector().fit(X, numbers)


def test_images_go_to_the_detector_as_they_are():
    generator = np.random.default_rng(0)
    dark = generator.integers(0, 60, (80, 3, 8, 8), dtype=np.uint8)
    model = ElsaOutlierDetector("isolation-forest").fit(dark)
    assert (model.predict(dark + np.uint8(180)) == -1).all()
    assert model.n_features_in_ == 192
    np.testing.assert_array_equal(model.predict(torch.from_numpy(dark)), model.predict(dark))
    for wrong in (dark / 255, dark.transpose(0, 2, 3, 1)):
        with pytest.raises(UserError, match="images must be uint8"):
            model.fit(wrong)


def test_settings_and_seed_reach_the_detector():
    X, _ = vectors()
    model = ElsaOutlierDetector("knn", settings={"k": 3}, random_state=11).fit(X)
    assert (model.detector_.k, model.detector_.seed) == (3, 11)
    first, second = (
        ElsaOutlierDetector("isolation-forest", random_state=np.random.RandomState(seed)).fit(X).score_samples(X)
        for seed in (1, 2)
    )
    assert not np.array_equal(first, second)
    with pytest.raises(UserError, match="'neighbours' of detector knn"):
        ElsaOutlierDetector("knn", settings={"neighbours": 3}).fit(X)


def test_it_fits_in_pipelines_clones_and_grid_searches():
    X, is_anomaly = vectors()
    words = np.where(is_anomaly, "anomaly", "normal")
    pipeline = make_pipeline(Normalizer(), ElsaOutlierDetector())
    search = GridSearchCV(
        clone(pipeline),
        {"elsaoutlierdetector__settings": [{"k": 1}, {"k": 7}]},
        scoring=lambda model, X, y: auroc(-model.score_samples(X), np.asarray(y) == "anomaly"),
        cv=[(np.arange(0, 300, 2), np.arange(1, 300, 2))],
    ).fit(X, words)
    assert search.best_score_ > 0.99
