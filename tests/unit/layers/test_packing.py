"""Encoder blocks that run on real positions only: the padded form's numbers, and proof that padding was left out."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.unit.packed import count_products, filled, hidden, set_price, without_packing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize, prune
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from headwise import Encoder, EncoderBlock, MultiheadAttention, TransformerEncoder, TransformerEncoderLayer, masks
from headwise.core import functional
from headwise.core import packing as core_packing
from headwise.layers import packing

B, L, D, H, M = 3, 7, 10, 2, 11
TOL = {"rtol": 1e-10, "atol": 1e-11}  # float64
Block = Callable[..., nn.Module]


PATTERNS = {
    "right": hidden("#######", "###....", "#......"),
    "left": hidden("..#####", "......#", "#######"),
    "holes": hidden("#.#.#.#", ".##..#.", "..#####"),
    "an empty sample": hidden("###....", ".......", "####..."),
    "one position": hidden(".......", "...#...", "......."),
    "nothing hidden": hidden("#######", "#######", "#######"),
    "all hidden": hidden(".......", ".......", "......."),
    "drawn": torch.rand(B, L, generator=torch.Generator().manual_seed(4)) < 0.5,
}
SOME = PATTERNS["holes"]


def block(**options: Any) -> nn.Module:
    return EncoderBlock(D, H, feedforward_dim=M, dtype=torch.float64, **options)


def layer(dropout: float = 0.0, **options: Any) -> nn.Module:
    return TransformerEncoderLayer(D, H, M, dropout, dtype=torch.float64, **options)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "pre-norm": block,
    "post-norm relu": lambda: block(norm_first=False, activation="relu"),
    "swiglu rmsnorm": lambda: block(activation="swiglu", norm="rmsnorm"),
    "no biases": lambda: block(bias=False),
    "modules": lambda: block(activation=nn.SiLU(), norm=nn.RMSNorm(D), norm_first=False),
    "functions": lambda: block(activation=torch.tanh, norm=nn.Identity()),
    "fused attention": lambda: block(
        attention=MultiheadAttention(D, H, batch_first=True, fused_qkv=True, dtype=torch.float64)
    ),
    "layer": layer,
    "layer, batch first": lambda: layer(batch_first=True, activation="gelu"),
    "layer, fused pre-norm": lambda: layer(fused_qkv=True, norm_first=True),
    "layer, batch first, fused": lambda: layer(fused_qkv=True, batch_first=True, norm="rmsnorm", activation="swiglu"),
}
every_block = pytest.mark.parametrize("kind", BLOCKS)
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take the paths of large ones."""
    set_price(monkeypatch, 0)


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each `functional.linear` was given."""
    return count_products(monkeypatch)


@pytest.fixture(autouse=True)
def packed_blocks(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """What blocks and stacks packed; an attention that packs for itself does not count."""
    shapes: list[torch.Size] = []
    original = packing.BlockPacking.pack

    def pack(self: packing.BlockPacking, x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return original(self, x)

    monkeypatch.setattr(packing.BlockPacking, "pack", pack)
    return shapes


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return without_packing(monkeypatch)


def batch_first(module: nn.Module) -> bool:
    return all(child.batch_first for child in module.modules() if isinstance(child, MultiheadAttention))


def x_of(module: nn.Module, rows: Tensor | None = None, poison: float = math.nan) -> Tensor:
    """A leaf, laid out as the module reads it, with poison at padding."""
    x = torch.randn(B, L, D, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    if rows is not None:
        x[rows] = poison
    return (x if batch_first(module) else x.transpose(0, 1).contiguous()).requires_grad_()


def run(module: nn.Module, x: Tensor, rows: Tensor, **more: Any) -> Tensor:
    """The module with `rows` hidden as queries and as keys."""
    word = "src_key_padding_mask" if isinstance(module, (TransformerEncoderLayer, TransformerEncoder)) else None
    out: Tensor = module(x, **{word or "key_padding_mask": rows}, query_padding_mask=rows, **more)
    return out


def everything(module: nn.Module, x: Tensor, rows: Tensor, **more: Any) -> list[Tensor]:
    """Output, and the gradients of x and of all parameters."""
    out = run(module, x, rows, **more)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return [out, *torch.autograd.grad((out.sin() * cotangent).sum(), [x, *module.parameters()])]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert other.isfinite().all()
        assert_close(one, other, **TOL)


def real(rows: Tensor) -> int:
    return int((~rows).sum())


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@every_pattern
@every_block
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_output_and_gradients(
    kind: str, pattern: str, causal: bool, padded: Callable[..., Any], products: list[int]
) -> None:
    training = pattern != "right"
    module, rows = filled(BLOCKS[kind]()).train(training), PATTERNS[pattern]
    x = x_of(module, rows)
    want = padded(lambda: everything(module, x, rows, is_causal=causal))
    assert set(products) == {B * L}
    products.clear()
    got = everything(module, x, rows, is_causal=causal)
    assert set(products) == {real(rows)}
    same(got, want)
    where = rows if batch_first(module) else rows.T
    for part in got[:2]:
        assert not part[where].any()
    assert got[0].shape == x.shape
    with torch.no_grad():
        products.clear()
        assert_close(run(module, x, rows, is_causal=causal), got[0], **TOL)
        assert set(products) == {real(rows)}


@pytest.mark.thin(2)
@every_pattern
@pytest.mark.parametrize("turn", [0, 1e30], ids=["sequence by sequence", "with a written mask"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
def test_however_attention_keeps_the_sequences_apart(
    pattern: str,
    turn: float,
    causal: bool,
    padded: Callable[..., Any],
    products: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TURN", "TURN_GRAD"):
        monkeypatch.setattr(functional, name, turn)
    for kind in ("pre-norm", "layer, fused pre-norm"):
        module, rows = filled(BLOCKS[kind]()), PATTERNS[pattern]
        x = x_of(module, rows)
        want = padded(lambda m=module, t=x, r=rows: everything(m, t, r, is_causal=causal))
        products.clear()
        same(everything(module, x, rows, is_causal=causal), want)
        assert set(products) == {real(rows)}


STACKS: dict[str, Callable[[], nn.Module]] = {
    "Encoder": lambda: Encoder([block(), block()], norm=nn.LayerNorm(D, dtype=torch.float64)),
    "TransformerEncoder": lambda: TransformerEncoder(layer(batch_first=True), 2, nn.LayerNorm(D, dtype=torch.float64)),
    "TransformerEncoder, (L, B, D)": lambda: TransformerEncoder(layer(fused_qkv=True, norm_first=True), 2),
    "one block twice": lambda: Encoder([shared := block(), shared]),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("pattern", ["right", "holes", "an empty sample", "nothing hidden"])
@pytest.mark.parametrize("stack", STACKS)
def test_stacks(stack: str, pattern: str, padded: Callable[..., Any], products: list[int]) -> None:
    """Each layer packs by itself where someone watches the layers, who sees what the user would."""
    module, rows = filled(STACKS[stack]()), PATTERNS[pattern]
    x = x_of(module, rows)
    seen: list[torch.Size] = []
    for one in module.layers:
        one.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape))
        one.register_forward_hook(lambda _, __, out: seen.append(out.shape))
    want = padded(lambda: everything(module, x, rows))
    products.clear()
    same(everything(module, x, rows), want)
    assert set(products) == {real(rows)}
    assert set(seen) == {x.shape}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_rule_of_torchs_nested_tensor_packs_too(
    training: bool, padded: Callable[..., Any], products: list[int]
) -> None:
    """A padding mask alone, where torch would nest: in training as in eval."""
    module = filled(TransformerEncoder(layer(batch_first=True), 2)).train(training)
    x = x_of(module, SOME)
    want = padded(lambda: module(x, src_key_padding_mask=SOME))
    products.clear()
    got = module(x, src_key_padding_mask=SOME)
    assert set(products) == {real(SOME)}
    assert_close(got, want, **TOL)
    assert not got[SOME].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["pre-norm", "layer"])
def test_other_dtypes(kind: str, dtype: torch.dtype, padded: Callable[..., Any], products: list[int]) -> None:
    module = filled(BLOCKS[kind]()).to(dtype)
    x = x_of(module).detach().to(dtype)
    for rows in PATTERNS.values():
        want = padded(run, module, x, rows)
        products.clear()
        got = run(module, x, rows)
        assert set(products) == {real(rows)}
        assert got.dtype == want.dtype == dtype
        eps = 32 * torch.finfo(dtype).eps
        assert_close(got, want, rtol=eps, atol=eps)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["pre-norm", "post-norm relu", "layer"])
@every_pattern
def test_autocast(kind: str, pattern: str, padded: Callable[..., Any], products: list[int]) -> None:
    module, rows = filled(BLOCKS[kind]()).float(), PATTERNS[pattern]
    x = x_of(module).detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        want = padded(run, module, x, rows)
        products.clear()
        got = run(module, x, rows)
    assert set(products) == {real(rows)}
    assert got.dtype == want.dtype
    assert_close(got, want, rtol=5e-2, atol=5e-2)
    (grad,) = torch.autograd.grad(got.float().sum(), x)
    assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["pre-norm", "layer", "layer, batch first"])
def test_other_strides(kind: str, padded: Callable[..., Any], products: list[int]) -> None:
    module = filled(BLOCKS[kind]())
    plain = x_of(module).detach()
    for x in (
        plain.transpose(0, 1).contiguous().transpose(0, 1),
        plain.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.cat([plain, plain], dim=-1)[..., ::2],
        plain[:1].expand_as(plain),
        plain[..., :1].expand_as(plain),
        nn.Parameter(plain),
    ):
        want = padded(run, module, x, SOME)
        products.clear()
        assert_close(run(module, x, SOME), want, **TOL)
        assert set(products) == {real(SOME)}
    one = torch.randn(D, dtype=torch.float64, requires_grad=True)
    found = [
        torch.autograd.grad(call(run, module, one.expand(plain.shape), SOME).sin().sum(), one)
        for call in (padded, lambda function, *rest: function(*rest))
    ]
    assert_close(found[1], found[0], **TOL)


@pytest.mark.parametrize("poison", [math.inf, -math.inf, 1e300])
def test_what_padding_holds_has_no_influence(poison: float) -> None:
    for kind in ("pre-norm", "layer"):
        module = filled(BLOCKS[kind]())
        same(
            everything(module, x_of(module, SOME, poison), SOME), everything(module, x_of(module, SOME, 0.0), SOME)
        )  # fmt: skip


def test_sizes_of_0(products: list[int]) -> None:
    for kind in ("pre-norm", "layer, fused pre-norm", "post-norm relu"):
        module = filled(BLOCKS[kind]())
        for batch, length in ((0, L), (0, 0), (B, 0)):
            shape = (batch, length, D) if batch_first(module) else (length, batch, D)
            x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
            out = run(module, x, torch.zeros(batch, length, dtype=torch.bool))
            assert out.shape == shape
            assert torch.autograd.grad(out.sum(), x)[0].shape == shape


# --- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["block", "layer"])
def test_dropout_of_all(kind: str, padded: Callable[..., Any], products: list[int]) -> None:
    """p = 1 leaves the input, and 0 at padding."""
    module = filled(block(dropout=1.0) if kind == "block" else layer(1.0, norm_first=True)).train()
    x = x_of(module, SOME)
    out = run(module, x, SOME)
    assert set(products) == {real(SOME)}
    where = SOME if batch_first(module) else SOME.T
    assert torch.equal(out, x.masked_fill(where[..., None], 0.0))
    same(everything(module, x, SOME), padded(lambda: everything(module, x, SOME)))


def test_dropout_in_training(products: list[int]) -> None:
    """What is added to x is dropped entry by entry, and the rest scaled up; the seed decides."""
    module = filled(EncoderBlock(256, 4)).train()
    module.dropout1.p = 0.25
    nn.init.zeros_(module.linear2.weight)
    nn.init.zeros_(module.linear2.bias)
    x = torch.randn(B, L, 256)
    for rate in (0.0, 0.25):
        module.dropout1.p = rate
        torch.manual_seed(2)
        added = (run(module, x, SOME) - x)[~SOME]
        if rate == 0.0:
            whole = added
    kept = added != 0
    assert_close(added[kept], whole[kept] / 0.75, rtol=1e-3, atol=1e-5)
    assert 0.7 < kept.float().mean() < 0.8
    assert set(products) == {real(SOME)}
    module = filled(block(dropout=0.5)).train()
    x = x_of(module, SOME)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(everything(module, x, SOME))
    same(found[1], found[0])
    assert not torch.equal(found[2][0], found[0][0])
    assert all(part.isfinite().all() for part in found[0])
    assert torch.equal(run(module.eval(), x, SOME), run(module, x, SOME))


# --- what is not packed -----------------------------------------------------------------------------------------------


class Adapted(nn.Linear):
    """What LoRA makes of a Linear."""


class Quantized(nn.Module):
    """Like torch's dynamically quantized Linear, whose weight is a method."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.inner = linear

    def weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Batched(nn.Module):
    """BatchNorm over the width, as a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(D, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class OwnAttention(MultiheadAttention):
    """A subclass may do anything."""


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def with_child(name: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = block()
        parent, _, last = name.rpartition(".")
        owner = module.get_submodule(parent)
        setattr(owner, last, make(getattr(owner, last)))
        return module

    return build


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module = block()
        change(module)
        return module

    return build


def attention(**options: Any) -> MultiheadAttention:
    return MultiheadAttention(D, H, batch_first=True, dtype=torch.float64, **options)


def patch_forward(module: nn.Module, name: str) -> None:
    child = getattr(module, name)
    original = child.forward
    child.forward = lambda x: original(x)


UNKNOWN_IN_BLOCK: dict[str, Callable[[], nn.Module]] = {
    "an adapter": with_child("linear1", lambda _: Adapted(D, M, dtype=torch.float64)),
    "a function of the user's": lambda: block(activation=lambda x: x.softmax(dim=1)),
    "a module of the user's": lambda: block(activation=nn.Softmax(dim=1)),
    "BatchNorm": lambda: block(norm=Batched()),
    "LayerNorm over positions": lambda: block(norm=nn.LayerNorm((L, D), dtype=torch.float64)),
    "RMSNorm over positions": lambda: block(norm=nn.RMSNorm((L, D), dtype=torch.float64)),
    "another dropout": with_child("dropout1", lambda _: nn.Dropout1d(0.0)),
    "a subclass of attention": lambda: block(attention=OwnAttention(D, H, batch_first=True, dtype=torch.float64)),
    "a parametrization": changed(
        lambda module: parametrize.register_parametrization(module.linear1, "weight", nn.Identity())
    ),
    "pruning": changed(lambda module: prune.l1_unstructured(module.linear2, "weight", 0.5)),
    "a forward of its own": changed(lambda module: patch_forward(module, "linear1")),
    "a compiled child": changed(
        lambda module: setattr(module.linear2, "_compiled_call_impl", module.linear2._call_impl)  # as .compile() does
    ),
}


UNKNOWN_IN_ATTENTION: dict[str, Callable[[], nn.Module]] = {
    "an adapter": with_child("self_attn.q_proj", lambda _: Adapted(D, D, dtype=torch.float64)),
    "an adapter behind": with_child("self_attn.out_proj", lambda _: Adapted(D, D, dtype=torch.float64)),
    "a weight that is a method": with_child("self_attn.out_proj", Quantized),
    "bias_kv": lambda: block(attention=attention(add_bias_kv=True)),
    "a zero key": lambda: block(attention=attention(add_zero_attn=True)),
    "torch's attention": lambda: block(attention=nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)),
    "a module on the weights": with_child("self_attn.attn_dropout", lambda _: Doubled()),
    "no dropout on the weights": with_child("self_attn.attn_dropout", lambda _: nn.Identity()),
    "a parametrization": changed(
        lambda module: parametrize.register_parametrization(module.self_attn.v_proj, "weight", nn.Identity())
    ),
    "a forward of its own": changed(lambda module: patch_forward(module.self_attn, "k_proj")),
}


@pytest.mark.parametrize("name", UNKNOWN_IN_BLOCK)
def test_what_is_not_known_sees_padded_shapes(
    name: str, padded: Callable[..., Any], products: list[int], packed_blocks: list[torch.Size]
) -> None:
    """The block is not packed; its attention, of which all is known, still leaves hidden keys out."""
    module = filled(UNKNOWN_IN_BLOCK[name]()).eval()
    x = x_of(module, SOME, 0.5)
    want = padded(run, module, x, SOME)
    products.clear()
    got = run(module, x, SOME)
    assert not packed_blocks
    assert [n for n in products if n != B * L] == [real(SOME)] * 2
    assert products[1:3] == [real(SOME)] * 2, "keys and values"
    assert_close(got, want, **TOL)


@pytest.mark.parametrize("name", UNKNOWN_IN_ATTENTION)
def test_what_is_not_known_in_attention_sees_padded_shapes(
    name: str, padded: Callable[..., Any], products: list[int], packed_blocks: list[torch.Size]
) -> None:
    module = filled(UNKNOWN_IN_ATTENTION[name]()).eval()
    x = x_of(module, SOME, 0.5)
    want = padded(run, module, x, SOME)
    products.clear()
    got = run(module, x, SOME)
    assert not packed_blocks
    assert set(products) <= {B * L}, "it was packed"
    assert_close(got, want, **TOL)


CHILDREN = [name for name, _ in block().named_modules() if name]
HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda child, seen: child.register_forward_hook(lambda _, given, out: seen.append((given, out))),
    "before": lambda child, seen: child.register_forward_pre_hook(lambda _, given: seen.append(given)),
    "backward": lambda child, seen: child.register_full_backward_hook(lambda _, *grads: seen.append(grads)),
    "before backward": lambda child, seen: child.register_full_backward_pre_hook(lambda _, *grads: seen.append(grads)),
}


def shapes_in(parts: Any) -> Iterator[torch.Size]:
    if isinstance(parts, Tensor):
        yield parts.shape
    elif isinstance(parts, (tuple, list)):
        for part in parts:
            yield from shapes_in(part)


@pytest.mark.thin(4)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("child", CHILDREN)
def test_hooks_on_children_see_padded_shapes(
    child: str, hook: str, padded: Callable[..., Any], products: list[int], packed_blocks: list[torch.Size]
) -> None:
    module = filled(block())
    x = x_of(module, SOME, 0.5)
    want = padded(lambda: everything(module, x, SOME))
    seen: list[Any] = []
    handle = HOOKS[hook](module.get_submodule(child), seen)
    products.clear()
    same(everything(module, x, SOME), want)
    assert not packed_blocks
    keys = B * L if child.startswith("self_attn.") else real(SOME)  # which attention leaves out by itself
    assert products == [B * L, keys, keys, B * L, B * L, B * L]
    shapes = set(shapes_in(seen))
    assert shapes
    assert all(shape[0] == B and L in shape for shape in shapes), shapes
    handle.remove()
    products.clear()
    same(everything(module, x, SOME), want)
    assert set(products) == {real(SOME)}


def test_global_hooks_see_padded_shapes(products: list[int]) -> None:
    module, seen = filled(block()), []
    handle = nn.modules.module.register_module_forward_hook(lambda _, given, __: seen.append(given[0].shape))
    try:
        run(module, x_of(module, SOME, 0.5), SOME)
    finally:
        handle.remove()
    assert (B, L, D) in seen
    assert all(shape[0] == B for shape in seen)
    assert set(products) == {B * L}


def test_masks_that_say_more(padded: Callable[..., Any], products: list[int], packed_blocks: list[torch.Size]) -> None:
    """A block needs the same positions hidden as queries and as keys; else its attention leaves out the keys."""
    module = filled(block())
    x = x_of(module, None)
    other = SOME.clone()
    other[0, 1] = False
    score = torch.zeros(B, L, dtype=torch.float64).masked_fill(SOME, -math.inf)
    whole, some = B * L, real(SOME)
    for words, keys in (
        ({"key_padding_mask": None}, whole),
        ({"key_padding_mask": other}, real(other)),
        ({"key_padding_mask": score}, whole),
        ({"key_padding_mask": SOME, "attn_mask": torch.zeros(L, L).bool()}, whole),
        ({"key_padding_mask": SOME, "mask": masks.documents(torch.arange(L) // 2)}, whole),
        ({"key_padding_mask": SOME, "mask": masks.window(2, 1)}, whole),  # counts what padding lies between
        ({"key_padding_mask": SOME, "mask": masks.padding(~other)}, some),
        ({"key_padding_mask": other, "mask": masks.padding([5, 4, 7])}, 11),
        ({"key_padding_mask": SOME, "need_weights": True}, whole),
    ):
        products.clear()
        packed_blocks.clear()
        got = module(x, query_padding_mask=SOME, **words)
        alike = keys == some
        rest = some if alike else whole
        assert products == [rest, keys, keys, rest, rest, rest], words
        assert bool(packed_blocks) == alike
        assert_close(got, padded(lambda w=words: module(x, query_padding_mask=SOME, **w)), **TOL)
    products.clear()
    assert_close(
        module(x[0], query_padding_mask=SOME[0], key_padding_mask=SOME[0]), run(module, x, SOME)[0], **TOL
    )  # fmt: skip
    assert products[0] == L
    equal = SOME.clone()  # says the same, in another tensor
    products.clear()
    module(x, query_padding_mask=SOME, key_padding_mask=equal)
    assert set(products) == {real(SOME)}


FUTURE = torch.ones(L, L).triu(1).bool()
SAYS_CAUSAL: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a bool tensor": ({"attn_mask": FUTURE}, ("holes", "left", "right", "an empty sample")),
    "a floating tensor": ({"attn_mask": torch.full((L, L), -math.inf).triu(1)}, ("holes", "left", "right")),
    "a tensor beside the flag": ({"attn_mask": FUTURE, "is_causal": True}, ("holes", "right")),
    "masks.causal": ({"mask": masks.causal()}, ("holes", "left", "right")),
    "masks.window": ({"mask": masks.window(2, 1)}, ("left", "right", "an empty sample", "one position")),
    "a window and the flag": ({"mask": masks.window(3, 2), "is_causal": True}, ("left", "right")),
}


@pytest.mark.parametrize("name", SAYS_CAUSAL)
def test_masks_of_distance_are_packed(
    name: str, padded: Callable[..., Any], products: list[int], packed_blocks: list[torch.Size]
) -> None:
    """Order is the same in what is real; distance is where that lies side by side."""
    words, patterns = SAYS_CAUSAL[name]
    module = filled(block())
    for pattern in patterns:
        rows = PATTERNS[pattern]
        x = x_of(module, rows)
        want = padded(lambda x=x, rows=rows: everything(module, x, rows, **words))
        products.clear()
        same(everything(module, x, rows, **words), want)
        assert set(products) == {real(rows)}
    assert len(packed_blocks) == len(patterns)


@pytest.mark.parametrize("call", ["padded", "packed"])
def test_refusals_stay_refusals(call: str, padded: Callable[..., Any]) -> None:
    module = filled(block())
    x = x_of(module).detach()
    function = padded if call == "padded" else lambda function, *rest: function(*rest)
    for given, rows, message in (
        (x[..., :-1], SOME, rf"^EncoderBlock: x must be {D} wide; got {D - 1} \(x \({B}, {L}, {D - 1}\)\)"),
        (x.float(), SOME, rf"^EncoderBlock: x must have the parameters' dtype, .* \(x \({B}, {L}, {D}\)\)"),
        (x, SOME[:2], r"^EncoderBlock: query_padding_mask must be bool \(3, 7\), True = padding; got "),
        (x, SOME.T, r"^EncoderBlock: query_padding_mask must be bool \(3, 7\), True = padding; got "),
        (x, SOME.double(), r"^EncoderBlock: query_padding_mask must be bool \(3, 7\), True = padding; got "),
    ):
        with pytest.raises(ValueError, match=message):
            function(run, module, given, rows)
    with pytest.raises(ValueError, match=r"key_padding_mask must be"):
        function(lambda: module(x, query_padding_mask=SOME, key_padding_mask=SOME[:, :3]))
    for mask in (~SOME, "causal"):
        with pytest.raises(ValueError, match=r"^MultiheadAttention: mask must be a Mask of headwise\.masks; "):
            function(lambda mask=mask: module(x, query_padding_mask=SOME, key_padding_mask=SOME, mask=mask))


# --- when it pays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_as_much_is_saved_as_it_costs(training: bool, products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """(padded positions) * (FLOPs of a position), for each sample a turn; dearer where a gradient is recorded."""
    module, x = filled(block()), torch.randn(B, L, D, dtype=torch.float64)
    for name in ("TURN", "TURN_GRAD"):  # else attention packs by itself where the block does not
        monkeypatch.setattr(core_packing, name, 1e30)

    def set_price(patch: pytest.MonkeyPatch, price: float, names: tuple[str, ...]) -> None:
        for name in names:
            patch.setattr(packing, name, price)

    own, other = ("TURN_GRAD", "TURN") if training else ("TURN", "TURN_GRAD")
    price = packing._PER_POSITION * D**2 * int(SOME.sum()) / B
    for offset, want in ((0, real(SOME)), (1, B * L)):
        set_price(monkeypatch, price + offset, (own,))
        set_price(monkeypatch, 1e30 if offset == 0 and not training else 0, (other,))
        for call in (
            lambda: run(module.train(training).requires_grad_(training), x, SOME),
            lambda: run(module.requires_grad_(False), x.clone().requires_grad_(training), SOME),
        ):
            products.clear()
            call()
            assert set(products) == {want}
    products.clear()
    module.requires_grad_(True)
    set_price(monkeypatch, 1e30, ("TURN_GRAD",))
    set_price(monkeypatch, 0, ("TURN",))
    with torch.no_grad():
        run(module, x, SOME)
    assert set(products) == {real(SOME)}


def test_small_calls_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for module in (packing, core_packing):
        monkeypatch.setattr(module, "pack_both", lambda *_: pytest.fail("read"))
    rows = torch.arange(32).expand(2, 32) >= torch.tensor([[32], [3]])
    run(EncoderBlock(16, 4), torch.randn(2, 32, 16), rows)


# --- gradients of every kind ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pre-norm", "post-norm relu", "layer"])
@pytest.mark.parametrize("pattern", ["holes", "an empty sample", "right"])
def test_second_derivatives(kind: str, pattern: str, padded: Callable[..., Any], products: list[int]) -> None:
    module, rows = filled(BLOCKS[kind]()), PATTERNS[pattern]
    x = x_of(module, rows)

    def penalised() -> list[Tensor]:
        (first,) = torch.autograd.grad(run(module, x, rows).pow(2).sum(), x, create_graph=True)
        second = torch.autograd.grad((first.norm() - 1).pow(2), [x, *module.parameters()], allow_unused=True)
        return [first, *(part for part in second if part is not None)]

    want = padded(penalised)
    products.clear()
    same(penalised(), want)
    assert set(products) == {real(rows)}


@pytest.mark.parametrize("which", ["x", "norm", "one weight", "nothing", "no_grad", "inference_mode"])
def test_who_requires_gradients(which: str, padded: Callable[..., Any], products: list[int]) -> None:
    module = filled(block()).requires_grad_(which in ("no_grad", "inference_mode"))
    x = x_of(module, SOME).detach().requires_grad_(which == "x")
    leaves = {
        "x": [x],
        "norm": list(module.norm1.requires_grad_(which == "norm").parameters()),
        "one weight": [module.linear1.weight.requires_grad_(which == "one weight")],
    }.get(which, [])

    def once() -> list[Tensor]:
        out = run(module, x, SOME)
        return [out, *(torch.autograd.grad(out.sin().sum(), leaves) if leaves else ())]

    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    if which in modes:
        plain = once
        once = lambda: modes[which]()(plain)()  # noqa: E731
    want = padded(once)
    products.clear()
    got = once()
    same(got, want)
    assert got[0].requires_grad == bool(leaves)
    assert got[0].is_inference() == (which == "inference_mode")
    assert set(products) == {real(SOME)}


def test_inference_tensors_in_training(products: list[int]) -> None:
    """What was made in inference mode is taken by a module that learns."""
    module = filled(block())
    with torch.inference_mode():
        x = x_of(module, SOME).detach().clone()
    got, want = run(module, x, SOME), run(module, x_of(module, SOME), SOME)
    assert_close(got, want, **TOL)
    grads = [torch.autograd.grad(out.sum(), list(module.parameters())) for out in (got, want)]
    assert_close(grads[0], grads[1], **TOL)


@pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing(reentrant: bool, dropout: float, products: list[int]) -> None:
    module = filled(block(dropout=dropout)).train()
    x = x_of(module, SOME)
    found = []
    for call in (lambda: run(module, x, SOME), lambda: checkpoint(run, module, x, SOME, use_reentrant=reentrant)):
        torch.manual_seed(5)
        x.grad = None
        module.zero_grad()
        out = call()
        out.sin().sum().backward()
        found.append([out, x.grad, *(parameter.grad for parameter in module.parameters())])
    same(found[1], found[0])
    assert set(products) == {real(SOME)}


def test_reentrant_checkpointing_draws_the_same_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs forward without a graph first, and packs there at another size: yet it must drop the same both times."""
    set_price(monkeypatch, 1e30, ("TURN_GRAD",))
    module = filled(block(dropout=0.5)).train()
    nn.init.zeros_(module.linear2.weight)
    x = x_of(module, SOME)
    out = checkpoint(run, module, x, SOME, use_reentrant=True)
    out.sum().backward()
    attention = module.self_attn.out_proj
    linear = (module.linear2.bias, attention.weight, attention.bias)  # in which the sum is linear
    assert_close(sum((leaf * leaf.grad).sum() for leaf in linear), out.sum() - x.detach()[~SOME].sum())


def test_offloading_and_saved_tensor_hooks(padded: Callable[..., Any], products: list[int]) -> None:
    module = filled(block())
    x = x_of(module, SOME)
    want = padded(lambda: everything(module, x, SOME))
    products.clear()
    with torch.autograd.graph.save_on_cpu():
        same(everything(module, x, SOME), want)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        same(everything(module, x, SOME), want)
    assert set(products) == {real(SOME)}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_anomaly_mode(products: list[int]) -> None:
    """No NaN at any node, though padding holds some."""
    for kind in ("pre-norm", "layer"):
        module = filled(BLOCKS[kind]())
        with torch.autograd.detect_anomaly():
            found = everything(module, x_of(module, SOME), SOME)
        assert all(part.isfinite().all() for part in found)
    assert set(products) == {real(SOME)}


def test_copies_pack_as_well(products: list[int]) -> None:
    module = filled(block())
    x = x_of(module, SOME)
    want = everything(module, x, SOME)
    twin = copy.deepcopy(module)
    products.clear()
    same(everything(twin, x, SOME), want)
    assert set(products) == {real(SOME)}


# --- what changes meanwhile -------------------------------------------------------------------------------------------


def test_one_mask_for_both_that_is_written_to(products: list[int]) -> None:
    """Between two calls, and between a call and its backward."""
    module, rows = filled(block()), SOME.clone()
    x = x_of(module, None)
    want = everything(module, x, SOME)
    out = run(module, x, rows)
    rows.copy_(PATTERNS["right"])
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    got = [out, *torch.autograd.grad((out.sin() * cotangent).sum(), [x, *module.parameters()])]
    same(got, want)
    products.clear()
    same(everything(module, x, rows), everything(module, x, PATTERNS["right"].clone()))
    assert set(products) == {real(rows)}


def test_the_input_stays_and_the_output_is_its_own(products: list[int]) -> None:
    module = filled(block(norm=nn.Identity()))
    for rows in (SOME, PATTERNS["nothing hidden"]):
        x = x_of(module).detach()
        before = x.clone()
        with torch.no_grad():
            out = run(module, x, rows)
            out += 1
        assert torch.equal(x, before)


# --- where numbers cannot be read, or must not be ---------------------------------------------------------------------


class Tagged(Tensor):
    """A subclass that does nothing."""


def a_mode(call: Callable[..., Tensor], *given: Tensor) -> Tensor:
    class Quiet(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert "_local_scalar_dense" not in str(function)
            assert "nonzero" not in str(function)
            return function(*args, **(kwargs or {}))

    with Quiet():
        return call(*given)


def compiled(call: Callable[..., Tensor], *given: Tensor) -> Tensor:
    torch._dynamo.reset()
    return torch.compile(call, backend="eager", fullgraph=True)(*given)


def exported(call: Callable[..., Tensor], *given: Tensor) -> Tensor:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = call.__self__ if isinstance(getattr(call, "__self__", None), nn.Module) else None

        def forward(self, *inputs: Tensor) -> Tensor:
            return call(*inputs)

    return torch.export.export(Wrapped(), given).module()(*given)


WAYS: dict[str, Callable[..., Tensor]] = {
    "compiled": compiled,
    "exported": exported,
    "a dispatch mode": a_mode,
    "a subclass": lambda call, x, rows: call(x.as_subclass(Tagged), rows).as_subclass(Tensor),
    "a mask of a subclass": lambda call, x, rows: call(x, rows.as_subclass(Tagged)).as_subclass(Tensor),
    "vmap": lambda call, x, rows: torch.func.vmap(call)(torch.stack([x, x]), torch.stack([rows, rows]))[1],
    "traced": lambda call, x, rows: torch.jit.trace(call, (x, rows), check_trace=False)(x, rows),
}


@pytest.mark.thin(2)
@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["pre-norm", "layer"])
def test_the_padded_form(way: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # Dynamo would trace the counter
    set_price(monkeypatch, 0)
    packs: list[int] = []
    original = core_packing.sequences
    monkeypatch.setattr(core_packing, "sequences", lambda *given: (packs.append(1), original(*given))[1])
    module = filled(BLOCKS[kind]()).requires_grad_(False)
    x = x_of(module, SOME, 0.5).detach()
    want = run(module, x, SOME)
    assert packs == [1]
    got = WAYS[way](lambda x, rows: run(module, x, rows), x, SOME)
    assert packs == [1]
    assert_close(got, want, **TOL)


@pytest.mark.slow  # small ones are compiled above, at a price of 0
def test_large_calls_compile_to_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """As large as is packed in eager mode: a number that is read would break the graph."""
    monkeypatch.undo()
    packs: list[int] = []
    original = core_packing.sequences
    monkeypatch.setattr(core_packing, "sequences", lambda *given: (packs.append(1), original(*given))[1])
    module = EncoderBlock(64, 2, feedforward_dim=8).eval().requires_grad_(False)
    x = torch.randn(1, 1100, 64)
    rows = torch.arange(1100)[None] >= 16
    want = run(module, x, rows)
    assert packs == [1]
    assert_close(compiled(lambda x, rows: run(module, x, rows), x, rows), want, rtol=1e-5, atol=1e-5)
    assert packs == [1]


def test_no_numbers_at_all(products: list[int]) -> None:
    module = filled(block())
    x, rows = x_of(module).detach(), SOME
    meta = copy.deepcopy(module).to("meta")
    assert run(meta, x.to("meta"), rows.to("meta")).shape == x.shape
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert run(module, mode.from_tensor(x), mode.from_tensor(rows)).shape == x.shape
    assert set(products) == {B * L}


def test_another_default_device(padded: Callable[..., Any], products: list[int]) -> None:
    for kind in ("pre-norm", "layer"):
        module = filled(BLOCKS[kind]())
        x = x_of(module, SOME, 0.5)
        want = padded(run, module, x, SOME)
        products.clear()
        with torch.device("meta"):
            got = run(module, x, SOME)
        assert_close(got, want, **TOL)
        assert set(products) == {real(SOME)}


@pytest.mark.parametrize("lengths", [(300, 3, 5, 2), (100, 8), (60, 5, 7, 3)])
def test_nan_in_one_sample_stays_there(lengths: tuple[int, ...]) -> None:
    """Also where the batch is packed, and a dense mask over the row would let it through."""
    model = EncoderBlock(64, 2).eval()
    rows = torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
    x = torch.randn(len(lengths), max(lengths), 64)
    x[1, 0] = math.nan
    out = model(x, key_padding_mask=rows, query_padding_mask=rows)
    assert [bool(sample.isnan().any()) for sample in out] == [index == 1 for index in range(len(lengths))]
