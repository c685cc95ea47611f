"""The page's addresses: what they tell, what they keep, and whom they refuse."""

import io
import json
import os
import shutil
import socket
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from made import is_anomaly, make_folder, make_workspace, weight_file
from PIL import Image

from elsa.cli import run
from elsa.errors import UserError
from elsa.workspace.app import _listen, make_app
from elsa.workspace.guard import is_loopback
from elsa.workspace.images import photo
from elsa.workspace.session import open_session

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # starlette would rather have the successor of httpx
    from starlette.testclient import TestClient

HOME = "http://127.0.0.1:8765"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, a workspace with two models, and weights; copied for each test that writes."""
    folder = tmp_path_factory.mktemp("made")
    source, weights = make_folder(folder / "photos"), weight_file(folder)
    return source, make_workspace(folder / "workspace", source, weights, models=2), f"mobilenet_v2:{weights}"


def opened(made, workspace, **options):
    source, original, encoder = made
    if not workspace.exists():
        shutil.copytree(original, workspace)
    session = open_session(source, workspace, encoder=encoder, **{"who": "ann", "batch": 1000} | options)
    session.start()
    return session


@pytest.fixture
def session(made, tmp_path):
    session = opened(made, tmp_path / "workspace")
    yield session
    session.close()


@pytest.fixture
def client(session):
    with TestClient(make_app(session), base_url=HOME) as client:
        yield client


def say(client, names, word, request="request-1", **more):
    items = [{"name": name, "label": word, "model": 1, "score": 0.5} for name in names]
    return client.post("/api/labels", json={"request": request, "items": items, **more})


def counts(client):
    return client.get("/api/state").json()["counts"]


def test_the_page_needs_nothing_from_elsewhere(client):
    page = client.get("/")
    assert page.status_code == 200
    assert "http" not in page.text.replace('lang="en"', "").split("<body")[0].split("<head>")[1]
    for path in ("/static/page.css", "/static/page.js", "/static/icon.svg"):
        found = client.get(path)
        assert found.status_code == 200
        assert "//cdn" not in found.text
        assert "@import" not in found.text
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    assert "unsafe" not in page.headers["content-security-policy"]
    assert "<script>" not in page.text
    assert "style=" not in page.text
    assert " onclick" not in page.text


def test_a_finished_model_that_nobody_noted_is_taken_up(client):
    state = client.get("/api/state").json()
    assert state["phase"] == "ready"
    assert state["images"] == 90
    assert state["given"] == 2
    assert [model["id"] for model in client.get("/api/models").json()] == [2, 1]
    assert state["model"] == 2


def test_the_queue_asks_for_images_without_a_label(client):
    items = client.get("/api/queue?count=20&seed=3").json()
    assert len({item["name"] for item in items}) == 20
    assert not any(item["word"] or item["given"] for item in items)
    assert all(item["probability"] is None or 0 < item["probability"] <= 1 for item in items)
    strategies = [item["strategy"] for item in items]
    assert "random audit" in strategies[:8]  # spread among the others: who stops half-way has answered some
    assert say(client, [item["name"] for item in items[:5]], "normal").status_code == 200
    again = client.get("/api/queue?count=85&seed=3").json()
    assert not {item["name"] for item in items[:5]} & {item["name"] for item in again}
    assert len(again) == 90 - 2 - 5
    assert client.get("/api/queue?strategy=guess").status_code == 409


def test_labels_are_counted_undone_and_said_anew(client):
    names = ["parts/002.png", "parts/003.png", "parts/009.png"]
    assert len(say(client, names, "anomaly").json()["ids"]) == 3
    assert counts(client)["anomaly"] == 3
    say(client, names[:1], "normal", "request-2")
    assert counts(client) == {"normal": 1, "anomaly": 2, "unsure": 0, "conflict": 0}
    undo = {"request": "undoing-1"}
    assert client.post("/api/undo", json=undo).json()["undone"] == names[:1]
    assert client.post("/api/undo", json=undo).json()["undone"] == names[:1]  # the same request: nothing more
    assert counts(client)["anomaly"] == 3
    assert sorted(client.post("/api/undo", json={"request": "undoing-2"}).json()["undone"]) == names
    assert sum(counts(client).values()) == 0
    assert client.post("/api/undo", json={"request": "undoing-3"}).json()["undone"] == []


def test_a_request_sent_twice_is_one_label(client, session):
    first = say(client, ["parts/002.png"], "unsure").json()
    assert say(client, ["parts/002.png"], "unsure").json() == first
    assert len(session.store.events()) == 1
    changed = say(client, ["parts/002.png"], "normal")
    assert changed.status_code == 409
    assert "request" in changed.json()["detail"]


def test_an_undo_cut_short_is_finished_by_sending_it_again(client, session):
    names = ["parts/002.png", "parts/003.png", "parts/004.png"]
    say(client, names[:1], "normal", "request-1")
    say(client, names, "anomaly", "request-2")
    session.store.undo("ann", "undoing-1:0")  # then the server was killed
    undone = client.post("/api/undo", json={"request": "undoing-1"}).json()["undone"]
    assert sorted(undone) == names
    assert counts(client)["normal"] == 1


def test_two_people_who_disagree_are_shown_and_settled(client):
    say(client, ["parts/002.png"], "normal", "request-1", who="bob")
    say(client, ["parts/002.png"], "anomaly", "request-2", who="eve")
    assert counts(client)["conflict"] == 1
    [item] = client.get("/api/images?show=conflict").json()["items"]
    assert item["people"] == {"bob": "normal", "eve": "anomaly"}
    body = {
        "request": "request-3",
        "who": "ann",
        "items": [{"name": item["name"], "label": "normal", "strategy": "settle"}],
    }
    assert client.post("/api/labels", json=body).status_code == 200
    assert counts(client) == {"normal": 1, "anomaly": 0, "unsure": 0, "conflict": 0}


def test_filters_show_what_they_say(client, session):
    everything = client.get("/api/images?count=200").json()
    scores = [item["score"] for item in everything["items"]]
    assert everything["total"] == 90
    assert scores == sorted(scores, reverse=True)
    assert [item["rank"] for item in everything["items"]] == list(range(1, 91))
    middle = sorted(scores)[45]
    high = client.get(f"/api/images?low={middle}&count=200&order=lowest").json()
    assert [item["score"] for item in high["items"]] == sorted(score for score in scores if score >= middle)
    low = client.get("/api/images", params={"high": np.nextafter(middle, -np.inf)}).json()
    assert low["total"] + high["total"] == 90
    by_prototype = [client.get(f"/api/images?prototype={k}").json()["total"] for k in range(20)]
    assert sum(by_prototype) == 90
    assert max(by_prototype) < 90
    assert client.get("/api/images?text=01&order=name").json()["items"][0]["name"] == "normal/001.png"
    assert client.get("/api/images?show=labelled").json()["total"] == 2
    assert client.get("/api/images?show=anomaly").json()["items"][0]["given"] == "anomaly"
    flagged = client.get("/api/images?show=flagged&count=200").json()["items"]
    assert {item["name"] for item in flagged} == {i["name"] for i in everything["items"] if i["flagged"]}
    second = client.get("/api/images?offset=60").json()["items"]
    assert second == everything["items"][60:]
    suspects = client.get("/api/images?show=suspects").json()["items"]
    assert 0 < len(suspects) < 30
    assert not any(item["given"] == "anomaly" for item in suspects)
    assert client.get("/api/images?show=nonsense").status_code == 422


def test_a_word_against_the_source_counts_instead_of_it(client, session):
    say(client, ["normal/001.png"], "anomaly")
    names = [item["name"] for item in client.get("/api/images?show=anomaly").json()["items"]]
    assert sorted(names) == ["anomaly/000.png", "normal/001.png"]
    assert session.state()["pending"] == 1
    say(client, ["anomaly/000.png"], "unsure", "request-2")
    assert session.state()["pending"] == 2


def test_estimates_come_with_the_audit_and_know_nothing_from_their_own_labels(client, session):
    rows = np.random.default_rng(0).permutation(88)[:60]
    names = [name for name in session.prepared.names if name.startswith("parts")]
    items = [
        {
            "name": names[row],
            "label": "anomaly" if is_anomaly(names[row]) else "normal",
            "strategy": "random audit",
            "probability": 1 / 88,
            "model": 1,
        }
        for row in rows
    ]
    assert client.post("/api/labels", json={"request": "request-1", "items": items}).status_code == 200
    with session._lock:
        figures = {one["title"]: one for one in session._estimate(session.view)}
        shown = session._unlearned_scores(session.view, {3: 1, 4: 1})
    share = figures["Anomalies among all images"]
    assert share["low"] < 10 / 90 < share["high"]
    rank = session._rank_under(1)
    assert shown[3] == session.view.scores[session.view.order[rank[3] - 1]]
    assert shown[5] == session.view.scores[5]


def test_pictures_are_encoded_anew_and_only_those_of_the_source(client, session, made):
    key = session.prepared.key[:12]
    thumb, large = client.get(f"/thumb/{key}/3"), client.get(f"/photo/{key}/3")
    for found in (thumb, large):
        assert found.status_code == 200
        assert found.headers["content-type"] == "image/png"
        assert "immutable" in found.headers["cache-control"]
    assert Image.open(io.BytesIO(thumb.content)).size == (32, 32)
    assert Image.open(io.BytesIO(large.content)).size == (36, 36)
    pixels = np.asarray(Image.open(io.BytesIO(large.content)))
    assert np.array_equal(pixels, np.asarray(Image.open(made[0] / session.prepared.names[3])))
    for path in (
        f"/thumb/{key}/90", f"/thumb/{key}/-1", f"/photo/{key}/90", f"/photo/{key}/-1", "/thumb/000000000000/3",
        f"/photo/{key}/..%2f..%2fworkspace.json", f"/photo/{key}/%2e%2e", "/static/../label.html",
        "/static/..%2flabel.html", "/static/%2e%2e/%2e%2e/store.py", "/workspace.json", "/elsa.db", "/photo/etc/passwd",
    ):  # fmt: skip
        assert client.get(path).status_code in (404, 422), path
    assert say(client, ["../outside.png"], "normal").status_code == 409


def test_a_photo_replaced_by_a_link_out_of_the_source_is_not_shown(made, tmp_path):
    source = tmp_path / "photos"
    shutil.copytree(made[0], source)
    workspace = make_workspace(tmp_path / "workspace", source, _path(made))
    session = opened((source, workspace, made[2]), workspace)
    try:
        name = session.prepared.names[5]
        (tmp_path / "secret.png").write_bytes((source / name).read_bytes())
        (source / name).unlink()
        (source / name).symlink_to(tmp_path / "secret.png")
        with pytest.raises(UserError, match="leaves the source"):
            photo(session.source, session.prepared.records[5])
        with TestClient(make_app(session), base_url=HOME) as client:
            assert client.get(f"/photo/{session.prepared.key[:12]}/5").status_code == 404
    finally:
        session.close()


def _path(made):
    return Path(made[2].partition(":")[2])


def test_large_photos_are_shrunk_turned_upright_and_lose_their_metadata(tmp_path):
    from elsa.data.sources import open_source

    image = Image.new("RGB", (3000, 1000), "red")
    image.paste("blue", (0, 0, 1500, 1000))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn right
    exif[0x010E] = "where it was taken"
    image.save(tmp_path / "photo.jpg", exif=exif)
    content, kind = photo(open_source(tmp_path), 0)
    shown = Image.open(io.BytesIO(content))
    assert kind == "image/jpeg"
    assert max(shown.size) <= 2048
    assert shown.height > shown.width
    assert shown.getpixel((10, 10))[2] > 200
    assert not shown.getexif()


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/api/state", {"sec-fetch-site": "cross-site"}),
        ("GET", "/api/state", {"sec-fetch-site": "same-site"}),
        ("GET", "/thumb/0/0", {"sec-fetch-site": "cross-site"}),
        ("GET", "/", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}),
        ("GET", "/api/state", {"origin": "http://evil.example"}),
        ("GET", "/api/state", {"origin": "null"}),
        ("GET", "/api/state", {"host": "evil.example"}),
        ("GET", "/api/state", {"host": "evil.example:8765"}),
        ("GET", "/api/state", {"host": "127.0.0.1.evil.example:8765"}),
        ("GET", "/", {"host": "evil.example:8765"}),
        ("POST", "/api/undo", {"origin": "http://127.0.0.1:9999"}),
        ("POST", "/api/undo", {"origin": "http://localhost:8765"}),
        ("POST", "/api/undo", {"sec-fetch-site": "cross-site"}),
        ("POST", "/api/undo", {"content-type": "text/plain"}),
        ("POST", "/api/undo", {"content-type": "application/x-www-form-urlencoded"}),
    ],
)
def test_requests_that_another_site_may_have_caused_are_refused(client, session, method, path, headers):
    say(client, ["parts/002.png"], "normal")
    content = json.dumps({"request": "undoing-1"})
    headers = {"content-type": "application/json", **headers}
    answer = client.request(method, path, content=content if method == "POST" else None, headers=headers)
    assert answer.status_code in (403, 415)
    assert "access-control-allow-origin" not in answer.headers
    assert counts(client)["normal"] == 1


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:8765", "[::1]:8765", "localhost"])
def test_the_page_itself_may_do_everything(client, host):
    headers = {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
    assert client.post("/api/undo", json={"request": "undoing-1"}, headers=headers).status_code == 200
    opened_from_a_link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    assert client.get("/", headers=opened_from_a_link).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"request": "request-1", "items": []},
        {"request": "request-1", "items": [{"name": "parts/002.png", "label": "good"}]},
        {"request": "short", "items": [{"name": "parts/002.png", "label": "normal"}]},
        {"request": "request-1", "items": [{"name": "parts/002.png", "label": "normal", "probability": 0}]},
        {"request": "request-1", "items": [{"name": "parts/002.png", "label": "normal", "x": 1}]},
        {"request": "request-1", "items": [{"name": "parts/002.png", "label": "normal"}] * 1001},
        {"request": "request-1", "who": "x" * 81, "items": [{"name": "parts/002.png", "label": "normal"}]},
    ],
)
def test_rubbish_is_refused_and_stores_nothing(client, session, body):
    assert client.post("/api/labels", json=body).status_code == 422
    assert client.post("/api/labels", content=b"{", headers={"content-type": "application/json"}).status_code == 422
    assert not session.store.events()


def test_too_long_a_body_is_refused_unread(client):
    answer = client.post("/api/labels", content=b" " * (1 << 20) + b"{}", headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_a_token_opens_the_page_and_nothing_opens_without_it(session):
    app = make_app(session, token="open sesame", loopback=False)
    with TestClient(app, base_url="http://lab.example:8765") as client:
        for path in ("/", "/?token=wrong", "/api/state", "/static/page.js", "/api/state?token=open+sesame"):
            assert client.get(path, follow_redirects=False).status_code == 401, path
        assert client.get("/", headers={"cookie": "elsa_token=open sesame"}).status_code == 401
        answer = client.get("/?token=open+sesame", follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "sesame" not in cookie
        assert client.get("/api/state").status_code == 200
        assert client.get("/api/state", headers={"origin": "http://evil.example"}).status_code == 403


def test_binding_to_others_than_this_machine_needs_a_token(made, tmp_path, capsys):
    workspace = tmp_path / "workspace"
    command = ["label", str(made[0]), "--workspace", str(workspace), "--encoder", made[2], "--no-browser"]
    for host in ("0.0.0.0", "192.168.1.7", "::"):
        assert run([*command, "--host", host]) == 2
        assert "--token" in capsys.readouterr().err
    np.savez(tmp_path / "vectors.npz", vectors=np.ones((50, 3), np.float32))
    assert run(["label", str(tmp_path / "vectors.npz"), "--workspace", str(workspace), "--encoder", made[2]]) == 2
    assert "holds vectors" in capsys.readouterr().err
    assert not is_loopback("example.com")
    assert is_loopback("127.0.0.2")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert run([*command, "--port", str(port)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"--port {port}" in error
    with _listen("127.0.0.1", 0) as free:
        assert free.getsockname()[1] > 0


def test_two_servers_do_not_share_a_workspace_and_a_workspace_keeps_its_source(made, session, tmp_path, monkeypatch):
    monkeypatch.setattr("elsa.workspace.session.PATIENCE", 0.1)
    with pytest.raises(UserError, match="open in another `elsa label`"):
        opened(made, session.folder)
    shutil.copytree(made[0] / "parts", tmp_path / "parts")
    with pytest.raises(UserError, match="was made for"):
        open_session(tmp_path / "parts", made[1], encoder=made[2])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file.txt").write_text("mine")
    with pytest.raises(UserError, match="not a workspace"):
        open_session(made[0], tmp_path / "other", encoder=made[2])
    with pytest.raises(UserError, match="--encoder resnet"):
        open_session(made[0], tmp_path / "new", encoder="resnet")


def test_going_back_and_a_restart_keep_everything(made, tmp_path):
    workspace = tmp_path / "workspace"
    session = opened(made, workspace)
    with TestClient(make_app(session), base_url=HOME) as client:
        say(client, ["parts/002.png", "parts/009.png"], "anomaly")
        assert client.post("/api/models/1/use", json={}).status_code == 200
        assert client.post("/api/models/77/use", json={}).status_code == 409
        before = client.get("/api/images?count=200").json()
        state = client.get("/api/state").json()
    session.close()
    again = opened(made, workspace)
    with TestClient(make_app(again), base_url=HOME) as client:
        assert client.get("/api/images?count=200").json() == before
        after = client.get("/api/state").json()
    again.close()
    for name in ("model", "counts", "event", "images", "pending", "threshold"):
        assert after[name] == state[name], name
    assert state["model"] == 1
    assert state["pending"] == 2


def test_a_replaced_image_loses_what_was_said_about_the_old_one(made, tmp_path):
    source = tmp_path / "photos"
    shutil.copytree(made[0], source)
    workspace = make_workspace(tmp_path / "workspace", source, _path(made))
    session = opened((source, workspace, made[2]), workspace)
    session.label("ann", "request-1", [{"name": "parts/002.png", "label": "anomaly"}])
    assert session.state()["counts"]["anomaly"] == 1
    session.close()
    os.replace(source / "parts" / "003.png", source / "parts" / "002.png")
    shutil.rmtree(workspace / "models")
    make_again = make_workspace(workspace, source, _path(made))
    session = opened((source, make_again, made[2]), workspace)
    assert session.state()["images"] == 89
    assert session.state()["counts"]["anomaly"] == 0
    session.close()


def test_many_threads_at_once_lose_nothing(client, session):
    names = [name for name in session.prepared.names if name.startswith("parts")]
    failures = []

    def work(number):
        who = f"person {number}"
        for turn, name in enumerate(names[number::8]):
            answer = say(client, [name], "normal", f"request-{number}-{turn}", who=who)
            if answer.status_code != 200:
                failures.append(answer.text)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counts(client)["normal"] == len(names) == len(session.store.events())
