"""Attention on the CPU in blocks: dropout, softcap and masks with gradients, in memory linear in L.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width, V value width; in
a block N pairs of a sample and a key/value head, R rows (queries of all heads that read this key/value head), C keys.

torch's own CPU kernel takes none of the three and falls back to whole L x S matrices. Here a block of scores, some
megabytes, is all that exists at a time: whole rows, so that no running maximum is needed, of as many heads and samples
as fit. Backward makes the scores again from the log-sum-exp and draws the same mask again from the seed.

What was measured, and decides how it is written (two cores; 1 ns a number is what one product costs):

- `exp2` takes half the time of `exp`, so scores are in units of log 2 where no mask is added.
- A comparison to a bool tensor and its use as a mask cost more than a product. `threshold_backward`, the gradient of
  `relu`, compares one tensor and selects from another in one vectorised pass; on int32 views it takes random words.
- torch's generator runs on one core and gives a word in 2 ns. It draws one word in `LANES`; the rest are multiples.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 1 << 20
"""Scores in a block: 4 MiB in float32."""
ROWS = 64
"""Rows that a block has at least, however many keys there are: thinner products are slow."""
LANES = 16
"""Random words made of a drawn one."""

_LOG2_E = math.log2(math.e)
# multiplier 0x93d765dd of Steele and Vigna, arXiv 2001.05304
_MULTIPLIERS = [((0x93D765DD**lane + 2**31) % 2**32) - 2**31 for lane in range(LANES)]

_select = torch.ops.aten.threshold_backward.grad_input
_tanh_backward = torch.ops.aten.tanh_backward.grad_input


class Options(NamedTuple):
    """What torch's kernel cannot do."""

    dropout: float = 0.0
    """Probability in [0, 1] that a weight becomes 0; see `realised`."""
    seed: int = 0
    """Of the mask that dropout draws: the same for the same sizes, whatever the number of threads."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap). None: as they are."""


def realised(p: float) -> float:
    """The probability that is drawn where `p` is asked for: the nearest multiple of 2**-32.

    No p in between becomes certain: the nearest to 0 and 1 are 2**-32 and 1 - 2**-32.
    """
    return _dropped(p) / 2**32


def _dropped(p: float) -> int:
    """How many of the 2**32 words drop a weight."""
    return round(p) << 32 if p in (0, 1) else min(max(round(p * 2**32), 1), 2**32 - 1)


@torch.no_grad()
def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, options: Options
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of each row's scores.

    Args:
        q: (B, H, L, K), any strides, floating.
        k: (B, G, S, K), H % G == 0; query head h reads key head h // (H / G).
        v: (B, G, S, V).
        mask: floating, broadcasts to (B, H, L, S), added to the scores after the softcap; -inf hides. None: 0.
        causal: row i sees keys 0..i only, and of these what the mask leaves.
        scale: factor on q . k, before the softcap.
        options: dropout and softcap.

    Returns:
        Output (B, H, L, V) in q's dtype, (B, L, H, V) in memory, and log-sum-exp (B, H, L) of the visible scores,
        before dropout, in float64 for float64 inputs and float32 for others. A row that sees no key gives 0 and -inf.
        All sizes may be 0.

    Cost: two products of B*H*L*S*K, an exponential and about four passes a score; memory for two blocks.
    """
    walk = _Walk(q, k, mask, causal, scale, options)
    B, H, L, V = *q.shape[:3], v.shape[-1]
    out = q.new_empty(B, L, H, V).transpose(1, 2)
    lse = torch.empty(B, H, L, dtype=walk.dtype, device=q.device)
    if k.shape[2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    scores = walk.buffer()
    for at in walk.parts():
        k_NSK, v_NSV = (walk.flat(x, at.pairs, at.samples, at.groups) for x in (k, v))
        for block in walk.blocks(at):
            S_NRC = block.carve(scores)
            walk.scores(block, walk.flat(q, at.pairs, *block.queries), k_NSK[:, block.keys], S_NRC)
            # the lowest number for a row that sees nothing: -inf - -inf would be NaN
            m_NR1 = S_NRC.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(walk.dtype).min)
            P_NRC = walk.exponentials(S_NRC.sub_(m_NR1))
            total_NR1 = P_NRC.sum(dim=-1, keepdim=True)
            lse[block.queries] = (m_NR1 / walk.unit + total_NR1.log()).view(block.shape[:3])
            kept_NRC = walk.drop(P_NRC) if options.dropout > 0 else P_NRC
            # the highest score alone adds 1 to the total, so below 1 means that there is none
            part, out_NRV = block.shape[:3], S_NRC.new_empty(*S_NRC.shape[:2], V)
            _product(out_NRV, kept_NRC, v_NSV[:, block.keys], 1.0)
            factor_NR1 = walk.kept / total_NR1.clamp_(min=1)
            torch.mul(out_NRV.view(*part, V), factor_NR1.view(*part, 1), out=out[block.queries])
    return out, lse


@torch.no_grad()
def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    options: Options,
    *,
    mask_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `forward`'s output with respect to q, k, v and, where asked for, the mask.

    Args:
        grad_out: (B, H, L, V), any strides.
        out: what `forward` gave, and
        lse: with it; or, of a softmax with more under its sum (a sink), `logaddexp` of both and `out` times
            exp(lse - it). Rows with lse = -inf get no gradient.
        mask_grad: whether the mask's gradient is wanted.
        q, k, v, mask, causal, scale, options: as given to `forward`.

    Returns:
        Gradients like q, k, v and mask (None unless asked for), summed where the mask was broadcast.

    Cost: five products of B*H*L*S*K, an exponential and about five passes a score; memory for three blocks, four with
    a softcap.
    """
    walk = _Walk(q, k, mask, causal, scale, options)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if k.shape[2] == 0:
        dq.zero_()
    dmask = torch.zeros_like(walk.mask, dtype=walk.dtype) if mask_grad and walk.mask is not None else None
    shift = torch.where(lse == -math.inf, -math.inf, -walk.unit * lse)
    weights, others = walk.buffer(), walk.buffer()
    tanhs = None if options.softcap is None else walk.buffer()
    for at in walk.parts():
        k_NSK, v_NSV = (walk.flat(x, at.pairs, at.samples, at.groups) for x in (k, v))
        # keys along the rows: a product with a transposed block on the left is slower
        dk_NKS, dv_NVS = (x.new_zeros(x.mT.shape) for x in (k_NSK, v_NSV))
        for block in walk.blocks(at):
            keys = block.keys
            q_NRK, do_NRV = (walk.flat(x, at.pairs, *block.queries) for x in (q, grad_out))
            P_NRC, D_NRC = block.carve(weights), block.carve(others)
            tanh_NRC = None if tanhs is None else block.carve(tanhs)
            shift_NR1 = shift[block.queries].reshape(*P_NRC.shape[:2], 1)
            walk.scores(block, q_NRK, k_NSK[:, keys], P_NRC, shift_NR1, tanh_NRC)
            walk.exponentials(P_NRC)
            o, do = (x[block.queries].to(walk.dtype) for x in (out, grad_out))
            delta_NR1 = (o * do).sum(dim=-1).neg_().reshape(shift_NR1.shape)
            kept_NRC = walk.drop(P_NRC) if options.dropout > 0 else P_NRC
            _product(dv_NVS[:, :, keys], do_NRV.mT, kept_NRC, walk.kept, add=True)
            # dS = P * (dP - delta), where dropout is in dP
            _product(D_NRC, do_NRV, v_NSV[:, keys].mT, walk.kept)
            if options.dropout > 0:
                D_NRC.mul_(kept_NRC).addcmul_(P_NRC, delta_NR1)
            else:
                D_NRC.add_(delta_NR1).mul_(P_NRC)
            if dmask is not None:
                part = dmask[block.cut(dmask)]
                part += D_NRC.view(block.shape).sum_to_size(part.shape)
            if tanh_NRC is not None:
                _tanh_backward(D_NRC, tanh_NRC, grad_input=D_NRC)
            dq_NRK = q_NRK.new_empty(q_NRK.shape)
            _product(dq_NRK, D_NRC, k_NSK[:, keys], scale)
            dq[block.queries] = dq_NRK.view(*block.shape[:3], -1).to(dq.dtype)
            _product(dk_NKS[:, :, keys], q_NRK.mT, D_NRC, scale, add=True)
        for grad, grad_NKS in ((dk, dk_NKS), (dv, dv_NVS)):
            target = grad[at.samples, at.groups]
            target.copy_(grad_NKS.mT.reshape(target.shape))
    if mask is None or dmask is None:
        return dq, dk, dv, None
    return dq, dk, dv, dmask.view(mask.shape).to(mask.dtype)


def _product(out: Tensor, left: Tensor, right: Tensor, factor: float, add: bool = False) -> None:
    """out = factor * left @ right, or that added to it. With `out=`, so that autocast leaves the dtype alone."""
    torch.baddbmm(out, left, right, beta=1 if add else 0, alpha=factor, out=out)


class _Part(NamedTuple):
    """Samples, key/value heads and the query heads that read them."""

    samples: slice
    groups: slice
    heads: slice
    pairs: int


class _Block(NamedTuple):
    """Rows of a part, and the keys that they may see."""

    queries: tuple[slice, slice, slice]
    keys: slice
    shape: tuple[int, int, int, int]
    """(samples, heads, queries, keys)."""
    pairs: int

    def carve(self, buffer: Tensor) -> Tensor:
        """The beginning of a buffer as (N, R, C)."""
        return buffer[: math.prod(self.shape)].view(self.pairs, -1, self.shape[-1])

    def cut(self, mask: Tensor) -> tuple[slice, ...]:
        """What of a mask belongs to this block, its broadcast dimensions left alone."""
        return tuple(
            part if n > 1 else slice(None) for n, part in zip(mask.shape, (*self.queries, self.keys), strict=True)
        )


class _Walk:
    """The blocks of one call in their order, with their scores and what dropout draws for them.

    Sizes come from the shapes alone, and one generator is drawn from in the order of the blocks: forward and backward
    see the same mask, and so does any number of threads.
    """

    def __init__(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float, options: Options) -> None:
        (self.b, self.h, self.l, _), (_, self.g, self.s, _) = q.shape, k.shape
        self.mask = None if mask is None else mask.view((1,) * (4 - mask.dim()) + mask.shape)
        self.causal, self.scale, self.softcap, self.dropped = causal, scale, options.softcap, _dropped(options.dropout)
        self.kept = 0.0 if options.dropout == 1 else 1 / (1 - realised(options.dropout))
        self.dtype, self.device = torch.promote_types(q.dtype, torch.float32), q.device
        # Scores are in units of log 2, for `exp2`, but not below a mask: the lowest float times 1.44 is -inf.
        self.unit = _LOG2_E if mask is None else 1.0

        each = max(1, self.h // max(1, self.g)) * self.s  # scores of a query and a key/value head
        rows = max(BLOCK // max(1, each), -(-ROWS * self.s // max(1, each)))
        self.rows = _even(self.l, min(rows, max(ROWS, self.l // 8)) if causal else rows)
        self.groups = _even(self.g, BLOCK // max(1, each * self.rows))
        whole = BLOCK // max(1, each * self.rows * self.groups) if self.groups == self.g else 1
        self.samples = _even(self.b, whole)
        self.size = each * self.rows * self.groups * self.samples

        self.future = q.new_full((self.rows, self.rows), -math.inf, dtype=self.dtype).triu_(1) if causal else None
        if options.dropout > 0:
            self.generator = torch.Generator(q.device).manual_seed(options.seed)
            self.drawn = torch.empty(self.size // LANES // 2 + 1, dtype=torch.int64, device=q.device)
            self.words = torch.empty(LANES * 2 * len(self.drawn), dtype=torch.int32, device=q.device)
            self.multipliers = torch.tensor(_MULTIPLIERS, dtype=torch.int32, device=q.device)[:, None]

    def buffer(self) -> Tensor:
        """Memory for the largest block."""
        return torch.empty(self.size, dtype=self.dtype, device=self.device)

    def parts(self) -> Iterator[_Part]:
        if self.s == 0:
            return
        share = self.h // self.g if self.g else 1
        for samples in _slices(self.b, self.samples):
            for groups in _slices(self.g, self.groups):
                pairs = (samples.stop - samples.start) * (groups.stop - groups.start)
                yield _Part(samples, groups, slice(groups.start * share, groups.stop * share), pairs)

    def blocks(self, at: _Part) -> Iterator[_Block]:
        samples, heads = (part.stop - part.start for part in (at.samples, at.heads))
        for rows in _slices(self.l, self.rows):
            keys = min(self.s, rows.stop) if self.causal else self.s
            shape = (samples, heads, rows.stop - rows.start, keys)
            yield _Block((at.samples, at.heads, rows), slice(0, keys), shape, at.pairs)

    def flat(self, x: Tensor, pairs: int, *cut: slice) -> Tensor:
        """Part of (B, H or G, L or S, K) as (N, R or S, K), the heads of one key/value head below one another."""
        x = x[cut]
        shape = (pairs, math.prod(x.shape[:3]) // pairs, x.shape[3])
        return x.reshape(shape).to(self.dtype)

    def scores(
        self,
        block: _Block,
        q_NRK: Tensor,
        k_NCK: Tensor,
        out_NRC: Tensor,
        shift_NR1: Tensor | None = None,
        tanh_NRC: Tensor | None = None,
    ) -> None:
        """Write unit * scores + shift to `out_NRC`, and where asked the softcap's tanh beside it."""
        if self.softcap is None:
            start, factor = out_NRC if shift_NR1 is None else shift_NR1, self.unit * self.scale
            torch.baddbmm(start, q_NRK, k_NCK.mT, beta=int(shift_NR1 is not None), alpha=factor, out=out_NRC)
        else:
            x_NRC, height = out_NRC if tanh_NRC is None else tanh_NRC, self.softcap * self.unit
            _product(x_NRC, q_NRK, k_NCK.mT, self.scale / self.softcap)
            x_NRC.tanh_()
            if shift_NR1 is None:
                torch.mul(x_NRC, height, out=out_NRC)
            else:
                torch.add(shift_NR1, x_NRC, alpha=height, out=out_NRC)
        score = out_NRC.view(block.shape)
        if self.mask is not None:
            score += self.mask[block.cut(self.mask)].to(self.dtype)
        if self.future is not None:
            first = block.queries[2].start
            score[..., first:] += self.future[: score.shape[2], : max(0, score.shape[3] - first)]

    def exponentials(self, scores: Tensor) -> Tensor:
        """exp(scores / unit), in place."""
        return (scores if self.mask is None else scores.mul_(_LOG2_E)).exp2_()

    def drop(self, x: Tensor) -> Tensor:
        """`x` with the next mask's zeros in it, unscaled; in memory that the next call uses again."""
        drawn = self.drawn[: x.numel() // LANES // 2 + 1].random_(-(2**63), None, generator=self.generator)
        words = self.words[: LANES * 2 * len(drawn)].view(LANES, -1)
        torch.mul(drawn.view(torch.int32), self.multipliers, out=words)
        whole = torch.int64 if x.dtype == torch.float64 else torch.int32  # as wide as x
        words = words.view(-1)[: x.numel()].view(x.shape).to(whole)
        _select(x.view(whole), words, self.dropped - 2**31 - 1, grad_input=words)
        return words.view(x.dtype)


def _even(total: int, at_most: int) -> int:
    """The size of equal pieces of `total`, none above `at_most` (but 1)."""
    pieces = -(-total // max(1, at_most))
    return -(-total // max(1, pieces))


def _slices(total: int, step: int) -> Iterator[slice]:
    for start in range(0, total, max(1, step)):
        yield slice(start, min(start + step, total))
