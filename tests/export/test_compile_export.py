"""torch.compile, torch.export, autocast and torch.func on the module: one graph, any size, the eager numbers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compiling import Counter
from torch import Tensor, nn
from torch.export import Dim, export
from torch.testing import assert_close

from headwise import MultiheadAttention, attention, masks

D, H = 12, 3
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def close(got: Any, want: Any) -> None:
    assert_close(got, want, rtol=1e-5, atol=1e-6)


def padded(batch: int, length: int) -> Tensor:
    """(B, S) bool, True = padding; sample 1 is all padding."""
    return torch.arange(length) >= (torch.arange(batch)[:, None] * 3 + length) % (length + 1)


# --- torch.compile ----------------------------------------------------------------------------------------------------

CALLS: dict[str, Callable[[MultiheadAttention, Tensor, Tensor], tuple[Tensor, Tensor | None]]] = {
    "weights": lambda m, x, pad: m(x, x, x, key_padding_mask=pad, query_padding_mask=pad),
    "causal": lambda m, x, pad: m(x, x, x, is_causal=True, need_weights=False),
    "masks": lambda m, x, pad: m(
        x, x, x, attn_mask=torch.zeros(x.shape[1], x.shape[1], device=x.device), key_padding_mask=pad, is_causal=True,
        average_attn_weights=False,
    ),
    "nothing": lambda m, x, pad: m(x, x, x, need_weights=False),
    "mask": lambda m, x, pad: m(x, x, x, mask=masks.causal() & masks.padding(pad.logical_not()), need_weights=False),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "fused"),
    [
        ("weights", True, False),
        pytest.param("causal", True, True, marks=pytest.mark.slow),
        pytest.param("masks", False, True, marks=pytest.mark.slow),
        ("mask", False, False),
        ("nothing", True, False),
    ],
)
def test_compile_of_many_lengths(name: str, train: bool, fused: bool) -> None:
    """One graph for the first size, one for all others; no break."""
    module = MultiheadAttention(D, H, batch_first=True, fused_qkv=fused).train(train)
    counter = Counter()
    call = CALLS[name]
    compiled = torch.compile(lambda x, pad: call(module, x, pad), backend=counter, fullgraph=True)
    with torch.set_grad_enabled(train):
        for batch, length in ((2, 5), (3, 7), (5, 11), (7, 13), (3, 29)):
            x = torch.randn(batch, length, D)
            pad = padded(batch, length)
            got, want = compiled(x, pad), call(module, x, pad)
            close(got[0], want[0])
            assert (got[1] is None) == (want[1] is None)
            if want[1] is not None:
                close(got[1], want[1])
    assert len(counter.graphs) <= 2


def test_compile_of_cross_attention_with_both_lengths_dynamic() -> None:
    module = MultiheadAttention(D, H, batch_first=True, kdim=17, vdim=19).eval()
    counter = Counter()
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for batch, queries, keys in ((2, 5, 7), (3, 7, 11), (5, 13, 3)):
            given = (torch.randn(batch, queries, D), torch.randn(batch, keys, 17), torch.randn(batch, keys, 19))
            close(
                compiled(*given, key_padding_mask=padded(batch, keys)),
                module(*given, key_padding_mask=padded(batch, keys)),
            )
    assert len(counter.graphs) == 1


@pytest.mark.parametrize("need_weights", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compile_lowers_forward_and_backward(need_weights: bool) -> None:
    """Through AOT autograd, gradients and all, in train; with dropout it is drawn inside the graph."""
    module = MultiheadAttention(D, H, batch_first=True)
    x, pad = torch.randn(3, 5, D, requires_grad=True), padded(3, 5)

    def call(x: Tensor) -> Tensor:
        out, weights = module(x, x, x, key_padding_mask=pad, is_causal=True, need_weights=need_weights)
        return out if weights is None else torch.cat([out, weights], dim=-1)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    cotangent = torch.randn_like(call(x))
    parameters = [x, *module.parameters()]
    got = torch.autograd.grad(compiled(x), parameters, cotangent)
    want = torch.autograd.grad(call(x), parameters, cotangent)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compile_with_dropout(train: bool) -> None:
    module = MultiheadAttention(D, H, batch_first=True, dropout=0.5).train(train)
    x = torch.randn(3, 5, D)
    compiled = torch.compile(lambda x: module(x, x, x, average_attn_weights=False), backend="aot_eager", fullgraph=True)
    (first, weights), (second, again) = compiled(x), compiled(x)
    assert torch.equal(first, second) == (not train)
    close(weights, again)
    close(weights.sum(dim=-1), torch.ones(3, H, 5))
    if not train:
        close(first, module(x, x, x)[0])


def test_compile_takes_masks_from_outside() -> None:
    """A Mask made outside may be an argument or a closure; `&` and `|` trace too."""
    q = torch.randn(2, 3, 5, 4)
    outside = ~masks.padding([3, 5]) | masks.causal()

    def inside(q: Tensor, mask: masks.Mask, lengths: Tensor) -> Tensor:
        return attention(
            q, q, q, mask=(mask & masks.padding(lengths)) | masks.prefix(1) | (outside & masks.window(1, 1))
        )

    compiled = torch.compile(inside, backend="eager", fullgraph=True)
    for lengths in (torch.tensor([5, 2]), torch.tensor([0, 1])):
        close(compiled(q, outside, lengths), inside(q, outside, lengths))


@pytest.mark.xfail(
    raises=torch._dynamo.exc.Unsupported, reason="Dynamo of torch 2.13 has no `~` for objects", strict=True
)
def test_compile_of_not_inside_the_graph() -> None:
    q = torch.randn(2, 3, 5, 4)
    torch.compile(lambda q: attention(q, q, q, mask=~masks.causal()), backend="eager", fullgraph=True)(q)


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("train", [True, False])
def test_compile_with_inductor(train: bool) -> None:
    module = MultiheadAttention(D, H, batch_first=True).train(train)
    x, pad = torch.randn(3, 5, D, requires_grad=train), padded(3, 5)
    compiled = torch.compile(module, fullgraph=True)
    with torch.set_grad_enabled(train):
        got, want = (call(x, x, x, key_padding_mask=pad, is_causal=True) for call in (compiled, module))
        assert_close(got, want, rtol=1e-4, atol=1e-5)
        if train:
            for one, other in zip(
                torch.autograd.grad(got[0].sum(), [x, *module.parameters()]),
                torch.autograd.grad(want[0].sum(), [x, *module.parameters()]),
                strict=True,
            ):
                assert_close(one, other, rtol=1e-4, atol=1e-5)


# --- torch.export -----------------------------------------------------------------------------------------------------


class Padded(nn.Module):
    """What an exported model holds: inputs and a padding mask, both of dynamic sizes."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = MultiheadAttention(D, H, batch_first=True, **options)

    def forward(self, x: Tensor, pad: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.attention(x, x, x, key_padding_mask=pad, query_padding_mask=pad, is_causal=True)


class Cross(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = MultiheadAttention(D, H, batch_first=True, **options)

    def forward(self, query: Tensor, memory: Tensor, attn_mask: Tensor) -> Tensor:
        return self.attention(query, memory, memory, attn_mask=attn_mask, need_weights=False)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strict", "train", "options"),
    [
        (True, True, {}),
        (False, False, {"add_bias_kv": True, "add_zero_attn": True}),
        pytest.param(False, True, {"fused_qkv": True}, marks=pytest.mark.slow),
        pytest.param(True, False, {"average_attn_weights": False, "fused_qkv": True}, marks=pytest.mark.slow),
    ],
)
def test_export_with_dynamic_batch_and_length(strict: bool, train: bool, options: dict[str, Any]) -> None:
    model = Padded(**options).train(train)
    sizes = {0: Dim("batch", max=64), 1: Dim("length", max=512)}
    program = export(model, (torch.randn(3, 7, D), padded(3, 7)), dynamic_shapes=(sizes, sizes), strict=strict)
    exported = program.module()
    for batch, length in ((3, 7), (5, 11), (2, 2), (13, 67)):
        x, pad = torch.randn(batch, length, D), padded(batch, length)
        close(exported(x, pad), model(x, pad))
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert all(name.startswith(("aten.", "<built-in")) or "sym" in name for name in operators), operators


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export_of_cross_attention(strict: bool) -> None:
    model = Cross().eval()
    batch, queries, keys = Dim("batch", max=64), Dim("queries", max=512), Dim("keys", max=512)
    given = (torch.randn(3, 5, D), torch.randn(3, 7, D), torch.randn(5, 7))
    shapes = ({0: batch, 1: queries}, {0: batch, 1: keys}, {0: queries, 1: keys})
    with torch.no_grad():
        exported = export(model, given, dynamic_shapes=shapes, strict=strict).module()
        for B, L, S in ((3, 5, 7), (2, 11, 5), (7, 3, 13)):
            given = (torch.randn(B, L, D), torch.randn(B, S, D), torch.randn(L, S))
            close(exported(*given), model(*given))


# --- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"fused_qkv": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("need_weights", [True, False])
def test_autocast_has_one_dtype_in_train_and_eval(options: dict[str, Any], need_weights: bool) -> None:
    module = MultiheadAttention(D, H, batch_first=True, **options)
    x = torch.randn(3, 5, D)
    penalty = torch.zeros(3, 5).index_fill(1, torch.tensor([4]), -3.0)
    want, want_weights = module(x, x, x, key_padding_mask=penalty)
    outs = []
    for train in (True, False):
        module.train(train)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(train):
            out, weights = module(x, x, x, key_padding_mask=penalty, need_weights=need_weights)
        assert out.dtype == torch.bfloat16
        assert_close(out.float(), want, rtol=5e-2, atol=2e-2)
        if weights is not None:
            assert weights.dtype == torch.float32  # the input's
            assert_close(weights, want_weights, rtol=5e-2, atol=1e-2)
        outs.append(out)
    assert_close(outs[0], outs[1], rtol=2e-2, atol=1e-2)
    module.train()
    with torch.autocast("cpu", torch.bfloat16):
        module(x, x, x, key_padding_mask=penalty, need_weights=need_weights)[0].float().sum().backward()
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in module.parameters()
    )


# --- torch.func -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_vmap_over_inputs_and_masks(fused: bool, train: bool) -> None:
    module = MultiheadAttention(D, H, batch_first=True, fused_qkv=fused).train(train)
    x, pad = (
        torch.randn(4, 3, 5, D),
        torch.stack([padded(3, 5), ~padded(3, 5), padded(3, 5) & False, padded(3, 5) | True]),
    )

    def call(x: Tensor, pad: Tensor) -> tuple[Tensor, Tensor | None]:
        return module(x, x, x, key_padding_mask=pad, query_padding_mask=pad, is_causal=True)

    with torch.set_grad_enabled(train):
        out, weights = torch.func.vmap(call)(x, pad)
        for lane in range(4):
            close((out[lane], weights[lane]), call(x[lane], pad[lane]))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_functional_call_with_stacked_parameters(fused: bool, train: bool) -> None:
    """An ensemble: vmap over parameters, and the gradient of each member."""
    members = [MultiheadAttention(D, H, batch_first=True, fused_qkv=fused).train(train) for _ in range(3)]
    stacked, buffers = torch.func.stack_module_state(members)
    assert buffers == {}
    x, pad = torch.randn(2, 5, D), padded(2, 5)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        given, masked = (x, x, x), {"key_padding_mask": pad}
        return torch.func.functional_call(members[0], parameters, given, masked)[0].pow(2).sum()

    with torch.set_grad_enabled(train):
        losses = torch.func.vmap(loss)(stacked)
        grads = torch.func.vmap(torch.func.grad(loss))(stacked)
    for index, member in enumerate(members):
        want = member(x, x, x, key_padding_mask=pad)[0].pow(2).sum()
        close(losses[index], want)
        wanted = torch.autograd.grad(want, list(member.parameters()))
        for (name, _), one in zip(member.named_parameters(), wanted, strict=True):
            assert_close(grads[name][index], one, rtol=1e-4, atol=1e-5)


@forward_mode
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("need_weights", "masked"), [(True, True), (False, True), (False, False)])
def test_jvp_and_grad_agree(need_weights: bool, masked: bool, train: bool) -> None:
    """Forward mode against reverse mode, in float64, with dead rows."""
    module = MultiheadAttention(D, H, batch_first=True, dtype=torch.float64).train(train)
    x, pad = torch.randn(2, 5, D, dtype=torch.float64), padded(2, 5)
    tangent, cotangent = torch.randn_like(x), torch.randn_like(x)

    def call(x: Tensor) -> Tensor:
        given = {"key_padding_mask": pad, "is_causal": True} if masked else {}
        return module(x, x, x, need_weights=need_weights, **given)[0]

    with torch.set_grad_enabled(train):
        out, forward = torch.func.jvp(call, (x,), (tangent,))
        gradient = torch.func.grad(lambda x: (call(x) * cotangent).sum())(x)
    assert_close(out, call(x), rtol=1e-12, atol=1e-12)
    assert_close((forward * cotangent).sum(), (gradient * tangent).sum(), rtol=1e-10, atol=1e-10)
    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(call(leaf), leaf, cotangent)
    assert_close(gradient, wanted, rtol=1e-10, atol=1e-10)
    step = 1e-6
    numeric = (call(x + step * tangent) - call(x - step * tangent)) / (2 * step)
    assert_close(forward, numeric.detach(), rtol=1e-5, atol=1e-7)


def test_per_sample_gradients() -> None:
    """vmap over grad of functional_call: the sum over samples is the batch's gradient."""
    module = MultiheadAttention(D, H, batch_first=True)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    x, pad = torch.randn(3, 5, D), padded(3, 5)

    def loss(parameters: dict[str, Tensor], x: Tensor, pad: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x, x, x), {"key_padding_mask": pad})[0].pow(2).sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, pad)  # unbatched inside
    module(x, x, x, key_padding_mask=pad)[0].pow(2).sum().backward()
    for name, parameter in module.named_parameters():
        assert each[name].shape == (3, *parameter.shape)
        assert_close(each[name].sum(dim=0), parameter.grad, rtol=1e-4, atol=1e-5)
