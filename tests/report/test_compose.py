"""What a report shows: ranked, bounded however many images there are, honest about what nobody knows."""

import base64
import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from elsa.report.chart import Chart, Line, draw_chart, spread
from elsa.report.compose import SHOWN, Facts, central, compose, look_alikes
from elsa.report.heat import COLD, FAINTEST, HOT, overlay, strength_of
from elsa.report.page import render
from elsa.trust.contamination import Contamination
from elsa.trust.metrics import evaluate

N = 137


def facts(count=N, **changed):
    """Images whose brightness is their score; the last tenth are anomalies, every third of them labelled."""
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(0, 1, count - count // 10), rng.normal(9, 1, count // 10)])
    labels = ["normal" if row % 5 == 0 else "" for row in range(count)]
    for row in range(count - count // 10, count):
        labels[row] = "anomaly" if row % 3 == 0 else ""
    vectors = normalize(torch.from_numpy(rng.normal(size=(count, 7))).float() + 2, dim=1)
    made = Facts(
        title="t",
        provenance={"command": "elsa fit"},
        calibration=torch.from_numpy(rng.normal(0, 1, 199)),
        names=[f"{row}.png" for row in range(count)],
        labels=labels,
        scores=scores,
        prototypes=rng.integers(0, 11, count),
        num_prototypes=11,
        vectors=lambda rows: vectors[list(rows)],
        pictures=lambda rows: torch.full((len(rows), 3, 96, 96), 50, dtype=torch.uint8),
        heat=lambda images: torch.rand(len(images), 96, 96, generator=torch.Generator().manual_seed(0)),
    )
    return replace(made, **changed)


def captions(gallery):
    return [picture.caption for picture in gallery.pictures]


def gallery(report, title):
    return next(one for one in report.galleries if one.title == title)


def test_galleries_are_ranked_by_score_and_say_what_is_known():
    made = facts()
    report = compose(made)
    order = np.argsort(-made.scores, kind="stable")
    assert captions(gallery(report, "Most anomalous")) == [f"{row}.png" for row in order[:SHOWN]]
    assert captions(gallery(report, "Most normal")) == [f"{row}.png" for row in order[::-1][:SHOWN]]
    suspects = gallery(report, "Suspects").pictures
    assert [one.caption for one in suspects] == [f"{r}.png" for r in order if made.labels[r] != "anomaly"][:SHOWN]
    assert all(one.heat is not None and one.heat.shape == (3, 96, 96) for one in suspects)
    near = gallery(report, "Nearest to the threshold").pictures
    outside = sorted(abs(made.scores - report.threshold))[SHOWN]
    assert all(abs(one.score - report.threshold) <= outside for one in near)


def test_the_threshold_is_the_calibrations_and_counts_agree():
    made = facts()
    report = compose(made)
    beyond = (made.calibration > report.threshold).double().mean()
    assert 0.03 <= beyond <= 0.05
    called = int((made.scores > report.threshold).sum())
    assert (f"{called:,}", "called anomalies at a false-alarm rate of 5%") in report.tiles
    [thresholds] = report.tables
    assert [row[0] for row in thresholds.rows] == ["1%", "5%", "10%", "20%"]
    assert thresholds.rows[1][3] == str(called)
    assert sum(len(series.scores) for series in report.histogram) == N


def test_too_small_a_calibration_gives_no_verdicts_and_says_why():
    report = compose(facts(calibration=torch.zeros(3)))
    assert report.threshold is None
    assert any(note.startswith("No verdicts") for note in report.notes)
    assert "Nearest to the threshold" not in {one.title for one in report.galleries}


def test_figures_nobody_can_state_are_left_out_with_their_reason():
    made = facts()
    evaluation = evaluate(made.scores, made.labels)  # 4 anomalies
    report = compose(replace(made, evaluation=evaluation))
    assert not report.rows
    assert sum("is not stated" in note for note in report.notes) == 3


def test_figures_on_images_learned_from_carry_a_warning_unless_judged_apart():
    made = facts(count=500)
    found = replace(made, evaluation=evaluate(made.scores, made.labels), learned_from=True)
    assert "expect less" in compose(found).rows_explanation
    assert "expect less" not in compose(replace(found, judged_apart=True)).rows_explanation
    assert [row.name for row in compose(found).rows][:2] == ["AUROC", "AUPR"]


def test_the_contamination_is_shown_with_its_interval():
    report = compose(facts(contamination=Contamination(0.123, 0.1, 0.15, "from an audit")))
    assert ("12.3%", "of the unlabelled images are anomalies (10.0% to 15.0%)") in report.tiles
    assert any("from an audit" in note for note in report.notes)
    unknown = compose(facts(contamination=Contamination(None, 0.0, 1.0, "label more")))
    assert not any("unlabelled images are" in words for _, words in unknown.tiles)


def test_prototypes_are_shown_by_their_most_central_images_largest_first():
    vectors = normalize(torch.tensor([[1.0, 0], [1, 0.1], [1, 0.9], [0, 1], [0.1, 1]]), dim=1)
    assert central(lambda rows: vectors[list(rows)], [0, 1, 2], 2) == [1, 0]
    made = facts()
    prototypes = compose(made).groups[1]
    sizes = [int(re.search(r"nearest to ([\d,]+)", group.note).group(1)) for group in prototypes.groups]
    assert sizes == sorted(np.bincount(made.prototypes).tolist(), reverse=True)
    assert all(len(group.pictures) == min(6, size) for group, size in zip(prototypes.groups, sizes, strict=True))


def test_kinds_never_labelled_come_first():
    """Two kinds of anomalies, labels of one."""
    made = facts(count=200)
    words, vectors = list(made.labels), torch.zeros(200, 3)
    vectors[:, 0] = 1
    vectors[180:190] = torch.tensor([0.0, 1, 0])
    vectors[190:] = torch.tensor([0.0, 0, 1])
    words[180:190], words[190:] = ["anomaly"] * 10, [""] * 10
    kinds = [""] * 180 + ["crack"] * 10 + [""] * 10
    report = compose(replace(made, labels=words, kinds=kinds, vectors=lambda rows: vectors[list(rows)]))
    first, *rest = report.groups[0].groups
    assert first.title == "Never labelled"
    assert {picture.caption for picture in first.pictures} <= {f"{row}.png" for row in range(190, 200)}
    assert "Known: crack" in {group.title for group in rest}


def test_look_alikes_put_every_row_into_one_group():
    vectors = normalize(torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    groups = look_alikes(lambda rows: vectors[list(rows)], list(range(40)))
    assert sorted(row for group in groups for row in group) == list(range(40))
    assert len(groups) <= 8
    assert look_alikes(lambda rows: vectors[list(rows)], [0, 1]) == []


def test_a_model_alone_shows_what_it_knows():
    history = [{"loss": 1.0 / e, "early_stop": 0.5 + e / 10} for e in range(1, 5)]
    alone = Facts(title="t", provenance={"a": "b"}, calibration=torch.arange(100.0), history=history)
    report = compose(alone)
    assert [chart.title for chart in report.charts] == ["Loss of the fine-tuning", "Early-stop score"]
    assert list(report.charts[0].lines[0].y) == [entry["loss"] for entry in history]
    assert report.histogram[0].name == "held-out images"
    assert report.galleries == []
    assert render(report).count("<svg") == 3


@pytest.mark.slow
def test_a_hundred_thousand_images_make_a_page_below_ten_megabytes():
    """With pictures that compress as badly as photographs do not: noise."""
    count = 100_000
    noise = torch.randint(0, 256, (64, 3, 224, 224), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = facts(
        count=count,
        pictures=lambda rows: noise[torch.tensor(list(rows)) % 64],
        heat=lambda images: torch.rand(len(images), 224, 224, generator=torch.Generator().manual_seed(0)),
        names=[f"a/rather/long/path/to/an/image/{row}.jpg" for row in range(count)],
    )
    page = render(compose(made)).encode()
    assert 1e6 < len(page) < 10e6
    assert page.count(b"<img") < 500


def test_attacks_in_names_kinds_and_notes_stay_text():
    attack = '"><script>alert(1)</script>'
    made = facts(names=[attack] * N, kinds=[attack] * N, title=attack, notes=[attack], provenance={attack: attack})
    page = render(compose(made))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_names_that_are_no_utf8_are_shown_and_written():
    page = render(compose(facts(names=["\udcff.png"] * N)))
    assert "\\udcff.png" in page
    page.encode()


# --- heat


def test_heat_colours_the_hottest_place_and_leaves_the_rest_grey():
    image = torch.full((3, 5, 7), 100, dtype=torch.uint8)
    heat = torch.zeros(5, 7)
    heat[2, 3], heat[4, 6] = 2.0, -1.0
    shown = overlay(image, heat)
    assert shown.dtype == torch.uint8
    assert shown[:, 0, 0].tolist() == [100, 100, 100]
    assert shown[:, 4, 6].tolist() == [100, 100, 100]  # what speaks for normal is not coloured
    assert shown[:, 2, 3].tolist() == [round(100 + 0.75 * (hot - 100)) for hot in HOT]
    faint = overlay(image, heat, FAINTEST)[:, 2, 3]
    assert abs(int(faint[0]) - 100) < abs(int(shown[0, 2, 3]) - 100)
    assert COLD != HOT
    assert torch.equal(overlay(image, torch.zeros(5, 7)), image)
    assert overlay(image[:1], heat).shape == (3, 5, 7)


def test_only_unusual_images_glow():
    calibration = torch.linspace(0, 1, 101)
    assert strength_of(0.2, calibration) == FAINTEST
    assert strength_of(5.0, calibration) == 1
    assert strength_of(0.725, calibration) == pytest.approx(0.5)
    assert strength_of(1.0, torch.zeros(9)) == 1
    assert strength_of(0.0, torch.zeros(9)) == FAINTEST


# --- charts


def chart(**changed):
    line = Line("a < b", "accent", [0, 5, 10], [50.0, 70, 60], [40.0, 60, 50], [60.0, 80, 70])
    return Chart(**{"title": "t", "explanation": "e", "x_name": "x & y", "y_name": "z", "lines": [line], **changed})


def test_points_of_a_chart_lie_where_their_numbers_say():
    svg = ElementTree.fromstring(draw_chart(chart()))
    [line] = [path.get("d") for path in svg.iter("path") if "line" in path.get("class")]
    points = [tuple(map(float, pair.split())) for pair in line.removeprefix("M").split("L")]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y1 < y2 < y0  # higher values are higher up
    assert (y0 - y2) * 2 == pytest.approx(y0 - y1, abs=0.3)
    [band] = [path for path in svg.iter("path") if "band" in path.get("class")]
    assert band.get("d").count("L") == 5
    assert "a < b" in svg.get("aria-label")


def test_a_flat_chart_survives():
    flat = chart(lines=[Line("a", "normal", [3.0], [7.0])])
    assert "nan" not in draw_chart(flat)
    assert spread([2.0, 2.0]) == (1.5, 2.5)
    assert spread([0.0, 10.0], margin=0.1) == (-1.0, 11.0)


# --- pictures


def test_large_pictures_are_shrunk_and_small_ones_kept():
    from elsa.report.page import LARGEST_SENT, data_uri

    for side, kind in ((64, "jpeg"), (500, "jpeg"), (63, "png")):
        uri = data_uri(torch.zeros(3, side, side, dtype=torch.uint8))
        head, content = uri.split(",")
        assert head == f"data:image/{kind};base64"
        assert Image.open(io.BytesIO(base64.b64decode(content))).width == min(side, LARGEST_SENT)
