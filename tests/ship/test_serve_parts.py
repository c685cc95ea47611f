"""The parts of the service on their own: batches, admission, drift, metrics, the description in OpenAPI."""

import asyncio
import dataclasses
import json
import re
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import ks_2samp
from served_model import make_model, pixels, png

from elsa.encoders import BATCH
from elsa.ship.serving.app import build_app
from elsa.ship.serving.batcher import Batch, Batcher
from elsa.ship.serving.bodies import Sent, read_multipart
from elsa.ship.serving.drift import EVERY, FEWEST, LAST, DriftWatch
from elsa.ship.serving.limits import Admission, Limits, Refusal
from elsa.ship.serving.loaded import Findings, load_for_service
from elsa.ship.serving.metrics import Histogram, Metric, braces
from elsa.ship.serving.service import Service

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using `httpx`")  # it would rather have httpx2
    from starlette.testclient import TestClient


class Counting:
    """A model whose score of an image is its first pixel; notes the batches it gets."""

    def __init__(self, fails=False):
        self.batches, self.fails = [], fails

    def find(self, images, heat):
        self.batches.append(len(images))
        if self.fails:
            raise ZeroDivisionError
        scores = images[:, 0, 0, 0].double().tolist()
        return Findings(scores, scores, None, None, heat[:, None, None].float() if heat.any() else None)


def numbered(*numbers):
    return torch.tensor(numbers, dtype=torch.uint8)[:, None, None, None]


def batched(jobs, **limits):
    """What each job was answered, and the batches that were observed; all jobs wait before the first is scored."""
    seen: list[Batch] = []

    async def drive():
        batcher = Batcher(Limits(**limits), seen.append)
        with batcher.changed:  # holds the thread back
            futures = [batcher.submit(model, images, heat) for model, images, heat in jobs]
        found = await asyncio.gather(*futures, return_exceptions=True)
        assert batcher.alive
        batcher.stop()
        assert not batcher.alive
        return found

    return asyncio.run(drive()), seen


def test_what_waits_is_scored_together_up_to_the_limit_in_order():
    model = Counting()
    jobs = [(model, numbered(*range(start, start + 3)), False) for start in range(0, 15, 3)]
    found, seen = batched(jobs, max_batch=7)
    assert [part.scores for part in found] == [[s, s + 1, s + 2] for s in range(0, 15, 3)]
    assert model.batches == [6, 6, 3]
    assert [len(batch.findings.scores) for batch in seen] == [6, 6, 3]


def test_chunks_are_whole_where_more_than_one_waits():
    """They are filled up to 16 with copies, whose scoring is work for nothing."""
    model = Counting()
    batched([(model, numbered(n), False) for n in range(45)], max_batch=40)
    assert model.batches == [32, 13]


def test_a_request_larger_than_a_batch_goes_alone():
    model = Counting()
    found, _ = batched([(model, numbered(*range(n)), False) for n in (2, 9, 2)], max_batch=4)
    assert [len(part.scores) for part in found] == [2, 9, 2]
    assert model.batches == [2, 9, 2]


def test_a_batch_is_of_one_model():
    one, other = Counting(), Counting()
    jobs = [(model, numbered(n), False) for n, model in enumerate([one, one, other, one])]
    found, seen = batched(jobs, max_batch=10)
    assert [part.scores for part in found] == [[0], [1], [2], [3]]
    assert (one.batches, other.batches) == ([2, 1], [1])
    assert [batch.model for batch in seen] == [one, other, one]


def test_heat_maps_go_to_those_who_asked():
    model = Counting()
    found, _ = batched([(model, numbered(1), False), (model, numbered(2, 3), True)], max_batch=10)
    assert found[0].heat.tolist() == [[[0.0]]]
    assert found[1].heat.tolist() == [[[1.0]], [[1.0]]]


def test_a_batch_that_fails_takes_nobody_else_with_it():
    bad, good = Counting(fails=True), Counting()
    found, seen = batched([(bad, numbered(1), False), (bad, numbered(2), False), (good, numbered(3), False)])
    assert [type(answer) for answer in found] == [ZeroDivisionError, ZeroDivisionError, Findings]
    assert len(seen) == 1


def test_what_was_given_up_is_not_scored():
    model = Counting()

    async def drive():
        batcher = Batcher(Limits(max_wait=50), lambda _: None)
        futures = [batcher.submit(model, numbered(n), False) for n in range(3)]
        futures[1].cancel()
        await asyncio.gather(*futures, return_exceptions=True)
        batcher.stop()

    asyncio.run(drive())
    assert model.batches == [2]


def test_stopping_answers_what_waits():
    async def drive():
        batcher = Batcher(Limits(max_wait=0, max_batch=1), lambda _: None)
        futures = [batcher.submit(Counting(), numbered(n), False) for n in range(20)]
        batcher.stop()
        return [part.scores for part in await asyncio.gather(*futures)]

    assert asyncio.run(drive()) == [[n] for n in range(20)]


def test_a_lone_request_waits_for_company_no_longer_than_told():
    async def drive(wait):
        batcher = Batcher(Limits(max_wait=wait), lambda _: None)
        began = asyncio.get_running_loop().time()
        await batcher.submit(Counting(), numbered(1), False)
        took = asyncio.get_running_loop().time() - began
        batcher.stop()
        return took

    assert asyncio.run(drive(200)) > 0.19
    assert min(asyncio.run(drive(0)) for _ in range(5)) < 0.1


def test_admission_counts_places_and_guesses_when_to_come_again():
    admission = Admission(Limits(queue=100, max_body=10))
    admission.enter(10)
    admission.grow(99)
    with pytest.raises(Refusal) as busy:
        admission.enter(1)
    assert (busy.value.status, busy.value.retry_after) == (429, 60)  # nothing is known of the pace yet
    for _ in range(40):
        admission.answered(10, 1.0)
    with pytest.raises(Refusal) as busy:
        admission.grow(1)
    assert busy.value.retry_after in (5, 6)  # half of 100 at 10 a second
    admission.leave(100, 10)
    assert (admission.images, admission.bytes) == (0, 0)
    with pytest.raises(Refusal) as large:
        admission.enter(11)
    assert large.value.status == 413


def test_where_scoring_is_slow_fewer_may_wait_than_the_queue_holds():
    admission = Admission(Limits(queue=100, timeout=10))
    for _ in range(40):
        admission.answered(4, 1.0)
    for _ in range(20):  # 4 a second for half of 10 s
        admission.enter(0)
    with pytest.raises(Refusal) as busy:
        admission.enter(0)
    assert busy.value.status == 429


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.text(st.characters(min_codepoint=35, max_codepoint=90), max_size=5), st.binary()), max_size=4)
)
def test_multipart_gives_back_what_was_put_in(parts):
    edge = b"0123456789-no-part-holds-this"
    body = b"".join(
        b'--%b\r\nContent-Disposition: form-data; name="i"; filename="%b"\r\n\r\n%b\r\n' % (edge, name.encode(), data)
        for name, data in parts
    )
    assert read_multipart(body + b"--%b--\r\n" % edge, edge) == [Sent(name, data) for name, data in parts]


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_damaged_form_is_refused_and_never_a_crash(noise, place):
    edge = b"b"
    body = b'--b\r\nContent-Disposition: form-data; filename="a"\r\n\r\n1\r\n--b--\r\n'
    with suppress(Refusal):
        found = read_multipart(body[:place] + noise + body[place:], edge)
        assert all(isinstance(sent.payload, bytes) for sent in found)


# drift


def noise(count, seed=0, shift=0.0):
    return (np.random.default_rng(seed).normal(size=count) + shift).tolist()


def test_drift_is_the_distance_of_two_distributions():
    watch = DriftWatch(torch.tensor(noise(300, 1)))
    scores = noise(FEWEST, 2, 0.4)
    watch.add(scores, [0.25] * FEWEST)
    both = np.sort(np.concatenate([scores, watch.calibration]))
    by_hand = max(abs(np.mean(np.asarray(scores) <= x) - np.mean(watch.calibration <= x)) for x in both)
    assert watch.now.distance == pytest.approx(by_hand)
    assert watch.now.p_value == pytest.approx(ks_2samp(scores, watch.calibration, method="asymp").pvalue)
    assert watch.now.mean_p_value == 0.25
    assert watch.about()["calibrated_on"] == 300


def test_the_alarm_is_raised_by_a_shift_and_cleared_when_it_is_over():
    watch = DriftWatch(torch.tensor(noise(500, 1)))
    assert not watch.add(noise(FEWEST - 1, 2), [0.5] * (FEWEST - 1))
    assert watch.now.distance is None
    assert not watch.add(noise(EVERY, 3), [0.5] * EVERY)
    assert not watch.now.alarm
    changes = [watch.add(noise(EVERY, 10 + n, 1.0), [0.1] * EVERY) for n in range(LAST // EVERY)]
    assert (sum(changes), watch.now.alarm, watch.now.images) == (1, True, LAST)
    changes = [watch.add(noise(EVERY, 40 + n), [0.5] * EVERY) for n in range(LAST // EVERY)]
    assert (sum(changes), watch.now.alarm) == (1, False)


def test_without_drift_the_alarm_stays_quiet():
    """25 services that score 3,000 images each; calibrations of 100 images differ a lot among themselves."""
    alarms = 0
    for seed in range(25):
        watch = DriftWatch(torch.tensor(noise(100, 1000 + seed)))
        scores = noise(3000, seed)
        alarms += any(watch.add(scores[n : n + 500], [0.5] * 500) for n in range(0, 3000, 500))
    assert alarms == 0


# metrics


def test_histogram_buckets_count_everything_up_to_their_bound():
    histogram = Histogram("h", "about", (1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 7):
        histogram.observe(value)
    assert histogram.lines()[2:] == [
        'h_bucket{le="1"} 2', 'h_bucket{le="2"} 3', 'h_bucket{le="5"} 4', 'h_bucket{le="+Inf"} 5',
        "h_sum 15.0", "h_count 5",
    ]  # fmt: skip


def test_labels_are_escaped_and_gauges_forget():
    assert braces((("a", 'x"\\\n'),)) == '{a="x\\"\\\\\\n"}'
    gauge = Metric("g", "gauge", "about")
    gauge.set(1, id="old")
    gauge.set(2, id="new")
    assert gauge.lines()[2:] == ['g{id="new"} 2']


# OpenAPI


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("described") / "bags"
    make_model(folder)
    with TestClient(build_app(Service(folder, Limits())), base_url="http://localhost") as client:
        yield client


def resolved(schema, root):
    return root["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def violations(value, schema, root, where="it"):
    """What of a JSON value is not as its schema says; knows the words that our schemas use."""
    schema = resolved(schema, root)
    if "anyOf" in schema:
        found = [violations(value, option, root, where) for option in schema["anyOf"]]
        return [] if [] in found else found[0]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int, "number": (int, float),
             "null": type(None)}  # fmt: skip
    kind = schema.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{where} is no {kind}: {value!r}"]
    found = []
    if isinstance(value, dict) and "properties" in schema:
        found += [f"{where}.{name} is missing" for name in schema.get("required", []) if name not in value]
        found += [f"{where}.{name} is not described" for name in value if name not in schema["properties"]]
        for name in value.keys() & schema["properties"].keys():
            found += violations(value[name], schema["properties"][name], root, f"{where}.{name}")
    if isinstance(value, list) and "items" in schema:
        for number, item in enumerate(value):
            found += violations(item, schema["items"], root, f"{where}[{number}]")
    return found


def check_answer(answer, operation, root):
    described = operation["responses"].get(str(answer.status_code))
    assert described, f"{answer.status_code} is not described: {answer.text}"
    content = described.get("content", {}).get("application/json")
    if answer.headers["content-type"] == "application/json" and content:
        assert violations(answer.json(), content["schema"], root) == []


def arbitrary(schema, root, depth=0):
    """Values as a schema says."""
    schema = resolved(schema, root)
    if "anyOf" in schema:
        return st.one_of([arbitrary(option, root, depth) for option in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object" and "properties" in schema:
        required = set(schema.get("required", []))
        parts = {name: arbitrary(part, root, depth + 1) for name, part in schema["properties"].items()}
        optional = {name: part for name, part in parts.items() if name not in required}
        return st.fixed_dictionaries({name: parts[name] for name in required}, optional=optional)
    if kind == "array":
        most = min(schema.get("maxItems", 3), 3)
        return st.lists(
            arbitrary(schema.get("items", {}), root, depth + 1), min_size=schema.get("minItems", 0), max_size=most
        )
    simple = {
        "string": st.sampled_from(["images", "UINT8", "BYTES", "score", "", "aGVsbG8="]) | st.text(max_size=8),
        "integer": st.integers(-3, 40),
        "boolean": st.booleans(),
        "null": st.none(),
        "object": st.dictionaries(
            st.sampled_from(["binary_data_size", "binary_data", "x"]), st.integers(0, 9) | st.booleans()
        ),
    }
    return simple.get(kind, st.integers(0, 300) | st.text(max_size=4) | st.lists(st.integers(0, 9), max_size=3))


def test_every_reference_of_the_description_leads_somewhere(client):
    root = client.get("/openapi.json").json()
    assert root["openapi"].startswith("3.1")
    names = re.findall(r"#/components/schemas/(\w+)", json.dumps(root))
    assert {"ScoreRequest", "InferenceRequest", "NamedImage", "InputTensor", "ScoreAnswer", "ErrorAnswer"} <= set(names)
    assert set(names) <= set(root["components"]["schemas"])
    assert set(root["paths"]["/score"]["post"]["requestBody"]["content"]) == {"application/json", "multipart/form-data"}
    assert "422" not in root["paths"]["/v2/models/{name}/infer"]["post"]["responses"]


def test_whatever_can_be_asked_by_get_is_answered_as_described(client):
    root = client.get("/openapi.json").json()
    asked = 0
    for path, operations in root["paths"].items():
        if "get" in operations:
            for name, version in (("bags", client.get("/v2/models/bags").json()["versions"][0]), ("x", "y")):
                check_answer(client.get(path.format(name=name, version=version)), operations["get"], root)
                asked += 1
    assert asked >= 18


def test_answers_to_real_images_are_as_described(client):
    root = client.get("/openapi.json").json()
    files = [("images", ("a.png", png(image))) for image in pixels(2)] + [("images", ("b.png", b"rubbish"))]
    answer = client.post("/score?heat_map=true", files=files)
    assert answer.status_code == 200
    check_answer(answer, root["paths"]["/score"]["post"], root)
    tensor = {"name": "images", "shape": [2, 3, 32, 32], "datatype": "UINT8", "data": pixels(2).tolist()}
    infer = root["paths"]["/v2/models/{name}/infer"]["post"]
    answer = client.post("/v2/models/bags/infer", json={"inputs": [tensor], "outputs": [{"name": "heat_map"}]})
    assert answer.status_code == 200
    check_answer(answer, infer, root)
    check_answer(client.post("/admin/reload"), root["paths"]["/admin/reload"]["post"], root)
    check_answer(client.post("/score?heat_map=perhaps", files=files), root["paths"]["/score"]["post"], root)
    check_answer(client.get("/drift", headers={"host": "evil"}), root["paths"]["/drift"]["get"], root)
    assert violations({"error": 1}, {"$ref": "#/components/schemas/ErrorAnswer"}, root) == ["it.error is no string: 1"]


@pytest.mark.parametrize("path", ["/score", "/v2/models/{name}/infer"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bodies_made_from_the_description_are_answered_as_described(client, path, data):
    root = client.get("/openapi.json").json()
    operation = root["paths"][path]["post"]
    body = data.draw(arbitrary(operation["requestBody"]["content"]["application/json"]["schema"], root))
    answer = client.post(path.format(name="bags"), json=body)
    assert answer.status_code in (200, 400, 422), answer.text
    check_answer(answer, operation, root)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=200), kind=st.sampled_from(["application/json", "multipart/form-data; boundary=b", "x"]))
def test_rubbish_is_refused_as_described(client, body, kind):
    root = client.get("/openapi.json").json()
    for path in ("/score", "/v2/models/{name}/infer"):
        answer = client.post(path.format(name="bags"), content=body, headers={"content-type": kind})
        assert answer.status_code in (400, 415)
        check_answer(answer, root["paths"][path]["post"], root)


def test_with_tokens_the_description_says_so(tmp_path):
    make_model(tmp_path / "bags")
    app = build_app(Service(tmp_path / "bags", Limits()), ["a-long-secret"])
    described = app.openapi()
    assert described["security"] == [{"token": []}]
    assert "401" in described["paths"]["/score"]["post"]["responses"]
    assert "401" not in described["paths"]["/v2/health/live"]["get"]["responses"]


def test_chunks_are_filled_up_to_one_size(tmp_path):
    make_model(tmp_path / "bags")
    loaded, sizes = load_for_service(tmp_path / "bags", None, 10**6), []

    def look(images):
        sizes.append(len(images))
        return images[:, 0, 0, 0].double(), None

    counted = dataclasses.replace(loaded, look=look)
    for count, chunks in ((1, 1), (BATCH, 1), (BATCH + 1, 2)):
        sizes.clear()
        images = pixels(count)
        assert counted.find(images).scores == images[:, 0, 0, 0].tolist()
        assert sizes == [BATCH] * chunks


def test_a_model_that_cannot_score_is_never_switched_to(tmp_path, monkeypatch):
    make_model(tmp_path / "bags")
    monkeypatch.setattr("elsa.elsa.Elsa.anomaly_score", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_for_service(tmp_path / "bags", None, 10**6)
