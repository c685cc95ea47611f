"""A short run of benchmarks/labelling.py: the server is killed under its labellers, acknowledged labels are kept."""

import sys
from pathlib import Path

import pytest
from made import make_folder, make_workspace, weight_file

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
from labelling import Server, compare, crowd

pytestmark = pytest.mark.slow


def test_every_acknowledged_label_is_in_the_store_exactly_once(tmp_path):
    source, weights = make_folder(tmp_path / "photos", count=45), weight_file(tmp_path)
    workspace = make_workspace(tmp_path / "workspace", source, weights)
    server = Server(source, workspace, "--encoder", f"mobilenet_v2:{weights}", "--batch", "1000")
    server.start()
    try:
        server.wait(lambda state: state["phase"] == "ready")
        names = [f"parts/{number:03}.png" for number in range(2, 45)]
        found = crowd(server, names, people=10, seconds=6, kills=2)
    finally:
        server.kill()
    counted = compare(workspace, found["acknowledged"])
    assert counted["acknowledged"] > 50
    assert counted["missing"] == counted["more_than_once"] == counted["not_acknowledged"] == 0


def test_the_comparison_notices_what_is_missing_or_doubled(tmp_path):
    from said import say

    from elsa.workspace.store import open_store

    with open_store(tmp_path) as store:
        store.add(
            [say("a.png", "normal", who="eve", request="one:0"), say("b.png", "normal", who="eve", request="two:0")]
        )
    acknowledged = [("one:0", "eve", "a.png", "anomaly"), ("three:0", "eve", "c.png", "normal")]
    counted = compare(tmp_path, acknowledged)
    assert counted == {"acknowledged": 2, "missing": 2, "more_than_once": 0, "not_acknowledged": 2}
