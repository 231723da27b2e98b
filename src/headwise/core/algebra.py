"""What `masks.py` makes: masks as objects that combine, are lowered, and are cut into parts.

Letters: B batch, H query heads, L query positions, S key positions.

Nothing of size L x S exists until a backend asks for it: `lower` hands over a flag, a view that broadcasts over heads
and queries, or, last, the whole; `band` says more with less, and `cut` gives a part without the rest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headwise._checks import invalid
from headwise.core.lowering import (
    NOTHING_HIDDEN,
    Band,
    Lowered,
    Rectangle,
    Size,
    add_scores,
    cast_scores,
    lower_triangle,
    per_sample,
    picture,
    said,
    same_device,
    steps_ahead,
)

TORCH_SHAPES = {
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
    adds: bool = False  # scores, and hides by no rule of its own

    def __and__(self, other: Mask) -> Mask:
        return And(self, _operand("&", other))

    def __or__(self, other: Mask) -> Mask:
        return Or(_boolean("|", self), _boolean("|", _operand("|", other)))

    def __invert__(self) -> Mask:
        return Not(_boolean("~", self))

    def __bool__(self) -> bool:
        raise TypeError("a Mask has no truth value: combine masks with &, | and ~, not with `and`, `or` and `not`")

    def keep(self, size: Size) -> Tensor | None:
        """True where a query may attend, broadcastable to (B, H, L, S); None: everywhere."""
        raise NotImplementedError(f"{type(self).__name__}.keep: a mask has to say which keys are seen")

    def score(self, size: Size) -> Tensor | None:
        """What is added to the scores, broadcastable to (B, H, L, S); None: nothing."""
        return None

    by_parts = False  # whether a part of it can be differentiated by its tensors without the whole

    def with_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        """The same with the next tensors in the place of its own, if it is learned `by_parts`."""
        return self

    def band(self) -> Band | None:
        """What it says if that is a stretch of keys for each query, the same in all samples and heads; None: more."""
        return None

    def cut(self, part: Rectangle, size: Size) -> Mask:
        """The same mask for a part of the scores, whose positions count from 0 again. `size` is of the whole.

        Overridden where a part can be written down without the whole.
        """
        return Part(self, part, size)

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
            >>> from headwise import masks
            >>> print((masks.causal() & masks.padding([2])).draw(3))
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
        return f"{type(self).__name__.lower()}({self._arguments()})"

    def _arguments(self) -> str:
        return ""


class And(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.parts = (left, right)

    def cut(self, part: Rectangle, size: Size) -> Mask:
        left, right = self.parts
        return And(left.cut(part, size), right.cut(part, size))

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


class Or(Mask):
    def __init__(self, left: Mask, right: Mask) -> None:
        self.parts = (left, right)

    def band(self) -> Band | None:
        left, right = self.parts
        causal_, prefix_ = (left, right) if isinstance(left, Causal) else (right, left)
        if not isinstance(causal_, Causal) or not isinstance(prefix_, Prefix):
            return None
        if not isinstance(causal_.offset, int) or not isinstance(prefix_.length, int):
            return None
        return Band(None, causal_.offset, prefix_.length)

    def cut(self, part: Rectangle, size: Size) -> Mask:
        left, right = self.parts
        return Or(left.cut(part, size), right.cut(part, size))

    def keep(self, size: Size) -> Tensor | None:
        left, right = (part.keep(size) for part in self.parts)
        return None if left is None or right is None else left | right

    def __repr__(self) -> str:
        return f"({self.parts[0]!r} | {self.parts[1]!r})"


class Not(Mask):
    def __init__(self, inner: Mask) -> None:
        self.parts = (inner,)

    def cut(self, part: Rectangle, size: Size) -> Mask:
        return Not(self.parts[0].cut(part, size))

    def keep(self, size: Size) -> Tensor | None:
        keep = self.parts[0].keep(size)
        return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=size.device) if keep is None else ~keep

    def __repr__(self) -> str:
        return f"~{self.parts[0]!r}"


class Part(Mask):
    """A part of a mask that has to be written down as a whole first."""

    def __init__(self, inner: Mask, part: Rectangle, size: Size) -> None:
        self.parts, self.part, self.size = (inner,), part, size

    def keep(self, size: Size) -> Tensor | None:
        return self.part.of(self.parts[0].keep(self.size))

    def score(self, size: Size) -> Tensor | None:
        return self.part.of(self.parts[0].score(self.size))

    def __repr__(self) -> str:
        return f"part({self.parts[0]!r}, {self.part})"


class Appended(Mask):
    """The caller's mask over the first keys, and `count` keys of our own after them that every query sees."""

    def __init__(self, inner: Mask, count: int) -> None:
        self.parts, self.count = (inner,), count

    def keep(self, size: Size) -> Tensor | None:
        return self.pad(self.parts[0].keep(self.inner_size(size)), size, True)

    def score(self, size: Size) -> Tensor | None:
        return self.pad(self.parts[0].score(self.inner_size(size)), size, 0.0)

    def cut(self, part: Rectangle, size: Size) -> Mask:
        (low, high), own = part.keys, size.keys - self.count
        if low >= own or high < own:
            return super().cut(part, size)
        inner = self.parts[0].cut(part._replace(keys=(low, own)), self.inner_size(size))
        return inner if high == own else Appended(inner, high - own)

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


class Causal(Mask):
    def __init__(self, offset: int | Tensor) -> None:
        self.offset = offset
        self.tensors, self.extent = _held(offset)

    def band(self) -> Band | None:
        return Band(None, self.offset) if isinstance(self.offset, int) else None

    def cut(self, part: Rectangle, size: Size) -> Mask:
        per_sample("causal", "offset", self.offset, size)
        return Causal(part.before(self.offset))

    def keep(self, size: Size) -> Tensor | None:
        return lower_triangle(size, per_sample("causal", "offset", self.offset, size))

    def _arguments(self) -> str:
        return "" if isinstance(self.offset, int) and self.offset == 0 else f"offset={said(self.offset)}"


class Window(Mask):
    def __init__(self, left: int | None, right: int | None) -> None:
        self.left, self.right = left, right

    def band(self) -> Band | None:
        return Band(self.left, self.right)

    def cut(self, part: Rectangle, size: Size) -> Mask:
        return Window(*Band(self.left, self.right).seen_from(part.queries[0], part.keys[0])[:2])

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


class Padding(Mask):
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

    def cut(self, part: Rectangle, size: Size) -> Mask:
        self.check(size)
        cuts = []
        for ids, bounds in zip(self.tensors, (part.queries, part.keys), strict=True):
            ids = ids[slice(*part.samples)] if ids.dim() == 2 and ids.shape[0] > 1 else ids
            cuts.append(ids[..., slice(*bounds)])
        return Documents(*cuts)

    def keep(self, size: Size) -> Tensor | None:
        self.check(size)
        query_ids, key_ids = self.tensors
        same = query_ids[..., :, None] == key_ids[..., None, :]
        return same[:, None] if same.dim() == 3 else same[None, None]

    def check(self, size: Size) -> None:
        """Refuse scores of other sizes."""
        lengths = (size.queries, size.keys)
        for name, ids, length in zip(("ids", "key_ids"), self.tensors, lengths, strict=True):
            if ids.shape[-1] != length or (ids.dim() == 2 and ids.shape[0] not in (1, size.batch)):
                rule = f"be ({length},) or ({size.batch}, {length}) for these scores; L != S needs key_ids"
                raise invalid("documents", name, rule, tuple(ids.shape))
            same_device("documents", name, ids, size)

    def _arguments(self) -> str:
        return f"ids {tuple(self.tensors[0].shape)}"


class Prefix(Mask):
    def __init__(self, length: int | Tensor) -> None:
        self.length = length
        self.tensors, self.extent = _held(length)

    def keep(self, size: Size) -> Tensor | None:
        keep = torch.arange(size.keys, device=size.device) < per_sample("prefix", "n", self.length, size)
        return keep if keep.dim() == 4 else keep[None, None, None]

    def _arguments(self) -> str:
        return said(self.length)


class Alibi(Mask):
    """Made by `alibi`."""

    adds = by_parts = True

    def __init__(self, slopes: Tensor, offset: int | Tensor) -> None:
        held, (batch, *_) = _held(offset)
        self.offset, self.tensors, self.extent = offset, (slopes, *held), (batch, slopes.shape[0], None, None)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Mask:
        return Alibi(next(tensors), self.offset)

    def cut(self, part: Rectangle, size: Size) -> Mask:
        return Alibi(self.tensors[0], part.before(self.offset))

    def keep(self, size: Size) -> Tensor | None:
        return None

    def score(self, size: Size) -> Tensor | None:
        slopes = self.tensors[0]
        if slopes.shape[0] != size.heads:
            raise invalid("alibi", "slopes", f"be one for each head, ({size.heads},)", tuple(slopes.shape))
        same_device("alibi", "slopes", slopes, size)
        ahead = steps_ahead(size, per_sample("alibi", "offset", self.offset, size))
        return ahead.abs().neg().to(slopes.dtype) * slopes[:, None, None]

    def _arguments(self) -> str:
        return f"slopes {said(self.tensors[0].detach())}, offset={said(self.offset)}"


class Given(Mask):
    """A mask that exists as a tensor that broadcasts to (B, H, L, S): bool keeps, floating adds."""

    def __init__(self, function: str, argument: str, tensor_BHLS: Tensor) -> None:
        self.function, self.argument = function, argument
        self.tensors, self.adds = (tensor_BHLS,), tensor_BHLS.dtype != torch.bool
        B, H, L, S = tensor_BHLS.shape
        self.extent = (B, H, None if L == 1 else L, None if S == 1 else S)

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


class TorchMask(Given):
    """A mask of `nn.MultiheadAttention`, polarity already turned; its rank is resolved when the sizes are known."""

    def __init__(self, function: str, argument: str, tensor: Tensor, shapes: dict[str, Tensor]) -> None:
        self.function, self.argument = function, argument
        self.tensors, self.adds, self.shapes = (tensor,), tensor.dtype != torch.bool, shapes
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
        rule = f"be {TORCH_SHAPES[self.argument]} with B = {B}, H = {H}, L = {L}, S = {S}"
        raise invalid(self.function, self.argument, rule, tuple(shape), **self.shapes)


def appended(mask: Mask | None, count: int) -> Mask | None:
    """`mask` over all keys but the last `count`, which every query sees."""
    return mask if mask is None or count == 0 else Appended(mask, count)


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
    return [term for part in mask.parts for term in terms(part)] if isinstance(mask, And) else [mask]


def walk_tensors(mask: Mask) -> Iterator[Tensor]:
    """All tensors that a mask holds."""
    yield from mask.tensors
    for part in mask.parts:
        yield from walk_tensors(part)


def with_learned(mask: Mask, tensors: Sequence[Tensor]) -> Mask:
    """The same mask with other tensors in the place of those that `learned` finds, in its order."""
    left = iter(tensors)
    return functools.reduce(And, [term.with_tensors(left) for term in terms(mask)])


def rebuilt(mask: Mask, parts: Sequence[Mask]) -> Mask:
    """A mask that is composed of others, composed of these."""
    assert isinstance(mask, (And, Or, Not))
    return type(mask)(*parts)


def _is_trained(mask: Mask) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in walk_tensors(mask))


def learned(mask: Mask | None) -> list[Tensor] | None:
    """The tensors of a mask that take gradients, if each can be computed part by part; None: one cannot."""
    trained = [term for term in ([] if mask is None else terms(mask)) if _is_trained(term)]
    if not all(term.by_parts for term in trained):
        return None
    return [term.tensors[0] for term in terms(mask) if term.by_parts] if mask is not None and trained else []


def is_flag(mask: Mask) -> bool:
    """Whether it is what kernels have a causal flag for."""
    return isinstance(mask, Causal) and isinstance(mask.offset, int) and mask.offset == 0


def _operand(symbol: str, other: object) -> Mask:
    if not isinstance(other, Mask):
        rule = "be a Mask (wrap a tensor in masks.dense or masks.bias)"
        raise invalid(f"Mask {symbol}", "the other operand", rule, said(other))
    return other


def _boolean(symbol: str, mask: Mask) -> Mask:
    if any(term.adds for term in terms(mask)):
        raise invalid(f"Mask {symbol}", "an operand", "hold no bias: scores add under & only", repr(mask))
    return mask


def both(left: Mask | None, right: Mask) -> Mask:
    return right if left is None else And(left, right)


def _held(value: int | Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int, None, None]]:
    """The tensors and the extent of a mask made of one number per batch or per sample."""
    if not isinstance(value, Tensor):
        return (), (1, 1, None, None)
    return (value,), (value.shape[0] if value.dim() else 1, 1, None, None)
