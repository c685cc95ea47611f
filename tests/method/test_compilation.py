import pytest
import torch
from toy import TOY_SETTINGS, toy_images

from elsa.augment import one_view
from elsa.elsa import Elsa
from elsa.finetune import finetune_loss
from elsa.nets import build_net, channels_last
from elsa.pretrain import contrastive_loss
from elsa.seeds import generator

IMAGES = toy_images(16, 4)
LABELS = torch.tensor([0] * 12 + [-1] * 4, dtype=torch.int8)
PROTOTYPES = torch.nn.functional.normalize(torch.randn(8, 128, generator=generator(0, "prototypes")), dim=1)


def new_net(seed):
    net = build_net("tiny", "auto", 3, 32, 4, generator(seed, "initial weights"))
    return channels_last(net, torch.device("cpu"))


def step(loss, net):
    config = Elsa(**TOY_SETTINGS, precision="bf16").config  # a new object each time, as in a new experiment
    draws = torch.rand(16 * 8, 12, generator=generator(0, "draws"))
    arguments = (IMAGES, draws, config) if net.training else (PROTOTYPES, IMAGES, LABELS, draws, config)
    loss(net, *arguments).backward()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own deprecations are not ours to mend
def test_one_compilation_serves_all_experiments_and_nothing_breaks_the_graph():
    # an H200 takes 15 to 20 s for each compilation: a sweep must pay once, not once per experiment
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    pretrain = torch.compile(contrastive_loss, backend=count, dynamic=False, fullgraph=True)
    finetune = torch.compile(finetune_loss, backend=count, dynamic=False, fullgraph=True)
    for seed in range(3):
        net = new_net(seed)
        for _ in range(2):
            step(pretrain, net.train())
            step(finetune, net.eval())
    assert len(graphs) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_views_of_a_score_are_one_graph_for_all_models():
    compiled = torch.compile(one_view, backend="eager", fullgraph=True, dynamic=False)
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in range(3):
            given = (toy_images(16, 4, seed=seed), torch.rand(12, generator=generator(seed, "view")), 4, 0.54, 0.54)
            assert torch.equal(compiled(*given), one_view(*given))
