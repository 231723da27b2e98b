"""Random mask expressions against a naive evaluation, element by element, in Python loops that share no code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from headwise import attention, attention_weights, masks
from headwise.core import reference
from headwise.core.algebra import lower
from headwise.core.lowering import Size
from headwise.core.traits import visible_keys

B, H, K = 2, 3, 5
Rule = Callable[[int, int, int, int], bool]  # (sample, head, query, key): may attend
Score = Callable[[int, int, int, int], float]


class Drawn(NamedTuple):
    """A mask and, independently, what it means."""

    mask: masks.Mask
    rule: Rule
    text: str

    def __repr__(self) -> str:
        return self.text


class DrawnScore(NamedTuple):
    mask: masks.Mask
    score: Score
    text: str

    def __repr__(self) -> str:
        return self.text


def _bools(draw: st.DrawFn, *shape: int) -> Tensor:
    count = math.prod(shape)
    return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool).view(shape)


def _ints(draw: st.DrawFn, low: int, high: int, *shape: int) -> Tensor:
    count = math.prod(shape)
    return torch.tensor(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)), dtype=torch.int64).view(
        shape
    )


KINDS = (
    "causal", "causal per sample", "window", "padding", "keep", "documents", "prefix", "prefix per sample", "dense"
)  # fmt: skip


@st.composite
def leaves(draw: st.DrawFn, L: int, S: int) -> Drawn:
    kind = draw(st.sampled_from(KINDS))
    if kind == "causal":
        offset = draw(st.integers(-3, 4))
        return Drawn(masks.causal(offset), lambda b, h, i, j: j <= i + offset, f"causal({offset})")
    if kind == "causal per sample":
        offsets = _ints(draw, -2, 3, draw(st.sampled_from([1, B])))
        each = offsets.tolist()
        return Drawn(masks.causal(offsets), lambda b, h, i, j: j <= i + each[b % len(each)], f"causal({each})")
    if kind == "window":
        left, right = (draw(st.one_of(st.none(), st.integers(0, 3))) for _ in range(2))
        return Drawn(
            masks.window(left, right),
            lambda b, h, i, j: (left is None or i - j <= left) and (right is None or j - i <= right),
            f"window({left}, {right})",
        )
    if kind == "padding":
        lengths = draw(st.lists(st.integers(0, S + 2), min_size=B, max_size=B))
        given = lengths if draw(st.booleans()) else torch.tensor(lengths)
        return Drawn(masks.padding(given), lambda b, h, i, j: j < lengths[b], f"padding({lengths})")
    if kind == "keep":
        keep = _bools(draw, B, S).tolist()
        mask = masks.padding(torch.tensor(keep, dtype=torch.bool).view(B, S))
        return Drawn(mask, lambda b, h, i, j: keep[b][j], f"padding({keep})")
    if kind == "documents":
        batched = draw(st.booleans()), draw(st.booleans())
        ids = _ints(draw, 0, 2, *([B, L] if batched[0] else [L]))
        key_ids = _ints(draw, 0, 2, *([B, S] if batched[1] else [S]))
        own = L == S and draw(st.booleans())
        mine, theirs = ids.tolist(), (ids if own else key_ids).tolist()
        of_query = (lambda b, i: mine[b][i]) if batched[0] else (lambda b, i: mine[i])
        of_key = of_query if own else (lambda b, j: theirs[b][j]) if batched[1] else lambda b, j: theirs[j]
        mask = masks.documents(ids) if own else masks.documents(ids, key_ids)
        return Drawn(mask, lambda b, h, i, j: of_query(b, i) == of_key(b, j), f"documents({mine}, {theirs})")
    if kind == "prefix":
        n = draw(st.integers(0, S + 1))
        return Drawn(masks.prefix(n), lambda b, h, i, j: j < n, f"prefix({n})")
    if kind == "prefix per sample":
        counts = _ints(draw, 0, S + 1, B)
        ns = counts.tolist()
        return Drawn(masks.prefix(counts), lambda b, h, i, j: j < ns[b], f"prefix({ns})")
    shape = draw(
        st.sampled_from([(L, S), (B, L, S), (B, 1, 1, S), (1, H, L, S), (B, H, 1, 1), (B, H, L, S), (1, 1, L, 1)])
    )
    keep = _bools(draw, *shape)
    four = keep.view((1, 1, *shape) if len(shape) == 2 else (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape)
    whole = four.expand(B, H, L, S).tolist()
    return Drawn(masks.dense(keep), lambda b, h, i, j: whole[b][h][i][j], f"dense{tuple(shape)}")


def expressions(L: int, S: int) -> st.SearchStrategy[Drawn]:
    def grown(inner: st.SearchStrategy[Drawn]) -> st.SearchStrategy[Drawn]:
        pair = st.tuples(inner, inner)
        return st.one_of(
            pair.map(lambda p: Drawn(
                p[0].mask & p[1].mask, lambda *at: p[0].rule(*at) and p[1].rule(*at), f"({p[0]} & {p[1]})"
            )),
            pair.map(lambda p: Drawn(
                p[0].mask | p[1].mask, lambda *at: p[0].rule(*at) or p[1].rule(*at), f"({p[0]} | {p[1]})"
            )),
            inner.map(lambda p: Drawn(~p.mask, lambda *at: not p.rule(*at), f"~{p}")),
        )  # fmt: skip

    return st.recursive(leaves(L, S), grown, max_leaves=4)


@st.composite
def scores(draw: st.DrawFn, L: int, S: int) -> DrawnScore:
    shape = draw(st.sampled_from([(L, S), (B, L, S), (B, 1, 1, S), (1, H, 1, 1), (B, H, L, S)]))
    count = math.prod(shape)
    values = draw(st.lists(st.sampled_from([-math.inf, -2.5, -1.0, 0.0, 0.5, 3.0]), min_size=count, max_size=count))
    tensor = torch.tensor(values, dtype=torch.float32).view(shape)
    four = tensor.view((1, 1, *shape) if len(shape) == 2 else (shape[0], 1, *shape[1:]) if len(shape) == 3 else shape)
    whole = four.expand(B, H, L, S).tolist()
    return DrawnScore(masks.bias(tensor), lambda b, h, i, j: whole[b][h][i][j], f"bias{shape}")


lengths = st.tuples(st.integers(1, 4), st.integers(1, 5))
sized = lengths.flatmap(lambda LS: st.tuples(st.just(LS), expressions(*LS)))
sized_with_scores = lengths.flatmap(
    lambda LS: st.tuples(st.just(LS), expressions(*LS), st.lists(scores(*LS), min_size=1, max_size=3))
)
few = settings(max_examples=40)


def naive(rule: Rule, L: int, S: int) -> Tensor:
    return torch.tensor(
        [[[[bool(rule(b, h, i, j)) for j in range(S)] for i in range(L)] for h in range(H)] for b in range(B)],
        dtype=torch.bool,
    ).view(B, H, L, S)


def naive_score(parts: list[DrawnScore], L: int, S: int) -> Tensor:
    return torch.tensor(
        [
            [[[sum(part.score(b, h, i, j) for part in parts) for j in range(S)] for i in range(L)] for h in range(H)]
            for b in range(B)
        ]
    ).view(B, H, L, S)


def size_of(L: int, S: int) -> Size:
    return Size(B, H, L, S, torch.device("cpu"))


@few
@given(sized)
def test_an_expression_means_what_its_parts_mean(drawn: tuple[tuple[int, int], Drawn]) -> None:
    (L, S), expression = drawn
    keep = expression.mask.keep(size_of(L, S))
    whole = torch.ones(B, H, L, S, dtype=torch.bool) if keep is None else keep.expand(B, H, L, S)
    assert torch.equal(whole, naive(expression.rule, L, S))


@few
@given(sized_with_scores)
def test_what_is_lowered_is_the_whole_mask(drawn: tuple[tuple[int, int], Drawn, list[DrawnScore]]) -> None:
    (L, S), expression, parts = drawn
    mask = expression.mask
    for part in parts:
        mask = mask & part.mask
    lowered = lower(mask, size_of(L, S), torch.float32)
    keep = lowered.whole_keep(size_of(L, S))
    whole = torch.ones(B, H, L, S, dtype=torch.bool) if keep is None else keep.expand(B, H, L, S)
    assert torch.equal(whole, naive(expression.rule, L, S))
    assert lowered.bias is not None
    assert torch.equal(lowered.bias.expand(B, H, L, S), naive_score(parts, L, S))
    if lowered.causal:
        flag = Drawn(masks.causal(), lambda b, h, i, j: j <= i, "")
        rest = torch.ones(B, H, L, S, dtype=torch.bool) if lowered.keep is None else lowered.keep.expand(B, H, L, S)
        assert torch.equal(rest & naive(flag.rule, L, S), whole)


@few
@given(sized_with_scores, st.sampled_from(["sdpa", "plain", "tiled"]))
def test_attention_under_an_expression(drawn: tuple[tuple[int, int], Drawn, list[DrawnScore]], backend: str) -> None:
    (L, S), expression, parts = drawn
    mask = expression.mask
    for part in parts[1:]:  # sometimes none: bool masks go another way
        mask = part.mask & mask
    keep = naive(expression.rule, L, S)
    bias = naive_score(parts[1:], L, S) if len(parts) > 1 else None
    leaves = [torch.randn(B, H, n, K, requires_grad=True) for n in (L, S, S)]
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = attention(*leaves, mask=mask, backend=backend)
    want, weights = reference.attention(*doubles, keep=keep, bias=bias)
    assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert_close(attention_weights(*leaves[:2], mask=mask).double(), weights, rtol=1e-5, atol=1e-6)
    cotangent = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, cotangent)
    wanted = torch.autograd.grad(want, doubles, cotangent.double())
    for got, expected in zip(grads, wanted, strict=True):
        assert_close(got.double(), expected, rtol=1e-4, atol=2e-5)


@few
@given(sized, st.sampled_from(["sdpa", "plain", "tiled"]))
def test_hidden_keys_have_no_effect_and_no_gradient(drawn: tuple[tuple[int, int], Drawn], backend: str) -> None:
    """A key that no query of its sample and head may see: another value changes no bit, its gradient is exactly 0."""
    (L, S), expression = drawn
    hidden = ~naive(expression.rule, L, S).any(dim=2)[..., None]  # (B, H, S, 1)
    query, key, value = (torch.randn(B, H, n, K, requires_grad=True) for n in (L, S, S))
    out = attention(query, key, value, mask=expression.mask, backend=backend)
    other = attention(
        query, torch.where(hidden, 7.0, key), torch.where(hidden, -9.0, value), mask=expression.mask, backend=backend
    )
    assert torch.equal(out, other)
    for grad in torch.autograd.grad(out.pow(2).sum(), [key, value]):
        assert torch.equal(grad.masked_select(hidden), torch.zeros(int(hidden.sum()) * K))


@few
@given(sized)
def test_keys_called_invisible_are(drawn: tuple[tuple[int, int], Drawn]) -> None:
    """What is silenced before the kernel is never a key that some query may see."""
    (L, S), expression = drawn
    keys = visible_keys(expression.mask, size_of(L, S))
    if keys is not None:
        seen = naive(expression.rule, L, S).any(dim=2, keepdim=True)
        assert not (seen & ~keys.expand(B, H, 1, S)).any()


@few
@given(sized, st.randoms(use_true_random=False), st.sampled_from(["sdpa", "plain", "tiled"]))
def test_the_order_of_keys_does_not_matter(drawn: tuple[tuple[int, int], Drawn], random: object, backend: str) -> None:
    (L, S), expression = drawn
    order = list(range(S))
    random.shuffle(order)
    keep = naive(expression.rule, L, S)
    query, key, value = (torch.randn(B, H, n, K) for n in (L, S, S))
    out = attention(query, key, value, mask=expression.mask, backend=backend)
    moved = attention(query, key[:, :, order], value[:, :, order], mask=masks.dense(keep[..., order]), backend=backend)
    assert_close(out, moved, rtol=1e-5, atol=1e-5)


@few
@given(st.data(), lengths, st.booleans())
def test_from_torch_turns_the_polarity(data: st.DataObject, LS: tuple[int, int], is_causal: bool) -> None:
    """True blocks there, True keeps here; floats are added; everything given holds at once."""
    L, S = LS
    draw = data.draw
    shape = draw(
        st.sampled_from([None, (L, S), (B * H, L, S), (B, L, S), (1, L, S), (B, H, L, S), (B, 1, 1, S), (1, H, L, 1)])
    )
    view = {None: None, (L, S): (1, 1, L, S), (B * H, L, S): (B, H, L, S)}
    floating, pad, floating_pad = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    keep, bias = torch.ones(B, H, L, S, dtype=torch.bool), torch.zeros(B, H, L, S)
    attn_mask = padding = None
    if shape is not None:
        block = (
            torch.tensor(draw(st.lists(st.booleans(), min_size=math.prod(shape), max_size=math.prod(shape))))
            .bool()
            .view(shape)
        )
        four = block.view(view.get(shape, shape if len(shape) == 4 else (shape[0], 1, *shape[1:])))
        attn_mask = block.float() * -1.5 if floating else block
        keep, bias = (keep, bias + four * -1.5) if floating else (keep & ~four, bias)
    if pad:
        block = torch.tensor(draw(st.lists(st.booleans(), min_size=B * S, max_size=B * S))).bool().view(B, S)
        padding = torch.zeros(B, S).masked_fill(block, -math.inf) if floating_pad else block
        keep = keep & ~block[:, None, None]
    if is_causal:
        keep = keep & torch.tensor([[j <= i for j in range(S)] for i in range(L)])
    mask = masks.from_torch(attn_mask, padding, is_causal)
    assert (mask is None) == (shape is None and not pad and not is_causal)
    query, key = torch.randn(B, H, L, K), torch.randn(B, H, S, K)
    _, want = reference.attention(query, key, key, keep=keep, bias=bias)
    assert_close(attention_weights(query, key, mask=mask).double(), want, rtol=1e-5, atol=1e-6)


def test_the_laws_of_the_algebra() -> None:
    """De Morgan, absorption and double negation, on the whole matrix."""
    size = Size(B, H, 4, 5, torch.device("cpu"))
    a, b = masks.causal(), masks.dense(torch.rand(B, H, 4, 5) < 0.5)

    def whole(mask: masks.Mask) -> Tensor:
        keep = mask.keep(size)
        return torch.ones(B, H, 4, 5, dtype=torch.bool) if keep is None else keep.expand(B, H, 4, 5)

    everything = masks.window(None, None)
    for left, right in (
        (~(a & b), ~a | ~b),
        (~(a | b), ~a & ~b),
        (a | (a & b), a),
        (a & (a | b), a),
        (~~b, b),
        (a & everything, a),
        (a | everything, everything),
        (a & ~everything, ~everything),
        (a | ~everything, a),
        (~everything & ~everything, ~everything),
    ):
        assert torch.equal(whole(left), whole(right)), (left, right)
    with pytest.raises(ValueError, match="hold no bias"):
        _ = masks.bias(torch.zeros(4, 5)) | a
