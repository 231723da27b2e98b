"""An attention that runs on what is real, projections included: what is packed, and the padded form's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.unit.packed import count_products, filled, hidden, set_price, without_packing
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from headwise import MultiheadAttention, masks
from headwise.core import packing, reference
from headwise.core.lowering import Band
from headwise.core.packing import Packing, find_packed, pack_both, pack_real

B, L, S, D, H = 3, 7, 5, 10, 2
TOL = {"rtol": 1e-10, "atol": 1e-11}  # float64


ROWS: dict[str, Tensor | None] = {
    "all": None,
    "right": hidden("#######", "###....", "#......"),
    "left": hidden("..#####", "......#", "#######"),
    "holes": hidden("#.#.#.#", ".##..#.", "..#####"),
    "an empty sample": hidden("###....", ".......", "####..."),
}
KEYS: dict[str, Tensor] = {
    "right": hidden("##...", "#####", "###.."),
    "left": hidden("...##", "#####", "..###"),
    "holes": hidden("#.#.#", ".#.##", "####."),
    "an empty sample": hidden("##...", ".....", "#####"),
    "nothing hidden": hidden("#####", "#####", "#####"),
    "all hidden": hidden(".....", ".....", "....."),
}
SOME, SOME_KEYS = ROWS["holes"], KEYS["holes"]

MODULES: dict[str, dict[str, Any]] = {
    "split": {},
    "fused": {"fused_qkv": True},
    "split, (L, B, D)": {"batch_first": False},
    "fused, (L, B, D)": {"fused_qkv": True, "batch_first": False},
    "other widths": {"kdim": 6, "vdim": 4},
    "other widths, fused, (L, B, D)": {"kdim": 6, "vdim": 4, "fused_qkv": True, "batch_first": False},
    "no biases": {"bias": False},
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls take the paths of large ones."""
    set_price(monkeypatch, 0)


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many positions each `functional.linear` was given: query, key, value, output; less where they are fused."""
    return count_products(monkeypatch)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    return without_packing(monkeypatch)


def attention(**options: Any) -> MultiheadAttention:
    """No parameter 0, and the same ones each time."""
    return filled(MultiheadAttention(D, H, **{"batch_first": True, "dtype": torch.float64, **options}))


def leaf(module: MultiheadAttention, padding: Tensor | None, length: int, width: int, poison: float) -> Tensor:
    x = torch.randn(B, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(length + width))
    if padding is not None:
        x[padding] = poison
    return (x if module.batch_first else x.transpose(0, 1).contiguous()).requires_grad_()


class Run:
    """A call of an attention from L queries to S keys; `own`: to themselves."""

    def __init__(
        self,
        module: MultiheadAttention,
        rows: Tensor | None,
        keys: Tensor | None,
        *,
        own: bool = False,
        poison: float = math.nan,
        **words: Any,
    ) -> None:
        self.module, self.rows, self.keys = module, rows, keys
        self.words = {"key_padding_mask": keys, "query_padding_mask": rows, "need_weights": False, **words}
        if own:
            both = None if rows is None or keys is None else rows & keys
            query = leaf(module, both, L, D, poison)
            self.given = (query, query, query)
        else:
            length = S if keys is None else keys.shape[1]
            key = leaf(module, keys, length, module.kdim, poison)
            value = key if module.vdim == D else leaf(module, keys, length, module.vdim, poison)
            self.given = (leaf(module, rows, L, D, poison), key, value)
        self.leaves = list({id(x): x for x in (*self.given, *module.parameters())}.values())

    def __call__(self) -> Tensor:
        out, weights = self.module(*self.given, **self.words)
        assert weights is None
        return out

    def gradients(self, out: Tensor) -> list[Tensor]:
        cotangent = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
        return list(torch.autograd.grad((out.double().sin() * cotangent).sum(), self.leaves))

    def everything(self) -> list[Tensor]:
        out = self()
        return [out, *self.gradients(out)]

    def oracle(self, keep_LS: Tensor | None = None) -> list[Tensor]:
        """By the formula: a padded query gives 0, a hidden key does not exist."""
        module, (query, key, value) = self.module, self.given
        query, key, value = (
            (x if module.batch_first else x.transpose(0, 1)).masked_fill(
                torch.zeros((), dtype=torch.bool) if padding is None else padding[..., None], 0.0
            )
            for x, padding in zip((query, key, value), self.silenced(), strict=True)
        )
        if not module.fused_qkv:
            weights = [child.weight for child in (module.q_proj, module.k_proj, module.v_proj)]
            biases = [child.bias for child in (module.q_proj, module.k_proj, module.v_proj)]
        else:
            whole = module.in_proj_weight
            apart = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
            weights = apart if whole is None else list(whole.split(D))
            biases = [None] * 3 if module.in_proj_bias is None else list(module.in_proj_bias.split(D))
        heads = [
            (x @ weight.T + (0 if bias is None else bias)).unflatten(2, (H, D // H)).transpose(1, 2)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]
        keep = torch.ones(B, 1, query.shape[1], key.shape[1], dtype=torch.bool)
        if self.keys is not None:
            keep = keep & ~self.keys[:, None, None]
        if keep_LS is not None:
            keep = keep & keep_LS
        mixed, _ = reference.attention(*heads, keep=keep)
        out = mixed.transpose(1, 2).flatten(2) @ module.out_proj.weight.T
        out = out if module.out_proj.bias is None else out + module.out_proj.bias
        out = out if self.rows is None else out.masked_fill(self.rows[..., None], 0.0)
        out = out if module.batch_first else out.transpose(0, 1)
        return [out, *self.gradients(out)]

    def silenced(self) -> list[Tensor | None]:
        """What is padding of each input in all the roles it plays."""
        if self.given[0] is self.given[1]:
            both = None if self.rows is None or self.keys is None else self.rows & self.keys
            return [both] * 3
        return [self.rows, self.keys, self.keys]


def same(got: list[Tensor], *wanted: list[Tensor]) -> None:
    for want in wanted:
        for one, other in zip(got, want, strict=True):
            assert other.isfinite().all()
            assert_close(one, other, **TOL)


def real(padding: Tensor | None, length: int = L) -> int:
    return B * length if padding is None else int((~padding).sum())


def are(products: list[int], queries: int, keys: int) -> bool:
    """Whether so many positions went into the products; key and value may share one."""
    return sorted(products) in (sorted([queries, keys, keys, queries]), sorted([queries, keys, queries]))


# --- the numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.thin(3)
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("split", "other widths, fused, (L, B, D)") else pytest.mark.slow)
        for kind in MODULES
    ],
)
def test_from_queries_to_keys(kind: str, rows: str, keys: str, padded: Callable[..., Any], products: list[int]) -> None:
    module = attention(**MODULES[kind])
    run = Run(module, ROWS[rows], KEYS[keys])
    want = padded(run.everything)
    assert set(products) == {B * L, B * S}
    products.clear()
    got = run.everything()
    assert are(products, real(ROWS[rows]), real(KEYS[keys], S))
    same(got, want, run.oracle())
    places = [ROWS[rows], ROWS[rows], KEYS[keys], KEYS[keys]]
    for part, where in zip(got[: 1 + len({id(x) for x in run.given})], places, strict=False):
        if where is not None:
            assert not part[where if module.batch_first else where.T].any(), "not exactly 0 at padding"
    with torch.no_grad():
        products.clear()
        assert_close(run(), got[0], **TOL)
        assert are(products, real(ROWS[rows]), real(KEYS[keys], S))


@pytest.mark.thin(3)
@pytest.mark.parametrize("rows", [name for name in ROWS if name != "all"])
@pytest.mark.parametrize("kind", [name for name in MODULES if "widths" not in name])
@pytest.mark.parametrize("how", ["both", "keys alone", "others"])
def test_self_attention(kind: str, rows: str, how: str, padded: Callable[..., Any], products: list[int]) -> None:
    """Where the same is hidden as queries and as keys the input is packed once, and one product stays one."""
    padding = ROWS[rows]
    other = padding.roll(1, dims=0)
    module = attention(**MODULES[kind])
    run = Run(module, {"both": padding, "keys alone": None, "others": other}[how], padding, own=True)
    want = padded(run.everything)
    products.clear()
    got = run.everything()
    queries = real(run.rows)
    if how == "both" and module.fused_qkv:
        assert products == [queries, queries]
    else:
        assert are(products, queries, real(padding))
    same(got, want, run.oracle())


def test_lengths_that_are_equal_of_tensors_that_are_not(padded: Callable[..., Any]) -> None:
    for kind in ("split", "fused", "fused, (L, B, D)"):
        for keys in ("left", "holes", "right"):
            run = Run(attention(**MODULES[kind]), ROWS[keys], ROWS[keys])
            same(run.everything(), padded(run.everything), run.oracle())


def test_three_inputs_and_one_that_plays_two_parts(padded: Callable[..., Any]) -> None:
    run = Run(attention(), None, SOME, own=True, poison=0.5)
    x, other = run.given[0], torch.randn(B, L, D, dtype=torch.float64, requires_grad=True)
    for given in ((x, other, x), (x, x, other), (other, x, x)):
        run.given, run.leaves = given, [x, other, *run.module.parameters()]
        want, got = padded(run.everything), run.everything()
        same(got, want)


CAUSAL = torch.ones(L, L).tril().bool()
BANDS: dict[str, tuple[dict[str, Any], Callable[[int, int], Tensor]]] = {
    "is_causal": ({"is_causal": True}, lambda i, j: j <= i),
    "masks.causal": ({"mask": masks.causal()}, lambda i, j: j <= i),
    "masks.window": ({"mask": masks.window(2, 1)}, lambda i, j: (j >= i - 2) & (j <= i + 1)),
    "window and is_causal": ({"mask": masks.window(3, 3), "is_causal": True}, lambda i, j: (j >= i - 3) & (j <= i)),
    "window back": ({"mask": masks.window(1, 0)}, lambda i, j: (j >= i - 1) & (j <= i)),
    "prefix or causal": ({"mask": masks.causal() | masks.prefix(3)}, lambda i, j: (j <= i) | (j < 3)),
}


def keep_of(name: str, queries: int, keys: int) -> Tensor:
    return BANDS[name][1](torch.arange(queries)[:, None], torch.arange(keys))


def counts_alike(name: str, rows: str, keys: Tensor | None, own: bool) -> bool:
    """Whether positions of the band mean the same in what is real."""
    at_start = {"all", "right", "an empty sample"}
    if not own:
        return rows in at_start
    return "prefix" not in name and (rows != "holes" or "window" not in name)


@pytest.mark.thin(2)
@pytest.mark.parametrize("rows", [name for name in ROWS if name != "all"])
@pytest.mark.parametrize("name", BANDS)
def test_bands_of_self_attention(name: str, rows: str, padded: Callable[..., Any], products: list[int]) -> None:
    """Distance is kept by stretches, order by holes too; where a band would mean something else it is not packed."""
    run = Run(attention(), ROWS[rows], ROWS[rows], own=True, **BANDS[name][0])
    want = padded(run.everything)
    products.clear()
    got = run.everything()
    packed = set(products) == {real(ROWS[rows])}
    assert packed or set(products) == {B * L}
    if counts_alike(name, rows, ROWS[rows], own=True):
        assert packed
    elif rows in ("left", "holes"):
        assert not packed
    same(got, want, run.oracle(keep_of(name, L, L)))


@pytest.mark.thin(3)
@pytest.mark.parametrize("keys", ["right", "left", "holes", "an empty sample"])
@pytest.mark.parametrize("rows", ["all", "right", "left"])
@pytest.mark.parametrize("name", BANDS)
def test_bands_between_queries_and_keys(
    name: str, rows: str, keys: str, padded: Callable[..., Any], products: list[int]
) -> None:
    """L != S: only what begins at 0 is counted as before."""
    run = Run(attention(), ROWS[rows], KEYS[keys], **BANDS[name][0])
    want = padded(run.everything)
    products.clear()
    got = run.everything()
    fits = rows in ("all", "right") and keys in ("right", "an empty sample")
    assert products[1] == (real(KEYS[keys], S) if fits else B * S)
    same(got, want, run.oracle(keep_of(name, L, S)))


@pytest.mark.parametrize("tensor", ["bool", "float", "4-D"])
@pytest.mark.parametrize("rows", ["right", "holes"])
def test_a_tensor_that_says_causal(tensor: str, rows: str, padded: Callable[..., Any], products: list[int]) -> None:
    future = ~CAUSAL
    attn_mask = {
        "bool": future,
        "float": torch.zeros(L, L, dtype=torch.float64).masked_fill(future, -math.inf),
        "4-D": future[None, None],
    }[tensor]
    run = Run(attention(), ROWS[rows], ROWS[rows], own=True, attn_mask=attn_mask)
    want = padded(run.everything)
    products.clear()
    same(run.everything(), want, run.oracle(CAUSAL))
    assert set(products) == {real(ROWS[rows])}


MORE: dict[str, dict[str, Any]] = {
    "another tensor": {"attn_mask": torch.ones(L, L).tril(-2).bool()},
    "scores": {"attn_mask": torch.linspace(-1, 1, L * L, dtype=torch.float64).view(L, L)},
    "of each head": {"attn_mask": torch.arange(H * L).view(1, H, 1, L) % 3 == 1},
    "documents": {"mask": masks.documents(torch.arange(L) // 3)},
    "floating padding": {"key_padding_mask": torch.zeros(B, L, dtype=torch.float64).masked_fill(SOME, -math.inf)},
    "a bias": {"mask": masks.bias(torch.linspace(-1, 1, L, dtype=torch.float64).view(1, 1, 1, L))},
    "two prefixes that cross": {"mask": (masks.causal() | masks.prefix(3)) & masks.window(2, 2)},
    "weights": {"need_weights": True},
}


@pytest.mark.parametrize("name", MORE)
def test_masks_that_say_more(name: str, padded: Callable[..., Any], products: list[int]) -> None:
    run = Run(attention(), SOME, SOME, own=True, poison=0.5, **MORE[name])
    want = padded(lambda: run.module(*run.given, **run.words))
    products.clear()
    got = run.module(*run.given, **run.words)
    assert set(products) == {B * L}
    assert_close(got, want, **TOL)


def test_padding_in_several_words(padded: Callable[..., Any], products: list[int]) -> None:
    """What any of them hides is hidden."""
    lengths = [4, 6, 7]
    both = SOME | (torch.arange(L) >= torch.tensor(lengths)[:, None])
    run = Run(attention(), None, SOME, own=True, poison=0.5, mask=masks.padding(lengths) & masks.padding(~SOME))
    want = padded(run.everything)
    products.clear()
    got = run.everything()
    assert products == [B * L, real(both), real(both), B * L]
    run.keys = both
    same(got, want, run.oracle())


def test_one_sample(padded: Callable[..., Any], products: list[int]) -> None:
    """Without a batch dimension, in both layouts."""
    for kind in ("split", "fused, (L, B, D)"):
        run = Run(attention(**MODULES[kind]), SOME, SOME_KEYS)
        batch = 0 if run.module.batch_first else 1
        run.given = tuple(x.detach().select(batch, 1).requires_grad_() for x in run.given[:2])
        run.given = (*run.given, run.given[1])
        run.leaves = [*run.given[:2], *run.module.parameters()]
        run.words |= {"key_padding_mask": SOME_KEYS[1], "query_padding_mask": SOME[1]}
        want = padded(run.everything)
        products.clear()
        got = run.everything()
        assert are(products, real(SOME[1:2]), real(SOME_KEYS[1:2]))
        assert got[0].shape == (L, D)
        same(got, want)


def test_sizes_of_0(padded: Callable[..., Any]) -> None:
    for batch, queries, keys in ((0, L, S), (B, 0, S), (B, L, 0), (0, 0, 0)):
        for module in (attention(), attention(fused_qkv=True)):
            query = torch.randn(batch, queries, D, dtype=torch.float64, requires_grad=True)
            key = torch.randn(batch, keys, D, dtype=torch.float64, requires_grad=True)
            words = {
                "key_padding_mask": torch.zeros(batch, keys, dtype=torch.bool),
                "query_padding_mask": torch.zeros(batch, queries, dtype=torch.bool),
            }

            def once(
                module: Any = module, query: Tensor = query, key: Tensor = key, words: Any = words
            ) -> list[Tensor]:
                out, _ = module(query, key, key, need_weights=False, **words)
                return [out, *torch.autograd.grad(out.sin().sum(), [query, key])]

            same(once(), padded(once))


# --- dtypes, gradients ------------------------------------------------------------------------------------------------


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["dtype", "autocast"])
@pytest.mark.parametrize("kind", ["split", "fused"])
def test_other_dtypes(kind: str, how: str, dtype: torch.dtype, padded: Callable[..., Any], products: list[int]) -> None:
    held = torch.float32 if how == "autocast" else dtype
    run = Run(attention(**MODULES[kind]).to(held), SOME, SOME_KEYS, poison=0.0)
    run.given = tuple(x.detach().to(held).requires_grad_() for x in run.given[:2])
    run.given = (*run.given, run.given[1])
    run.leaves = [*run.given[:2], *run.module.parameters()]
    with torch.autocast("cpu", dtype if dtype != torch.float32 else torch.bfloat16, enabled=how == "autocast"):
        want = padded(run.everything)
        products.clear()
        got = run.everything()
    assert are(products, real(SOME), real(SOME_KEYS))
    eps = 64 * torch.finfo(torch.bfloat16 if how == "autocast" and dtype == torch.float32 else dtype).eps
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert_close(one, other, rtol=eps, atol=eps)


def test_second_derivatives(padded: Callable[..., Any]) -> None:
    run = Run(attention(), SOME, SOME_KEYS)

    def penalised() -> list[Tensor]:
        first = torch.autograd.grad(run().pow(2).sum(), run.given[:2], create_graph=True)
        norm = sum((grad.norm() - 1).pow(2) for grad in first)
        return [*first, *torch.autograd.grad(norm, run.leaves, allow_unused=True, materialize_grads=True)]

    same(penalised(), padded(penalised))


@pytest.mark.parametrize("kind", ["split", "fused"])
def test_dropout(kind: str, products: list[int]) -> None:
    """The seed decides; recomputation draws the same; eval drops nothing."""
    run = Run(attention(dropout=0.5, **MODULES[kind]).train(), SOME, SOME, own=True)
    found = []
    for seed, reentrant in ((1, None), (1, None), (1, False), (1, True), (2, None)):
        torch.manual_seed(seed)
        products.clear()
        for one in run.leaves:
            one.grad = None

        def call(x: Tensor) -> Tensor:
            return run.module(x, x, x, **run.words)[0]

        x = run.given[0]
        out = call(x) if reentrant is None else checkpoint(call, x, use_reentrant=reentrant)
        out.sin().sum().backward()
        found.append([out, *(one.grad for one in run.leaves)])
        assert set(products) == {real(SOME)}
    for other in found[1:4]:
        same(other, found[0])
    assert not torch.equal(found[4][0], found[0][0])
    run.module.eval()
    same([run()], [run.oracle()[0]])


def test_dropout_of_all_and_its_mean(padded: Callable[..., Any]) -> None:
    run = Run(attention(dropout=1.0).train(), SOME, SOME_KEYS)
    out = run()
    assert_close(out, run.module.out_proj.bias.expand_as(out).masked_fill(SOME[..., None], 0.0), **TOL)
    same(run.everything(), padded(run.everything))
    run.module.dropout = 0.25
    with torch.no_grad():
        torch.manual_seed(3)
        drawn = torch.stack([run() for _ in range(200)])
        run.module.eval()
        error = (drawn.mean(dim=0) - run()).abs()
    assert (error <= 5 * drawn.std(dim=0) / math.sqrt(len(drawn)) + 1e-9).all()
    assert drawn.std(dim=0)[~SOME].min() > 1e-3


@pytest.mark.parametrize("poison", [math.nan, math.inf, 1e300])
def test_what_padding_holds_has_no_influence(poison: float) -> None:
    for kind in ("split", "fused, (L, B, D)"):
        for own in (True, False):
            module, keys = attention(**MODULES[kind]), SOME if own else SOME_KEYS
            clean = Run(module, SOME, keys, own=own, poison=0.0).everything()
            same(Run(module, SOME, keys, own=own, poison=poison).everything(), clean)


def test_nan_in_one_sample_stays_there() -> None:
    """In another's query, key or value: a dense mask over the row would let it through."""
    for place in (0, 1):
        run = Run(attention(), SOME, SOME_KEYS)
        with torch.no_grad():
            run.given[place][1, [1, 1]] = math.nan
        out = run()
        assert [bool(sample.isnan().any()) for sample in out] == [False, place == 1, False] or place == 0
        assert out[[0, 2]].isfinite().all()
        (grad,) = torch.autograd.grad(out[[0, 2]].sum(), run.given[place])
        assert grad[[0, 2]].isfinite().all()


# --- what is not packed -----------------------------------------------------------------------------------------------

PARTS = ["q_proj", "k_proj", "v_proj", "out_proj", "attn_dropout", "attend"]
HOOKS: dict[str, Callable[[nn.Module, list[Any]], Any]] = {
    "forward": lambda child, seen: child.register_forward_hook(lambda _, given, out: seen.append(given[0].shape)),
    "before": lambda child, seen: child.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape)),
    "backward": lambda child, seen: child.register_full_backward_hook(lambda _, g, __: seen.append(g[0].shape)),
    "before backward": lambda child, seen: child.register_full_backward_pre_hook(lambda _, g: seen.append(g[0].shape)),
}


@pytest.mark.thin(2)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("part", PARTS)
def test_who_watches_a_part_sees_padded_shapes(
    part: str, hook: str, padded: Callable[..., Any], products: list[int]
) -> None:
    run = Run(attention(), SOME, SOME_KEYS, poison=0.5)
    want = padded(run.everything)
    seen: list[torch.Size] = []
    handle = HOOKS[hook](run.module.get_submodule(part), seen)
    products.clear()
    same(run.everything(), want)
    assert products == [B * L, B * S, B * S, B * L]
    assert seen
    assert all(shape[0] == B for shape in seen)
    handle.remove()
    products.clear()
    run.everything()
    assert products == [real(SOME), real(SOME_KEYS), real(SOME_KEYS), real(SOME)]


def test_who_watches_the_whole_sees_padded_shapes(products: list[int]) -> None:
    run, seen = Run(attention(), SOME, SOME_KEYS), []
    run.module.register_forward_hook(lambda _, given, out: seen.extend([*(x.shape for x in given), out[0].shape]))
    run.everything()
    assert seen == [(B, L, D), (B, S, D), (B, S, D), (B, L, D)]
    assert products[0] == real(SOME)


class Adapted(nn.Linear):
    """What LoRA makes of a Linear."""


def changed(change: Callable[[MultiheadAttention], Any], **options: Any) -> Callable[[], MultiheadAttention]:
    def build() -> MultiheadAttention:
        module = attention(**options)
        change(module)
        return module

    return build


def patch_forward(module: nn.Module) -> None:
    original = module.forward
    module.forward = lambda *given, **words: original(*given, **words)


UNKNOWN: dict[str, Callable[[], MultiheadAttention]] = {
    "an adapter": changed(lambda module: setattr(module, "q_proj", Adapted(D, D, dtype=torch.float64))),
    "an adapter behind": changed(lambda module: setattr(module, "out_proj", Adapted(D, D, dtype=torch.float64))),
    "an adapter behind, fused": changed(
        lambda module: setattr(module, "out_proj", Adapted(D, D, dtype=torch.float64)), fused_qkv=True
    ),
    "a parametrization": changed(
        lambda module: parametrize.register_parametrization(module.k_proj, "weight", nn.Identity())
    ),
    "a module on the weights": changed(lambda module: setattr(module, "attn_dropout", nn.Identity())),
    "a forward of its own": changed(lambda module: patch_forward(module.v_proj)),
    "another attend": changed(lambda module: patch_forward(module.attend)),
    "bias_k": lambda: attention(add_bias_kv=True),
    "a zero key": lambda: attention(add_zero_attn=True),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_known_sees_padded_shapes(name: str, padded: Callable[..., Any], products: list[int]) -> None:
    run = Run(UNKNOWN[name](), SOME, SOME_KEYS, poison=0.5)
    want = padded(run)
    products.clear()
    assert_close(run(), want, **TOL)
    assert set(products) == {B * L, B * S}


def test_shared_key_heads(padded: Callable[..., Any], products: list[int]) -> None:
    """Smaller projections in their places share keys and values among heads."""
    module = attention()
    module.k_proj, module.v_proj = (nn.Linear(D, D // H, dtype=torch.float64) for _ in range(2))
    run = Run(module, SOME, SOME_KEYS)
    want = padded(run.everything)
    products.clear()
    same(run.everything(), want)
    assert products[:2] == [real(SOME), real(SOME_KEYS)]


@pytest.mark.slow  # loads torch's compiler
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_are_padded(padded: Callable[..., Any], products: list[int]) -> None:
    """Where numbers cannot be read, or one path has to hold for all numbers; also if one input alone is transformed."""
    module = attention().requires_grad_(False)
    run = Run(module, None, SOME_KEYS, poison=0.5)
    query, key = (x.detach() for x in run.given[:2])

    def call(query: Tensor, key: Tensor) -> Tensor:
        return module(query, key, key, **run.words)[0]

    want = padded(call, query, key)
    for function in (
        lambda: torch.func.vmap(call)(torch.stack([key.new_zeros(B, L, D), query]), torch.stack([key, key]))[1],
        lambda: torch.func.vmap(call, (None, 0))(query, torch.stack([key.neg(), key]))[1],
        lambda: torch.func.vmap(call, (0, None))(torch.stack([query.neg(), query]), key)[1],
        lambda: torch.func.jvp(lambda key: call(query, key), (key,), (key,))[0],
        lambda: torch.func.vjp(lambda key: call(query, key), key)[0],
        lambda: torch.compile(call, backend="eager", fullgraph=True)(query, key),
    ):
        products.clear()
        assert_close(function(), want, **TOL)
        assert not {real(SOME_KEYS)} & set(products)


def test_refusals_stay_refusals(padded: Callable[..., Any]) -> None:
    run = Run(attention(), SOME, SOME_KEYS, poison=0.5)
    query, key, value = run.given
    cases: list[tuple[tuple[Tensor, ...], dict[str, Any], str]] = [
        ((query[..., 1:], key, value), {}, r"MultiheadAttention: query must be 10 wide; got 9 \(query \(3, 7, 9\)"),
        ((query, key[:2], value[:2]), {}, r"MultiheadAttention: key must have the query's batch size 3"),
        (
            (query.float(), key, value),
            {},
            r"MultiheadAttention: query must have the parameters' dtype, .* \(3, 7, 10\)",
        ),
        (run.given, {"query_padding_mask": SOME.double()}, r"MultiheadAttention: query_padding_mask must be a bool"),
        (run.given, {"key_padding_mask": SOME}, r"MultiheadAttention: key_padding_mask must be \(B, S\) = \(3, 5\)"),
        (run.given, {"mask": ~SOME_KEYS}, r"MultiheadAttention: mask must be a Mask of headwise\.masks"),
        (run.given, {"mask": masks.padding([1, 2])}, r"padding: lengths must have one entry per sample, B = 3"),
        (
            run.given,
            {"mask": masks.dense(torch.ones(B, 1, 1, S + 1) > 0)},
            r"dense: keep must broadcast to \(B, H, L, ",
        ),
        (run.given, {"attn_mask": torch.ones(L, S + 1) > 0}, r"MultiheadAttention: attn_mask must be \(L, S\)"),
    ]
    for given, words, message in cases:
        for call in (padded, lambda function: function()):
            with pytest.raises(ValueError, match=f"^{message}"):
                call(lambda given=given, words=words: run.module(*given, **{**run.words, **words}))


# --- when it pays -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False], ids=["grad", "no grad"])
def test_as_much_is_saved_as_it_costs(training: bool, products: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """FLOPs of what is left out of the projections and of attention, a turn for each sample."""
    run = Run(attention(kdim=6, vdim=4), SOME, SOME_KEYS, poison=0.5)
    pairs = sum(int(q) * int(k) for q, k in zip((~SOME).sum(dim=1), (~SOME_KEYS).sum(dim=1), strict=True))
    saved = 4 * D * D * (B * L - real(SOME)) + 2 * D * (6 + 4) * (B * S - real(SOME_KEYS)) + 4 * D * (B * L * S - pairs)
    own, other = ("TURN_GRAD", "TURN") if training else ("TURN", "TURN_GRAD")
    for price, packed in ((saved / B, True), (saved / B + 1, False)):
        set_price(monkeypatch, price, (own,))
        set_price(monkeypatch, 1e30 if packed else 0, (other,))
        products.clear()
        with torch.set_grad_enabled(training):
            run()
        assert (products[0] == real(SOME)) == packed


def test_dropout_is_priced_alike_with_and_without_gradients(
    products: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reentrant checkpointing runs forward without a graph first: it has to draw the same numbers."""
    run = Run(attention(dropout=0.5).train(), SOME, SOME_KEYS, poison=0.5)
    set_price(monkeypatch, 1e30, ("TURN_GRAD",))
    for enabled in (True, False):
        products.clear()
        with torch.set_grad_enabled(enabled):
            run()
        assert products[0] == B * L


def test_small_calls_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(packing, "pack_both", lambda *_: pytest.fail("read"))
    Run(attention(), SOME, SOME_KEYS, poison=0.5)()


# --- the parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False], ids=["(B, L, D)", "(L, B, D)"])
@pytest.mark.parametrize("rows", ROWS)
def test_pack_and_unpack(rows: str, first: bool) -> None:
    """Sample after sample, and back, with 0 at padding."""
    padding = ROWS[rows]
    x = torch.randn(B, L, D)
    laid = x if first else x.transpose(0, 1)
    found = pack_real(None if padding is None else ~padding, laid, first)
    keep = torch.ones(B, L, dtype=torch.bool) if padding is None else ~padding
    packed = found.pack(laid)
    assert packed.shape == ((1, real(padding), D) if first else (real(padding), 1, D))
    assert torch.equal(packed.reshape(-1, D), x[keep])
    assert found.lengths == tuple(keep.sum(dim=1).tolist())
    assert torch.equal(found.unpack(packed), (x * keep[..., None] if first else (x * keep[..., None]).transpose(0, 1)))
    wider = found.unpack(torch.cat([packed, packed], dim=-1))
    assert wider.shape == (*laid.shape[:2], 2 * D)


def test_all_that_is_real_is_not_copied() -> None:
    x = torch.randn(B, L, D)
    found = pack_real(None, x, True)
    assert found == Packing(None, (L,) * B, x.shape, True)
    assert found.pack(x).data_ptr() == x.data_ptr()
    assert found.unpack(found.pack(x)).data_ptr() == x.data_ptr()


def test_pack_both() -> None:
    module = MultiheadAttention(D, H, batch_first=True)
    """One Packing where the same is real; the sequences of the row with their band; None for what cannot be packed."""
    query, key = torch.randn(B, L, D), torch.randn(B, S, D)
    alike = pack_both([module], query, query, masks.padding(~SOME), SOME.clone())
    assert alike is not None
    assert alike.queries is alike.keys
    assert alike.mask.own == Band()
    apart = pack_both([module], query, key, masks.padding(~SOME_KEYS), SOME)
    assert apart is not None
    assert (apart.queries.lengths, apart.keys.lengths) == ((4, 3, 5), (3, 3, 4))
    assert (apart.mask.queries, apart.mask.keys) == ((4, 3, 5), (3, 3, 4))
    assert pack_both([module], query, key, None, SOME).keys.lengths == (S, S, S)
    causal = pack_both([module], query, query, masks.padding(~SOME) & masks.causal(), SOME)
    assert causal is not None
    assert causal.mask.own == Band(None, 0)
    assert isinstance(pack_both([module], query, key, masks.padding(~SOME_KEYS) & masks.causal(), SOME), str)
    assert isinstance(pack_both([module], query, key, masks.dense(torch.rand(L, S) < 0.5), SOME), str)
    assert isinstance(pack_both([module], query, key, masks.padding(~SOME_KEYS.to("meta")), SOME), str)
    assert isinstance(pack_both([module], query, key, masks.padding(~SOME_KEYS), SOME.to("meta")), str)


def test_find_and_attend() -> None:
    """The two steps of `forward`."""
    run = Run(attention(), SOME, SOME_KEYS)
    query, key, _ = run.given
    packed = find_packed(run.module, query, key, masks.padding(~SOME_KEYS), SOME)
    assert isinstance(packed, packing.Packed)
    rows = packed.pack(query, key, key)
    assert rows[1] is rows[2]
    assert [row.shape[1] for row in rows[:2]] == [int((~SOME).sum()), int((~SOME_KEYS).sum())]
    out, _ = run.module(*rows, mask=packed.mask, need_weights=False)
    assert_close(packed.queries.unpack(out), run.oracle()[0], **TOL)
    assert isinstance(find_packed(run.module, query.to("meta"), key, masks.padding(~SOME_KEYS), SOME), str)
