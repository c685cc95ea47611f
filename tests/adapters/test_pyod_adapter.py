"""PyOD's contract, as its own tests of a detector ask for it, and label words beside it."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal, assert_equal
from sklearn.base import clone

pytest.importorskip("pyod")
from pyod.models.base import BaseDetector
from pyod.utils.data import generate_data

from elsa.adapters.pyod import ElsaPyOD
from elsa.errors import UserError
from elsa.trust.metrics import auroc

CONTAMINATION = 0.1
HEAD = {"num_prototypes": 3, "tau": 1.0}


@pytest.fixture(scope="module")
def data():
    return generate_data(n_train=200, n_test=100, n_features=5, contamination=CONTAMINATION, random_state=42)


@pytest.fixture(scope="module", params=["knn", "elsa-head", "isolation-forest"])
def fitted(request, data):
    settings = HEAD if request.param == "elsa-head" else None
    return ElsaPyOD(request.param, contamination=CONTAMINATION, settings=settings).fit(data[0])


def test_what_a_fit_leaves(fitted, data):
    assert isinstance(fitted, BaseDetector)
    assert_equal(len(fitted.decision_scores_), 200)
    assert_equal(fitted.labels_.sum(), 20)
    assert set(np.unique(fitted.labels_)) == {0, 1}
    assert_array_equal(fitted.labels_, (fitted.decision_scores_ > fitted.threshold_).astype(int))
    assert auroc(fitted.decision_scores_, data[2] == 1) > 0.8


def test_scores_and_predictions_of_new_rows(fitted, data):
    new, truth = data[1], data[3]
    scores, labels = fitted.decision_function(new), fitted.predict(new)
    assert_equal(scores.shape, (100,))
    assert auroc(scores, truth == 1) > 0.8
    assert_array_equal(labels, (scores > fitted.threshold_).astype(int))


@pytest.mark.parametrize("method", ["linear", "unify"])
def test_probabilities_and_confidence(fitted, data, method):
    p, confidence = fitted.predict_proba(data[1], method=method, return_confidence=True)
    assert_equal(p.shape, (100, 2))
    assert p.min() >= 0
    assert p.max() <= 1
    assert_allclose(p.sum(axis=1), 1)
    assert 0 <= confidence.min() <= confidence.max() <= 1
    with pytest.raises(ValueError, match="method"):
        fitted.predict_proba(data[1], method="something")


def test_confidence_ranks_and_rejection(fitted, data):
    new = data[1]
    labels, confidence = fitted.predict(new, return_confidence=True)
    assert_equal(confidence.shape, labels.shape)
    ranks = fitted._predict_rank(new, normalized=True)
    assert 0 <= ranks.min() <= ranks.max() <= 1
    rejected = fitted.predict_with_rejection(new, c_r=0.2)
    assert set(np.unique(rejected)) <= {-2, 0, 1}


def test_parameters_and_clones(fitted, data):
    assert_equal(clone(fitted).get_params(), fitted.get_params())
    with pytest.raises(ValueError, match="contamination"):
        ElsaPyOD(contamination=0.6)
    again = clone(fitted).fit(data[0])
    assert_array_equal(again.decision_function(data[1]), fitted.decision_function(data[1]))


def test_numbers_as_y_are_ignored_and_words_are_heard(data):
    rows, truth = data[0], data[2]
    alone = ElsaPyOD("elsa-head", settings=HEAD).fit(rows).decision_function(data[1])
    assert_array_equal(ElsaPyOD("elsa-head", settings=HEAD).fit(rows, truth).decision_function(data[1]), alone)
    words = np.where(truth == 1, "anomaly", "")
    heard = ElsaPyOD("elsa-head", settings=HEAD).fit(rows, words).decision_function(data[1])
    assert not np.allclose(heard, alone)


def test_rows_of_another_width_and_rubbish_are_refused(fitted, data):
    with pytest.raises(UserError, match="4 features, the detector was fitted on 5"):
        fitted.predict(data[1][:, :4])
    with pytest.raises(ValueError, match="NaN"):
        fitted.decision_function(np.full((3, 5), np.nan))
