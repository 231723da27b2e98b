"""`MultiheadAttention`: torch's constructor, call and `state_dict`, one answer on every path.

Letters: B batch, H heads, L query positions, S key positions, D model width, K head width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from headwise._checks import invalid, positive
from headwise.core.backends import PLAIN, choose, readable, run_unmasked
from headwise.core.functional import prepare
from headwise.core.inputs import Masks, check_inputs, check_shards, wrong_kind
from headwise.core.layouts import is_hooked, is_sharded
from headwise.core.lowering import Size
from headwise.core.masks import Mask, appended, read_torch, visible_keys
from headwise.core.nested import attend_nested
from headwise.core.projections import ProjectedAttention, call, direct

__all__ = ["Attend", "MultiheadAttention"]

_NAME = "MultiheadAttention"


class Attend(nn.Module):
    """The attention inside a module, without parameters: receives the final queries, keys, values and mask.

    A forward pre-hook on it sees `(query (B, H, L, K), key (B, G, S, K), value, mask)` of every call, whichever kernel
    runs; `headwise.attention_weights(query, key, mask=mask)` gives the weights. `key` ends in `bias_k` and the zeros.
    """

    shards = 1  # processes that hold H heads each, in tensor parallelism by headwise.layers.tp_plan

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None = None,
        dropout: float = 0.0,
        drop: Callable[[Tensor], Tensor] | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """Output (B, H, L, K), and weights (B, L, S), or (B, H, L, S) not averaged, or None."""
        grouped = False
        if query.shape[1] != key.shape[1]:  # a branch, for what may be a symbol in a compiled call
            grouped = True
        by_sequence = False if need_weights else None
        request = prepare(query, key, value, mask, None, dropout, drop, grouped=grouped, by_sequence=by_sequence)
        if not need_weights:
            return choose(request).run(request), None
        return PLAIN.run_with_average(request) if average_attn_weights else PLAIN.run_with_weights(request)


class MultiheadAttention(ProjectedAttention):
    """Multi-head attention, a drop-in for `torch.nn.MultiheadAttention`.

        out = out_proj(concat_h(softmax(q_h k_h^T / sqrt(K) + masks) v_h)),   q = q_proj(query), and so on

    Args:
        embed_dim: D, width of query and output; num_heads must divide it.
        num_heads: H, at least 1; the head width is K = D / H.
        dropout: probability in [0, 1] on the attention weights, in training.
        bias: adds a bias to all four projections.
        add_bias_kv: appends one learned key and value (`bias_k`, `bias_v`) that every query sees.
        add_zero_attn: appends a key and value of zeros that every query sees.
        kdim: width of the keys. None: embed_dim.
        vdim: width of the values. None: embed_dim.
        batch_first: True reads (B, L, D), False (L, B, D).
        device: of the parameters. None: torch's default.
        dtype: of the parameters. None: torch's default.
        average_attn_weights: what `forward` does while its own argument is None.
        fused_qkv: True holds the input projections as torch's Parameters with one product, False as three `nn.Linear`.

    Raises:
        ValueError: sizes below 1, num_heads that does not divide embed_dim, dropout outside [0, 1].

    Parameters by name are those of `ProjectedAttention`; `state_dict` has torch's keys in both layouts.

    Children: `attn_dropout` (its own `training` flag decides; anything but an unhooked `nn.Dropout` is called on the
    weights) and `attend`, which hooks can watch.

    Unlike torch: a query that sees no key gives `out_proj.bias`, never NaN; `is_causal` works alone and always holds;
    masks may be per sample or 4-D and mix dtypes; weights are returned before dropout; train and eval run the same
    code; `out_proj` is called, so hooks and adapters on it work. Not a subclass of torch's.

    Cost: 8*B*L*D^2 + 4*B*L*S*D FLOPs forward for L = S.
    Source: arXiv 1706.03762 section 3.2.2.
    Checked in: tests/parity, tests/contract/test_semantics.py.

    Example:
        >>> import torch
        >>> from headwise import MultiheadAttention
        >>> mha = MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(10, 20, 64)
        >>> out, weights = mha(x, x, x, average_attn_weights=False)
        >>> out.shape, weights.shape
        (torch.Size([10, 20, 64]), torch.Size([10, 4, 20, 20]))
    """

    # torch's encoder layers read this before they bypass their self_attn in eval; ours must always be called
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        average_attn_weights: bool = True,
        fused_qkv: bool = False,
    ) -> None:
        super().__init__()
        embed_dim, num_heads = positive(_NAME, "embed_dim", embed_dim), positive(_NAME, "num_heads", num_heads)
        if dtype is not None and not dtype.is_floating_point:
            raise invalid(_NAME, "dtype", "be a floating one", dtype)
        self.kdim = embed_dim if kdim is None else positive(_NAME, "kdim", kdim)
        self.vdim = embed_dim if vdim is None else positive(_NAME, "vdim", vdim)
        if embed_dim % num_heads:
            nearest = embed_dim // num_heads * num_heads or num_heads
            rule = f"be a multiple of num_heads {num_heads}, such as {nearest} or {nearest + num_heads}"
            raise invalid(_NAME, "embed_dim", rule, embed_dim)
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.batch_first, self.add_zero_attn = batch_first, add_zero_attn
        self.average_attn_weights = average_attn_weights
        self._warned_of_zero_one = False
        self._build_projections(bias=bias, fused=fused_qkv, add_bias_kv=add_bias_kv, device=device, dtype=dtype)
        self.attn_dropout: nn.Module = nn.Dropout(_probability(dropout))
        self.attend = Attend()
        self.reset_parameters()

    @property
    def head_dim(self) -> int:
        """K, the width of a head; follows `num_heads`, as torch's call does."""
        return self.embed_dim // self.num_heads

    @property
    def dropout(self) -> float | None:
        """Probability of `attn_dropout`; None if that child was replaced by a module without one."""
        return getattr(self.attn_dropout, "p", None)

    @dropout.setter
    def dropout(self, probability: float) -> None:
        if not isinstance(self.attn_dropout, nn.modules.dropout._DropoutNd):
            kind = type(self.attn_dropout).__name__
            raise invalid(_NAME, "dropout", "be set on attn_dropout while that is a dropout layer", kind)
        self.attn_dropout.p = _probability(probability)

    def extra_repr(self) -> str:
        """torch's arguments where they differ from the default, and the widths always."""
        said = [f"{self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"]
        has_bias = getattr(self.out_proj, "bias", None) is not None
        for shown, text in (
            (self.kdim != self.embed_dim, f"kdim={self.kdim}"),
            (self.vdim != self.embed_dim, f"vdim={self.vdim}"),
            (not has_bias, "bias=False"),
            (self.bias_k is not None, "add_bias_kv=True"),
            (self.add_zero_attn, "add_zero_attn=True"),
            (not self.average_attn_weights, "average_attn_weights=False"),
            (self.fused_qkv, "fused_qkv=True"),
        ):
            if shown:
                said.append(text)
        return ", ".join(said)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool | None = None,
        is_causal: bool = False,
        *,
        query_padding_mask: Tensor | None = None,
        mask: Mask | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and mix `value`.

        Args:
            query: (B, L, D) with `batch_first`, (L, B, D) without, (L, D) unbatched; the parameters' dtype. Nested:
                (B, *, D), samples of unequal lengths, each as if it were alone; no torch masks then.
            key: (B, S, kdim), (S, B, kdim) or (S, kdim); nested if the query is, and to a dense query too.
            value: (B, S, vdim), (S, B, vdim) or (S, vdim); nested if the key is, with the same lengths.
            key_padding_mask: (B, S), or (S,) unbatched; bool with True = padding, or floating and added.
            need_weights: False returns None for the weights and lets the fused kernel run.
            attn_mask: bool with True = may not attend, or floating and added; (L, S), (B*H, L, S), (B, L, S), (1, L, S)
                or 4-D that broadcasts to (B, H, L, S).
            average_attn_weights: True averages the returned weights over heads, False gives each head's. None: what the
                constructor was told.
            is_causal: query l sees keys 0 .. l only, beside all other masks; needs no `attn_mask`.
            query_padding_mask: (B, L), or (L,) unbatched; bool with True = padding: output and weights there are
                exactly 0, the output bias included.
            mask: a Mask of `headwise.masks` (True may attend), intersected with the above; of each sample if nested.

        Returns:
            Output shaped as `query` (jagged: with its offsets, so that they add), and the weights (B, L, S) or
            (B, H, L, S), without B if unbatched, before dropout; S counts `bias_k` and the zero key too. A query that
            sees no key has attention 0 (the output is then `out_proj.bias`), weights 0 and gradients 0. What padding
            holds, NaN included, has no influence. Weights of nested input are padded to the longest sample with 0.

        Raises:
            ValueError: ranks, widths, lengths, dtypes or devices that do not fit, with all sizes; integer masks; torch
                masks, holes or a dense key beside nested tensors.

        Warns:
            UserWarning: once per module, on the CPU in eager mode, for a floating mask of zeros and ones only.

        Cost: see the class; averaged weights hold one head at a time when no gradient is needed.
        """
        masks = (key_padding_mask, attn_mask, query_padding_mask, mask)
        one_input = query is key and key is value and not (need_weights or is_causal)
        if one_input and (short := self._short_call(query, masks)) is not None:
            return short, None
        batch_first, given = self.batch_first, (query, key, value)
        average = self.average_attn_weights if average_attn_weights is None else average_attn_weights
        if getattr(query, "is_nested", False) or getattr(key, "is_nested", False):
            return _attend_nested(self, given, masks, need_weights, average, is_causal)
        batched, masked = check_inputs(self, query, key, value, masks)
        if not batched:
            query, key, value = _once(lambda t: t.unsqueeze(0 if batch_first else 1), query, key, value)
        if masked or is_causal:
            mask, query, key, value = _settle_masks(self, query, key, value, masks, is_causal, given)
        try:
            q_BHLK, k_BHSK, v_BHSK = self._project(query, key, value, self.head_dim, batch_first)
            check_shards(self, q_BHLK, k_BHSK, v_BHSK, need_weights)
            k_BHSK, v_BHSK, mask = self._append(k_BHSK, v_BHSK, mask)
            dropout, drop = _dropout_of(self.attn_dropout)
            out_BHLK, weights = self.attend(q_BHLK, k_BHSK, v_BHSK, mask, dropout, drop, need_weights, average)
            out = (out_BHLK.transpose(1, 2) if batch_first else out_BHLK.permute(2, 0, 1, 3)).flatten(2)
            out = self.out_proj(out)
        except RuntimeError as error:
            raise wrong_kind(self, error, *given) from error.__cause__
        if need_weights or query_padding_mask is not None or not batched:
            return _finish(out, weights, query_padding_mask, query.dtype, batched, batch_first)
        return out, None

    def _short_call(self, x: Tensor, masks: Masks) -> Tensor | None:
        """`forward` of x on itself, batch first, without masks, weights or anything attached; None for any other call.

        The same operations in the same order, so the same numbers to the bit. Only the detours are missing: a fifth of
        the time of a short sequence goes into calls of modules and functions that have nothing to do.
        """
        own = self.__dict__
        masked = not (masks[0] is None and masks[1] is None and masks[2] is None and masks[3] is None)
        if masked or not own["batch_first"] or own["add_zero_attn"] or not isinstance(x, Tensor) or x.is_nested:
            return None
        modules: dict[str, Any] = own["_modules"]
        drop, attend, shape = modules["attn_dropout"], modules["attend"], x.shape
        if (
            len(shape) != 3
            or not shape[2] == own["embed_dim"] == own["kdim"] == own["vdim"]
            or own.get("bias_k", 0) is not None  # a Parameter, parametrized or not, is elsewhere
            or type(drop) is not nn.Dropout
            or (drop.training and drop.p > 0)
            or type(attend) is not Attend
            or is_hooked(drop)
            or is_hooked(attend)
            or not direct()
        ):
            return None
        try:
            q_BHLK, k_BHSK, v_BHSK = self._project(x, x, x, own["embed_dim"] // own["num_heads"], True, True)
            if k_BHSK.shape != q_BHLK.shape:
                return None  # replaced projections may share key heads
            out_BLD = run_unmasked(q_BHLK, k_BHSK, v_BHSK).flatten(2)
            return cast(Tensor, call(modules["out_proj"], out_BLD, True))
        except RuntimeError as error:
            raise wrong_kind(self, error, x, x, x) from error.__cause__

    def _append(self, k_BHSK: Tensor, v_BHSK: Tensor, mask: Mask | None) -> tuple[Tensor, Tensor, Mask | None]:
        """Keys and values that end in `bias_k`, `bias_v` and the zeros, and a mask that shows these to everyone."""
        if not self.add_zero_attn and self.bias_k is None:
            return k_BHSK, v_BHSK, mask
        B, H, _, K = k_BHSK.shape
        keys, values = [k_BHSK], [v_BHSK]
        if self.bias_k is not None and self.bias_v is not None:
            keys.append(_here(self.bias_k).to(k_BHSK.dtype).view(1, H, 1, K).expand(B, H, 1, K))
            values.append(_here(self.bias_v).to(v_BHSK.dtype).view(1, H, 1, K).expand(B, H, 1, K))
        if self.add_zero_attn:
            keys.append(k_BHSK.new_zeros(B, H, 1, K))
            values.append(v_BHSK.new_zeros(B, H, 1, K))
        return torch.cat(keys, dim=2), torch.cat(values, dim=2), appended(mask, len(keys) - 1)


def _here(bias: Tensor) -> Tensor:
    """What this process holds of a tensor that may be sharded."""
    return cast(Tensor, cast(Any, bias).to_local()) if is_sharded(bias) else bias


def _probability(value: float) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise invalid(_NAME, "dropout", "be in [0, 1]", repr(value))
    return value


def _dropout_of(child: nn.Module | None) -> tuple[float, Callable[[Tensor], Tensor] | None]:
    """A probability where the kernel can draw it, else the module to call on the weights."""
    if child is None:
        return 0.0, None
    if type(child) is nn.Dropout and not is_hooked(child):
        return (child.p if child.training else 0.0), None
    return 0.0, child


def _once(
    change: Callable[[Tensor], Tensor], query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Change each distinct tensor once, so that self-attention stays recognisable by identity."""
    new_query = change(query)
    new_key = new_query if key is query else change(key)
    return new_query, new_key, (new_key if value is key else new_query if value is query else change(value))


def _settle_masks(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: Masks,
    is_causal: bool,
    given: tuple[Tensor, Tensor, Tensor],
) -> tuple[Mask | None, Tensor, Tensor, Tensor]:
    """All masks as one, and the inputs with 0 where they are padding in every role, if gradients are recorded."""
    key_padding_mask, attn_mask, query_padding_mask, mask = masks
    if given[0].dim() == 2:
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        query_padding_mask = None if query_padding_mask is None else query_padding_mask.unsqueeze(0)
    shapes = dict(zip(("query", "key", "value"), given, strict=True))
    joined = read_torch(_NAME, attn_mask, key_padding_mask, is_causal, shapes)
    if not module._warned_of_zero_one:
        for name, tensor in (("attn_mask", attn_mask), ("key_padding_mask", key_padding_mask)):
            if tensor is not None and _zeros_and_ones(tensor):
                module._warned_of_zero_one = True
                warnings.warn(
                    f"{_NAME}: the floating {name} holds only 0 and 1, which are added to the scores and hide nothing; "
                    f"if 1 means 'may not attend' pass {name}.bool(), if it means 'may attend' pass {name} == 0",
                    stacklevel=5,  # this function, forward, two frames of nn.Module
                )
                break
    if mask is not None:
        joined = mask if joined is None else joined & mask
    if torch.is_grad_enabled():
        query, key, value = _still(module, query, key, value, joined, query_padding_mask)
    return joined, query, key, value


def _finish(
    out: Tensor,
    weights: Tensor | None,
    query_padding_mask: Tensor | None,
    dtype: torch.dtype,
    batched: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor | None]:
    """0 for padded queries, weights in the dtype of the input, and without the batch dimension that was added."""
    weights = None if weights is None else weights.to(dtype)
    if query_padding_mask is not None:
        rows_BL = query_padding_mask if batched else query_padding_mask[None]
        out = out.masked_fill((rows_BL if batch_first else rows_BL.T)[..., None], 0)
        if weights is not None:
            rows = rows_BL[:, :, None] if weights.dim() == 3 else rows_BL[:, None, :, None]
            weights = weights.masked_fill(rows, 0)
    if batched:
        return out, weights
    return out.squeeze(0 if batch_first else 1), None if weights is None else weights.squeeze(0)


def _attend_nested(
    module: MultiheadAttention,
    given: tuple[Tensor, Tensor, Tensor],
    masks: Masks,
    need_weights: bool,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    drops, run = _dropout_of(module.attn_dropout), attend_nested
    if torch.compiler.is_compiling():
        run = torch.compiler.disable(attend_nested)  # lengths are numbers to it, and a graph would hold for one batch
    try:
        return run(module, given, masks, drops, need_weights, average, is_causal)
    except RuntimeError as error:
        raise wrong_kind(module, error, *given) from error.__cause__


def _zeros_and_ones(mask: Tensor) -> bool:
    if not isinstance(mask, Tensor) or not readable(mask) or not mask.is_floating_point():
        return False
    if mask.dtype.itemsize == 1 or mask.numel() == 0:
        return False
    mask = mask.detach()
    if mask[(0,) * (mask.dim() - 1) + (-1,)].item() not in (0.0, 1.0):
        return False  # one cheap look settles causal masks and biases
    low, high = mask.aminmax()
    return low.item() == 0 and high.item() == 1 and bool(((mask == 0) | (mask == 1)).all())


def _still(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    joined: Mask | None,
    query_padding_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Set to 0 what is padding in every role it plays: a NaN there would reach the projections' gradients (0 * NaN)."""
    batch_first = module.batch_first
    batch_dim, length_dim = (0, 1) if batch_first else (1, 0)
    size = Size(query.shape[batch_dim], module.num_heads, query.shape[length_dim], key.shape[length_dim], query.device)
    keys = visible_keys(joined, size)
    hidden_key = None
    if keys is not None:
        hidden_key = ~keys.any(dim=1)[:, 0, :, None]  # (B or 1, S or 1, 1)
    hidden_query = None if query_padding_mask is None else query_padding_mask[..., None]

    def still(tensor: Tensor) -> Tensor:
        roles = [(query, hidden_query), (key, hidden_key), (value, hidden_key)]
        hidden = None
        for played, where in roles:
            if played is tensor:
                if where is None:
                    return tensor
                hidden = where if hidden is None else hidden & where
        assert hidden is not None
        return tensor.masked_fill(hidden if batch_first else hidden.transpose(0, 1), 0)

    return _once(still, query, key, value)
