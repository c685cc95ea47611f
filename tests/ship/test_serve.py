"""The service, in this process: the same scores by every road, and no way to hurt it."""

import asyncio
import base64
import itertools
import json
import logging
import re
import struct
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from served_model import SIDE, make_model, pixels, png

from elsa.cli import run
from elsa.errors import UserError
from elsa.model_file import read_model, write_model
from elsa.ship.serving.app import build_app
from elsa.ship.serving.front import JsonLines, is_loopback
from elsa.ship.serving.limits import Limits
from elsa.ship.serving.loaded import Loaded, load_for_service
from elsa.ship.serving.service import Service
from elsa.trust.calibrate import p_values, score_threshold
from elsa.trust.explain import heat_map, space_of

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using `httpx`")  # it would rather have httpx2
    from starlette.testclient import TestClient

IMAGES = pixels(32)  # two chunks: every one is scored offline in a full one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("served") / "bags"


@pytest.fixture(scope="module")
def detector(folder):
    return make_model(folder)


@pytest.fixture(scope="module")
def expected(detector):
    return detector.anomaly_score(IMAGES).tolist()


@pytest.fixture(scope="module")
def service(folder, detector):
    return Service(folder, Limits())


def client_of(service, tokens=(), **options):
    return TestClient(build_app(service, tokens), base_url="http://localhost:8000", **options)


@pytest.fixture(scope="module")
def client(service):
    with client_of(service) as client:
        yield client


@pytest.fixture
def small(folder, detector):
    """A service with its own limits, and its client."""
    opened = []

    def make(tokens=(), **limits):
        service = Service(folder, Limits(**limits))
        client = client_of(service, tokens)
        client.__enter__()
        opened.append(client)
        return service, client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def files(images):
    return [("images", (f"{n}.png", png(image), "image/png")) for n, image in enumerate(images)]


def as_json(*payloads):
    return {"images": [{"name": f"{n}", "data": base64.b64encode(p).decode()} for n, p in enumerate(payloads)]}


def infer(client, tensor, binary=b"", name="bags", **more):
    head = json.dumps({"inputs": [tensor], **more}).encode()
    headers = {"inference-header-content-length": str(len(head))} if binary else {}
    return client.post(f"/v2/models/{name}/infer", content=head + binary, headers=headers)


def raw_tensor(images, **more):
    return {"name": "images", "shape": [*images.shape], "datatype": "UINT8", **more}


def outputs(answer):
    return {each["name"]: each["data"] for each in answer.json()["outputs"]}


# the same scores by every road


def test_multipart_answers_everything_there_is_to_say(client, detector, expected):
    answer = client.post("/score", files=files(IMAGES)).json()
    results = answer["results"]
    assert [row["name"] for row in results] == [f"{n}.png" for n in range(32)]
    assert [row["score"] for row in results] == expected
    assert [row["p_value"] for row in results] == p_values(torch.tensor(expected), detector.calibration_).tolist()
    assert answer["threshold"] == score_threshold(detector.calibration_, 0.05)
    words = ["anomaly" if score > answer["threshold"] else "normal" for score in expected]
    assert [row["verdict"] for row in results] == words
    space = space_of(detector)
    assert [row["prototype"] for row in results] == space.prototype_of(space.vectors(IMAGES)).tolist()
    assert len({row["prototype"] for row in results}) > 1
    assert answer["higher_is"] == "anomalous"
    assert answer["false_alarms"] == 0.05
    assert "heat_map" not in results[0]


def test_json_says_the_same(client, expected):
    answer = client.post("/score", json=as_json(*map(png, IMAGES))).json()
    assert [row["score"] for row in answer["results"]] == expected
    assert [row["name"] for row in answer["results"]] == [str(n) for n in range(32)]


@pytest.mark.parametrize("nested", [True, False])
def test_a_tensor_of_pixels_in_json(client, expected, nested):
    data = IMAGES.tolist() if nested else IMAGES.flatten().tolist()
    found = outputs(infer(client, raw_tensor(IMAGES, data=data)))
    assert found["score"] == expected
    assert set(found) == {"score", "p_value", "verdict", "prototype"}


def test_a_tensor_of_pixels_as_binary_data(client, expected):
    binary = IMAGES.numpy().tobytes()
    tensor = raw_tensor(IMAGES, parameters={"binary_data_size": len(binary)})
    assert outputs(infer(client, tensor, binary))["score"] == expected


def test_encoded_files_in_both_forms_of_the_protocol(client, expected):
    encoded = [png(image) for image in IMAGES]
    tensor = {"name": "images", "shape": [32], "datatype": "BYTES"}
    texts = [base64.b64encode(file).decode() for file in encoded]
    assert outputs(infer(client, {**tensor, "data": texts}))["score"] == expected
    binary = b"".join(struct.pack("<I", len(file)) + file for file in encoded)
    tensor["parameters"] = {"binary_data_size": len(binary)}
    assert outputs(infer(client, tensor, binary))["score"] == expected


def test_outputs_are_those_asked_for_also_as_binary_data(client, detector, expected):
    names = ["verdict", "score", "prototype", "heat_map"]
    wanted = [{"name": name, "parameters": {"binary_data": True}} for name in names]
    answer = infer(client, raw_tensor(IMAGES[:3], data=IMAGES[:3].tolist()), outputs=wanted, id="mine")
    length = int(answer.headers["inference-header-content-length"])
    head, tail = json.loads(answer.content[:length]), answer.content[length:]
    assert head["id"] == "mine"
    assert head["model_version"] == client.get("/v2/models/bags").json()["versions"][0]
    assert [each["name"] for each in head["outputs"]] == names
    parts = {}
    for each in head["outputs"]:
        size = each["parameters"]["binary_data_size"]
        parts[each["name"]], tail = tail[:size], tail[size:]
    assert not tail
    assert np.frombuffer(parts["score"], "<f8").tolist() == expected[:3]
    assert np.frombuffer(parts["prototype"], "<i8").shape == (3,)
    words = outputs(infer(client, raw_tensor(IMAGES[:3], data=IMAGES[:3].tolist())))["verdict"]
    assert parts["verdict"] == b"".join(struct.pack("<I", len(word)) + word.encode() for word in words)
    heat = np.frombuffer(parts["heat_map"], "<f4").reshape(3, SIDE, SIDE)
    np.testing.assert_array_equal(heat, heat_map(detector, IMAGES[:3]).numpy())


def test_a_heat_map_comes_on_request_alone(client, detector):
    row = client.post("/score?heat_map=true", files=files(IMAGES[:1])).json()["results"][0]
    heat = np.frombuffer(base64.b64decode(row["heat_map"]["data"]), "<f4").reshape(row["heat_map"]["shape"])
    np.testing.assert_array_equal(heat, heat_map(detector, IMAGES[:1])[0].numpy())


def test_a_score_does_not_depend_on_the_company_it_came_in(client, expected):
    for size in (1, 2, 3, 7, 17):
        answer = client.post("/score", files=files(IMAGES[:size])).json()
        assert [row["score"] for row in answer["results"]] == expected[:size]


def test_requests_at_the_same_time_get_their_own_answers(client, expected):
    found = {}

    def ask(start, stop):
        answer = client.post("/score", files=files(IMAGES[start:stop])).json()
        found[start] = [row["score"] for row in answer["results"]]

    cuts = [0, 1, 3, 4, 9, 16, 17, 32]
    threads = [threading.Thread(target=ask, args=cut) for cut in itertools.pairwise(cuts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [score for start in sorted(found) for score in found[start]] == expected


def test_elsa_score_says_the_same_of_the_same_files(client, folder, tmp_path):
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(IMAGES):
        (tmp_path / "photos" / f"{number:02}.png").write_bytes(png(image))
    options = ["--out", str(tmp_path / "s.csv"), "--device", "cpu", "--workers", "1"]
    assert run(["score", str(folder), str(tmp_path / "photos"), *options]) == 0
    rows = [line.split(",") for line in (tmp_path / "s.csv").read_text().splitlines()[1:]]
    answer = client.post("/score", files=files(IMAGES)).json()
    offline = {int(name[:2]): (float(score), float(p), word) for name, score, p, word, _ in rows}
    for number, row in enumerate(answer["results"]):
        # workers of `elsa score` have one thread each, and convolutions round differently with two
        assert row["score"] == pytest.approx(offline[number][0], abs=1e-5)
        assert (row["p_value"], row["verdict"]) == offline[number][1:]


# broken and hostile images


def test_a_broken_image_is_a_row_with_its_reason(client, expected):
    sent = [png(IMAGES[0]), png(IMAGES[1])[:100], b"", png(IMAGES[2])]
    answer = client.post("/score", json=as_json(*sent))
    assert answer.status_code == 200
    rows = answer.json()["results"]
    assert [rows[0]["score"], rows[3]["score"]] == [expected[0], expected[2]]
    assert "damaged" in rows[1]["error"]
    assert "empty" in rows[2]["error"]
    assert "score" not in rows[1]


def test_nothing_readable_is_422_and_a_tensor_has_no_room_for_reasons(client):
    answer = client.post("/score", json=as_json(b"rubbish"))
    assert answer.status_code == 422
    assert "not an image" in answer.json()["results"][0]["error"]
    text = base64.b64encode(b"rubbish").decode()
    answer = infer(client, {"name": "images", "shape": [1], "datatype": "BYTES", "data": [text]})
    assert answer.status_code == 400
    assert answer.json()["error"].startswith("image 0: not an image")


def test_pixels_are_counted_before_they_are_unpacked(small):
    service, client = small(max_pixels=1000)
    row = client.post("/score", files=files(IMAGES[:1])).json()["results"][0]
    assert "32 x 32 pixels are more than the pixel limit of 1,000" in row["error"]
    assert service.model.decoding.pixel_limit == 1000


@pytest.mark.parametrize(
    ("body", "kind", "status", "says"),
    [
        (b"{", "application/json", 400, "the body: Invalid JSON"),
        (b"{}", "application/json", 400, "images: Field required"),
        (b'{"images": []}', "application/json", 400, "images: List should have at least 1"),
        (b'{"images": [{"data": "%%"}]}', "application/json", 400, "not base64"),
        (b'{"images": [{"data": "", "nmae": 1}]}', "application/json", 400, "images.0.nmae"),
        (b"\xff\xfe", "application/json", 400, "the body"),
        (b"x", "text/plain", 415, "send multipart/form-data or application/json"),
        (b"x", "", 415, "Content-Type ''"),
        (b"x", "multipart/form-data", 415, "multipart"),
        (b"rubbish", "multipart/form-data; boundary=b", 400, "multipart"),
        (b"--b--\r\n", "multipart/form-data; boundary=b", 400, "the form holds no file"),
        (b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--b--\r\n',
         "multipart/form-data; boundary=b", 400, "the form holds no file"),
        (b'--b\r\nContent-Disposition: form-data; filename="a"\r\n\r\n1\r\n',
         "multipart/form-data; boundary=b", 400, "ends before its closing boundary"),
    ],
)  # fmt: skip
def test_bodies_that_are_not_what_they_should_be(client, body, kind, status, says):
    answer = client.post("/score", content=body, headers={"content-type": kind})
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "pixels"}, "the one input is called 'images'"),
        ({"datatype": "FP32"}, "datatype 'FP32'"),
        ({"shape": [1, 3, 8, 8]}, "this model takes [N, 3, 32, 32]"),
        ({"shape": [2, 3, 32, 32]}, "holds 6144 numbers, 3072 were sent"),
        ({"shape": [0, 3, 32, 32], "data": []}, "whole numbers"),
        ({"data": [256] * 3072}, "whole numbers from 0 to 255"),
        ({"data": [-1] * 3072}, "whole numbers from 0 to 255"),
        ({"data": [0.5] * 3072}, "whole numbers from 0 to 255"),
        ({"data": [[1], [2, 3]]}, "nested unevenly"),
        ({"data": ["a"] * 3072}, "whole numbers"),
        ({"data": None}, "give either data, or binary_data_size"),
        ({"parameters": {"binary_data_size": 3}}, "binary_data_size 3"),
        ({"datatype": "BYTES", "shape": [1], "data": [5]}, "strings of base64"),
        ({"datatype": "BYTES", "shape": [2], "data": [""]}, "1 images were sent"),
        ({"shape": []}, "inputs.0.shape"),
        ({"shape": [-1, 3, 32, 32]}, "holds -3072 numbers"),
    ],
)
def test_tensors_that_are_not_what_they_should_be(client, change, says):
    answer = infer(client, {**raw_tensor(IMAGES[:1], data=IMAGES[0].flatten().tolist()), **change})
    assert answer.status_code == 400, answer.text
    assert says in answer.json()["error"]


def test_binary_data_that_ends_too_early_and_headers_that_lie(client):
    tensor = {"name": "images", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 6}}
    answer = infer(client, tensor, struct.pack("<I", 100) + b"ab")
    assert "in the middle of an image" in answer.json()["error"]
    for length in ("99999", "-1", "x"):
        answer = client.post(
            "/v2/models/bags/infer", content=b"{}", headers={"inference-header-content-length": length}
        )
        assert answer.status_code == 400
    assert "output 'x'" in infer(client, raw_tensor(IMAGES[:1], data=[0] * 3072), outputs=[{"name": "x"}]).text


# limits


def test_a_body_over_the_limit_is_refused_whether_it_says_so_or_not(small):
    service, client = small(max_body=2000)
    answer = client.post("/score", content=b"x" * 2001, headers={"content-type": "application/json"})
    assert (answer.status_code, service.accepted) == (413, 0)  # by its Content-Length, unread
    answer = client.post("/score", content=(b"x" * 500 for _ in range(5)), headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "content-length" not in answer.request.headers
    assert (service.admission.images, service.admission.bytes) == (0, 0)


def test_more_images_than_may_ever_wait_are_too_many_for_one_request(small):
    service, client = small(queue=4)
    assert client.post("/score", files=files(IMAGES[:5])).status_code == 413
    assert client.post("/score", files=files(IMAGES[:4])).status_code == 200
    assert service.admission.images == 0


class Held:
    """Holds the inference thread back until told."""

    def __init__(self, monkeypatch):
        self.let_go, self.inside, find = threading.Event(), threading.Event(), Loaded.find

        def held(*arguments):
            self.inside.set()
            assert self.let_go.wait(20)
            return find(*arguments)

        monkeypatch.setattr(Loaded, "find", held)


def background(work):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(work()))
    thread.start()
    return thread, answers


def test_what_does_not_fit_the_queue_is_told_when_to_come_again(small, monkeypatch, expected):
    service, client = small(queue=3, max_wait=0)
    held = Held(monkeypatch)
    thread, answers = background(lambda: client.post("/score", files=files(IMAGES[:2])))
    assert held.inside.wait(20)
    assert client.post("/score", files=files(IMAGES[:2])).status_code == 429  # one more fits, two don't
    assert service.admission.images == 2
    service.admission.grow(1)
    refused = client.post("/score", content=b"never read", headers={"content-type": "application/json"})
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert "3 images are waiting already" in refused.json()["error"]
    assert client.get("/v2/health/ready").status_code == 200  # busy is not broken
    service.admission.leave(1, 0)
    held.let_go.set()
    thread.join()
    assert [row["score"] for row in answers[0].json()["results"]] == expected[:2]
    assert service.admission.images == 0


def test_bodies_together_have_a_limit_too(small):
    service, client = small(max_body=1000)
    service.admission.bytes = 7500
    assert client.post("/score", content=b"x" * 501).status_code == 429
    assert client.post("/score", content=b"x" * 500).status_code == 415


def test_an_answer_that_takes_too_long_is_given_up_and_not_scored(small, monkeypatch):
    service, client = small(timeout=1.5, max_wait=0)
    held = Held(monkeypatch)
    late = [background(lambda: client.post("/score", files=files(IMAGES[:1])))]
    assert held.inside.wait(20)
    late.append(background(lambda: client.post("/score", files=files(IMAGES[:1]))))
    for thread, _ in late:
        thread.join()
    assert [answers[0].status_code for _, answers in late] == [503, 503]
    assert late[0][1][0].headers["retry-after"] == "1"
    service.limits = Limits()
    held.let_go.set()
    assert client.post("/score", files=files(IMAGES[:1])).status_code == 200
    assert service.metrics.batch_images.sum == 2  # of the late ones only the one that was under way


def call(app, messages, headers=(), path="/score"):
    """Drive the app by hand, for what a well-behaved client does not do."""
    sent = []

    async def receive():
        if not messages:
            await asyncio.sleep(60)
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    async def drive():
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
                 "query_string": b"", "headers": [(b"host", b"localhost"), *headers], "client": ("127.0.0.1", 1),
                 "server": ("127.0.0.1", 80), "scheme": "http", "root_path": ""}  # fmt: skip
        app.state.service.start()
        try:
            await app(scope, receive, send)
        finally:
            app.state.service.stop()

    asyncio.run(drive())
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


def test_a_body_that_trickles_in_is_cut_off_and_one_that_breaks_off_is_let_go(folder, detector):
    service = Service(folder, Limits(timeout=0.2))
    app = build_app(service)
    app.state.service = service
    part = {"type": "http.request", "body": b"x", "more_body": True}
    status, answer = call(app, [part])
    assert (status, answer["error"]) == (408, "the body did not arrive within 0.2 s")
    status, answer = call(app, [part, {"type": "http.disconnect"}])
    assert (status, "went away" in answer["error"]) == (400, True)
    assert (service.admission.images, service.admission.bytes) == (0, 0)
    assert service.accepted == service.answered == 2


@pytest.mark.parametrize(
    ("limits", "option"),
    [({"queue": 0}, "--queue"), ({"max_batch": 0}, "--max-batch"), ({"max_body": 0}, "--max-body"),
     ({"max_pixels": 0}, "--max-pixels"), ({"max_wait": -1}, "--max-wait"), ({"timeout": 0}, "--timeout"),
     ({"timeout": float("nan")}, "--timeout"), ({"max_wait": float("inf")}, "--max-wait")],
)  # fmt: skip
def test_limits_that_make_no_sense_are_refused(limits, option):
    with pytest.raises(UserError, match=option):
        Limits(**limits)


# faults of our own


def test_a_batch_that_fails_is_told_to_each_of_its_requests_and_the_next_one_is_scored(small, monkeypatch, caplog):
    _, client = small()
    with monkeypatch.context() as patched:
        patched.setattr(Loaded, "find", lambda *_: 1 / 0)
        answer = client.post("/score", files=files(IMAGES[:1]))
    assert answer.status_code == 500
    assert answer.json() == {"error": "the service failed at this request; its log says more"}
    assert "ZeroDivisionError" in str([record.exc_info for record in caplog.records])
    assert client.post("/score", files=files(IMAGES[:1])).status_code == 200


# who may ask


def test_with_tokens_nothing_but_the_probes_is_open(small):
    _, client = small(tokens=["secret-one", "secret-two"])
    for path in ("/score", "/admin/reload", "/v2/models/bags/infer"):
        assert client.post(path).status_code == 401
    for path in ("/metrics", "/drift", "/openapi.json", "/v2", "/v2/models/bags"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer secret-tw"}).status_code == 401
        assert client.get(path, headers={"authorization": "Basic secret-two"}).status_code == 401
        assert client.get(path, headers={"authorization": "Bearer secret-two"}).status_code == 200
    assert client.get("/drift").headers["www-authenticate"] == "Bearer"
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert client.get(path).status_code == 200
    far = client.get("/drift", headers={"authorization": "bearer secret-one", "host": "elsa.example"})
    assert far.status_code == 200


def test_without_a_token_other_sites_and_other_names_are_refused(client):
    for host in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:80", "[", ""):
        assert client.get("/drift", headers={"host": host}).status_code == 403, host
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000"):
        assert client.get("/drift", headers={"host": host}).status_code == 200, host
    assert client.post("/admin/reload", headers={"origin": "http://evil.example"}).status_code == 403
    assert client.get("/drift", headers={"origin": "http://localhost:8000"}).status_code == 200


def test_a_service_for_others_needs_a_token_and_a_token_needs_length(folder, detector, capsys):
    for host in ("0.0.0.0", "::", "192.168.0.7", "elsa.example"):
        assert run(["serve", str(folder), "--host", host]) == 2
        assert "--token" in capsys.readouterr().err
    assert run(["serve", str(folder), "--token", "short"]) == 2
    assert "at least 8" in capsys.readouterr().err
    assert run(["serve", str(folder), "--queue", "0"]) == 2
    assert "--queue 0" in capsys.readouterr().err
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8:1", "localhost", "[::1]")))


def test_a_missing_package_is_one_line_that_says_what_to_install(folder, detector, monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "elsa.ship.serve", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve", str(folder), "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said == "Error: elsa serve needs the package uvicorn: pip install elsa[serve]\n"


# the model changes


@pytest.fixture
def changing(tmp_path, folder, detector):
    """A service on a folder of its own, and the description and tensors of another model."""
    mine = tmp_path / "bags"
    write_model(mine, *read_model(folder))
    make_model(tmp_path / "other", seed=1)
    service = Service(mine, Limits(max_wait=0))
    with client_of(service) as client:
        yield mine, read_model(tmp_path / "other"), service, client


def test_a_swap_changes_the_answers_and_each_names_its_model(changing, monkeypatch, expected):
    mine, other, _, client = changing
    before = client.post("/score", files=files(IMAGES)).json()
    held = Held(monkeypatch)
    thread, under_way = background(lambda: client.post("/score", files=files(IMAGES)))
    assert held.inside.wait(20)
    monkeypatch.undo()
    write_model(mine, *other)
    named = client.post("/admin/reload").json()
    assert named["id"] == other[1]["sha256_json"][:16] != before["model"]["id"]
    held.let_go.set()
    thread.join()
    assert under_way[0].json() == before  # it had met the first model
    after = client.post("/score", files=files(IMAGES)).json()
    assert after["model"] == named
    assert [row["score"] for row in after["results"]] != expected
    assert client.get("/v2/models/bags").json()["versions"] == [named["id"]]
    assert client.get(f"/v2/models/bags/versions/{before['model']['id']}").status_code == 404
    assert f'elsa_model_info{{id="{named["id"]}",name="bags"}} 1' in client.get("/metrics").text


def test_a_folder_that_does_not_load_changes_nothing(changing, expected):
    mine, _, _, client = changing
    (mine / "model.safetensors").write_bytes(b"torn")
    answer = client.post("/admin/reload")
    assert answer.status_code == 409
    assert "goes on answering" in answer.json()["error"]
    found = client.post("/score", files=files(IMAGES)).json()["results"]
    assert [row["score"] for row in found] == expected
    assert 'elsa_reloads_total{result="refused"} 1' in client.get("/metrics").text


def test_a_model_without_enough_calibration_gives_no_verdicts_unless_a_rate_was_asked_for(tmp_path):
    make_model(tmp_path / "few", calibrated_on=5)
    with client_of(Service(tmp_path / "few", Limits())) as client:
        answer = client.post("/score", files=files(IMAGES[:1])).json()
        assert (answer["threshold"], answer["results"][0]["verdict"]) == (None, None)
        tensor = raw_tensor(IMAGES[:1], data=IMAGES[:1].tolist())
        assert outputs(infer(client, tensor, name="few"))["verdict"] == [""]
    with pytest.raises(UserError, match="--false-alarms"):
        load_for_service(tmp_path / "few", 0.05, 10**6)
    assert load_for_service(tmp_path / "few", 0.5, 10**6).threshold is not None


# operation


def test_health_metadata_and_unknown_names(client, service):
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    about = client.get("/v2/models/bags").json()
    assert about["inputs"][0] == {"name": "images", "datatype": "UINT8", "shape": [-1, 3, 32, 32]}
    assert client.get(f"/v2/models/bags/versions/{about['versions'][0]}").json() == about
    assert client.get("/v2/models/bags/ready").json() == {"name": "bags", "ready": True}
    for path in ("/v2/models/shoes", "/v2/models/bags/versions/2/ready", "/nowhere"):
        assert client.get(path).status_code == 404
        assert set(client.get(path).json()) == {"error"}
    assert client.get("/score").status_code == 405
    service.draining = True
    try:
        answer = client.get("/v2/health/ready")
        assert (answer.status_code, answer.json()) == (503, {"ready": False})
        assert answer.headers["connection"] == "close"
        assert client.get("/v2/health/live").status_code == 200
        assert client.post("/score", files=files(IMAGES[:1])).status_code == 200  # last orders
    finally:
        service.draining = False


def test_metrics_are_in_prometheus_form_and_add_up(small):
    _, client = small()
    client.post("/score", files=files(IMAGES[:5]))
    client.post("/score", json=as_json(b"rubbish"))
    client.get("/nowhere")
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    values = {}
    for line in answer.text.splitlines():
        if line.startswith("#"):
            assert re.fullmatch(r"# (HELP \w+ .+|TYPE \w+ (counter|gauge|histogram))", line)
        else:
            name, value = re.fullmatch(r'(\w+(?:\{\w+="[^"]*"(?:,\w+="[^"]*")*\})?) (\S+)', line).groups()
            assert name not in values
            values[name] = float(value)
    assert sum(value for name, value in values.items() if name.startswith("elsa_images_total")) == 5
    assert values["elsa_broken_images_total"] == 1
    assert values['elsa_requests_total{route="/score",status="200"}'] == 1
    assert values['elsa_requests_total{route="/score",status="422"}'] == 1
    assert values['elsa_requests_total{route="none",status="404"}'] == 1
    assert values["elsa_batch_images_count"] == 1
    assert values["elsa_batch_images_sum"] == 5
    assert values['elsa_batch_images_bucket{le="4"}'] == 0
    assert values['elsa_batch_images_bucket{le="8"}'] == values['elsa_batch_images_bucket{le="+Inf"}'] == 1
    assert values["elsa_request_seconds_count"] == 1
    assert values["elsa_waiting_images"] == 0
    assert values["elsa_ready"] == 1
    assert values["process_resident_memory_bytes"] > 1e7


def test_log_lines_are_json_with_the_request_and_its_model(client, caplog):
    caplog.set_level(logging.INFO, "elsa.serve")
    answer = client.post("/score", files=files(IMAGES[:2]), headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    other = client.post("/score", files=files(IMAGES[:2]), headers={"x-request-id": 'forged"\nline'})
    assert re.fullmatch(r"[0-9a-f]{16}", other.headers["x-request-id"])
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records if record.name == "elsa.serve"]
    line = lines[0]
    assert (line["event"], line["id"], line["status"], line["images"]) == ("request", "mine-1", 200, 2)
    assert line["model"] == answer.json()["model"]["id"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    caplog.clear()
    client.get("/v2/health/live")
    assert not caplog.records  # probes would fill the log


def test_an_image_of_one_channel_and_another_side_is_prepared_as_the_model_says(client, detector):
    large = np.asarray(Image.fromarray(IMAGES[0].permute(1, 2, 0).numpy()).resize((64, 48)).convert("L"))
    file = png(torch.from_numpy(large.copy())[None].expand(3, -1, -1))
    assert client.post("/score", json=as_json(file)).json()["results"][0]["score"] < 0
