"""Which keys a query may attend: a small algebra, lowered to the cheapest form a backend takes.

Letters: B batch, H query heads, L query positions, S key positions.

Every mask says *may attend* (True keeps), whatever its name. Masks combine with `&` (both hold), `|` (either
holds) and `~` (the opposite); additive scores (`bias`) join with `&` only. Nothing of size L x S exists until a
backend asks for it: `lower` hands over a flag, a view that broadcasts over heads and queries, or, last, the whole.

    causal()              window(2, 0)          padding([3, 5])       causal() & padding([3, 5])
    # . . . .             # . . . .             # # # . .             # . . . .
    # # . . .             # # . . .             # # # . .             # # . . .
    # # # . .             # # # . .             # # # . .             # # # . .
    # # # # .             . # # # .             # # # . .             # # # . .
    # # # # #             . . # # #             # # # . .             # # # . .

Source of the rules: ONNX Attention (opset 23 to 25) for the order of composition and for rows without a visible key;
`torch.nn.MultiheadAttention` for polarity and ranks in `from_torch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core.lowering import (
    NOTHING_HIDDEN,
    Lowered,
    Size,
    add_scores,
    cast_scores,
    lower_triangle,
    per_sample,
    picture,
    said,
    same_device,
)

__all__ = [
    "Mask",
    "bias",
    "causal",
    "dense",
    "documents",
    "from_torch",
    "padding",
    "prefix",
    "window",
]

_TORCH_SHAPES = {
    "attn_mask": "(L, S), (B*H, L, S), (B, L, S), (1, L, S), or 4-D and broadcast to (B, H, L, S),",
    "key_padding_mask": "(B, S)",
}


class Mask:
    """What a query may attend. Made by the functions of this module; combine with `&`, `|` and `~`.

    Raises:
        ValueError: an operand is not a Mask (a tensor has no polarity: wrap it in `dense` or `bias`), or a bias
            under `|` or `~`, which add no scores.
    """

    parts: tuple[Mask, ...] = ()  # what it is composed of
    tensors: tuple[Tensor, ...] = ()  # what it holds itself
    extent: tuple[int, int, int | None, int | None] = (1, 1, None, None)  # B, H, L, S as far as its tensors fix them

    def __and__(self, other: Mask) -> Mask:
        return _And(self, _operand("&", other))

    def __or__(self, other: Mask) -> Mask:
        return _Or(_boolean("|", self), _boolean("|", _operand("|", other)))

    def __invert__(self) -> Mask:
        return _Not(_boolean("~", self))

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: combine masks with &, | and ~, not with `and`, `or` and `not`")

    def keep(self, size: Size) -> Tensor | None:
        """True where a query may attend, broadcastable to (B, H, L, S); None: everywhere."""
        raise NotImplementedError

    def score(self, size: Size) -> Tensor | None:
        """What is added to the scores, broadcastable to (B, H, L, S); None: nothing."""
        return None

    def draw(self, queries: int | None = None, keys: int | None = None, *, sample: int = 0, head: int = 0) -> str:
        """A picture of one sample and head: `#` may attend, `.` may not; biases as numbers.

        Args:
            queries: L, the number of rows. None: what the mask's tensors fix, else `keys`, else 8.
            keys: S, the number of columns. None: what the mask's tensors fix, else L.
            sample: which sample of the batch, from 0.
            head: which head, from 0.

        Returns:
            Lines of ASCII text. Beyond 48 rows or columns a cell stands for a block, `+` where only part of it is
            visible, and the last line says how large a block is; biases are then left out.

        Raises:
            ValueError: sizes that the mask's tensors contradict, or a sample or head it does not have.

        Example:
            >>> print((causal() & padding([2])).draw(3))
                    0 1 2
                0   # . .
                1   # # .
                2   # # .
        """
        B, H, fixed_L, fixed_S = _extent(self)
        L = next(n for n in (queries, fixed_L, keys, fixed_S, 8) if n is not None)
        S = next(n for n in (keys, fixed_S, L) if n is not None)
        for name, index, count in (("sample", sample, B), ("head", head, H)):
            if not 0 <= index < count and count > 1:
                raise invalid("Mask.draw", name, f"be in 0 .. {count - 1}", index)
        if L < 1 or S < 1:
            raise invalid("Mask.draw", "queries and keys", "be at least 1", (L, S))
        device = next((tensor.device for tensor in walk_tensors(self)), torch.device("cpu"))
        size = Size(B, H, L, S, device)
        lowered = lower(self, size)

        def one(part: Tensor) -> Tensor:
            return part.detach().expand(B, H, L, S)[min(sample, B - 1), min(head, H - 1)].cpu()

        keep = lowered.whole_keep(size)
        keep_LS = torch.ones(L, S, dtype=torch.bool) if keep is None else one(keep)
        bias_LS = None if lowered.bias is None else one(lowered.bias).float()
        if bias_LS is not None:
            keep_LS = keep_LS & (bias_LS != -math.inf)
        return picture(keep_LS, bias_LS)

    def __repr__(self) -> str:
        return f"{type(self).__name__.lstrip('_').lower()}({self._arguments()})"

    def _arguments(self) -> str:
        return ""


class _And(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.parts = (left, right)

    def keep(self, size: Size) -> Tensor | None:
        left, right = (part.keep(size) for part in self.parts)
        if left is None or right is None:
            return right if left is None else left
        return left & right

    def score(self, size: Size) -> Tensor | None:
        left, right = (part.score(size) for part in self.parts)
        return add_scores(left, right)

    def __repr__(self) -> str:
        return f"({self.parts[0]!r} & {self.parts[1]!r})"


class _Or(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.parts = (left, right)

    def keep(self, size: Size) -> Tensor | None:
        left, right = (part.keep(size) for part in self.parts)
        return None if left is None or right is None else left | right

    def __repr__(self) -> str:
        return f"({self.parts[0]!r} | {self.parts[1]!r})"


class _Not(Mask):
    def __init__(self, inner: Mask) -> None:
        self.parts = (inner,)

    def keep(self, size: Size) -> Tensor | None:
        keep = self.parts[0].keep(size)
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=size.device) if keep is None else ~keep

    def __repr__(self) -> str:
        return f"~{self.parts[0]!r}"


class _Appended(Mask):
    """The caller's mask over the first keys, and `count` keys of our own after them that every query sees."""

    def __init__(self, inner: Mask, count: int) -> None:
        self.parts, self.count = (inner,), count

    def keep(self, size: Size) -> Tensor | None:
        return self.pad(self.parts[0].keep(self.inner_size(size)), size, True)

    def score(self, size: Size) -> Tensor | None:
        return self.pad(self.parts[0].score(self.inner_size(size)), size, 0.0)

    def inner_size(self, size: Size) -> Size:
        """The size of the caller's scores."""
        return size._replace(keys=size.keys - self.count)

    def pad(self, part: Tensor | None, size: Size, value: float) -> Tensor | None:
        """`part` of the caller's scores, with `value` for the keys after them."""
        if part is None:
            return None
        whole = part.expand(*part.shape[:-1], size.keys - self.count)
        return torch.nn.functional.pad(whole, (0, self.count), value=value)

    def __repr__(self) -> str:
        return f"appended({self.parts[0]!r}, {self.count})"


class _Causal(Mask):
    def __init__(self, offset: int | Tensor) -> None:
        self.offset = offset
        self.tensors, self.extent = _held(offset)

    def keep(self, size: Size) -> Tensor | None:
        return lower_triangle(size, per_sample("causal", "offset", self.offset, size))

    def _arguments(self) -> str:
        return "" if isinstance(self.offset, int) and self.offset == 0 else f"offset={said(self.offset)}"


class _Window(Mask):
    def __init__(self, left: int | None, right: int | None) -> None:
        self.left, self.right = left, right

    def keep(self, size: Size) -> Tensor | None:
        query_L1 = torch.arange(size.queries, device=size.device)[:, None]
        ahead_LS = torch.arange(size.keys, device=size.device) - query_L1  # a difference cannot overflow, a sum can
        keep_LS = None
        if self.left is not None:
            keep_LS = ahead_LS >= -self.left
        if self.right is not None:
            right_LS = ahead_LS <= self.right
            keep_LS = right_LS if keep_LS is None else keep_LS & right_LS
        return None if keep_LS is None else keep_LS[None, None]

    def _arguments(self) -> str:
        return f"{self.left}, {self.right}"


class _Padding(Mask):
    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.tensors, self.extent = _held(lengths)

    def keep(self, size: Size) -> Tensor | None:
        return torch.arange(size.keys, device=size.device) < per_sample("padding", "lengths", self.lengths, size)

    def _arguments(self) -> str:
        return f"lengths={said(self.lengths)}"


class Documents(Mask):
    """Made by `documents`."""

    def __init__(self, query_ids: Tensor, key_ids: Tensor) -> None:
        self.tensors = (query_ids, key_ids)
        batch = max(ids.shape[0] if ids.dim() == 2 else 1 for ids in self.tensors)
        self.extent = (batch, 1, query_ids.shape[-1], key_ids.shape[-1])

    def keep(self, size: Size) -> Tensor | None:
        query_ids, key_ids = self.tensors
        for name, ids, length in (("ids", query_ids, size.queries), ("key_ids", key_ids, size.keys)):
            if ids.shape[-1] != length or (ids.dim() == 2 and ids.shape[0] not in (1, size.batch)):
                rule = f"be ({length},) or ({size.batch}, {length}) for these scores; L != S needs key_ids"
                raise invalid("documents", name, rule, tuple(ids.shape))
            same_device("documents", name, ids, size)
        same = query_ids[..., :, None] == key_ids[..., None, :]
        return same[:, None] if same.dim() == 3 else same[None, None]

    def _arguments(self) -> str:
        return f"ids {tuple(self.tensors[0].shape)}"


class _Prefix(Mask):
    def __init__(self, length: int | Tensor) -> None:
        self.length = length
        self.tensors, self.extent = _held(length)

    def keep(self, size: Size) -> Tensor | None:
        keep = torch.arange(size.keys, device=size.device) < per_sample("prefix", "n", self.length, size)
        return keep if keep.dim() == 4 else keep[None, None, None]

    def _arguments(self) -> str:
        return said(self.length)


class Given(Mask):
    """A mask that exists as a tensor that broadcasts to (B, H, L, S): bool keeps, floating adds."""

    def __init__(self, function: str, argument: str, tensor_BHLS: Tensor) -> None:
        self.function, self.argument = function, argument
        self.tensors = (tensor_BHLS,)
        B, H, L, S = tensor_BHLS.shape
        self.extent = (B, H, None if L == 1 else L, None if S == 1 else S)

    @property
    def adds(self) -> bool:
        return self.tensors[0].dtype != torch.bool

    def keep(self, size: Size) -> Tensor | None:
        return None if self.adds else self._checked(size)

    def score(self, size: Size) -> Tensor | None:
        return self._checked(size) if self.adds else None

    def _checked(self, size: Size) -> Tensor:
        tensor = self.tensors[0]
        wanted = (size.batch, size.heads, size.queries, size.keys)
        if any(have not in (1, want) for have, want in zip(tensor.shape, wanted, strict=True)):
            raise invalid(self.function, self.argument, f"broadcast to (B, H, L, S) = {wanted}", tuple(tensor.shape))
        same_device(self.function, self.argument, tensor, size)
        return tensor

    def __repr__(self) -> str:
        return f"{self.function}({self.argument} {tuple(self.tensors[0].shape)})"


class _Torch(Given):
    """A mask of `nn.MultiheadAttention`, polarity already turned; its rank is resolved when the sizes are known."""

    def __init__(self, function: str, argument: str, tensor: Tensor, shapes: dict[str, Tensor]) -> None:
        self.function, self.argument = function, argument
        self.tensors, self.shapes = (tensor,), shapes
        shape = tensor.shape
        L, S = (None if n == 1 and len(shape) == 4 else n for n in shape[-2:])
        if argument == "key_padding_mask":
            self.extent = (shape[0], 1, None, S)
        else:
            B, H = shape[:2] if len(shape) == 4 else (shape[0] if len(shape) == 3 else 1, 1)
            self.extent = (B, H, L, S)

    def _checked(self, size: Size) -> Tensor:
        tensor, shape = self.tensors[0], self.tensors[0].shape
        B, H, L, S = size[:4]
        same_device(self.function, self.argument, tensor, size, **self.shapes)
        if self.argument == "key_padding_mask":
            if shape == (B, S):
                return tensor[:, None, None, :]
        elif len(shape) == 4:
            if all(have in (1, want) for have, want in zip(shape, (B, H, L, S), strict=True)):
                return tensor
        elif shape[-2:] == (L, S):
            if len(shape) == 2:
                return tensor[None, None]
            if shape[0] == B * H:
                return tensor.reshape(B, H, L, S)
            if shape[0] in (B, 1):
                return tensor[:, None]
        rule = f"be {_TORCH_SHAPES[self.argument]} with B = {B}, H = {H}, L = {L}, S = {S}"
        raise invalid(self.function, self.argument, rule, tuple(shape), **self.shapes)


def causal(offset: int | Tensor = 0) -> Mask:
    """Query l sees the keys 0 .. l + offset (aligned to the first key, as SDPA's `is_causal`).

        causal(), L=3, S=5        causal(2), L=3, S=5 (two keys are already in a cache)
        # . . . .                 # # # . .
        # # . . .                 # # # # .
        # # # . .                 # # # # #

    Args:
        offset: keys before the first query's own; an int, or an integer tensor of shape () or (B,). With
            `offset = S - L` the last query sees the last key (flash-attention's alignment).

    Returns:
        A mask; lowered to the kernel's own flag where the offset is the int 0.

    Raises:
        ValueError: the offset is neither an int nor an integer tensor of one of these shapes.
    """
    return _Causal(_count("causal", "offset", offset))


def window(left: int | None, right: int | None) -> Mask:
    """Query l sees the keys l - left .. l + right.

        window(1, 0)        window(1, 1)
        # . . .             # # . .
        # # . .             # # # .
        . # # .             . # # #
        . . # #             . . # #

    Args:
        left: keys before the query's own position, at least 0; None: all of them.
        right: keys after it, at least 0; None: all of them. `window(None, 0)` is `causal()`.

    Raises:
        ValueError: a side is negative or not an int.
    """
    for name, side in (("left", left), ("right", right)):
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
            raise invalid("window", name, "be an int of at least 0, or None for no limit", repr(side))
    return causal() if left is None and right == 0 else _Window(left, right)


def padding(lengths: Tensor | Sequence[int]) -> Mask:
    """Keys past a sample's length are invisible.

    Args:
        lengths: (B,) integers, the number of real keys of each sample; or a bool tensor (B, S), True where the key is
            real (left padding and holes included). Values are not read: a length beyond S hides nothing.

    Raises:
        ValueError: another dtype or rank. torch's `key_padding_mask` is the opposite: pass `~key_padding_mask`.
    """
    if not isinstance(lengths, Tensor):
        lengths = torch.tensor(lengths)
    if lengths.dtype == torch.bool and lengths.dim() == 2:
        return Given("padding", "keep", lengths[:, None, None, :])
    if lengths.dim() != 1 or _not_integer(lengths):
        raise invalid("padding", "lengths", "be integers (B,) or a bool keep mask (B, S)", said(lengths))
    return _Padding(lengths)


def documents(ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Queries see the keys of their own document; for several sequences in one row.

    Args:
        ids: (L,) or (B, L) integers, the document of each query position.
        key_ids: (S,) or (B, S), the document of each key. None: `ids`, which needs L == S.

    Raises:
        ValueError: not an integer tensor of one or two dimensions.
    """
    for name, given in (("ids", ids), ("key_ids", key_ids)):
        if given is None and name == "key_ids":
            continue
        if not isinstance(given, Tensor) or given.dim() not in (1, 2) or _not_integer(given):
            raise invalid("documents", name, "be an integer tensor (L,) or (B, L)", said(given))
    return Documents(ids, ids if key_ids is None else key_ids)


def prefix(n: int | Tensor) -> Mask:
    """Every query sees the first n keys and no other; a prefix language model is `causal() | prefix(n)`.

        causal() | prefix(2)
        # # . .
        # # . .
        # # # .
        # # # #

    Args:
        n: an int, or an integer tensor of shape () or (B,).

    Raises:
        ValueError: neither.
    """
    return _Prefix(_count("prefix", "n", n))


def dense(keep: Tensor) -> Mask:
    """A mask you already have, True where a query may attend (SDPA's polarity, not `nn.MultiheadAttention`'s).

    Args:
        keep: bool, (L, S), (B, L, S) or anything 4-D that broadcasts to (B, H, L, S).

    Raises:
        ValueError: another dtype or rank; a size that does not broadcast is reported when the mask is used.
    """
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.dim() not in (2, 3, 4):
        raise invalid(
            "dense", "keep", "be a bool tensor (L, S), (B, L, S) or 4-D; float scores go into bias()", said(keep)
        )
    return Given("dense", "keep", _four_dims(keep))


def bias(scores: Tensor) -> Mask:
    """Scores added before the softmax: ALiBi, a learned relative position, a soft penalty.

    Args:
        scores: any floating dtype, (L, S), (B, L, S) or anything 4-D that broadcasts to (B, H, L, S). Cast to the
            query's dtype where it differs: finite values stay finite, only -inf hides a key. Gradients flow to it.

    Raises:
        ValueError: another dtype or rank.
    """
    if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() not in (2, 3, 4):
        raise invalid(
            "bias", "scores", "be a floating tensor (L, S), (B, L, S) or 4-D; bool masks go into dense()", said(scores)
        )
    return Given("bias", "scores", _four_dims(scores))


def from_torch(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, is_causal: bool = False
) -> Mask | None:
    """Turn the masks of `nn.MultiheadAttention` (True blocks) into one Mask (True keeps), once.

    Args:
        attn_mask: bool or floating, (L, S), (B*H, L, S), (B, L, S), (1, L, S), or 4-D that broadcasts to
            (B, H, L, S). A 3-D mask whose first size fits several is read in this order, torch's first.
        key_padding_mask: bool or floating, (B, S).
        is_causal: adds the causal rule; it holds beside the masks, it is no hint about them.

    Returns:
        The intersection of all that was given, floats added; None where nothing was.

    Raises:
        ValueError: another dtype or rank at once; a size that does not fit when the mask is used.

    Unlike torch: bool and floating masks mix, per-sample and 4-D masks are taken, and `is_causal` always holds.
    """
    return read_torch("from_torch", attn_mask, key_padding_mask, is_causal)


def read_torch(
    caller: str,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    shapes: dict[str, Tensor] | None = None,
) -> Mask | None:
    """`from_torch`, with the name that errors begin with and the tensors whose sizes they show."""
    shown = {} if shapes is None else shapes
    found: Mask | None = causal() if is_causal else None
    for argument, mask, ranks in (("attn_mask", attn_mask, (2, 3, 4)), ("key_padding_mask", key_padding_mask, (2,))):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise invalid(caller, argument, "be a bool (True blocks) or floating (added) tensor", said(mask), **shown)
        if mask.dim() not in ranks:
            rule = f"be {_TORCH_SHAPES[argument].rstrip(',')}"
            raise invalid(caller, argument, rule, f"{mask.dim()}-D {tuple(mask.shape)}", **shown)
        if mask.is_floating_point() and mask.dtype.itemsize == 1:
            mask = mask.float()  # float8 has no arithmetic
        found = _and(found, _Torch(caller, argument, ~mask if mask.dtype == torch.bool else mask, shown))
    return found


def appended(mask: Mask | None, count: int) -> Mask | None:
    """`mask` over all keys but the last `count`, which every query sees."""
    return mask if mask is None or count == 0 else _Appended(mask, count)


def lower(mask: Mask | None, size: Size, dtype: torch.dtype | None = None) -> Lowered:
    """Write a mask down for a kernel, in the cheapest form that says it all.

    Args:
        mask: None hides nothing.
        size: of the scores.
        dtype: the query's, to which biases are cast (only -inf stays -inf). None: as they are.

    Returns:
        The flag and the broadcastable tensors.
    """
    if mask is None:
        return NOTHING_HIDDEN
    causal_flag, keep, score = False, None, None
    for term in terms(mask):
        if is_flag(term):
            causal_flag = True
            continue
        term_keep, term_score = term.keep(size), term.score(size)
        if term_score is not None and dtype is not None and term_score.dtype != dtype:
            term_score = cast_scores(term_score, dtype)
        if term_keep is not None:
            keep = term_keep if keep is None else keep & term_keep
        score = add_scores(score, term_score)
    return Lowered(causal_flag, keep, score)


def _extent(mask: Mask) -> tuple[int, int, int | None, int | None]:
    B, H, L, S = mask.extent
    for part in mask.parts:
        part_B, part_H, part_L, part_S = _extent(part)
        B, H = max(B, part_B), max(H, part_H)
        L, S = (part_L if L is None else L), (part_S if S is None else S)
    return B, H, L, S


def terms(mask: Mask) -> list[Mask]:
    """What holds at once."""
    return [term for part in mask.parts for term in terms(part)] if isinstance(mask, _And) else [mask]


def walk_tensors(mask: Mask) -> Iterator[Tensor]:
    """All tensors that a mask holds."""
    yield from mask.tensors
    for part in mask.parts:
        yield from walk_tensors(part)


def is_flag(mask: Mask) -> bool:
    """Whether it is what kernels have a causal flag for."""
    return isinstance(mask, _Causal) and isinstance(mask.offset, int) and mask.offset == 0


def visible_keys(mask: Mask | None, size: Size) -> Tensor | None:
    """(B or 1, H or 1, 1, S or 1) bool, False where no query of the sample may see the key; None: all visible.

    Only terms that do not depend on the query are asked, so that nothing of size L x S is read.
    """
    keys = None
    for term in [] if mask is None else terms(mask):
        if isinstance(term, _Appended):
            seen = term.pad(visible_keys(term.parts[0], term.inner_size(size)), size, True)
        elif per_key(term):
            seen, score = term.keep(size), term.score(size)
            seen = seen if score is None else score != -math.inf
        else:
            continue
        keys = seen if keys is None else keys if seen is None else keys & seen
    return keys


def per_key(mask: Mask) -> bool:
    """Whether it hides a key from all queries or from none, as far as its structure tells."""
    if isinstance(mask, _Torch) and mask.argument == "key_padding_mask":
        return True
    if isinstance(mask, Given):
        return mask.tensors[0].shape[-2] == 1
    return isinstance(mask, (_Padding, _Prefix)) or (bool(mask.parts) and all(per_key(part) for part in mask.parts))


def _operand(symbol: str, other: object) -> Mask:
    if not isinstance(other, Mask):
        rule = "be a Mask (wrap a tensor in masks.dense or masks.bias)"
        raise invalid(f"Mask {symbol}", "the other operand", rule, said(other))
    return other


def _boolean(symbol: str, mask: Mask) -> Mask:
    if any(term.adds for term in terms(mask) if isinstance(term, Given)):
        raise invalid(f"Mask {symbol}", "an operand", "hold no bias: scores add under & only", repr(mask))
    return mask


def _and(left: Mask | None, right: Mask) -> Mask:
    return right if left is None else _And(left, right)


def _count(function: str, argument: str, value: int | Tensor) -> int | Tensor:
    fits = isinstance(value, int) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        fits = value.dim() <= 1 and not _not_integer(value)
    elif isinstance(value, torch.SymInt):
        fits = True
    if not fits:
        raise invalid(function, argument, "be an int or an integer tensor of shape () or (B,)", said(value))
    return value


def _held(value: int | Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int, None, None]]:
    """The tensors and the extent of a mask made of one number per batch or per sample."""
    if not isinstance(value, Tensor):
        return (), (1, 1, None, None)
    return (value,), (value.shape[0] if value.dim() else 1, 1, None, None)


def _four_dims(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return tensor
    return tensor[None, None] if tensor.dim() == 2 else tensor[:, None]


def _not_integer(tensor: Tensor) -> bool:
    return tensor.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
