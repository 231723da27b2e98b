"""`SequenceClassifier`: a padded batch is each sequence alone; embedding, pooling, scale, config, errors, learning."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F
from torch.testing import assert_close

from headwise import SequenceClassifier
from headwise.models.classifier import SeriesEmbedding

D, H, X, Y, V = 15, 3, 2, 5, 17
F64 = torch.float64
INF, NAN = float("inf"), float("nan")
POOLING = pytest.mark.parametrize("pooling", ["mean", "max"])
PRE_POST = pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
VARIANT = pytest.mark.parametrize(("pooling", "norm_first"), [("mean", True), ("max", False)])
STRIDES = [(1, 1), (1, 2), (1, 5), (2, 2), (2, 3), (3, 3), (3, 4), (3, 7), (4, 5), (4, 6), (5, 5), (5, 8)]
STRIDE = pytest.mark.parametrize(("stride", "kernel_size"), STRIDES)
LENGTHS = (13, 1, 2, 5, 7, 11, 10)


def fill(model: nn.Module, seed: int = 1) -> Any:
    """Random parameters everywhere, and a scale that is not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
            values = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(values.abs() + 0.5 if name.endswith("std_X") else values * (0.5 if tensor.dim() > 1 else 1.0))
    return model


def series(**options: Any) -> SequenceClassifier:
    given = {"num_channels": X, "embed_dim": D, "num_heads": H, "feedforward_dim": 11, "dtype": F64, **options}
    model: SequenceClassifier = fill(SequenceClassifier(Y, **given)).eval()
    return model


def tokens(**options: Any) -> SequenceClassifier:
    return series(**{"num_channels": None, "vocab_size": V, **options})


def randn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(V, shape, generator=torch.Generator().manual_seed(seed))


def padding_of(*lengths: int, longest: int | None = None) -> Tensor:
    return torch.arange(longest or max(lengths)) >= torch.tensor(lengths)[:, None]


def scored(model: SequenceClassifier, x: Tensor, padding: Tensor | None = None) -> tuple[Tensor, list[Tensor]]:
    logits, weights = model(x, padding, need_weights=True)
    assert isinstance(logits, Tensor)
    assert isinstance(weights, list)
    return logits, weights


# --- A padded batch is each sequence alone ----------------------------------------------------------------------------


def compare_with_alone(model: SequenceClassifier, x: Tensor, lengths: tuple[int, ...], stride: int) -> None:
    padding = padding_of(*lengths, longest=x.shape[1])
    logits, weights = scored(model, x, padding)
    assert logits.shape == (len(lengths), Y)
    assert_close(model(x, padding), logits)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    num_positions = math.ceil(x.shape[1] / stride)
    for index, length in enumerate(lengths):
        alone, its = scored(model, x[index : index + 1, :length])
        assert_close(logits[index], alone[0])
        assert_close(model(x[index : index + 1, :length]), alone)
        positions = math.ceil(length / stride)
        for one, other in zip(weights, its, strict=True):
            assert one.shape == (len(lengths), H, num_positions, num_positions)
            assert other.shape == (1, H, positions, positions)
            assert_close(one[index, :, :positions, :positions], other[0])
            assert one[index, :, positions:].eq(0).all()
            assert one[index, :, :, positions:].eq(0).all()
            assert_close(other.sum(-1), torch.ones(1, H, positions, dtype=F64))


@VARIANT
@STRIDE
def test_series_in_a_padded_batch(stride: int, kernel_size: int, pooling: str, norm_first: bool) -> None:
    """Logits and weights; lengths of 1, below the kernel, multiples of the stride and not; more padding than needed."""
    model = series(stride=stride, kernel_size=kernel_size, pooling=pooling, norm_first=norm_first)
    compare_with_alone(model, randn(len(LENGTHS), 17, X), LENGTHS, stride)


@POOLING
@PRE_POST
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_tokens_in_a_padded_batch(pooling: str, norm_first: bool, norm: str) -> None:
    model = tokens(pooling=pooling, norm_first=norm_first, norm=norm, activation="swiglu")
    compare_with_alone(model, ids(len(LENGTHS), 17), LENGTHS, 1)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("stride", [1, 3])
def test_no_mask_is_a_mask_of_nothing(training: bool, stride: int) -> None:
    for model, x in (
        (series(dropout=0.0, stride=stride, kernel_size=4), randn(3, 7, X)),
        (tokens(dropout=0.0), ids(3, 7)),
    ):
        for pooling in ("mean", "max"):
            model.train(training).pooling = pooling
            got = scored(model, x, torch.zeros(3, 7, dtype=torch.bool))
            assert_close(got, scored(model, x))
            assert_close(model(x), got[0])


# --- Padding has no influence -----------------------------------------------------------------------------------------


def poisoned(x: Tensor, padding: Tensor) -> Tensor:
    poison = torch.tensor([NAN, INF, -INF, 1e300], dtype=F64).repeat(x.numel() // 4 + 1)[: x.numel()].view(x.shape)
    return torch.where(padding[..., None], poison, x)


def gradients(model: SequenceClassifier, x: Tensor, padding: Tensor, need_weights: bool) -> list[Tensor]:
    """Of x (a series) and of every parameter, from all logits and, if asked for, all weights."""
    leaves = list(model.parameters())
    if x.is_floating_point():
        x = x.clone().requires_grad_()
        leaves.append(x)
    if need_weights:
        logits, weights = scored(model, x, padding)
    else:
        logits, weights = model(x, padding), []
    outs = [logits, *weights]
    return list(torch.autograd.grad(outs, leaves, [randn(*out.shape, seed=7 + n) for n, out in enumerate(outs)]))


@POOLING
@PRE_POST
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize(("stride", "kernel_size"), [(1, 1), (1, 4), (3, 5)])
def test_nan_and_inf_in_padding(
    stride: int, kernel_size: int, pooling: str, norm_first: bool, need_weights: bool
) -> None:
    """The same logits, weights and gradients to the bit; a sequence that is all padding too."""
    model = series(stride=stride, kernel_size=kernel_size, pooling=pooling, norm_first=norm_first)
    x, padding = randn(4, 11, X), padding_of(11, 7, 1, 0)
    dirty = poisoned(x, padding)
    for one, other in zip(scored(model, dirty, padding), scored(model, x, padding), strict=True):
        assert_close(one, other, rtol=0, atol=0)
    want = gradients(model, x, padding, need_weights)
    got = gradients(model, dirty, padding, need_weights)
    for one, other in zip(got, want, strict=True):
        assert one.isfinite().all()
        assert torch.equal(one, other)
    assert got[-1][padding].eq(0).all()
    assert got[-1][0].abs().max() > 0
    assert sum(grad.abs().max().item() > 0 for grad in got) >= len(got) - 2  # the key biases have none without weights


@POOLING
def test_ids_at_padding(pooling: str) -> None:
    """Any id in range: no influence, and no gradient for its vector."""
    model, x, padding = tokens(pooling=pooling), ids(3, 7) % (V - 1), padding_of(7, 3, 0)
    other = x.masked_fill(padding, V - 1)
    assert_close(scored(model, other, padding), scored(model, x, padding), rtol=0, atol=0)
    table = [name for name, _ in model.named_parameters()].index("embedding.weight")
    got, want = (gradients(model, t, padding, need_weights=False) for t in (other, x))
    for one, two in zip(got, want, strict=True):
        assert torch.equal(one, two)
    assert got[table][V - 1].eq(0).all()
    assert got[table][x[0]].abs().amax(-1).min() > 0


@POOLING
@PRE_POST
@pytest.mark.parametrize("kind", ["series", "strided", "tokens"])
def test_a_sequence_that_is_all_padding(kind: str, pooling: str, norm_first: bool) -> None:
    """Pooled to 0: its logits are the head's bias, its weights are 0."""
    options = {"pooling": pooling, "norm_first": norm_first}
    model = tokens(**options) if kind == "tokens" else series(**options, **_stride_of(kind))
    x = ids(3, 7) if kind == "tokens" else randn(3, 7, X)
    padding = padding_of(0, 7, 4)
    logits, weights = scored(model, x, padding)
    assert torch.equal(logits[0], model.head.bias)
    assert_close(logits[1:], model(x[1:], padding[1:]))
    for one in weights:
        assert one[0].eq(0).all()
        assert one.isfinite().all()
    assert (logits[1] - model.head.bias).abs().max() > 1e-3
    nothing = torch.ones_like(padding)
    assert torch.equal(model(x, nothing), model.head.bias.expand(3, Y))
    assert all(grad.isfinite().all() for grad in gradients(model, x, nothing, need_weights=True))


def _stride_of(kind: str) -> dict[str, int]:
    return {"stride": 3, "kernel_size": 4} if kind == "strided" else {}


# --- The model, written down ------------------------------------------------------------------------------------------


def embedded_by_hand(model: SequenceClassifier, x: Tensor, stride: int, kernel_size: int) -> Tensor:
    """One series (L, X) -> (P, D): position p reads the steps from p * stride - (kernel_size - stride) // 2 on."""
    state = model.state_dict()
    scaled = (x - state["embedding.mean_X"]) / state["embedding.std_X"]
    weight, bias = state["embedding.conv.weight"], state["embedding.conv.bias"]
    rows = []
    for position in range(math.ceil(len(x) / stride)):
        row = bias.clone()
        for tap in range(kernel_size):
            step = position * stride - (kernel_size - stride) // 2 + tap
            if 0 <= step < len(x):
                row = row + weight[:, :, tap] @ scaled[step]
        rows.append(row)
    return torch.stack(rows)


def positions_by_hand(length: int) -> Tensor:
    """ "Attention Is All You Need", 3.5, all sines before all cosines: width D is odd, so one sine more."""
    table = torch.zeros(length, D, dtype=F64)
    sines = (D + 1) // 2
    for position, index in itertools.product(range(length), range(sines)):
        angle = position / 10_000 ** (2 * index / D)
        table[position, index] = math.sin(angle)
        if sines + index < D:
            table[position, sines + index] = math.cos(angle)
    return table


def finished_by_hand(model: SequenceClassifier, x: Tensor, pooling: str) -> Tensor:
    """Embedded and placed (P, D) -> logits (Y,)."""
    for block in model.encoder.layers:
        x = block(x)
    if model.encoder.norm is not None:
        x = model.encoder.norm(x)
    pooled = x.mean(0) if pooling == "mean" else x.max(0).values
    return model.head.weight @ pooled + model.head.bias


@VARIANT
@STRIDE
def test_series_by_hand(stride: int, kernel_size: int, pooling: str, norm_first: bool) -> None:
    model = series(stride=stride, kernel_size=kernel_size, pooling=pooling, norm_first=norm_first, num_layers=3)
    assert len(model.encoder.layers) == 3
    assert (model.encoder.norm is None) != norm_first
    lengths = (11, 4, 1)
    x = randn(3, 11, X)
    logits = model(x, padding_of(*lengths))
    for index, length in enumerate(lengths):
        embedded = embedded_by_hand(model, x[index, :length], stride, kernel_size)
        wanted = finished_by_hand(model, embedded + positions_by_hand(len(embedded)), pooling)
        # the sinusoids are float32
        assert_close(logits[index], wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())


@POOLING
def test_tokens_by_hand(pooling: str) -> None:
    model, x = tokens(pooling=pooling), ids(3, 11)
    logits = model(x)
    for index in range(3):
        embedded = model.embedding.weight[x[index]] + positions_by_hand(11)
        wanted = finished_by_hand(model, embedded, pooling)
        assert_close(logits[index], wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    assert (logits - model(x.flip(1))).abs().max() > 1e-3  # the order counts


@STRIDE
@pytest.mark.parametrize("length", [1, 7, 12])
def test_positions_and_the_steps_they_stand_for(stride: int, kernel_size: int, length: int) -> None:
    """P = ceil(L / stride); position p is padding when all of its own steps are, wherever the padding lies."""
    model, x = series(stride=stride, kernel_size=kernel_size), randn(3, length, X)
    positions = math.ceil(length / stride)
    padding = torch.rand(3, length, generator=torch.Generator().manual_seed(2)) < 0.7
    padding[2] = torch.arange(length) != length - 1
    y, hidden = model.embedding(x, padding)
    assert y.shape == (3, positions, D)
    _, weights = scored(model, x, padding)
    for index, position in itertools.product(range(3), range(positions)):
        whole = bool(padding[index, position * stride : (position + 1) * stride].all())
        assert hidden[index, position] == whole
        for one in weights:
            assert one[index, :, :, position].eq(0).all() == whole
            assert one[index, :, position].eq(0).all() == (whole or bool(hidden[index].all()))


@STRIDE
def test_a_position_sees_its_kernel_and_no_more(stride: int, kernel_size: int) -> None:
    """Every step is seen by the position that stands for it, and by those within the kernel's reach."""
    embedding, length = SeriesEmbedding(X, D, kernel_size, stride, dtype=F64), 13
    before = (kernel_size - stride) // 2
    x = randn(1, length, X)
    plain, _ = embedding(x, None)
    for step in range(length):
        changed = x.clone()
        changed[0, step] += 3.0
        seen = (embedding(changed, None)[0] - plain).abs().amax((0, 2)) > 0
        for position in range(math.ceil(length / stride)):
            first = position * stride - before
            assert seen[position] == (first <= step < first + kernel_size)
        assert seen[step // stride]


# --- Scale ------------------------------------------------------------------------------------------------------------


def measured(*lengths: int) -> list[Tensor]:
    scale, shift = torch.tensor([3.0, 0.01, 1.0]), torch.tensor([-50.0, 0.0, 7.25])
    values = [randn(length, 3, seed=length).float() * scale + shift for length in lengths]
    for one in values:
        one[:, 2] = 0.1  # constant, and no binary fraction
    return values


def test_fit_scale_is_over_all_steps() -> None:
    """Exact mean and standard deviation of each channel, each step counting once, whatever the series' lengths."""
    values = measured(2, 13, 5)
    embedding = SeriesEmbedding(3, D)
    assert embedding.mean_X.eq(0).all()
    assert embedding.std_X.eq(1).all()
    embedding.fit_scale(values)
    steps = torch.cat(values).double()
    mean = steps.sum(0) / 20
    std = ((steps - mean).square().sum(0) / 20).sqrt()
    assert_close(embedding.mean_X, mean.float(), rtol=1e-7, atol=0)
    assert_close(embedding.std_X[:2], std[:2].float(), rtol=1e-6, atol=0)
    assert embedding.std_X[2] == 1.0
    assert embedding.mean_X[2] == torch.tensor(0.1)
    assert {name for name, _ in embedding.named_buffers()} == {"mean_X", "std_X"}
    assert {"mean_X", "std_X"} < embedding.state_dict().keys()
    scaled = (torch.cat(values) - embedding.mean_X) / embedding.std_X
    assert_close(scaled.mean(0), torch.zeros(3), rtol=0, atol=1e-5)
    assert_close(scaled[:, :2].std(0, correction=0), torch.ones(2), rtol=1e-5, atol=0)


def test_fit_scale_of_a_large_offset() -> None:
    """A mean a million times the spread: float32 sums would lose the spread."""
    values = [1e6 + torch.arange(997.0)[:, None].expand(-1, X) % 7 for _ in range(3)]
    model = series(dtype=torch.float32)
    model.embedding.fit_scale(values)
    steps = torch.cat(values).double()
    assert_close(model.embedding.std_X, steps.std(0, correction=0).float(), rtol=1e-6, atol=0)
    assert_close(model.embedding.mean_X, steps.mean(0).float(), rtol=1e-7, atol=0)


@pytest.mark.parametrize("factor", [1000.0, 1e-3, -2.0])
def test_the_unit_of_a_channel_does_not_count(factor: float) -> None:
    """A channel in millimetres instead of metres, refitted: the same logits."""
    model, values = series(num_channels=3, stride=2, kernel_size=3), [one.double() for one in measured(11, 7, 3)]
    padded = nn.utils.rnn.pad_sequence(values, batch_first=True)
    units = torch.tensor([abs(factor), 1.0, 1.0], dtype=F64)
    shift = torch.tensor([5.0, -3.0, 0.0], dtype=F64)
    padding = padding_of(11, 7, 3)
    before = model(padded, padding)
    model.embedding.fit_scale(values)
    fitted = model(padded, padding)
    assert (fitted - before).abs().max() > 1e-3
    model.embedding.fit_scale([one * units + shift for one in values])
    assert_close(model(padded * units + shift, padding), fitted)


def test_fit_scale_keeps_dtype_and_buffers() -> None:
    model = series(num_channels=3, dtype=torch.float32)
    mean, std = model.embedding.mean_X, model.embedding.std_X
    model.embedding.fit_scale(iter([one.double() for one in measured(5, 3)]))
    assert model.embedding.mean_X is mean
    assert model.embedding.std_X is std
    assert mean.dtype == std.dtype == torch.float32
    assert [name for name, _ in model.named_parameters() if name.startswith("embedding")] == [
        "embedding.conv.weight",
        "embedding.conv.bias",
    ]
    integers = [torch.arange(6).view(2, 3), torch.arange(6).view(2, 3) ** 2]
    model.embedding.fit_scale(integers)
    assert_close(model.embedding.mean_X, torch.cat(integers).float().mean(0))


@pytest.mark.parametrize(
    "values",
    [
        [torch.randn(5)],
        [torch.randn(5, 1)],
        [torch.randn(5, X + 1)],
        [torch.randn(4, 5, X)],
        torch.randn(4, 5, X + 1),
        [],
        [torch.randn(0, X)],
        [torch.tensor([[1.0, 2.0], [NAN, 3.0]])],
        [torch.tensor([[1.0, 2.0], [INF, 3.0]])],
    ],
    ids=["(L,)", "(L, 1)", "(L, X + 1)", "(B, L, X)", "a tensor", "none", "no steps", "NaN", "inf"],
)
def test_fit_scale_of_what_is_no_list_of_series(values: Any) -> None:
    """One channel's numbers must not be spread over all of them, nor NaN become the scale."""
    embedding = SeriesEmbedding(X, D)
    with pytest.raises(ValueError, match=r"fit_scale|values"):
        embedding.fit_scale(values)
    assert embedding.mean_X.eq(0).all()
    assert embedding.std_X.eq(1).all()


@pytest.mark.parametrize(("dtype", "tiny"), [(torch.float16, 1e-9), (torch.float32, 1e-50)])
def test_a_spread_too_small_for_the_buffers_dtype(dtype: torch.dtype, tiny: float) -> None:
    """It must not become 0, by which every series would be divided."""
    embedding = SeriesEmbedding(X, D, dtype=dtype)
    values = randn(7, X) * tiny
    embedding.fit_scale([values])
    assert (embedding.std_X > 0).all()
    assert embedding(values.to(dtype)[None], None)[0].isfinite().all()


def test_fit_scale_records_no_graph() -> None:
    embedding = SeriesEmbedding(X, D)
    embedding.fit_scale([torch.randn(7, X, requires_grad=True)])
    assert not embedding.mean_X.requires_grad
    assert not embedding.std_X.requires_grad
    copy.deepcopy(embedding)


# --- Ids --------------------------------------------------------------------------------------------------------------


def test_int32_ids_are_int64_ids() -> None:
    model, x = tokens(), ids(3, 7)
    assert torch.equal(model(x.int()), model(x))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("wrong", [V, -1, 10_000])
@pytest.mark.parametrize("at_padding", [True, False])
def test_ids_out_of_range(wrong: int, dtype: torch.dtype, at_padding: bool) -> None:
    model, x, padding = tokens(), (ids(3, 7) % 5 + 2).to(dtype), padding_of(7, 7, 3)
    x[0, 0], x[0, 1] = 1, 6
    x[2, 5 if at_padding else 1] = wrong
    low, high = min(wrong, 1), max(wrong, 6)
    message = f"SequenceClassifier: x must hold ids in [0, {V}), at padding too; got {low} to {high} (x (3, 7))"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        model(x, padding)
    x[2, 5 if at_padding else 1] = V - 1
    assert model(x, padding).isfinite().all()


# --- Config -----------------------------------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "least": {"num_classes": 2, "num_channels": 1},
    "series": {
        "num_classes": 3,
        "num_channels": 2,
        "embed_dim": 10,
        "num_heads": 2,
        "num_layers": 3,
        "dropout": 0.375,
        "attention_dropout": 0.125,
        "feedforward_dim": 7,
        "activation": "swiglu",
        "norm": "rmsnorm",
        "norm_first": False,
        "kernel_size": 5,
        "stride": 3,
        "pooling": "max",
        "class_names": ("walk", "run", "fall"),
        "channel_names": ["x", "y"],
        "interval": 2.5,
        "unit": "ms",
    },
    "tokens": {
        "num_classes": 2,
        "vocab_size": 11,
        "embed_dim": 9,
        "num_heads": 3,
        "activation": "relu",
        "num_layers": 1,
    },
    "one": {"num_classes": 1, "vocab_size": 1, "embed_dim": 1, "num_heads": 1},
}
CONFIG = pytest.mark.parametrize("name", CONFIGS)


def example(model: SequenceClassifier) -> Tensor:
    if model.config["vocab_size"] is not None:
        return ids(3, 7) % model.config["vocab_size"]
    return randn(3, 7, model.config["num_channels"]).float()


@CONFIG
def test_config_rebuilds_the_model(name: str) -> None:
    """Through JSON and back: the same strict state_dict, dropouts and names; the same logits and weights."""
    model = fill(SequenceClassifier(**CONFIGS[name]))
    written = json.dumps(model.config)
    assert json.loads(written) == model.config
    again = SequenceClassifier(**json.loads(written))
    again.load_state_dict(model.state_dict(), strict=True)
    assert again.config == model.config
    assert repr(again) == repr(model)
    assert (again.class_names, again.channel_names) == (model.class_names, model.channel_names)
    x, padding = example(model), padding_of(7, 4, 0)
    assert_close(scored(again.eval(), x, padding), scored(model.eval(), x, padding), rtol=0, atol=0)
    torch.manual_seed(5)
    dropped = again.train()(x, padding)
    torch.manual_seed(5)
    assert torch.equal(dropped, model.train()(x, padding))


@CONFIG
def test_config_holds_every_argument_as_given(name: str) -> None:
    model = SequenceClassifier(**CONFIGS[name], device="cpu", dtype=F64)
    signature = inspect.signature(SequenceClassifier).parameters
    assert model.config.keys() == signature.keys() - {"device", "dtype"}
    for argument, value in model.config.items():
        if argument.endswith("_names"):
            continue
        default = signature[argument].default
        assert value == CONFIGS[name].get(argument, default)
        assert type(value) is type(CONFIGS[name].get(argument, default))
    assert model.config["class_names"] == [*model.class_names]
    assert model.config["channel_names"] == [*model.channel_names]


def test_the_series_config_differs_from_every_default() -> None:
    """Else the test above would not see an argument that is left out."""
    parameters = inspect.signature(SequenceClassifier).parameters.items()
    left_out = {"vocab_size", "device", "dtype"}
    same = {n for n, p in parameters if CONFIGS["series"].get(n, p.default) == p.default}
    assert same == left_out


def test_every_option_reaches_its_place() -> None:
    model = SequenceClassifier(**CONFIGS["series"])
    assert len(model.encoder.layers) == 3
    assert model.encoder.norm is None
    for block in model.encoder.layers:
        assert block.self_attn.num_heads == 2
        assert block.linear1.out_features == block.linear3.out_features == 7
        assert block.activation is F.silu
        assert isinstance(block.norm1, nn.RMSNorm)
        assert not block.norm_first
    for block in model.encoder.layers:
        dropouts = {name: module.p for name, module in block.named_modules() if isinstance(module, nn.Dropout)}
        assert dropouts == {"self_attn.attn_dropout": 0.125, "dropout": 0.375, "dropout1": 0.375, "dropout2": 0.375}
    conv = model.embedding.conv
    assert (conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride) == (2, 10, (5,), (3,))
    assert isinstance(SequenceClassifier(2, num_channels=1, norm="rmsnorm").encoder.norm, nn.RMSNorm)
    assert isinstance(SequenceClassifier(2, num_channels=1).encoder.norm, nn.LayerNorm)


def test_names() -> None:
    named = SequenceClassifier(**CONFIGS["series"])
    assert named.class_names == ("walk", "run", "fall")
    assert named.channel_names == ("x", "y")
    numbered = SequenceClassifier(3, num_channels=2)
    assert numbered.class_names == ("0", "1", "2")
    assert numbered.channel_names == ("1", "2")
    assert SequenceClassifier(2, vocab_size=3).channel_names == ()
    given = ["a", "b"]
    model = SequenceClassifier(2, vocab_size=3, class_names=given)
    given[0] = "changed later"
    assert model.class_names == ("a", "b")
    assert model.config["class_names"] == ["a", "b"]


# --- Errors -----------------------------------------------------------------------------------------------------------

ONE_OF_TWO = (
    "SequenceClassifier: num_channels must be given for time series, or else vocab_size for token ids; "
    "exactly one of the two; got "
)
AT_LEAST_1 = "must be an int of at least 1; got "


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *[
            ({name: wrong}, f"SequenceClassifier: {name} {AT_LEAST_1}{wrong!r}")
            for name in ("num_classes", "num_channels", "num_layers", "kernel_size", "stride")
            for wrong in (0, -3, 2.0, True, "2")
        ],
        ({"vocab_size": 0, "num_channels": None}, f"SequenceClassifier: vocab_size {AT_LEAST_1}0"),
        (
            {"num_channels": None},
            ONE_OF_TWO + "None and None",
        ),
        (
            {"vocab_size": 7},
            ONE_OF_TWO + "2 and 7",
        ),
        (
            {"stride": 4, "kernel_size": 3},
            "SequenceClassifier: kernel_size must be at least stride 4, or steps would be left out; got 3",
        ),
        (
            {"vocab_size": 7, "num_channels": None, "kernel_size": 3},
            "SequenceClassifier: kernel_size must be 1 for token ids; got 3",
        ),
        ({"vocab_size": 7, "num_channels": None, "stride": 2}, "SequenceClassifier: "),
        ({"pooling": "sum"}, "SequenceClassifier: pooling must be one of ['mean', 'max']; got 'sum'"),
        (
            {"activation": torch.relu},
            "SequenceClassifier: activation must be one of ['gelu', 'relu', 'swiglu']; got <built-in",
        ),
        ({"norm": nn.LayerNorm}, "SequenceClassifier: norm must be one of ['layernorm', 'rmsnorm']; got <class"),
        ({"norm": "batchnorm"}, "SequenceClassifier: norm must be one of ['layernorm', 'rmsnorm']; got 'batchnorm'"),
        ({"class_names": ["a", "b"]}, "SequenceClassifier: class_names must be 5 different names; got ['a', 'b']"),
        ({"class_names": [*"abcda"]}, "SequenceClassifier: class_names must be 5 different names; got"),
        ({"class_names": "abcde"}, "SequenceClassifier: class_names must be 5 different names; got 'abcde'"),
        ({"channel_names": ["a"]}, "SequenceClassifier: channel_names must be 2 different names; got ['a']"),
        ({"channel_names": ["a", "a"]}, "SequenceClassifier: channel_names must be 2 different names; got ['a', 'a']"),
        (
            {"vocab_size": 7, "num_channels": None, "channel_names": ["a"]},
            "SequenceClassifier: channel_names must be 0 different names; got ['a']",
        ),
        ({"num_heads": 4}, "MultiheadAttention: embed_dim must be a multiple of num_heads 4"),
        ({"num_heads": 0}, "SequenceClassifier: num_heads must be an int of at least 1; got 0"),
        ({"attention_dropout": 1.5}, "MultiheadAttention: dropout must be in [0, 1]; got 1.5"),
        ({"attention_dropout": NAN}, "MultiheadAttention: dropout must be in [0, 1]; got nan"),
        ({"feedforward_dim": 0}, "EncoderBlock: feedforward_dim must be an int of at least 1; got 0"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:50],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str) -> None:
    given = {"num_classes": Y, "num_channels": X, "embed_dim": D, "num_heads": H, **arguments}
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        SequenceClassifier(**given)


@pytest.mark.parametrize("wrong", [-0.1, 1.5, NAN])
def test_wrong_dropout(wrong: float) -> None:
    """Not only in the attention: torch's own Dropout takes NaN."""
    with pytest.raises(ValueError, match=rf"dropout.*got {wrong}"):
        SequenceClassifier(Y, num_channels=X, dropout=wrong)


@pytest.mark.parametrize("wrong", [0, -4, 64.0, "64", True, None], ids=repr)
@pytest.mark.parametrize("kind", ["num_channels", "vocab_size"])
def test_wrong_width(kind: str, wrong: Any) -> None:
    """A ValueError that names embed_dim, and no warning, before anything of that width is built."""
    with pytest.raises(ValueError, match=rf"embed_dim must be an int of at least 1; got {re.escape(repr(wrong))}"):
        SequenceClassifier(Y, **{kind: 3}, embed_dim=wrong, num_heads=1)


SERIES_RULE = "SequenceClassifier: x must be a padded batch of series (B, L, 2) with L at least 1; got "
TOKENS_RULE = "SequenceClassifier: x must be a padded batch of token ids (B, L) with L at least 1; got "


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (lambda: randn(3, 7), SERIES_RULE + "(3, 7)"),
        (lambda: randn(7, 3, X + 1), SERIES_RULE + "(7, 3, 3)"),
        (lambda: randn(2, 3, 7), SERIES_RULE + "(2, 3, 7)"),
        (lambda: randn(1, 3, 7, X), SERIES_RULE + "(1, 3, 7, 2)"),
        (lambda: randn(3, 0, X), SERIES_RULE + "(3, 0, 2)"),
        (
            lambda: randn(3, 7, X).float(),
            "SequenceClassifier: x must be torch.float64, as the parameters; x.to(torch.float64); got torch.float32",
        ),
        (
            lambda: torch.ones(3, 7, X, dtype=torch.int64),
            "SequenceClassifier: x must be torch.float64, as the parameters; x.to(torch.float64); got torch.int64",
        ),
    ],
)
def test_wrong_series(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        series()(x())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (lambda: ids(7), TOKENS_RULE + "(7,)"),
        (lambda: ids(3, 7, 1), TOKENS_RULE + "(3, 7, 1)"),
        (lambda: ids(3, 0), TOKENS_RULE + "(3, 0)"),
        (lambda: ids(3, 7).double(), "SequenceClassifier: x must be int64 or int32 token ids; got torch.float64"),
        (lambda: ids(3, 7).bool(), "SequenceClassifier: x must be int64 or int32 token ids; got torch.bool"),
        (lambda: ids(3, 7).to(torch.uint8), "SequenceClassifier: x must be int64 or int32 token ids; got torch.uint8"),
    ],
)
def test_wrong_tokens(x: Any, message: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        tokens()(x())


@pytest.mark.parametrize(
    ("padding", "got"),
    [
        (lambda p: p.double(), "torch.float64 (3, 7)"),
        (lambda p: p.int(), "torch.int32 (3, 7)"),
        (lambda p: p.T, "torch.bool (7, 3)"),
        (lambda p: p[0], "torch.bool (7,)"),
        (lambda p: p[:1], "torch.bool (1, 7)"),
        (lambda p: p[:, :6], "torch.bool (3, 6)"),
        (lambda p: p[..., None], "torch.bool (3, 7, 1)"),
        (lambda p: p.tolist(), ""),
    ],
)
@pytest.mark.parametrize("kind", ["series", "strided", "tokens"])
def test_wrong_padding_mask(kind: str, padding: Any, got: str) -> None:
    model, x = (tokens(), ids(3, 7)) if kind == "tokens" else (series(**_stride_of(kind)), randn(3, 7, X))
    message = "SequenceClassifier: padding_mask must be bool (3, 7), True = padding; got " + got
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        model(x, padding(padding_of(7, 4, 1)))


# --- Everything else that is done with a module -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["series", "strided", "tokens"])
def test_copies(kind: str) -> None:
    model, x = (tokens(), ids(3, 7)) if kind == "tokens" else (series(**_stride_of(kind)), randn(3, 7, X))
    wanted = model(x, padding_of(7, 4, 0))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x, padding_of(7, 4, 0)), wanted)
        assert other.config == model.config
        assert other.class_names == model.class_names
        with torch.no_grad():
            other.head.weight.zero_()
    assert torch.equal(model(x, padding_of(7, 4, 0)), wanted)


@pytest.mark.parametrize("kind", ["series", "strided", "tokens"])
def test_on_meta(kind: str) -> None:
    """Built there, nothing is allocated; shapes come out, and real weights can be loaded."""
    options = {"device": "meta", "embed_dim": D, "num_heads": H, "feedforward_dim": 11, "dtype": F64}
    real, x = (tokens(), ids(3, 7)) if kind == "tokens" else (series(**_stride_of(kind)), randn(3, 7, X))
    sizes = {"vocab_size": V} if kind == "tokens" else {"num_channels": X, **_stride_of(kind)}
    model = SequenceClassifier(Y, **sizes, **options).eval()
    assert {t.device.type for t in model.state_dict().values()} == {"meta"}
    assert {t.dtype for t in model.state_dict().values()} == {F64}
    padding = padding_of(7, 4, 0)
    logits, weights = scored(model, x.to("meta"), padding.to("meta"))
    wanted, whole = scored(real, x, padding)
    assert logits.shape == wanted.shape
    assert logits.device.type == "meta"
    assert [one.shape for one in weights] == [one.shape for one in whole]
    model.load_state_dict(real.state_dict(), assign=True)
    assert_close(model(x, padding), wanted, rtol=1e-12, atol=1e-12)  # memory laid out another way: a bit may differ


@POOLING
@pytest.mark.parametrize("embed_dim", [1, 2, 7])
def test_odd_widths(embed_dim: int, pooling: str) -> None:
    for model, x in (
        (series(embed_dim=embed_dim, num_heads=1, pooling=pooling), randn(3, 7, X)),
        (tokens(embed_dim=embed_dim, num_heads=1, pooling=pooling), ids(3, 7)),
    ):
        out = model(x, padding_of(7, 4, 1))
        assert out.shape == (3, Y)
        assert out.isfinite().all()
        assert_close(out[1:2], model(x[1:2, :4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_dtypes(dtype: torch.dtype) -> None:
    for model, x in ((series(stride=2, kernel_size=3), randn(3, 7, X)), (tokens(), ids(3, 7))):
        wanted = model(x, padding_of(7, 4, 0))
        model = copy.deepcopy(model).to(dtype)
        out = model(x.to(dtype) if x.is_floating_point() else x, padding_of(7, 4, 0))
        assert out.dtype == dtype
        tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
        assert_close(out.double(), wanted, rtol=0, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_autocast(training: bool) -> None:
    """Logits near those of float32; a bfloat16 series is taken too, any other dtype is still refused."""
    for build, x in ((series, randn(3, 7, X).float()), (tokens, ids(3, 7))):
        model = build(dtype=torch.float32, dropout=0.0).train(training)
        wanted = model(x, padding_of(7, 4, 0))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x, padding_of(7, 4, 0))
            if build is series:
                assert_close(model(x.bfloat16(), padding_of(7, 4, 0)).float(), out.float(), rtol=0.1, atol=0.3)
                for wrong in (x.double(), x.long()):
                    with pytest.raises(ValueError, match="SequenceClassifier: x must be"):
                        model(wrong, padding_of(7, 4, 0))
        assert_close(out.float(), wanted, rtol=0, atol=0.1 * wanted.abs().max().item())
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_compile_of_many_lengths() -> None:
    """One graph for all sizes, no break, and the eager numbers."""
    model = series(num_layers=1, pooling="max", **_stride_of("strided"))
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for batch, length in ((3, 7), (7, 11), (4, 8)):
        x, padding = randn(batch, length, X), padding_of(*range(batch), longest=length)
        assert_close(compiled(x, padding), model(x, padding))
    assert len(graphs) == 1


@pytest.mark.parametrize("kind", ["strided", pytest.param("tokens", marks=pytest.mark.slow)])
def test_export(kind: str) -> None:
    """With a padding mask and both sizes dynamic."""
    model = tokens(num_layers=1) if kind == "tokens" else series(num_layers=1, **_stride_of(kind))

    def given(*lengths: int, longest: int) -> tuple[Tensor, Tensor]:
        shape = (len(lengths), longest)
        return ids(*shape) if kind == "tokens" else randn(*shape, X), padding_of(*lengths, longest=longest)

    # With a stride, torch cannot prove of a named range that it holds for ceil(length / stride) too.
    sizes = {0: Dim.AUTO, 1: Dim.AUTO}
    program = export(model, given(7, 4, 0, longest=7), dynamic_shapes=(sizes, sizes), strict=False)
    for lengths, longest in (((7, 4, 0), 7), ((11, 1), 11), ((3, 0, 5, 2, 1), 5), ((12, 4), 12), ((4, 1), 4)):
        x, padding = given(*lengths, longest=longest)
        assert_close(program.module()(x, padding), model(x, padding))


def test_empty_batch() -> None:
    for pooling in ("mean", "max"):
        model = series(pooling=pooling, stride=2, kernel_size=3)
        logits, weights = scored(model, randn(0, 7, X), torch.zeros(0, 7, dtype=torch.bool))
        assert logits.shape == (0, Y)
        assert [one.shape for one in weights] == [(0, H, 4, 4)] * 2


def test_long_sequences_need_no_table() -> None:
    """Positions are computed, not learned: any length."""
    model = tokens(num_layers=1)
    assert model(ids(1, 2003)).isfinite().all()
    assert not [name for name in model.state_dict() if "position" in name]


def test_the_input_is_left_alone() -> None:
    x, padding = poisoned(randn(3, 7, X), padding_of(7, 4, 0)), padding_of(7, 4, 0)
    before = x.clone()
    series(stride=3, kernel_size=4, pooling="max")(x, padding)
    assert torch.equal(x.nan_to_num(7.0), before.nan_to_num(7.0))
    assert torch.equal(padding, padding_of(7, 4, 0))


# --- Learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "pooling"), [("series", "mean"), ("strided", "max"), ("tokens", "mean")])
def test_learns_a_planted_task(kind: str, pooling: str) -> None:
    """Which of two marks comes first: no count of marks tells, only their order. Chance has a loss of log 2 = 0.69."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V} if kind == "tokens" else {"num_channels": X, **_stride_of(kind)}
    model = SequenceClassifier(
        2, **sizes, embed_dim=16, num_heads=2, num_layers=1, dropout=0.0, pooling=pooling, feedforward_dim=32
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def batch(number: int) -> tuple[Tensor, Tensor, Tensor]:
        lengths = torch.randint(7, 13, (number,))
        labels = torch.randint(2, (number,))
        x = torch.randint(3, V, (number, 13)) if kind == "tokens" else torch.randn(number, 13, X) * 0.3
        marks = torch.tensor([[1, 2], [2, 1]])[labels]
        for index in range(number):
            first = int(torch.randint(0, 3, ()))
            for place, mark in zip((first, first + 3), marks[index].tolist(), strict=True):
                x[index, place] = mark if kind == "tokens" else torch.eye(X)[mark - 1] * 3
        return x, torch.arange(13) >= lengths[:, None], labels

    for _ in range(60):
        x, padding, labels = batch(64)
        optimizer.zero_grad()
        F.cross_entropy(model(x, padding), labels).backward()
        optimizer.step()
    x, padding, labels = batch(500)
    with torch.no_grad():
        logits = model.eval()(x, padding)
    assert F.cross_entropy(logits, labels) < 0.2
    assert (logits.argmax(-1) == labels).double().mean() > 0.93


def test_numpys_numbers_and_names_become_jsons() -> None:
    numpy = pytest.importorskip("numpy")
    model = SequenceClassifier(
        numpy.int64(2),
        num_channels=numpy.int32(1),
        embed_dim=numpy.int64(8),
        num_heads=numpy.int64(2),
        feedforward_dim=numpy.int64(5),
        dropout=numpy.float32(0.25),
        class_names=numpy.array(["a", "b"]),
    )
    assert json.loads(json.dumps(model.config)) == model.config
    assert model.config["num_heads"] == 2
    assert model.class_names == ("a", "b")


@pytest.mark.parametrize(
    "changed",
    [
        {"class_names": [1, 2, 3, 4, 5]},
        {"class_names": ["a", "b", "c", "d", None]},
        {"class_names": ["a", "b", "c", "d", "\ud800"]},
        {"norm_first": "no"},
        {"norm_first": 1},
        {"interval": 0.0},
        {"interval": math.inf},
        {"interval": "fast"},
        {"dropout": "much"},
        {"unit": 3},
    ],
    ids=str,
)
def test_what_no_file_could_hold_is_refused(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(ValueError, match=f"^SequenceClassifier: {name} must "):
        SequenceClassifier(5, num_channels=2, **changed)


def test_names_cannot_be_changed_behind_the_config() -> None:
    model = SequenceClassifier(2, num_channels=1)
    with pytest.raises(AttributeError):
        model.class_names = ("a", "b")
