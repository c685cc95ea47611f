"""The report is one file that shows other people's file names: complete, escaped, honest about its scale."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from elsa.errors import UserError
from elsa.report.histogram import BINS, HEIGHT, Series, draw_histogram
from elsa.report.page import Gallery, Picture, Report, Row, data_uri, render, write_report

ATTACK = '"><script>alert(1)</script>.png'


class Tags(HTMLParser):
    """Every tag with its attributes, every text, and whether the tags close in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.texts, self.open = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def report(name="bag.png", rows=()):
    picture = Picture(torch.zeros(1, 7, 5, dtype=torch.uint8), 1.234, name, name)
    return Report(
        title=name,
        lead=name,
        tiles=[(name, name)],
        rows=rows or [Row(name, 90.0, 80.0, 95.0, note=name, ours=True)],
        rows_title=name,
        rows_explanation=name,
        galleries=[Gallery(name, name, [picture])],
        histogram_explanation=name,
        histogram=[Series(name, name, [0.0, 1.0])],
        findings=[name],
        provenance={name: name},
    )


def test_a_file_name_cannot_become_markup():
    plain, attacked = Tags(render(report("bag.png"))), Tags(render(report(ATTACK)))
    assert [tag for tag, _ in attacked.tags] == [tag for tag, _ in plain.tags]
    assert [set(attributes) for _, attributes in attacked.tags] == [set(attributes) for _, attributes in plain.tags]
    assert attacked.texts.count(ATTACK) >= 14  # every place a text goes to shows it as it is
    assert attacked.open == []


def test_the_page_fetches_nothing_and_runs_nothing():
    page = render(report())
    parsed = Tags(page)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in parsed.tags}
    sources = [attributes[key] for _, attributes in parsed.tags for key in ("src", "href") if key in attributes]
    assert sources
    assert all(source.startswith("data:") for source in sources)
    assert not re.search(r"url\(|@import|https?:", page)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_picture_arrives_pixel_for_pixel(channels):
    image = torch.randint(0, 256, (channels, 7, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shown = Image.open(io.BytesIO(base64.b64decode(data_uri(image).removeprefix("data:image/png;base64,"))))
    pixels = np.asarray(shown).reshape(7, 5, channels)
    np.testing.assert_array_equal(pixels, image.permute(1, 2, 0).numpy())


def test_bars_lie_where_their_numbers_say():
    page = render(report(rows=[Row("a", 90.0, 80.0, 95.0), Row("b", 50.0, 40.0, 60.0)]))  # the scale is 40 to 100
    assert re.findall(r'<i style="left:([\d.]+)%;width:([\d.]+)%"></i><b style="left:([\d.]+)%">', page) == [
        ("66.67", "25.00", "83.33"),
        ("0.00", "33.33", "16.67"),
    ]
    assert "<span>40</span><span>100</span>" in page


def test_the_histogram_counts_every_image_and_shows_rare_groups_as_high_as_common_ones():
    many, few = [0.0] * 900 + [1.0] * 450, [0.0, 2.0, 2.0]
    svg = draw_histogram([Series("many", "normal", many), Series("few", "anomaly", few)])
    paths = dict(re.findall(r'<path class="(\w+)" d="([^"]+)"', svg))
    heights = {kind: [HEIGHT - 26 - float(y) for y in re.findall(r" ([\d.]+)H", path)] for kind, path in paths.items()}
    highest = HEIGHT - 26 - 8
    # 2.0 lies outside the 99.5% of all scores: it is drawn in the last bin, where 1.0 is.
    for kind, first, last in (("normal", highest, highest / 2), ("anomaly", highest / 2, highest)):
        assert heights[kind] == [first, *[0.0] * (BINS - 2), last]


def test_the_histogram_survives_one_score_for_all_and_keeps_an_outlier_at_the_edge():
    assert "nan" not in draw_histogram([Series("same", "normal", [3.0] * 5)])
    outlier = draw_histogram([Series("most", "normal", [*np.linspace(0, 1, 999), 1e6])])
    ticks = [float(text) for text in re.findall(r">([-\d.]+)</text>", outlier)]
    assert ticks == [0.2, 0.4, 0.6, 0.8]


def test_zero_on_the_axis_has_no_sign():
    svg = draw_histogram([Series("around zero", "normal", np.linspace(-4, 18, 99).tolist())])
    assert re.findall(r">([-\d.]+)</text>", svg) == ["0", "5", "10", "15"]


def test_an_empty_part_leaves_no_empty_heading():
    page = render(Report(title="t", lead="l"))
    assert "<h2>" not in page


def test_a_report_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write --out .*r\.html"):
        write_report(tmp_path / "file" / "r.html", report())
    write_report(tmp_path / "new" / "r.html", report())
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["r.html"]
