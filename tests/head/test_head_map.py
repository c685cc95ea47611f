"""The part of the head that L_e trains, from closed form to learning: the map, its loss, the bent energy."""

import dataclasses
import math

import pytest
import torch
from clouds import D, problem, unit
from torch.nn.functional import normalize

import elsa.head
from elsa.energy import energy
from elsa.head import ElsaHead, HeadConfig, head_loss, learn_map, moved, suspicion
from elsa.labels import ANOMALY, NORMAL, UNLABELLED

N, K, R = 23, 11, 3  # distinct primes: no axis can stand in for another
CONFIG = HeadConfig(num_prototypes=K, tau=0.5, map_rank=R)


@pytest.fixture(scope="module")
def fitted():
    vectors, labels, _, _ = problem()
    return ElsaHead(seed=3).fit(vectors, labels)


# --- the map and its loss


def test_a_map_of_zero_leaves_every_unit_embedding_where_it_is():
    z = unit(N)
    down = torch.randn(D, R, dtype=torch.float64)
    torch.testing.assert_close(moved(z, down, torch.zeros(R, D, dtype=torch.float64)), z)


def test_the_map_matches_its_definition():
    z, down, up = unit(N), unit(D, R, seed=1), unit(R, D, seed=2)
    for row, result in zip(z.tolist(), moved(z, down, up).tolist(), strict=True):
        low = [sum(row[d] * down[d, r].item() for d in range(D)) for r in range(R)]
        out = [row[d] + sum(low[r] * up[r, d].item() for r in range(R)) for d in range(D)]
        norm = math.sqrt(sum(x * x for x in out))
        assert result == pytest.approx([x / norm for x in out])


def loss_by_hand(z, label, prototypes, down, up, config):
    """Each side's mean of 1 / (distance to the end of the energy range it must leave), normals and unlabelled apart."""
    bound = math.log(len(prototypes)) + 1 / config.tau
    paid = {ANOMALY: [], NORMAL: [], UNLABELLED: []}
    for row, code in zip(moved(z, down, up).tolist(), label.tolist(), strict=True):
        normality = math.log(
            sum(math.exp(sum(a * b for a, b in zip(row, p, strict=True)) / config.tau) for p in prototypes.tolist())
        )
        paid[code].append(1 / (bound - normality) if code == ANOMALY else 1 / normality)
    weight = {ANOMALY: 1.0, NORMAL: config.normal_share, UNLABELLED: 1 - config.normal_share}
    present = [code for code in paid if paid[code]]
    loss = sum(weight[c] * sum(paid[c]) / len(paid[c]) for c in present) / sum(weight[c] for c in present)
    return loss + config.map_penalty * (down @ up).square().sum().item()


@pytest.mark.parametrize("codes", [(-1, 0, 1), (-1, 0), (-1, 1), (-1,)])
def test_the_loss_matches_its_definition(codes):
    config = dataclasses.replace(CONFIG, normal_share=0.3, map_penalty=0.7)
    label = torch.tensor([codes[n % len(codes)] if n % 4 else codes[0] for n in range(N)], dtype=torch.int8)
    args = unit(N), label, unit(K, seed=1), unit(D, R, seed=2), 0.3 * unit(R, D, seed=3)
    assert head_loss(*args, config).item() == pytest.approx(loss_by_hand(*args, config))


def test_the_loss_hears_each_group_however_few_it_has():
    label = torch.tensor([-1] * 2 + [1] * 3 + [0] * 18, dtype=torch.int8)
    z, rest = unit(N), (unit(K, seed=1), unit(D, R, seed=2), 0.3 * unit(R, D, seed=3), CONFIG)
    once = head_loss(z, label, *rest)
    more = torch.cat([torch.arange(5), torch.arange(5, N).repeat(7)])
    torch.testing.assert_close(head_loss(z[more], label[more], *rest), once)


def test_the_gradient_of_the_loss_is_right():
    label = torch.tensor([-1, 0, 1, 0, -1], dtype=torch.int8)
    z, prototypes = unit(5), unit(K, seed=1)
    down, up = unit(D, R, seed=2).requires_grad_(), (0.3 * unit(R, D, seed=3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: head_loss(z, label, prototypes, a, b, CONFIG), (down, up))


def test_learning_lowers_the_loss_from_that_of_the_raw_embeddings():
    label = torch.tensor([-1, 0, 1] * 7 + [0, 0], dtype=torch.int8)
    z, prototypes = unit(N).float(), unit(K, seed=1).float()
    down, up = learn_map(z, label, prototypes, dataclasses.replace(CONFIG, map_iterations=0), 0)
    assert not up.any()
    before = head_loss(z, label, prototypes, down, up, CONFIG)
    after = head_loss(z, label, prototypes, *learn_map(z, label, prototypes, CONFIG, 0), CONFIG)
    assert after < 0.95 * before


def test_labelled_anomalies_leave_the_prototypes_and_a_higher_penalty_holds_them_back():
    vectors, labels, _, _ = problem(hidden=0)
    z = normalize(vectors, dim=1)
    label = torch.tensor([{"normal": 1, "": 0, "anomaly": -1}[word] for word in labels], dtype=torch.int8)
    prototypes = z[:20]
    gaps = []
    for penalty in (1e-3, 1e-1, 1e3):
        maps = learn_map(z, label, prototypes, dataclasses.replace(CONFIG, map_penalty=penalty), 0)
        energies = energy(moved(z, *maps), prototypes, CONFIG.tau)
        gaps.append((energies[label == ANOMALY].mean() - energies[label != ANOMALY].mean()).item())
    assert gaps[0] > gaps[1] > gaps[2] > 0


# --- what it weighs in the score


def test_labels_of_many_kinds_are_worth_the_map_and_labels_of_one_kind_the_direction():
    vectors, labels, _, _ = problem()
    head = ElsaHead().fit(vectors, labels)
    straight, _, _, bent = head.weight_.tolist()
    assert straight / (straight + bent) == pytest.approx(head.one_kind_)
    vectors, labels, _, _ = problem(kinds=(3,), hidden=0)
    alike = ElsaHead().fit(vectors, labels)
    assert alike.one_kind_ > head.one_kind_


def test_suspects_do_not_teach_the_map(monkeypatch):
    seen = []
    learn = elsa.head.learn_map
    monkeypatch.setattr(elsa.head, "learn_map", lambda z, label, *rest: seen.append(label) or learn(z, label, *rest))
    vectors, labels, _, _ = problem()
    ElsaHead().fit(vectors, labels)
    [label] = seen
    assert (label == ANOMALY).sum() == labels.count("anomaly")
    assert (label == UNLABELLED).sum() < labels.count("") - 30 - 10  # held out and hidden ones are gone


def test_a_handful_of_labels_is_not_worth_much_of_a_map():
    vectors, labels, _, _ = problem(anomalies=5, hidden=0)
    head = ElsaHead().fit(vectors, labels)
    straight, _, _, bent = head.weight_.tolist()
    assert bent == pytest.approx(5 / 20 * (1 - head.one_kind_) * (straight + bent))


# --- what else the fit rests on


def test_normals_that_were_asked_for_do_not_hide_the_suspects():
    draw = torch.Generator().manual_seed(0)
    score = torch.cat([torch.randn(300, generator=draw), 6 + torch.randn(30, generator=draw)]).double()
    fair, asked = (
        score[:300][::15].contiguous(),
        score[:300].sort().values[-20:] + 4,
    )  # as high as anomalies, which is why
    alone = suspicion(score, score[:0])
    assert alone[300:].mean() > 0.4  # the share of clean images that the upper bell takes is discounted
    torch.testing.assert_close(suspicion(score, asked), alone)
    assert not torch.equal(suspicion(score, fair), alone)


def test_the_scores_of_the_held_out_images_are_those_of_new_images(fitted):
    assert torch.isin(fitted.calibration_, fitted.train_scores_).all()
