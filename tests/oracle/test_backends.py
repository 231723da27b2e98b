"""Each backend against the float64 reference: values and gradients, error at most twice the plain one's and a floor."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.oracle.cases import INF, lower_left, minus_inf
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwise import MultiheadAttention, attention, attention_weights, explain, masks
from headwise.core import reference, twice

B, H, L, S, K = 2, 6, 5, 7, 3
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# torch's own warning when forward-mode rules are first loaded
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

DRAWN = torch.Generator().manual_seed(5)
KEEP_4D = torch.rand(B, H, L, S, generator=DRAWN) < 0.6
KEEP_4D[0, :, 1] = False  # dead rows
LENGTHS = torch.tensor([S, 2])
KEEP_KEY = (torch.arange(S) < LENGTHS[:, None])[:, None, None]
IDS, KEY_IDS = torch.tensor([0, 0, 1, 1, 3]), torch.tensor([[0, 0, 0, 1, 1, 2, 2], [3, 3, 1, 1, 1, 1, 0]])
SCORES = torch.randn(B, 1, L, S, generator=DRAWN)
LOWER = lower_left(L, S)

# name -> the mask, and what the reference is told
MASKS: dict[str, tuple[masks.Mask | None, dict[str, Tensor]]] = {
    "none": (None, {}),
    "causal": (masks.causal(), {"keep": LOWER}),
    "causal(2)": (masks.causal(2), {"keep": lower_left(L + 2, S)[2:]}),
    "causal per sample": (
        masks.causal(torch.tensor([0, 2])),
        {"keep": torch.stack([LOWER, lower_left(L + 2, S)[2:]])[:, None]},
    ),
    "window": (masks.window(1, 1), {"keep": lower_left(L + 1, S)[1:] & lower_left(S + 1, L)[1:].T}),
    "padding": (masks.padding(LENGTHS), {"keep": KEEP_KEY}),
    "causal & padding": (masks.causal() & masks.padding(LENGTHS), {"keep": KEEP_KEY & LOWER}),
    "dense": (masks.dense(KEEP_4D), {"keep": KEEP_4D}),
    "dense & causal": (masks.dense(KEEP_4D) & masks.causal(), {"keep": KEEP_4D & LOWER}),
    "dense per head": (masks.dense(KEEP_4D[:1, :, :1]), {"keep": KEEP_4D[:1, :, :1]}),
    "dense per query": (masks.dense(KEEP_4D[:, :1, :, :1]), {"keep": KEEP_4D[:, :1, :, :1]}),
    "documents": (masks.documents(IDS, KEY_IDS), {"keep": (IDS[:, None] == KEY_IDS[:, None])[:, None]}),
    "prefix language model": (masks.causal() | masks.prefix(3), {"keep": LOWER | (torch.arange(S) < 3)}),
    "not": (~masks.causal(), {"keep": ~LOWER}),
    "bias": (masks.bias(SCORES), {"bias": SCORES}),
    "bias & causal": (masks.bias(SCORES) & masks.causal(), {"bias": SCORES, "keep": LOWER}),
    "bias & padding": (masks.bias(SCORES) & masks.padding(LENGTHS), {"bias": SCORES, "keep": KEEP_KEY}),
    "bias of -inf": (
        masks.bias(SCORES + minus_inf(~KEEP_4D[:, :1])),
        {"bias": SCORES + minus_inf(~KEEP_4D[:, :1])},
    ),
    "hides all": (masks.padding([0, 0]), {"keep": torch.zeros(1, 1, 1, S, dtype=torch.bool)}),
}  # fmt: skip

EVERY = ("sdpa", "plain", "tiled")
# name -> (H, G, L, S, K, V)
SHAPES = {
    "equal heads": (H, H, L, S, K, K),
    "three a group": (H, 2, L, S, K, K),
    "one key head": (H, 1, L, S, K, K),
    "wide values": (H, H, L, S, K, 11),
    "narrow grouped values": (H, 3, L, S, K, 1),
}


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float64, batch: int = B) -> list[Tensor]:
    heads, groups, queries, keys, width, value_width = shape
    sizes = ((heads, queries, width), (groups, keys, width), (groups, keys, value_width))
    return [torch.randn(batch, *size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def results(
    function: Callable[..., Tensor], inputs: list[Tensor], cotangent: Tensor, extra: list[Tensor] | None = None
) -> list[Tensor]:
    """The output and the gradient of each input, in float64."""
    out = function(*inputs)
    grads = torch.autograd.grad(out, [*inputs, *(extra or [])], cotangent.to(out.dtype))
    return [part.detach().double() for part in (out, *grads)]


def worst(got: list[Tensor], want: list[Tensor]) -> list[float]:
    assert [part.shape for part in got] == [part.shape for part in want]
    assert all(part.isfinite().all() for part in got)
    return [(g - w).abs().max().item() if g.numel() else 0.0 for g, w in zip(got, want, strict=True)]


def hold(
    inputs: list[Tensor],
    mask: masks.Mask | None,
    means: dict[str, Tensor],
    backends: tuple[str, ...] = ("sdpa", "plain"),
    **options: Any,
) -> None:
    """Every backend's output and gradients within twice the plain one's error, and the plain one within the dtype's."""
    dtype = inputs[0].dtype
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    cotangent = torch.randn(*inputs[0].shape[:3], inputs[2].shape[-1]).to(dtype)
    told = {key: value for key, value in options.items() if key in ("scale", "softcap")}
    extra: dict[str, Tensor] = {key: value for key, value in options.items() if isinstance(value, Tensor)}
    extra_doubles = {key: value.detach().double().requires_grad_() for key, value in extra.items()}
    want = results(
        lambda q, k, v: reference.attention(q, k, v, **means, **told, **extra_doubles)[0],
        doubles, cotangent.double(), list(extra_doubles.values()),
    )  # fmt: skip
    errors = {}
    for backend in ("plain", *backends):
        call = lambda q, k, v, b=backend: attention(q, k, v, mask=mask, backend=b, **options)  # noqa: E731
        errors[backend] = worst(results(call, inputs, cotangent, list(extra.values())), want)
    eps = torch.finfo(dtype).eps
    for index, part in enumerate(("output", "query", "key", "value", *extra)):
        size = max(1.0, want[index].abs().max().item() if want[index].numel() else 0.0)
        assert errors["plain"][index] <= 32 * eps * size, (part, errors["plain"][index] / eps / size)
        for backend in backends:
            assert errors[backend][index] <= 2 * errors["plain"][index] + 16 * eps * size, (backend, part, errors)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mask(dtype: torch.dtype, shape: str) -> None:
    for name, (mask, means) in MASKS.items():
        try:
            hold(drawn(SHAPES[shape], dtype), mask, means, EVERY)
        except AssertionError as error:
            raise AssertionError(f"under {name}") from error


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_gradients_the_numbers_are_the_same(dtype: torch.dtype, backend: str) -> None:
    """Inference may take another path; it has to agree with training."""
    for shape, name in itertools.product(SHAPES.values(), MASKS):
        mask, means = MASKS[name]
        inputs = drawn(shape, dtype)
        want, _ = reference.attention(*(tensor.detach() for tensor in inputs), **means)
        with torch.no_grad():
            found = attention(*inputs, mask=mask, backend=backend)
        assert found.dtype == dtype
        eps = torch.finfo(dtype).eps
        assert_close(found.double(), want, rtol=8 * eps, atol=8 * eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_every_mask_on_cuda(backend: str, dtype: torch.dtype) -> None:
    """Kernels there have no rule for a row without a key, and refuse the causal flag beside a mask."""
    for name, (_, means) in MASKS.items():
        keep, bias = means.get("keep"), means.get("bias")
        mask = None if keep is None else masks.dense(keep.expand(B, H, L, S).cuda())
        if bias is not None:
            mask = masks.bias(bias.cuda()) if mask is None else mask & masks.bias(bias.cuda())
        inputs = drawn((H, 2, L, S, 16, 16), dtype)
        doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
        cotangent = torch.randn(B, H, L, 16)
        want = results(lambda q, k, v, m=means: reference.attention(q, k, v, **m)[0], doubles, cotangent)
        got = results(
            lambda q, k, v, m=mask: attention(q.cuda(), k.cuda(), v.cuda(), mask=m, backend=backend).cpu(),
            inputs,
            cotangent,
        )
        eps = torch.finfo(dtype).eps
        for one, other in zip(got, want, strict=True):
            assert_close(one, other, rtol=32 * eps, atol=32 * eps, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("groups", [3, 1])
def test_many_short_heads_in_inference(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizes for which eager inference leaves the fused kernel: the same answers, dead rows and hidden NaN too."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    batch, heads, width = 43, 3, 37
    query = torch.randn(batch, heads, L, width)
    key, value = torch.randn(2, batch, groups, S, width).unbind(0)
    lengths = torch.arange(batch) % (S + 1)
    keep = torch.rand(batch, heads, L, S) < 0.5
    keep_key = (torch.arange(S) < lengths[:, None])[:, None, None]
    score = torch.randn(1, heads, L, S)
    for mask, means in (
        (None, {}),
        (masks.causal(), {"keep": LOWER}),
        (masks.padding(lengths), {"keep": keep_key}),
        (masks.padding(lengths) & masks.causal(), {"keep": keep_key & LOWER}),
        (masks.dense(keep), {"keep": keep}),
        (masks.bias(score) & masks.padding(lengths), {"bias": score, "keep": keep_key}),
    ):
        assert explain(query, key, value, mask=mask).backend == ("plain" if mask is None else "sdpa")
        want, _ = reference.attention(query, key, value, **means)
        poisoned = [tensor.masked_fill(~keep_key.transpose(-1, -2), float("nan")) for tensor in (key, value)]
        given = poisoned if means.get("keep") is keep_key else (key, value)
        assert_close(attention(query, *given, mask=mask).double(), want, rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            trained = attention(query.clone().requires_grad_(), *given, mask=mask)
        assert_close(trained.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.0, 0.3, -1.7])
def test_scale(dtype: torch.dtype, scale: float | None) -> None:
    for shape in ("equal heads", "three a group"):
        for name in ("none", "causal & padding", "bias"):
            mask, means = MASKS[name]
            hold(drawn(SHAPES[shape], dtype), mask, means, EVERY, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 0.5, 30.0])
@pytest.mark.parametrize("with_sink", [False, True])
def test_softcap_and_sink(dtype: torch.dtype, softcap: float | None, with_sink: bool) -> None:
    """torch's kernel takes neither; gradients reach the sink too."""
    for index, (mask, means) in enumerate(MASKS.values()):
        options: dict[str, Any] = {"softcap": softcap, "scale": 1.3}
        if with_sink:
            options["sink"] = torch.linspace(-2, 2, H).to(dtype).requires_grad_()
        shape = ("equal heads", "three a group")[index % 2]
        hold(drawn(SHAPES[shape], dtype), mask, means, ("plain", "tiled"), **options)


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
@pytest.mark.parametrize(
    "shape", [(B, 1, L, S), (1, H, L, S), (1, 1, L, S), (B, H, 1, S), (1, 1, 1, S), (B, 1, L, 1), (L, S), (B, L, S)]
)
def test_gradient_of_a_bias(shape: tuple[int, ...], backend: str) -> None:
    """Summed over what it was broadcast over, also beside other masks and where it hides keys."""
    inputs = drawn(SHAPES["equal heads"], torch.float32)
    scores = torch.randn(shape)
    scores.view(-1)[3] = -INF
    scores.requires_grad_()
    for beside, keep in ((None, None), (masks.causal(), LOWER), (masks.padding(LENGTHS), KEEP_KEY)):
        mask = masks.bias(scores) if beside is None else masks.bias(scores) & beside
        double = scores.detach().double().requires_grad_()
        four = double[None, None] if double.dim() == 2 else double[:, None] if double.dim() == 3 else double
        cotangent = torch.randn(B, H, L, K)
        out = attention(*inputs, mask=mask, backend=backend)
        want, _ = reference.attention(*(tensor.double() for tensor in inputs), bias=four, keep=keep)
        assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
        (got_grad,) = torch.autograd.grad(out, scores, cotangent)
        (want_grad,) = torch.autograd.grad(want, double, cotangent.double())
        assert_close(got_grad.double(), want_grad, rtol=1e-4, atol=1e-5)
        assert got_grad.view(-1)[3] == 0


SIZES = [
    (1, 1, 1, 1, 1, 1),
    (1, 1, 1, 7, 3, 3),
    (1, 1, 5, 1, 3, 3),
    (2, 1, 0, 7, 3, 3),
    (2, 2, 5, 0, 3, 3),
    (2, 2, 0, 0, 3, 3),
    (2, 2, 5, 7, 3, 0),
    (2, 1, 37, 67, 17, 17),
    (1, 1, 131, 257, 5, 5),
]


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_sizes_0_and_1_and_odd_ones(shape: tuple[int, ...], batch: int) -> None:
    heads, _, queries, keys, _, _ = shape
    lengths = torch.arange(batch) * 2 + 1
    keep_key = (torch.arange(keys) < lengths[:, None])[:, None, None]
    lower = lower_left(queries, keys)
    for dtype in (torch.float32, torch.bfloat16):
        for mask, means in (
            (None, {}),
            (masks.causal(), {"keep": lower}),
            (masks.padding(lengths), {"keep": keep_key}),
            (masks.causal() & masks.padding(lengths), {"keep": keep_key & lower}),
            (masks.dense(lower.T.reshape(queries, keys)), {"keep": lower.T.reshape(queries, keys)}),
            (masks.bias(torch.zeros(1, heads, queries, keys) + 0.25), {"bias": torch.tensor(0.25).view(1, 1, 1, 1)}),
        ):
            hold(drawn(shape, dtype, batch), mask, means)


@pytest.mark.parametrize("backend", EVERY)
def test_strides_do_not_matter(backend: str) -> None:
    """Inputs as views: transposed widths, every second head, expanded batch."""
    query = torch.randn(B, K, L, H).transpose(1, 3)
    key = torch.randn(B, 2 * H, S, K)[:, ::2]
    value = torch.randn(1, H, K, S).transpose(2, 3).expand(B, H, S, K)
    for mask, means in MASKS.values():
        want, _ = reference.attention(query, key, value, **means)
        assert_close(attention(query, key, value, mask=mask, backend=backend).double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_weights_is_the_twin(dtype: torch.dtype) -> None:
    for index, (mask, means) in enumerate(MASKS.values()):
        shape = ("equal heads", "three a group")[index % 2]
        query, key, _ = (tensor.detach() for tensor in drawn(SHAPES[shape], dtype))
        for options in ({}, {"softcap": 0.7}, {"sink": torch.linspace(-1, 1, H)}, {"scale": -0.4}):
            _, want = reference.attention(query, key, key, **means, **options)
            each = attention_weights(query, key, mask=mask, **options)
            average = attention_weights(query, key, mask=mask, average_attn_weights=True, **options)
            assert each.dtype == (dtype if dtype in (torch.float32, torch.float64) else torch.float32)
            eps = torch.finfo(dtype).eps
            assert_close(each.double(), want, rtol=8 * eps, atol=8 * eps)
            assert_close(average, each.mean(dim=1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", [False, True])
def test_attention_weights_has_gradients(average: bool) -> None:
    mask, means = MASKS["dense"]
    query, key, _ = drawn(SHAPES["three a group"], torch.float32)
    double_query, double_key = (tensor.detach().double().requires_grad_() for tensor in (query, key))
    got = attention_weights(query, key, mask=mask, average_attn_weights=average)
    _, want = reference.attention(double_query, double_key, double_key, **means)
    want = want.mean(dim=1) if average else want
    cotangent = torch.randn_like(got)
    grads = torch.autograd.grad(got, [query, key], cotangent)
    wanted = torch.autograd.grad(want, [double_query, double_key], cotangent.double())
    for one, other in zip(grads, wanted, strict=True):
        assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


# --- derivatives of every kind ----------------------------------------------------------------------------------------

SMALL = (2, 1, 3, 5, 2, 2)  # H, G, L, S, K, V


def small_masks() -> Iterator[tuple[str, masks.Mask | None]]:
    keep = torch.tensor([[[[True, False, True, True, False]]], [[[False] * 5]]])  # sample 1 is dead
    yield "none", None
    yield "causal", masks.causal()
    yield "padding with a dead sample", masks.dense(keep)
    yield "lengths with a dead sample", masks.padding([4, 0])
    yield "causal and padding", masks.causal() & masks.padding([4, 1])
    yield "bias", masks.bias(torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5))


@pytest.mark.parametrize("shape", [(2, 2, 3, 5, 2, 2), SMALL, (2, 2, 3, 5, 2, 3)], ids=str)
@pytest.mark.parametrize("backend", EVERY)
def test_double_backward_in_eager(backend: str, shape: tuple[int, ...]) -> None:
    for _, mask in small_masks():
        call = lambda q, k, v, m=mask: attention(q, k, v, mask=m, backend=backend)  # noqa: E731
        inputs = drawn(shape)
        assert gradcheck(call, inputs, fast_mode=True)
        assert gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("backend", ["sdpa", "plain"])
def test_double_backward_of_a_bias(backend: str) -> None:
    inputs = [*drawn((2, 2, 3, 5, 2, 2)), torch.randn(1, 2, 3, 5, dtype=torch.float64, requires_grad=True)]
    for beside in (masks.causal(), masks.padding([4, 0])):
        call = lambda q, k, v, b, m=beside: attention(q, k, v, mask=masks.bias(b) & m, backend=backend)  # noqa: E731
        assert gradcheck(call, inputs, fast_mode=True)
        assert gradgradcheck(call, inputs, fast_mode=True)


def test_double_backward_of_a_sink_and_of_the_weights() -> None:
    query, key, value = drawn(SMALL)
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    mask = masks.causal() & masks.padding([4, 0])
    assert gradgradcheck(
        lambda q, k, v, s: attention(q, k, v, mask=mask, sink=s, softcap=2.0), (query, key, value, sink), fast_mode=True
    )
    assert gradgradcheck(lambda q, k: attention_weights(q, k, mask=mask), (query, key), fast_mode=True)


RELATED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "one tensor": lambda x: (x, x, x),
    "key and value": lambda x: (x.sin(), x, x),
    "query and key": lambda x: (x, x, x.sin()),
    "query and value": lambda x: (x, x.sin(), x),
    "key made of the query": lambda x: (x, x * 2, x.sin()),
    "a chain": lambda x: (q := x * 1, k := q * 2, k.sin() + q),
    "query made of the value": lambda x: ((x.cos() * 3).sin(), x.cos(), x.cos() * 3),
    "only the query": lambda x: (x, x.detach() * 2, x.detach()),
    "only the key": lambda x: (x.detach(), x, x.detach()),
    "only the value": lambda x: (x.detach(), x.detach(), x),
}


@pytest.mark.parametrize("name", RELATED)
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_where_inputs_depend_on_each_other(name: str, create_graph: bool) -> None:
    """The second derivative's first one: it must stay the gradient, whatever came from what."""
    x = torch.randn(2, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    found = {}
    for backend in ("sdpa", "plain"):
        out = attention(*RELATED[name](x), mask=masks.causal(), backend=backend)
        (first,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=create_graph)
        found[backend] = [first]
        if create_graph:
            found[backend] += torch.autograd.grad(first.pow(2).sum(), x)
    want, _ = reference.attention(*RELATED[name](x), keep=lower_left(5, 5))
    (first,) = torch.autograd.grad(want.pow(2).sum(), x, create_graph=create_graph)
    wanted = [first, *(torch.autograd.grad(first.pow(2).sum(), x) if create_graph else [])]
    for backend, parts in found.items():
        for got, expected in zip(parts, wanted, strict=True):
            assert_close(got, expected, rtol=1e-9, atol=1e-10, msg=lambda m, b=backend: f"{b}: {m}")


def test_second_derivative_inside_a_longer_graph() -> None:
    """A gradient penalty through projections, and a hessian."""
    projections = nn.Linear(3, 9).double()

    def penalised(backend: str, x: Tensor) -> tuple[Tensor, ...]:
        projections.zero_grad()
        out = attention(*projections(x).chunk(3, dim=-1), mask=masks.causal(), backend=backend)
        (first,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        (first.pow(2).sum() + out.sum()).backward()
        return x.grad, *(parameter.grad.clone() for parameter in projections.parameters())

    start = torch.randn(2, 2, 5, 3, dtype=torch.float64)
    got, want = (penalised(backend, start.clone().requires_grad_()) for backend in ("sdpa", "plain"))
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=1e-9, atol=1e-10)
    small = start[:1, :1, :2]
    hessians = [
        torch.autograd.functional.hessian(
            lambda x, b=backend: attention(x, x * 2, x.sin(), backend=b).pow(3).sum(), small
        )
        for backend in ("sdpa", "plain")
    ]
    assert_close(hessians[0], hessians[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("masked", ["no", "padding", "causal", "both"])
def test_second_derivative_of_the_module(masked: str, fused: bool) -> None:
    """A gradient penalty in training: through the fused kernel as through the weights."""
    module = MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, fused_qkv=fused)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor([[False] * 5, [True] * 5]) if masked in ("padding", "both") else None
    found = {}
    for need_weights in (True, False):
        module.zero_grad()
        out, _ = module(
            x, x, x, key_padding_mask=padding, is_causal=masked in ("causal", "both"), need_weights=need_weights
        )
        (first,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        penalty = (first.norm(dim=-1) - 1).pow(2).sum()
        second = torch.autograd.grad(penalty, [x, *module.parameters()], allow_unused=True)
        found[need_weights] = [first, *(part for part in second if part is not None)]
    assert len(found[True]) == len(found[False])
    for got, want in zip(found[False], found[True], strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("groups", [2, 1])
def test_retained_twice_then_create_graph(groups: int) -> None:
    query, key, value = drawn((2, groups, 3, 5, 2, 2))
    out = attention(query, key, value, mask=masks.causal(), backend="sdpa").pow(2).sum()
    inputs = [query, key, value]
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs, retain_graph=True)
    third = torch.autograd.grad(out, inputs, create_graph=True)
    for one, other, last in zip(first, second, third, strict=True):
        assert torch.equal(one, other)
        assert_close(last.detach(), one, rtol=1e-12, atol=1e-12)
    again = torch.autograd.grad(sum(part.pow(2).sum() for part in third), inputs)
    plain = attention(query, key, value, mask=masks.causal(), backend="plain").pow(2).sum()
    third = torch.autograd.grad(plain, inputs, create_graph=True)
    for got, want in zip(again, torch.autograd.grad(sum(part.pow(2).sum() for part in third), inputs), strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-10)
    out = attention(query, key, value, backend="sdpa").pow(2).sum()
    out.backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_create_graph_keeps_only_what_is_asked_for() -> None:
    """With respect to one input, the others are untouched and their gradients are not made up."""
    query, key, value = drawn((2, 2, 3, 5, 2, 2))
    value.requires_grad_(False)
    out = attention(query, key, value, backend="sdpa").pow(2).sum()
    (got,) = torch.autograd.grad(out, key, create_graph=True)
    want = attention(query, key, value, backend="plain").pow(2).sum()
    (wanted,) = torch.autograd.grad(want, key, create_graph=True)
    assert_close(got, wanted, rtol=1e-9, atol=1e-10)
    for one, other in zip(
        torch.autograd.grad(got.sum(), [query, key]), torch.autograd.grad(wanted.sum(), [query, key]), strict=True
    ):
        assert_close(one, other, rtol=1e-9, atol=1e-10)


def test_second_derivative_is_made_once_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the graph is walked with create_graph, and not at all without."""
    asked: list[int] = []
    original = twice._plain_gradients
    monkeypatch.setattr(twice, "_plain_gradients", lambda *given: (asked.append(1), original(*given))[1])
    module = MultiheadAttention(6, 2, batch_first=True)
    x = torch.randn(2, 5, 6, requires_grad=True)
    for given in ({}, {"is_causal": True}):
        asked.clear()
        out = module(x, x, x, need_weights=False, **given)[0].pow(2).sum()
        torch.autograd.grad(out, x, retain_graph=True)
        assert asked == []
        for walks in (1, 2, 3):
            torch.autograd.grad(out, x, create_graph=True)
            assert len(asked) == walks
        torch.autograd.grad(out, x)
        assert len(asked) == 3


def test_second_derivative_under_autocast() -> None:
    """The kernel sees 16-bit casts of the inputs; the derivatives reach the inputs themselves, in their dtype."""
    query, key, value = drawn((2, 2, 3, 5, 2, 2), torch.float32)
    found = {}
    for backend in ("sdpa", "tiled", "plain"):
        with torch.autocast("cpu", torch.bfloat16):
            out = attention(query, key, value, mask=masks.causal() & masks.padding([4, 1]), backend=backend)
        assert out.dtype == torch.bfloat16
        first = torch.autograd.grad(out.float().pow(2).sum(), [query, key, value], create_graph=True)
        second = torch.autograd.grad(sum(part.pow(2).sum() for part in first), [query, key, value])
        found[backend] = [*first, *second]
    for backend in ("sdpa", "tiled"):
        for got, want in zip(found[backend], found["plain"], strict=True):
            assert got.dtype == torch.float32
            assert_close(got, want, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_vmap_over_everything_and_over_parts(randomness: str) -> None:
    lanes = 3
    query, key, value = (torch.randn(lanes, *size) for size in ((B, H, L, K), (B, 2, S, K), (B, 2, S, K)))
    lengths = torch.tensor([[S, 2], [1, 0], [5, 5]])
    offsets = torch.tensor([0, 1, 2])
    scores = torch.randn(lanes, L, S)

    def one(q: Tensor, k: Tensor, v: Tensor, n: Tensor, offset: Tensor, score: Tensor) -> Tensor:
        return attention(q, k, v, mask=masks.causal(offset) & masks.padding(n) & masks.bias(score))

    whole = torch.func.vmap(one, randomness=randomness)(query, key, value, lengths, offsets, scores)
    for lane in range(lanes):
        want = one(query[lane], key[lane], value[lane], lengths[lane], offsets[lane], scores[lane])
        assert_close(whole[lane], want, rtol=1e-5, atol=1e-6)
    for parts in itertools.product((0, None), repeat=3):
        dims = (*parts, None, 0, None)
        got = torch.func.vmap(one, dims)(
            *(tensor if dim == 0 else tensor[1] for tensor, dim in zip((query, key, value), parts, strict=True)),
            lengths[2], offsets, scores[0],
        )  # fmt: skip
        for lane in range(lanes):
            picked = [tensor[lane if dim == 0 else 1] for tensor, dim in zip((query, key, value), parts, strict=True)]
            assert_close(got[lane], one(*picked, lengths[2], offsets[lane], scores[0]), rtol=1e-5, atol=1e-6)


@forward_mode
@pytest.mark.parametrize("name", ["none", "causal & padding", "dense", "bias", "hides all"])
def test_function_transforms(name: str) -> None:
    """jvp, grad, jacrev, hessian and forward-mode AD of `attention` as it is called, against the reference."""
    mask, means = MASKS[name]
    query, key, value = (tensor.detach() for tensor in drawn((H, 2, L, S, K, K)))
    tangents = tuple(torch.randn_like(tensor) for tensor in (query, key, value))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=mask, softcap=None)

    def textbook(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return reference.attention(q, k, v, **means)[0]

    def close(got: Any, want: Any) -> None:
        assert_close(got, want, rtol=1e-9, atol=1e-10)

    got, got_tangent = torch.func.jvp(ours, (query, key, value), tangents)
    want, want_tangent = torch.func.jvp(textbook, (query, key, value), tangents)
    close(got, want)
    close(got_tangent, want_tangent)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(*pair) for pair in zip((query, key, value), tangents, strict=True)]
        close(torch.autograd.forward_ad.unpack_dual(ours(*duals)).tangent, want_tangent)
    close(ours(query, key, value), want)  # nothing is left switched on

    cut = (query[:1, :2, :2], key[:1, :1, :3], value[:1, :1, :3])
    mask = None if mask is None else masks.causal() & masks.padding([2])
    means = {} if mask is None else {"keep": lower_left(2, 3) & (torch.arange(3) < 2)}
    for index in (0, 1, 2):
        close(
            torch.func.grad(lambda *a: ours(*a).pow(3).sum(), index)(*cut),
            torch.func.grad(lambda *a: textbook(*a).pow(3).sum(), index)(*cut),
        )
        close(torch.func.jacrev(ours, index)(*cut), torch.func.jacrev(textbook, index)(*cut))
    close(
        torch.func.hessian(lambda *a: ours(*a).pow(2).sum(), (0, 1))(*cut),
        torch.func.hessian(lambda *a: textbook(*a).pow(2).sum(), (0, 1))(*cut),
    )
    jacobian = torch.autograd.functional.jacobian
    close(jacobian(ours, cut, vectorize=True), jacobian(textbook, cut))


@pytest.mark.parametrize(
    ("name", "backend"),
    list(itertools.product(("none", "causal & padding", "dense", "bias"), ("sdpa", "tiled"))),
)
@pytest.mark.parametrize("groups", [6, 2])
def test_checkpointing(name: str, backend: str, groups: int) -> None:
    """torch.utils.checkpoint: same gradients, and the hook does not hold what checkpointing lets go."""
    mask, _ = MASKS[name]
    inputs = drawn((H, groups, L, S, K, K))
    inner: list[weakref.ref[Tensor]] = []

    def block(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = query * 1, key * 1, value * 1
        inner.extend(weakref.ref(tensor) for tensor in (query, key, value))
        return attention(query, key, value, mask=mask, backend=backend)

    cotangent = torch.randn(B, H, L, K, dtype=torch.float64)
    want = torch.autograd.grad(block(*inputs), inputs, cotangent)
    inner.clear()
    out = checkpoint(block, *inputs, use_reentrant=False)
    assert [ref() for ref in inner] == [None] * 3
    for got, wanted in zip(torch.autograd.grad(out, inputs, cotangent), want, strict=True):
        assert_close(got, wanted, rtol=1e-12, atol=1e-12)


# --- what is kept alive -----------------------------------------------------------------------------------------------


def alive(references: list[weakref.ref[Tensor]]) -> list[bool]:
    return [reference() is not None for reference in references]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Everything must go by counting alone: a cycle would hold a training step's memory until the collector comes."""
    gc.disable()
    yield
    gc.enable()


every_kernel = pytest.mark.parametrize("backend", ["sdpa", "tiled"])


def run_and_forget(backend: str, groups: int = H) -> tuple[list[Tensor], Tensor, list[weakref.ref[Tensor]]]:
    """Leaves, the output, and weak references to the tensors that the kernel was given."""
    leaves = drawn((H, groups, L, S, K, K))
    made = [leaf * 1 for leaf in leaves]
    out = attention(*made, mask=masks.causal() & masks.padding(LENGTHS), backend=backend)
    return leaves, out, [weakref.ref(tensor) for tensor in made]


@pytest.mark.usefixtures("no_collector")
@every_kernel
@pytest.mark.parametrize("groups", [H, 2])
def test_memory_after_a_plain_backward(groups: int, backend: str) -> None:
    """The output outlives it; what only a second derivative would need does not."""
    _, out, references = run_and_forget(backend, groups)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert alive(references) == [False] * 3
    assert out.grad_fn is not None


@pytest.mark.usefixtures("no_collector")
@every_kernel
def test_memory_without_a_backward(backend: str) -> None:
    _, out, references = run_and_forget(backend)
    del out
    assert alive(references) == [False] * 3


@pytest.mark.usefixtures("no_collector")
@every_kernel
def test_memory_after_create_graph(backend: str) -> None:
    leaves, out, references = run_and_forget(backend)
    grads = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
    again = torch.autograd.grad(sum(grad.sum() for grad in grads), leaves)
    del grads, again, out
    assert alive(references) == [False] * 3


def run_module_and_forget(masked: bool, fused: bool = False) -> tuple[Tensor, Tensor, list[weakref.ref[Tensor]]]:
    """The input, the output, and weak references to the tensors between the projections and the kernel."""
    module = MultiheadAttention(6, 2, batch_first=True, fused_qkv=fused)
    made: list[weakref.ref[Tensor]] = []
    project = type(module)._project

    def noting(*arguments: Any) -> Any:
        parts = project(module, *arguments)
        made.extend(weakref.ref(part) for part in parts)
        return parts

    object.__setattr__(module, "_project", noting)
    x = torch.randn(2, 5, 6, requires_grad=True)
    out = module(x, x, x, is_causal=masked, need_weights=False)[0]
    assert len(made) == 3
    return x, out, made


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("masked", [False, True])
def test_memory_of_the_module(masked: bool) -> None:
    """Without a backward, after one, and after second derivatives, nothing waits for the garbage collector."""
    _, out, references = run_module_and_forget(masked)
    del out
    assert alive(references) == [False] * 3
    _, out, references = run_module_and_forget(masked)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert alive(references) == [False] * 3
    assert out.grad_fn is not None
    x, out, references = run_module_and_forget(masked)
    for _ in range(2):
        (grad,) = torch.autograd.grad(out.pow(2).sum(), x, create_graph=True)
        torch.autograd.grad(grad.sum(), x, retain_graph=True)
    del grad, out
    assert alive(references) == [False] * 3
    with torch.no_grad():
        _, _, references = run_module_and_forget(masked)
    assert alive(references) == [False] * 3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_module_retained_twice_then_create_graph(fused: bool, masked: bool) -> None:
    module = MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, fused_qkv=fused)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    inputs = [x, *module.parameters()]
    out, same = (module(x, x, x, is_causal=masked, need_weights=weights)[0].pow(2).sum() for weights in (False, True))
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    second = torch.autograd.grad(out, inputs, retain_graph=True)
    for _ in range(2):
        third = torch.autograd.grad(out, inputs, create_graph=True)
        wanted = torch.autograd.grad(same, inputs, create_graph=True)
        again = torch.autograd.grad(sum(part.pow(2).sum() for part in third), inputs, retain_graph=True)
        wanted_again = torch.autograd.grad(sum(part.pow(2).sum() for part in wanted), inputs, retain_graph=True)
        for got, want in zip(
            (*first, *second, *third, *again), (*wanted, *wanted, *wanted, *wanted_again), strict=True
        ):
            assert_close(got, want, rtol=1e-9, atol=1e-10)
    fourth = torch.autograd.grad(out, inputs, retain_graph=True)
    for got, want in zip(fourth, first, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("masked", [False, True])
def test_checkpointing_the_module(masked: bool) -> None:
    module = MultiheadAttention(6, 2, batch_first=True)
    x = torch.randn(2, 5, 6, requires_grad=True)

    def call(x: Tensor) -> Tensor:
        return module(x, x, x, is_causal=masked, need_weights=False)[0]

    inputs = [x, *module.parameters()]
    cotangent = torch.randn(2, 5, 6)
    want = torch.autograd.grad(call(x), inputs, cotangent)
    for got, wanted in zip(
        torch.autograd.grad(checkpoint(call, x, use_reentrant=False), inputs, cotangent), want, strict=True
    ):
        assert_close(got, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("size", [(2, 5, 6, 2), (8, 5, 128, 4)], ids=["few", "many short heads"])
def test_the_short_way_through_the_module_is_the_long_way(size: tuple[int, ...], fused: bool, train: bool) -> None:
    """With a hook that does nothing every call is made one by one: the same bits, and the same gradients."""
    batch, length, width, heads = size
    module = MultiheadAttention(width, heads, batch_first=True, fused_qkv=fused).train(train)
    x = torch.randn(batch, length, width, requires_grad=True)
    found = []
    for hooked in (False, True):
        watched = [child for child in module.children() if hooked and child is not module.attn_dropout]
        handles = [child.register_forward_hook(lambda *_: None) for child in watched]
        with torch.set_grad_enabled(train):
            out = module(x, x, x, need_weights=False)[0]
        found.append([out, *(torch.autograd.grad(out.pow(2).sum(), [x, *module.parameters()]) if train else ())])
        for handle in handles:
            handle.remove()
    for short, long in zip(*found, strict=True):
        assert torch.equal(short, long)


@pytest.mark.usefixtures("no_collector")
def test_memory_of_the_storage_itself() -> None:
    """Not a Python name only: the bytes of the inputs are given back while the output lives."""
    leaf = torch.randn(1, 1, 4, 4, requires_grad=True)
    made = leaf * 1
    storage = weakref.ref(made.untyped_storage())
    out = attention(made, made, made, backend="sdpa")
    del made
    out.sum().backward()
    assert storage() is None
