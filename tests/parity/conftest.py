"""One private Ray head for all of tests/parity, with three trainer ranks and an engine that live as long as it."""

import os
import sys
import threading

import pytest

from stages.config_models import Architecture

from . import stack

ARCHITECTURE = Architecture(vocab_size=300, hidden_size=64, intermediate_size=128, layers=2, heads=2, context=256).model_dump()
TEXTS = ["the tent is light and dries fast", "the zip of the tent sticks", "a lamp that shines for ten hours"]


@pytest.fixture(scope="package")
def head(tmp_path_factory):
    """A head of our own, and this process connected to it as a driver, with one thread so that the ranks have theirs."""
    import ray
    import torch

    from stages.cluster import head

    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["RLHF_STATE_DIR"] = str(tmp_path_factory.mktemp("state"))
    # what a test module hands to a rank travels as code: the ranks cannot import tests
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        cluster = head.up(cpus=2, idle_minutes=20, object_store_mb=100)
        head.connect(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        head.down()
        for module in modules:
            ray.cloudpickle.unregister_pickle_by_value(module)
        torch.set_num_threads(threads)
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="package")
def stacks(head, tmp_path_factory, request):
    """name -> Stack, of those that the collected tests use: they start side by side, since importing takes long."""
    scratch = tmp_path_factory.mktemp("models")
    made = {
        "engine": stack.Stack("engine", scratch),
        "pair": stack.Stack("pair", scratch, ranks=2),
        "solo": stack.Stack("solo", scratch, ranks=1),
    }
    wanted = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}

    def start():
        for name in wanted & made.keys():
            if name == "engine":
                made[name]._engines()[0].warm.remote()
            else:
                made[name].on_ranks(stack.freeze)

    starting = threading.Thread(target=start)
    starting.start()
    yield made
    starting.join()


@pytest.fixture(scope="package")
def solo(stacks) -> stack.Stack:
    """A trainer group of one rank."""
    return stacks["solo"]


@pytest.fixture(scope="package")
def pair(stacks) -> stack.Stack:
    """A trainer group of two ranks."""
    return stacks["pair"]


@pytest.fixture(scope="package")
def engine(stacks) -> stack.Stack:
    """A vLLM engine; its trainer group is never started."""
    return stacks["engine"]


@pytest.fixture(scope="package")
def tied(stacks, tmp_path_factory):
    """Folder of an untrained Llama whose head is its embeddings."""
    from stages import fresh_model

    folder = tmp_path_factory.mktemp("start") / "tied"
    fresh_model.make(str(folder), TEXTS, ARCHITECTURE, seed=1)
    return folder


@pytest.fixture(scope="package")
def untied(tied):
    """The same with a head of its own."""
    return variant(tied, "untied", seed=2, tie_word_embeddings=False)


@pytest.fixture(scope="package")
def reward(tied):
    """A scorer with a head, as transformers itself saves it."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(tied, num_labels=1)
    folder = tied.parent / "reward"
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tied).save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def policies(tied, untied):
    """tied, untied -> three folders each of one architecture and different weights, far from uniform."""
    return {
        name: [variant(base, f"{name}-{seed}", seed=seed, scale=0.3) for seed in (11, 12, 13)]
        for name, base in (("tied", tied), ("untied", untied))
    }


def variant(base, name, *, seed, scale=None, **config):
    """A sibling of a folder: new random weights, of standard deviation `scale`, and changes of its config."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    torch.manual_seed(seed)
    fields = config | ({"initializer_range": scale} if scale else {})
    folder = base.parent / name
    LlamaForCausalLM(AutoConfig.from_pretrained(base, **fields)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder
