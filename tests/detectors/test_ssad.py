import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from sklearn.svm import OneClassSVM

from elsa.detectors import ssad
from elsa.detectors.inputs import hold_out
from elsa.detectors.shallow import median_squared_distance
from elsa.detectors.ssad import SSADConfig, SSADDetector, solve_dual
from elsa.errors import UserError
from elsa.trust.metrics import auroc

N, D = 23, 3


def problem(labelled_normals=3, labelled_anomalies=5, seed=0, number=N):
    """Kernel, signs, who is labelled and bounds; anomalies lie off to one side."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(number, D, generator=generator, dtype=torch.float64)
    y, is_labelled = torch.ones(number, dtype=torch.float64), torch.zeros(number, dtype=torch.bool)
    anomalies = range(number - labelled_anomalies, number)
    is_labelled[:labelled_normals] = True
    for n in anomalies:
        rows[n, 0] += 1.5
        y[n], is_labelled[n] = -1, True
    kernel = torch.exp(-0.4 * torch.cdist(rows, rows).square())
    free = 1 / (0.2 * max(1, int((~is_labelled).sum())))
    return kernel, y, is_labelled, torch.where(is_labelled, 1.0, free).double()


def generic_solution(kernel, y, is_labelled, upper, kappa):
    """The same dual handed to scipy's general-purpose solver."""
    quadratic = (kernel * y[:, None] * y).numpy()
    constraints = [{"type": "eq", "fun": lambda a: a @ y.numpy() - 1}]
    if is_labelled.any():
        constraints.append({"type": "ineq", "fun": lambda a: a[is_labelled.numpy()].sum() - kappa})
    found = minimize(
        lambda a: a @ quadratic @ a / 2,
        upper.numpy() / 2,
        jac=lambda a: quadratic @ a,
        bounds=[(0, u) for u in upper.tolist()],
        constraints=constraints,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 2000},
    )
    assert found.success
    return found.x


@pytest.mark.parametrize("kappa", [0.0, 1.0, 2.5])
@pytest.mark.parametrize(("normals", "anomalies"), [(3, 5), (0, 5), (7, 2), (0, 0)])
def test_the_dual_agrees_with_a_generic_solver(normals, anomalies, kappa):
    setting = problem(normals, anomalies)
    alpha, _ = solve_dual(*setting, kappa)
    np.testing.assert_allclose(alpha.numpy(), generic_solution(*setting, kappa), atol=2e-5)


@pytest.mark.parametrize("kappa", [1.0, 6.0])
def test_the_solution_satisfies_primal_and_dual(kappa):
    """Karush-Kuhn-Tucker: feasible, and what is not at a bound lies on its boundary."""
    kernel, y, is_labelled, upper = problem()
    alpha, rho = solve_dual(kernel, y, is_labelled, upper, kappa)
    assert ((alpha >= 0) & (alpha <= upper)).all()
    assert (alpha @ y).item() == pytest.approx(1, abs=1e-8)
    assert alpha[is_labelled].sum() >= kappa - 1e-8
    outside = rho - kernel @ (alpha * y)  # the score
    free = (alpha > 1e-6) & (alpha < upper - 1e-6)
    assert (free & ~is_labelled).any()
    assert outside[free & ~is_labelled].abs().max() < 1e-6
    unlabelled_at_zero = (alpha < 1e-7) & ~is_labelled
    assert (outside[unlabelled_at_zero] < 1e-6).all()
    assert (outside[(alpha > upper - 1e-7) & ~is_labelled] > -1e-6).all()
    margin = -(y * outside)[free & is_labelled]  # one gamma for all free labelled images, at least 0
    assert len(margin) > 1
    assert margin.max() - margin.min() < 1e-6
    assert margin.min() > -1e-6


def test_a_binding_kappa_is_met_exactly_and_a_loose_one_changes_nothing():
    kernel, y, is_labelled, upper = problem()
    loose, _ = solve_dual(kernel, y, is_labelled, upper, 0.0)
    needed = loose[is_labelled].sum().item()
    same, _ = solve_dual(kernel, y, is_labelled, upper, needed * 0.9)
    torch.testing.assert_close(same, loose, atol=1e-5, rtol=0)
    bound, _ = solve_dual(kernel, y, is_labelled, upper, needed * 1.5)
    assert bound[is_labelled].sum().item() == pytest.approx(needed * 1.5, abs=1e-7)


@pytest.mark.parametrize("nu", [0.1, 0.5])
def test_without_labels_it_is_the_one_class_svm(nu):
    vectors = torch.randn(151, 5, generator=torch.Generator().manual_seed(0))
    new = 2 * torch.randn(97, 5, generator=torch.Generator().manual_seed(1))
    detector = SSADDetector(nu=nu).fit(vectors, [""] * 151)
    train = vectors[hold_out(torch.arange(151), 0)[0]]
    svm = OneClassSVM(nu=nu, gamma=1 / median_squared_distance(train), tol=1e-6).fit(train.numpy())
    # scikit-learn's multipliers sum to nu N, ours to 1
    theirs = -svm.decision_function(new.numpy()) / (nu * len(train))
    np.testing.assert_allclose(detector.anomaly_score(new).numpy(), theirs, atol=1e-5)
    assert (detector.anomaly_score(train) > 1e-6).float().mean() <= nu


def test_without_labelled_anomalies_normals_are_as_good_as_unlabelled():
    vectors = torch.randn(80, D, generator=torch.Generator().manual_seed(0))
    scores = [SSADDetector().fit(vectors, [word] * 80).anomaly_score(vectors) for word in ("", "normal")]
    assert torch.equal(*scores)


def test_labelled_anomalies_are_kept_out_though_their_like_hides_among_the_unlabelled():
    generator = torch.Generator().manual_seed(0)
    vectors, new = torch.randn(200, D, generator=generator), torch.randn(300, D, generator=generator)
    vectors[130:, 0] += 3  # 40 of them hidden, 30 labelled
    new[150:, 0] += 3
    is_anomaly = np.arange(300) >= 150
    labels = ["normal"] * 20 + [""] * 150 + ["anomaly"] * 30
    with_labels = auroc(SSADDetector().fit(vectors, labels).anomaly_score(new).numpy(), is_anomaly)
    without = auroc(SSADDetector().fit(vectors[:170], labels[:170]).anomaly_score(new).numpy(), is_anomaly)
    assert with_labels > without + 0.05


def test_pixels_lie_between_0_and_1_and_their_order_does_not_matter():
    images = torch.randint(0, 256, (60, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = ["anomaly" if n % 6 == 0 else "" for n in range(60)]
    pixels = SSADDetector(kernel_gamma=0.1).fit(images, labels)
    rows = SSADDetector(kernel_gamma=0.1).fit(images.flatten(1).float() / 255, labels)
    torch.testing.assert_close(pixels.anomaly_score(images), rows.anomaly_score(images.flatten(1).float() / 255))


def test_a_large_set_keeps_its_labels(monkeypatch):
    monkeypatch.setattr(ssad, "MOST_TRAINED_ON", 40)
    vectors = torch.randn(150, D, generator=torch.Generator().manual_seed(0))
    labels = ["anomaly"] * 7 + ["normal"] * 5 + [""] * 138
    seen = []
    monkeypatch.setattr(
        ssad, "solve_dual", lambda kernel, y, is_labelled, *rest: seen.append((y, is_labelled)) or (y, 0.0)
    )
    SSADDetector().fit(vectors, labels)
    ((y, is_labelled),) = seen
    assert len(y) == 40
    assert (y < 0).sum() == 7
    assert is_labelled.sum() <= 12


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"kappa": 9.0}, ["anomaly"] * 3 + ["normal"] * 3),
        ({"nu": 0.9}, ["anomaly"] * 3),  # the others can give 1.1, and 2 are needed
        ({"labelled_cost": 0.1}, ["anomaly"] * 3),
    ],
)
def test_settings_that_leave_no_solution_are_refused_with_what_is_possible(settings, labels):
    vectors = torch.randn(90, D, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="kappa must be below"):
        SSADDetector(**settings).fit(vectors, labels + [""] * (90 - len(labels)))


@pytest.mark.parametrize(("normals", "anomalies"), [(2, 3), (0, 3), (9, 2)])
def test_the_largest_kappa_it_names_is_accepted_and_more_is_not(normals, anomalies):
    vectors = torch.randn(90, D, generator=torch.Generator().manual_seed(0))
    labels = ["anomaly"] * anomalies + [""] * (90 - anomalies)
    for n in range(normals):
        labels[n + 30] = "normal"
    with pytest.raises(UserError) as refusal:
        SSADDetector(kappa=100.0).fit(vectors, labels)
    largest = float(str(refusal.value).split("below ")[1].split(";")[0])
    SSADDetector(kappa=largest * 0.98).fit(vectors, labels)
    with pytest.raises(UserError):
        SSADDetector(kappa=largest * 1.02).fit(vectors, labels)


@pytest.mark.parametrize("setting", [{"nu": 0.0}, {"nu": 1.1}, {"kappa": -1.0}, {"labelled_cost": 0.0}, {"gama": 1.0}])
def test_settings_that_mean_nothing_are_refused(setting):
    with pytest.raises(UserError, match=next(iter(setting))):
        SSADDetector(**setting)


def test_defaults_are_the_published_ones():
    assert SSADConfig() == SSADConfig(kappa=1.0, nu=0.1, labelled_cost=1.0)


def test_the_solver_ends_on_thousands_of_images_of_noise():
    """No two alike and no structure: nearly all become support vectors. The paper's 5,547 take 28 s, too long here."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1553, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = ["normal"] * 79 + [""] * 1395 + ["anomaly"] * 79
    detector = SSADDetector().fit(images, labels)
    assert detector.calibration_.isfinite().all()
