"""`quantize` on models of all kinds: what is turned, what stays, what is refused."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import headwise
from headwise.quant import Int8Linear, report

D, H, L = 32, 4, 7
DYNAMIC_STATIC = pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])


class Mixed(nn.Module):
    """A user's model: convolution, stock encoder, cross attention, a tied head."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, D)
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 64, batch_first=True), 2)
        self.cross = nn.MultiheadAttention(D, H, batch_first=True)
        self.head = nn.Linear(D, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids, padding=None):
        x = self.embedding(ids)
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x + self.cross(x, x.flip(1), x.flip(1), key_padding_mask=padding, need_weights=False)[0]
        return self.head(x)


MODELS = {
    "attention": (lambda: headwise.MultiheadAttention(D, H, batch_first=True), 4, lambda m, x, p: m(x, x, x, p)[0]),
    "fused": (
        lambda: headwise.MultiheadAttention(D, H, batch_first=True, fused_qkv=True),
        4,
        lambda m, x, p: m(x, x, x, p)[0],
    ),
    "grouped": (
        lambda: headwise.MultiheadAttention(D, H, batch_first=True, num_kv_heads=2, gate=True, positions="rotary"),
        5,
        lambda m, x, p: m(x, x, x, p)[0],
    ),
    "stock attention": (lambda: nn.MultiheadAttention(D, H, batch_first=True), 4, lambda m, x, p: m(x, x, x, p)[0]),
    "length first": (
        lambda: nn.MultiheadAttention(D, H),
        4,
        lambda m, x, p: m(*[x.transpose(0, 1)] * 3, p)[0].transpose(0, 1),
    ),
    "block": (lambda: headwise.EncoderBlock(D, H), 6, lambda m, x, p: m(x, p)),
    "swiglu": (lambda: headwise.EncoderBlock(D, H, activation="swiglu"), 7, lambda m, x, p: m(x, p)),
    "stock encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(D, H, 64, batch_first=True), 2),
        12,
        lambda m, x, p: m(x, src_key_padding_mask=p),
    ),
    "stock decoder": (
        lambda: nn.TransformerDecoderLayer(D, H, 64, batch_first=True),
        10,
        lambda m, x, p: m(x, x.flip(0), tgt_key_padding_mask=p),
    ),
    "plain": (lambda: nn.Sequential(nn.Linear(D, 16), nn.ReLU(), nn.Linear(16, D)), 2, lambda m, x, p: m(x)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@DYNAMIC_STATIC
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")  # torch's own layer
def test_models(name, padded, static):
    build, number, call = MODELS[name]
    model = build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    x = torch.randn(3, L, D)
    padding = torch.tensor([[False] * L, [False] * 5 + [True] * 2, [False] * 2 + [True] * 5]) if padded else None

    class Called(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x, padding=None):
            return call(self.model, x, padding)

    whole = Called()
    with torch.no_grad():
        want = whole(x, padding)
    small = headwise.quantize(whole, [(x, padding)] if static else None)
    said = report(small)
    assert (said.num_int8, said.num_float, said.kind) == (number, 0, "static" if static else "dynamic")
    with torch.no_grad():
        got = small(x, padding)
        error = (got - want).norm() / want.norm()
        assert 0 < error < 0.03
        # The float model is as it was
        assert torch.equal(whole(x, padding), want)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert not any(p.requires_grad for p in small.parameters())
    assert not small.training


def test_a_users_model():
    model, ids = Mixed().train(), torch.randint(0, 11, (3, L))
    padding = torch.tensor([[False] * L, [False] * 5 + [True] * 2, [False] * 3 + [True] * 4])
    small = headwise.quantize(model, [{"ids": ids, "padding": padding}, (ids,)])
    assert model.training
    assert report(small).num_int8 == 2 * 6 + 4 + 1
    assert isinstance(small.conv, nn.Conv1d)
    assert torch.equal(small.embedding.weight, model.embedding.weight)
    model.eval()
    with torch.no_grad():
        want, got = model(ids), small(ids)
    assert (got - want).norm() / want.norm() < 0.05


def test_what_padding_holds_does_not_matter_to_others():
    model = headwise.MultiheadAttention(D, H, batch_first=True).eval()
    x, padding = torch.randn(2, L, D), torch.tensor([[False] * L, [False] * 5 + [True] * 2])
    small = headwise.quantize(model, [(x, x, x)])
    with torch.no_grad():
        want = small(x, x, x, padding)[0]
        x = x.clone()
        x[1, 5:] = math.nan
        got = small(x, x, x, padding)[0]
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1, :5], want[1, :5])


def test_nan_comes_out():
    small = headwise.quantize(headwise.EncoderBlock(D, H))
    x = torch.randn(2, L, D)
    x[0, 1, 2] = math.nan
    with torch.no_grad():
        got = small(x)
    assert got[0].isnan().all()  # every position attends to it
    assert got[1].isfinite().all()


@DYNAMIC_STATIC
def test_where(static):
    model = headwise.EncoderBlock(D, H)
    seen = []

    def where(name, module):
        seen.append(name)
        return "linear" in name

    small = headwise.quantize(model, [torch.randn(2, L, D)] if static else None, where=where)
    assert report(small).names == ("linear1", "linear2")
    assert seen == [
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.out_proj",
        "linear1",
        "linear2",
    ]


def test_a_linear_itself_and_a_shared_one():
    linear = nn.Linear(D, D)
    assert isinstance(headwise.quantize(linear), Int8Linear)
    small = headwise.quantize(nn.Sequential(linear, nn.ReLU(), linear))
    assert small[0] is small[2]
    assert report(small).num_int8 == 1


def test_reduced_range():
    small = headwise.quantize(headwise.EncoderBlock(D, H), reduce_range=True)
    assert max(int(m.int_weight.abs().max()) for m in small.modules() if isinstance(m, Int8Linear)) == 63
    assert report(small).weight_bits == 7
    assert "in int8 (dynamic, 7-bit weights), " in str(report(small))
    assert report(headwise.quantize(headwise.EncoderBlock(D, H))).weight_bits == 8


def test_hooks_stay():
    model, seen = headwise.EncoderBlock(D, H), []
    model.linear1.register_forward_hook(lambda module, given, out: seen.append(type(module)))
    with torch.no_grad():
        headwise.quantize(model)(torch.randn(2, L, D))
    assert seen == [Int8Linear]


def test_it_says_what_it_did(caplog):
    with caplog.at_level(logging.INFO, logger="headwise"):
        small = headwise.quantize(headwise.EncoderBlock(D, H))
    assert caplog.messages == [f"quantize: {report(small)}"]
    assert str(report(small)).startswith("6 of 6 linears in int8 (dynamic), 50,816 bytes with float weights, ")
    assert str(report(nn.ReLU())).startswith("0 of 0 linears in int8 (float)")


class Reads(nn.TransformerEncoderLayer):
    """Stays torch's: its forward is its own."""

    def forward(self, src, *args, **kwargs):
        return super().forward(src, *args, **kwargs)


@pytest.mark.filterwarnings("ignore:upgrade. left as they are:UserWarning")
def test_what_is_never_called_is_left():
    model = nn.Sequential(Reads(D, H, 64, batch_first=True), nn.Linear(D, 3)).eval()
    small = headwise.quantize(model)
    assert report(small).names == ("1",)
    with torch.no_grad():
        assert small(torch.randn(2, L, D)).shape == (2, L, 3)
    with pytest.raises(ValueError, match=r"are not called as an nn\.Linear is"):
        headwise.quantize(model[0])


@pytest.mark.parametrize(
    ("model", "words", "says"),
    [
        (nn.ReLU(), {}, "hold an nn.Linear, or attention of headwise or torch; got ReLU with none"),
        ("model", {}, "be an nn.Module"),
        (nn.Linear(3, 3), {"where": lambda *_: False}, "got 1 that where selected none of"),
        (nn.Linear(3, 3), {"where": "linear"}, r"where must be called as where\(name, module\)"),
        (nn.Linear(3, 3).double(), {}, r"model.float\(\) converts it; got torch.float64"),
        (nn.Linear(3, 3).bfloat16(), {}, r"model.float\(\) converts it; got torch.bfloat16"),
        (nn.Linear(3, 3, device="meta"), {}, "got a meta tensor"),
        (nn.Linear(3, 3), {"calibration": []}, "hold inputs, some hundred samples"),
        (nn.Linear(3, 3), {"calibration": torch.randn(5, 3)}, r"\[x\] for one; got torch.float32 \(5, 3\)"),
        (nn.Linear(3, 3), {"calibration": {"input": torch.randn(5, 3)}}, r"\[x\] for one; got dict"),
        (nn.Linear(3, 3), {"calibration": 3}, r"\[x\] for one; got int"),
        (nn.Linear(3, 3), {"calibration": [3]}, "hold tensors, tuples of arguments or dicts of keywords; got int at 0"),
        (nn.Linear(3, 3), {"calibration": [torch.randn(5, 4)]}, r"RuntimeError from input 0, torch.float32 \(5, 4\)"),
        (
            nn.Linear(3, 3),
            {"calibration": [torch.randn(5, 3), (torch.randn(5, 3), 4)]},
            r"labels left out: .*TypeError from input 1, \(torch.float32 \(5, 3\), int\)",
        ),
        (
            nn.Linear(3, 3),
            {"calibration": [torch.randn(5, 3), torch.full((5, 3), math.nan)]},
            "clean or drop input 1, counted from 0; got 15 of 15 numbers that are NaN or infinite",
        ),
    ],
)
def test_refused(model, words, says):
    with pytest.raises(ValueError, match=rf"^quantize: .*{says}"):
        headwise.quantize(model, **words)


def test_a_weight_that_is_no_number():
    model = headwise.EncoderBlock(D, H)
    with torch.no_grad():
        model.linear1.weight[3, 4] = math.nan
    with pytest.raises(ValueError, match=r"^quantize: linear1 must hold finite numbers only; got 1 that are NaN"):
        headwise.quantize(model)


def test_a_linear_that_calibration_never_reaches():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(
        ValueError, match=r"name not in \{'idle'\} leaves those as they are; got 1 input, and idle never"
    ):
        headwise.quantize(Two(), [torch.randn(2, 3)])
    small = headwise.quantize(Two(), [torch.randn(2, 3)], where=lambda name, module: name not in {"idle"})
    assert report(small).names == ("used",)


def test_already_int8():
    small = headwise.quantize(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"be a float model; got one that is int8 already: 1 of 1 linear in int8"):
        headwise.quantize(small)


class Counts(nn.Module):
    """Remembers what it saw, in eval too, and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.kept = []

    def forward(self, x):
        self.calls += 1
        self.kept.append(x)
        return self.linear(x) + torch.rand(())


def test_calibration_leaves_no_trace():
    model, given = Counts(), [torch.randn(2, 3) for _ in range(4)]
    before = torch.get_rng_state()
    small = headwise.quantize(model, given)
    assert torch.equal(torch.get_rng_state(), before)
    assert int(small.calls) == int(model.calls) == 0
    assert small.kept == model.kept == []


def test_calls_that_pass_by_the_hooks_count():
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear.forward(x * 100) + self.linear(input=x)

    x = torch.rand(8, 3)
    small = headwise.quantize(Direct(), [x])
    assert small.linear.state.input_scale > 50 / 255
    with torch.no_grad():
        assert small(x).shape == (8, 3)


def test_zeros_are_no_calibration():
    with pytest.raises(ValueError, match=r"give every linear more than zeros.*of which zeros alone reach 0"):
        headwise.quantize(nn.Sequential(nn.Linear(3, 3)), [torch.zeros(4, 3)])


@pytest.mark.parametrize("word", ["equalize", "reduce_range"])
@pytest.mark.parametrize("value", ["no", None, 1])
def test_flags(word, value):
    with pytest.raises(ValueError, match=f"quantize: {word} must be True or False"):
        headwise.quantize(nn.Linear(3, 3), **{word: value})


def test_a_model_that_copies_to_itself():
    class Shared(nn.Linear):
        def __deepcopy__(self, memo):
            return self

    model = nn.Sequential(nn.Sequential(Shared(3, 3)), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"be copied whole by copy\.deepcopy.*0\.0, whose __deepcopy__ gives itself"):
        headwise.quantize(model)
    assert all(p.requires_grad for p in model.parameters())


def test_report_anywhere():
    small = headwise.quantize(headwise.EncoderBlock(D, H), [torch.randn(2, L, D)])
    assert report(small.to("meta")) == report(headwise.quantize(headwise.EncoderBlock(D, H), [torch.randn(2, L, D)]))


def test_in_two_steps():
    """Some layers dynamic, others static."""
    block, x = headwise.EncoderBlock(D, H), torch.randn(2, L, D)
    first = headwise.quantize(block, where=lambda name, _: "self_attn" in name)
    both = headwise.quantize(first, [x])
    assert (report(first).num_int8, report(both).num_int8, report(both).kind) == (4, 6, "mixed")
    assert torch.equal(both.self_attn.q_proj.int_weight, first.self_attn.q_proj.int_weight)
    with torch.no_grad():
        assert (both(x) - block(x)).norm() / block(x).norm() < 0.03


def test_lazy_and_pruned_layers_are_named():
    with pytest.raises(ValueError, match=r"model must know its widths: call it once before; got 1, an nn\.Lazy"):
        headwise.quantize(nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(3)))
    model = nn.Sequential(nn.Linear(3, 3))
    prune.l1_unstructured(model[0], "weight", 2)
    model(torch.randn(2, 3))  # with gradients: what it computed cannot be copied
    with pytest.raises(ValueError, match=r"^quantize: 0 must have a weight of its own: make it one first"):
        headwise.quantize(model)


class OwnAttention(nn.MultiheadAttention):
    """Stays torch's: its forward is its own."""

    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("function", ["quantize", "prepare_qat"])
def test_attention_that_stays_in_float_is_named(function):
    model = nn.Sequential(OwnAttention(D, H, batch_first=True), nn.Linear(D, 3)).eval()
    with pytest.warns(UserWarning, match=rf"{function}: left in float: 0 \(.*OwnAttention\): a subclass that"):
        getattr(headwise, function)(model)
