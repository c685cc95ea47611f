"""Several processes that train as one: losses, gradients and models of 2 and 4 are those of one."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from toy import toy_images

from elsa import distributed
from elsa.augment import draw
from elsa.cli import run
from elsa.config import method_config
from elsa.data.load import load_images
from elsa.data.sources import open_source
from elsa.distributed import share_of_draws, share_of_images, shared_map, synchronise_norms
from elsa.elsa import Elsa
from elsa.errors import UserError
from elsa.finetune import finetune_loss
from elsa.labels import encode_labels
from elsa.nets import build_net
from elsa.pretrain import contrastive_loss
from elsa.saved import load
from elsa.seeds import generator
from elsa.training import TrainStep

IMAGES, CLOSE = 12, 1e-5
LABELS = [["", "normal", "anomaly"][i % 3] for i in range(IMAGES)]
SETTINGS = {
    "preset": "cpu", "num_prototypes": 8, "pretrain_epochs": 2, "pretrain_batch": 16, "finetune_epochs": 2,
    "finetune_batch": 16, "views": 1,
}  # fmt: skip


class Wide(torch.nn.Module):
    """A net in float64: in float32 the rounding of a sum decides on which side of a ReLU a few numbers fall."""

    def __init__(self, net):
        super().__init__()
        self.net = net.double()

    def forward(self, x):
        return self.net(x.double())


def gradients(method, kind):
    """Loss, gradients and buffers of one step on 12 images, by name."""
    config = method_config(method, "cpu", num_prototypes=11, precision="fp32")
    net = Wide(synchronise_norms(build_net("tiny", "auto", 3, 32, config.shifts, generator(0, "net")))).train()
    images, draws = toy_images(IMAGES, 4), draw(2 * config.shifts * IMAGES, generator(0, "draws"))
    inputs = [share_of_images(images), share_of_draws(draws, 2 * config.shifts)]
    if kind == "finetune":
        prototypes = F.normalize(torch.randn(11, 128, generator=generator(0, "prototypes")), dim=1)
        inputs = [prototypes, inputs[0], encode_labels(LABELS), inputs[1]]
    still = torch.optim.SGD(net.parameters(), lr=0.0)
    loss = TrainStep(contrastive_loss if kind == "pretrain" else finetune_loss, net, still, config)(*inputs)
    found = {f"gradient of {name}": w.grad for name, w in net.named_parameters() if w.grad is not None}
    return {"loss": loss, **found, **{name: b.clone() for name, b in net.named_buffers()}}


def fitted():
    model = Elsa(seed=3, **SETTINGS).fit(toy_images(48, 6), [""] * 40 + ["anomaly"] * 8)
    return {"scores": model.anomaly_score(toy_images(11, 3, seed=1)), "prototypes": model.prototypes_}


def exchanged():
    """What every process is told by the others."""
    batches = [torch.arange(n + 2.0) for n in range(5)]
    asked = []
    results = shared_map(lambda batch: asked.append(len(batch)) or batch[:, None] * 2, batches)
    with pytest.raises(UserError, match="finetune_batch: batches of 7 images cannot be shared evenly"):
        distributed.check_batch("finetune_batch", 7)
    with pytest.raises(UserError, match="the processes disagree on the epoch"):
        distributed.check_together("the epoch", os.environ["RANK"])
    distributed.check_together("the epoch", 3)
    return {
        "results": torch.cat(results),
        "computed here": torch.tensor(len(asked)),
        "prototypes": distributed.as_the_first(torch.full((2,), float(os.environ["RANK"]))),
        "score": torch.tensor(distributed.number_of_the_first(float(os.environ["RANK"]) + 0.1, torch.device("cpu"))),
    }


TASKS = {
    **{
        f"{method} {kind}": (gradients, method, kind)
        for method in ("elsa", "elsa+")
        for kind in ("pretrain", "finetune")
    },
    "exchanged": (exchanged,),
    "fitted": (fitted,),
}


def one_process(rank, count, port, answers):
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        assert distributed.join("cpu") == "cpu"
        found = {name: work(*given) for name, (work, *given) in TASKS.items()}
        distributed.leave()
    except BaseException:
        answers.put((rank, traceback.format_exc()))
        raise
    answers.put((rank, {name: {k: v.numpy() for k, v in tensors.items()} for name, tensors in found.items()}))


def make_photos(folder, count=48):
    folder.mkdir()
    for number, pixels in enumerate(toy_images(count, 6).permute(0, 2, 3, 1).numpy()):
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module", params=[2, 4])
def processes(request):
    """What each of 2 or 4 processes found: a list of {task: {name: tensor}}."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    answers, port = context.Queue(), free_port()
    started = [
        context.Process(target=one_process, args=(rank, request.param, port, answers)) for rank in range(request.param)
    ]
    for process in started:
        process.start()
    found = {}
    try:
        for _ in started:
            rank, answer = answers.get(timeout=120)
            assert isinstance(answer, dict), answer
            found[rank] = answer
    finally:
        for process in started:
            process.join(10 if len(found) == len(started) else 0)
            process.kill()
    return [
        {name: {k: torch.from_numpy(v) for k, v in arrays.items()} for name, arrays in found[rank].items()}
        for rank in range(request.param)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("task", [name for name, (work, *_) in TASKS.items() if work is gradients])
def test_loss_gradients_and_statistics_are_those_of_one_process(task, processes):
    expected = gradients(*TASKS[task][1:])
    assert len(expected) > 20
    for found in processes:
        assert found[task].keys() == expected.keys()
        for name, value in expected.items():
            size = value.abs().max().item() if value.is_floating_point() else 0
            torch.testing.assert_close(
                found[task][name],
                value,
                atol=CLOSE * max(size, 1),
                rtol=0,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.slow
def test_every_process_ends_with_one_model_and_it_is_that_of_one_process(processes):
    expected = fitted()
    for found in processes:
        for name in expected:
            assert torch.equal(found["fitted"][name], processes[0]["fitted"][name])
    # rounding grows with every step; a wrong step would change everything
    torch.testing.assert_close(processes[0]["fitted"]["scores"], expected["scores"], atol=5e-3, rtol=0)


@pytest.mark.slow
def test_work_is_divided_and_what_the_first_one_says_counts(processes):
    told = [found["exchanged"] for found in processes]
    expected = torch.cat([torch.arange(n + 2.0)[:, None] * 2 for n in range(5)])
    assert all(torch.equal(one["results"], expected) for one in told)
    assert sum(int(one["computed here"]) for one in told) == 5
    assert all(torch.equal(one["prototypes"], torch.zeros(2)) for one in told)
    assert {one["score"].item() for one in told} == {torch.tensor(0.1).item()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds the workers in /proc")
def test_a_fit_goes_on_after_one_of_its_processes_is_killed(tmp_path):
    """By torchrun, which starts all of them again; pre-training is behind them and is not repeated."""
    photos = make_photos(tmp_path / "photos")
    settings = ["pretrain_epochs=2", "pretrain_batch=16", "finetune_epochs=15", "finetune_batch=16", "num_prototypes=8"]
    fit = ["-m", "elsa", "fit", str(photos), "--out", str(tmp_path / "m"), "--encoder", "tiny", "--device", "cpu"]
    fit += [word for setting in [*settings, "views=1"] for word in ("--set", setting)]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with open(tmp_path / "log", "w") as log:
        job = subprocess.Popen([*torchrun, *fit], stdout=log, stderr=log)
    while not (tmp_path / "m.checkpoint").exists():
        assert job.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    workers = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    os.kill(workers[-1], signal.SIGKILL)
    code, log = job.wait(120), (tmp_path / "log").read_text()
    assert code == 0, log
    assert log.count("pretrain 1/2") == 1
    assert log.count("Fitted on 48 images") == 1  # the other process says nothing
    assert not (tmp_path / "m.checkpoint").exists()
    assert run([*fit[2:], "--out", str(tmp_path / "alone")]) == 0
    images = load_images(open_source(photos), size=32, channels=3).images
    together, alone = (load(tmp_path / name).anomaly_score(images) for name in ("m", "alone"))
    torch.testing.assert_close(together, alone, atol=1e-2, rtol=0)


def test_what_one_process_does_not_do_is_refused(tmp_path, monkeypatch, capsys):
    make_photos(tmp_path / "photos", 24)
    monkeypatch.setattr(distributed, "num_processes", lambda: 2)
    monkeypatch.setattr(distributed.dist, "barrier", lambda: None)
    arguments = ["fit", str(tmp_path / "photos"), "--out", str(tmp_path / "m"), "--device", "cpu"]
    assert run([*arguments, "--method", "deep-svdd"]) == 2
    assert "--method deep-svdd trains in one process" in capsys.readouterr().err
    assert not (tmp_path / "m").exists()


def test_one_process_is_left_as_it_is(monkeypatch):
    net, x = build_net("tiny", "auto", 3, 32, 4, generator(0, "net")), torch.randn(6, 5)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert distributed.join("cuda") == "cuda"
    assert synchronise_norms(net) is net
    assert {type(module).__name__ for module in net.modules()} & {"SharedNorm"} == set()
    assert (
        distributed.gather_views(x, 2) is share_of_draws(x, 2) is share_of_images(x) is distributed.as_the_first(x) is x
    )
    assert distributed.is_first()
    assert distributed.num_processes() == 1
    distributed.leave()
