"""The one seam for kernels: each backend says what it cannot take, and one function chooses.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width.

A backend is an object with `name`, `why_not(request) -> list[str]`, `run(request)`. Nothing is switched globally:
the choice is made per call from the request alone, and by size or device in eager mode only, so that a compiled,
exported or vmapped call has one path.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from headwise._checks import invalid
from headwise.core.algebra import learned
from headwise.core.blockwise import BLOCK, Options
from headwise.core.lowering import NOTHING_HIDDEN, Lowered, Size, flagged_pairs
from headwise.core.tiles import HAS_FUSED, Call, Tiled, again, widened
from headwise.core.twice import private, teach
from headwise.core.varlen import VARLEN


class Request(NamedTuple):
    """One call of attention, shapes checked and masks lowered.

    Attributes:
        query, key, value: (B, H, L, K), (B, G, S, K), (B, G, S, V).
        mask: what is hidden and added.
        scale: factor on the scores; None: 1 / sqrt(K).
        dropout: probability on the weights, already 0 outside training.
        drop: a module or function called on the weights (B, H, L, S) in place of `dropout`.
        softcap, sink: as in `attention`.
        grouped: whether G < H.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Lowered
    scale: float | None = None
    dropout: float = 0.0
    drop: Callable[[Tensor], Tensor] | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    grouped: bool = False

    @property
    def size(self) -> Size:
        B, H, L, _ = self.query.shape
        return Size(B, H, L, self.key.shape[-2], self.query.device)


class Backend(Protocol):
    """A kernel behind the seam."""

    name: str

    def why_not(self, request: Request) -> list[str]:
        """Reasons why it cannot run this request; empty where it can."""
        ...

    def cost(self, request: Request) -> tuple[float, int]:
        """FLOPs of the forward pass, and bytes that it holds at once beside inputs and output, about."""
        ...

    def run(self, request: Request) -> Tensor:
        """(B, H, L, V). Rows that see no key are 0, with gradient 0."""
        ...


def eager() -> bool:
    """Whether this is an ordinary call: not compiled, exported, traced or inside a function transform."""
    return not (torch.compiler.is_compiling() or transformed() or torch.jit.is_tracing())


def transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode AD is at work, which fused kernels have no rules for."""
    return not torch.compiler.is_compiling() and (_IN_TRANSFORM() or forward_ad._current_level >= 0)


def readable(tensor: Tensor) -> bool:
    """Whether the tensor's numbers can be read without a wait, and no tracer needs one path for all numbers."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return eager() and plain and not _len_torch_dispatch_stack()


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for this kind of device; some, such as meta, have none."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def choose(request: Request) -> Backend:
    """The backend for a request: torch's SDPA, or the plain one where SDPA cannot run it or is slower."""
    if request.mask.tiling is not None:
        return TILED
    if request.mask.sequences is not None:
        return VARLEN
    return PLAIN if SDPA.why_not(request) or PLAIN.faster(request) else SDPA


def named(function: str, name: str | None, request: Request) -> Backend:
    """The backend of this name, or that of `choose` for None.

    Raises:
        ValueError: there is no such backend, or it cannot run the request.
    """
    if name is None:
        return choose(request)
    for backend in BACKENDS:
        if backend.name == name:
            reasons = backend.why_not(request)
            if reasons:
                rule = f"take this call, and {name} does not: " + "; ".join(reasons)
                raise invalid(function, "backend", rule, repr(name), query=request.query, key=request.key)
            return backend
    known = " or ".join(repr(backend.name) for backend in BACKENDS)
    raise invalid(function, "backend", f"be {known}, or None to let headwise choose", repr(name))


def run_unmasked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`choose` and `run` without mask, dropout or options, heads not grouped: the call whose overhead shows.

    Returns:
        (B, L, H, K), a view of the kernel's output, whose only use it has to be.
    """
    recorded = query.requires_grad and torch.is_grad_enabled()  # then no other kernel is quicker
    if _IN_TRANSFORM() or forward_ad._current_level >= 0 or (not recorded and PLAIN.shorter(query, key, value)):
        return PLAIN.run(Request(query, key, value, NOTHING_HIDDEN)).transpose(1, 2)
    out = functional.scaled_dot_product_attention(query, key, value)
    view = out.transpose(1, 2)
    if view.requires_grad:
        teach(out, (query, key, value, NOTHING_HIDDEN, None), _by_formula, view)
    return view


def run_step(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`choose` and `run` of one query without mask, options or gradients: (B, H, 1, K)."""
    grouped = query.shape[1] != key.shape[1]
    request = Request(query, key, value, NOTHING_HIDDEN, grouped=grouped)
    if PLAIN.faster(request):
        return PLAIN.run(request)
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=grouped)


class _Plain:
    """Two matrix products and a softmax: takes everything, differentiates every way, holds the weights."""

    name = "plain"

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def why_not(self, request: Request) -> list[str]:
        return []

    def cost(self, request: Request) -> tuple[float, int]:
        scores = math.prod(request.size[:4])
        width = request.query.shape[-1] + request.value.shape[-1]
        held = scores * max(4, request.query.element_size()) * (2 if request.dropout > 0 or request.drop else 1)
        return 2.0 * scores * width, held

    def faster(self, request: Request) -> str:
        """Why it beats SDPA on a request that both can run; empty where it does not."""
        unmasked = request.mask is NOTHING_HIDDEN  # a mask is two more passes over the scores here, and none there
        if not unmasked or needs_grad(request):
            return ""
        if self.shorter(request.query, request.key, request.value):
            return "many short heads in inference: a fused kernel's set-up costs more than it saves"
        if request.grouped and self._shares(request):
            return "few queries in inference: all heads that share a key make one product, the kernel one each"
        return ""

    def _shares(self, request: Request) -> bool:
        """A step of decoding: the queries of all heads that share a key are the rows of one product."""
        query, key = request.query, request.key
        if torch.compiler.is_compiling():
            return False  # before a symbolic size is compared
        B, H, L, K = query.shape
        return (
            _FEW_ROWS * key.shape[1] >= L * H
            and B * H * L * key.shape[2] * K >= _MUCH_SHARED
            and query.dtype == torch.float32
            and query.device.type == "cpu"
            and eager()
        )

    def shorter(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Many short heads in inference on several threads: a fused kernel's set-up costs more than it saves."""
        if torch.compiler.is_compiling():
            return False  # before a symbolic size is compared
        B, H, L, K = query.shape
        S = key.shape[-2]
        return (
            L * S <= _FEW_PAIRS
            and L * K <= _FEW_NUMBERS
            and B * H * min(K, 32) ** 3 >= _MANY_HEADS
            and B * H * L * S <= _SCORES_IN_CACHE
            and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad))
            and query.dtype == torch.float32
            and query.device.type == "cpu"
            and torch.get_num_threads() > 1
            and eager()
        )

    def run(self, request: Request) -> Tensor:
        return self.run_with_weights(request)[0]

    def run_with_weights(self, request: Request) -> tuple[Tensor, Tensor]:
        """Output, and the weights (B, H, L, S) before dropout."""
        weight, dead = softmax_scores(request)
        used = weight.to(request.value.dtype)
        if request.drop is not None:
            used = request.drop(used.clone())  # it may work in place, on what is returned as the weights
        elif request.dropout > 0:
            used = functional.dropout(used, request.dropout)
        out = _times_heads(used, request.value)
        if dead is not None:
            out, weight = out.masked_fill(dead, 0), weight.masked_fill(dead, 0)
        return out, weight

    def run_with_average(self, request: Request) -> tuple[Tensor, Tensor]:
        """Output, and the weights averaged over heads (B, L, S), a block of one head at a time if nothing keeps it."""
        if request.drop is not None or needs_grad(request) or not eager() or _are_few(request):
            out, weight = self.run_with_weights(request)
            return out, weight.mean(dim=1)
        request = request._replace(mask=Lowered(keep=request.mask.whole_keep(request.size), bias=request.mask.bias))
        B, H, L, _ = request.query.shape
        S, V = request.value.shape[-2:]
        out = request.value.new_empty(B, L, H, V).transpose(1, 2)
        average: Tensor | None = None
        rows = max(1, _BLOCK // max(1, B * S))
        usual = request.dropout == 0 and request.softcap is None and request.sink is None
        scores = request.query.new_empty(B * min(rows, L) * S) if usual and request.query.dtype in _PRECISE else None
        small = scores is not None and _are_small(request)
        for first in range(0, L, rows):
            block = slice(first, first + rows)
            for head in range(H):
                part = one_head(request, head, block)
                if scores is None:
                    out[:, head : head + 1, block], whole = self.run_with_weights(part)
                    weight, share = whole[:, 0], None
                    del whole  # or it would live through the next block's softmax
                else:
                    weight, share = _share_out(part, scores, out[:, head : head + 1, block], small)
                if average is None:
                    average = weight.new_zeros(B, L, S)
                if share is None:
                    average[:, block] += weight
                else:
                    average[:, block].addcmul_(weight, share)
                del weight
        if average is None:  # no queries
            average = softmax_scores(request)[0].sum(dim=1)
        return out, average.div_(H)


class _Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention`, with the flag or a broadcast view, never an expanded mask."""

    name = "sdpa"

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def why_not(self, request: Request) -> list[str]:
        drop, softcap, sink = request[6:9]
        in_transform = transformed()
        if drop is None and softcap is None and sink is None and not in_transform:
            return []  # the usual answer, early
        reasons = []
        if softcap is not None:
            reasons.append("softcap changes the scores, which the kernel keeps to itself")
        if sink is not None:
            reasons.append("a sink adds a logit without a key")
        if drop is not None:
            reasons.append("a module is called on the weights in place of dropout")
        if in_transform:
            reasons.append("a function transform (torch.func, forward-mode AD) needs rules the kernel lacks")
        return reasons

    def cost(self, request: Request) -> tuple[float, int]:
        flops, held = PLAIN.cost(request)
        B, H, L, S, device = request.size
        if device.type != "cpu" or request.dropout > 0:  # what other devices' kernels do is theirs
            return flops, held if device.type == "cpu" else 4 * B * H * L
        pairs = flagged_pairs(L, S) if request.mask.causal else L * S
        return flops * pairs / max(1, L * S), 4 * B * H * L

    def run(self, request: Request) -> Tensor:
        query, key, value, mask, scale, dropout = request[:6]
        grouped, flag, attn_mask, dead = request.grouped, mask.causal, None, None
        if flag and scale is not None and scale <= 0:  # the CPU kernel masks before it scales: -inf * 0 is NaN
            flag, mask = False, mask._replace(causal=False, keep=mask.whole_keep(request.size))
        if mask.keep is not None or mask.bias is not None:
            if flag and not _takes_flag_and_mask(request):
                flag, mask = False, mask._replace(causal=False, keep=mask.whole_keep(request.size))
            if query.device.type != "cpu":  # torch promises 0 for a row without a key only there
                mask, dead = revive(mask, request.size)
            attn_mask = _one_mask(mask)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, flag, scale=scale, enable_gqa=grouped
        )
        if out.requires_grad and dropout == 0 and not torch.compiler.is_compiling():
            teach(out, request[:5], _by_formula)
        return out if dead is None else out.masked_fill(dead, 0)


class _Tiled:
    """Attention on the parts of the scores that anybody sees: what is padding, past or of others is not computed."""

    name = "tiled"

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def why_not(self, request: Request) -> list[str]:
        if request.mask.tiling is not None:
            return []
        reasons = []
        if not readable(request.query):
            reasons.append("it needs an eager call on plain tensors on the CPU, outside of function transforms")
        if request.drop is not None:
            reasons.append("a module is called on the weights in place of dropout")
        if request.mask.bias is not None and request.mask.bias.requires_grad:
            reasons.append("a bias that is learned number by number needs the gradient of all scores")
        return reasons or [NOT_WORTH]

    def cost(self, request: Request) -> tuple[float, int]:
        tiling = request.mask.tiling
        assert tiling is not None
        B, H, L, _ = request.query.shape
        pair = 2.0 * H * (request.query.shape[-1] + request.value.shape[-1])
        blocks = 2 * BLOCK if request.dropout > 0 or request.softcap is not None or learned(tiling.rest) else 0
        return pair * sum(tile.pairs for tile in tiling.tiles), 4 * (B * H * L + blocks)

    def run(self, request: Request) -> Tensor:
        query, key, value, mask, scale, dropout, _, softcap, sink, _ = request
        tiling = mask.tiling
        assert tiling is not None
        if autocasts(query.device) and query.dtype != torch.float64:  # as torch does for its own kernels
            dtype = torch.get_autocast_dtype(query.device.type)
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        K, V = query.shape[-1], value.shape[-1]
        scale = 1 / math.sqrt(K) if scale is None else scale
        query, key, value = (widened(tensor, max(K, V)) for tensor in (query, key, value))
        learned_ = learned(tiling.rest) or []
        options = None
        if dropout > 0 or softcap is not None or learned_ or not HAS_FUSED:
            seed = int(torch.randint(2**62, (), device="cpu")) if dropout > 0 else 0
            options = Options(dropout, seed, softcap)
        call = Call(tiling, scale, options, functools.partial(again, _by_formula, scale, options, tiling))
        with torch.autocast(query.device.type, enabled=False):
            out: Tensor = Tiled.apply(query, key, value, sink, call, *learned_)
        return out[..., :V] if out.shape[-1] > V else out


PLAIN = _Plain()
SDPA = _Sdpa()
TILED = _Tiled()
BACKENDS: tuple[Backend, ...] = (TILED, VARLEN, SDPA, PLAIN)

NOT_WORTH = "what can be left out of these scores is nothing, or not worth the cuts"

# Measured by benchmarks/run.py: below these SDPA wins or the two are within noise.
_FEW_PAIRS = 2**10  # of a head
_FEW_NUMBERS = 2**10  # of a head's queries
_SCORES_IN_CACHE = 2**21
_FEW_WEIGHTS = 2**18  # of all heads: a loop over heads takes longer than their memory is worth
_BLOCK = 2**21  # weights of one head held at a time while they are averaged: a few MiB, which stay in the cache
_PRECISE = (torch.float32, torch.float64)
_MANY_HEADS = 2**22  # 128 of 32 numbers, 1024 of 16
_FEW_ROWS = 16  # query positions of all heads that share a key
_MUCH_SHARED = 2**21  # products of a query's and a key's numbers, in all


def _are_few(request: Request) -> bool:
    B, H, L, S, _ = request.size
    return B * H * L * S <= _FEW_WEIGHTS


def needs_grad(request: Request) -> bool:
    """Whether autograd will keep the intermediates of this call."""
    if not torch.is_grad_enabled():
        return False
    query, key, value, mask = request[:4]
    bias, sink = mask.bias, request.sink
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (bias is not None and bias.requires_grad)
        or (sink is not None and sink.requires_grad)
    )


def softmax_scores(request: Request) -> tuple[Tensor, Tensor | None]:
    """Weights (B, H, L, S) before dropout, in float32 at least, and the rows that see nothing.

    Returns:
        The weights, and a bool tensor broadcastable to (B, H, L, 1), True where a row saw no key and its weights are
        meaningless but finite (the caller sets what it uses of them to 0); None where that cannot happen.
    """
    score, hidden = scores(request)
    dead = None
    if hidden is not None:
        if request.mask.keep is not None or request.mask.bias is not None:
            dead = hidden.all(dim=-1, keepdim=True)
            if request.sink is not None:
                dead = dead & (request.sink == -math.inf).view(1, -1, 1, 1)  # any other sink takes all of the weight
            hidden = hidden & ~dead  # softmax over nothing is NaN, in the gradient too: let it see all, drop it later
        score = score.masked_fill(hidden, -math.inf)
    if request.sink is None:
        return torch.softmax(score, dim=-1), dead
    B, H, L, _ = score.shape
    sink = request.sink.to(score.dtype).view(1, H, 1, 1).expand(B, H, L, 1)
    return torch.softmax(torch.cat([score, sink], dim=-1), dim=-1)[..., :-1], dead


def scores(request: Request) -> tuple[Tensor, Tensor | None]:
    """Scores (B, H, L, S) in float32 at least, bias added, and which are hidden, broadcastable to them; None: none."""
    scale = 1 / math.sqrt(request.query.shape[-1]) if request.scale is None else request.scale
    score = _products(request.query, request.key, scale)
    if request.softcap is not None:
        score = request.softcap * torch.tanh(score / request.softcap)
    hidden, bias = hidden_keys(request.mask, request.size)
    return score if bias is None else score + bias, hidden


def _are_small(request: Request) -> bool:
    """Whether 2 to the power of any score is far from overflow, also when it meets a value: |q . k| <= |q| |k|."""
    if request.mask.bias is not None or request.query.device.type != "cpu":  # elsewhere to read is to wait
        return False
    scale = 1 / math.sqrt(request.query.shape[-1]) if request.scale is None else request.scale
    tensors = (request.query, request.key, request.value)
    query, key, value = (float(torch.linalg.vector_norm(t, dim=-1).amax()) if t.numel() else 0.0 for t in tensors)
    return abs(scale) * query * key < 20 and value < 1e10  # not where one of them is NaN


def _share_out(request: Request, memory: Tensor, out: Tensor, small: bool) -> tuple[Tensor, Tensor]:
    """Write the output of one head, and return its weights: (B, L, S), which lie in `memory`, times (B, L, 1).

    Scores that are `small` need no maximum taken off, which is two passes over them out of seven.
    """
    query, key, value, mask, scale = request[:5]
    B, _, L, S, _ = request.size
    hidden, bias = hidden_keys(mask, request.size)
    unit = math.log2(math.e) if bias is None else 1.0  # exp2 is quicker, but the lowest of floats times that is -inf
    factor = unit / math.sqrt(query.shape[-1]) if scale is None else unit * scale
    score = memory[: B * L * S].view(B, L, S)
    torch.baddbmm(score, query[:, 0], key[:, 0].mT, beta=0, alpha=factor, out=score)
    if bias is not None:
        score += bias[:, 0]
    if hidden is not None:
        score.masked_fill_(hidden[:, 0], -math.inf)
    if not small:
        score.sub_(score.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(score.dtype).min))
    score = score.exp2_() if bias is None else score.exp_()
    share = score.sum(dim=-1, keepdim=True).clamp_(min=torch.finfo(score.dtype).tiny).reciprocal_()
    out[:, 0] = (score @ value[:, 0]).mul_(share)  # a row that sees nothing is 0, whatever its share
    return score, share


def hidden_keys(mask: Lowered, size: Size) -> tuple[Tensor | None, Tensor | None]:
    """(what is hidden, the bias with 0 in place of -inf), each broadcastable to (B, H, L, S) or None."""
    keep, bias = mask.whole_keep(size), mask.bias
    hidden = None if keep is None else ~keep
    if bias is not None:
        infinite = bias == -math.inf
        hidden = infinite if hidden is None else hidden | infinite
        bias = bias.masked_fill(infinite, 0)
    return hidden, bias


def _by_formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Lowered,
    scale: float | None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    return PLAIN.run(Request(query, key, value, mask, scale, softcap=softcap, sink=sink))


def one_head(request: Request, head: int, rows: slice) -> Request:
    """The same request for some rows of a single head, as views."""
    H, G = request.query.shape[1], request.key.shape[1]
    pick, shared = slice(head, head + 1), slice(head // (H // G), head // (H // G) + 1)

    def of(part: Tensor | None) -> Tensor | None:
        if part is None:
            return None
        part = part if part.shape[1] == 1 else part[:, pick]
        return part if part.shape[2] == 1 else part[:, :, rows]

    return request._replace(
        query=request.query[:, pick, rows],
        key=request.key[:, shared],
        value=request.value[:, shared],
        mask=Lowered(keep=of(request.mask.keep), bias=of(request.mask.bias)),
        sink=None if request.sink is None else request.sink[pick],
        grouped=False,
    )


def _products(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Scaled scores in float32 at least, as fused kernels have them: 16 bit would round them, or overflow."""
    if query.dtype in (torch.float16, torch.bfloat16):
        query, key = query.float(), key.float()
    if autocasts(query.device):
        with torch.autocast(query.device.type, enabled=False):
            return _times_heads(query * scale, key.transpose(-1, -2))
    return _times_heads(query * scale, key.transpose(-1, -2))


def _times_heads(left: Tensor, right: Tensor) -> Tensor:
    """left (B, H, L, n) @ right (B, G, n, m), each right head shared by H / G left heads without a copy."""
    B, H, L, n = left.shape
    G = right.shape[1]
    if H == G:
        return left @ right
    if not eager():  # sizes may be symbols, of which a reshape would ask what it must not
        return left @ right.repeat_interleave(H // G, dim=1)
    return (left.reshape(B, G, (H // G) * L, n) @ right).view(B, H, L, right.shape[-1])


def _one_mask(mask: Lowered) -> Tensor:
    """SDPA's single mask, causal flag apart."""
    keep, bias = mask.keep, mask.bias
    if bias is None:
        assert keep is not None
        return keep
    return bias if keep is None else bias.masked_fill(~keep, -math.inf)


def revive(mask: Lowered, size: Size) -> tuple[Lowered, Tensor]:
    """Let the rows that see no key see them all, and name them (bool, broadcasts to (B, H, L, 1)).

    For kernels that may give NaN for such a row: the caller sets its output to 0 afterwards, and so its gradient.
    """
    hidden, bias = hidden_keys(mask, size)
    assert hidden is not None
    dead = hidden.all(dim=-1, keepdim=True)
    return Lowered(keep=~hidden | dead, bias=bias), dead


def _takes_flag_and_mask(request: Request) -> bool:
    """torch's CPU flash kernel applies both, and skips half the work; every other kernel refuses the pair."""
    query, key, value, mask = request[:4]
    if request.dropout > 0 or query.device.type != "cpu" or not eager():
        return False
    if type(query) is not Tensor or (mask.bias is not None and mask.bias.requires_grad):
        return False
    options = {"scale": request.scale, "enable_gqa": request.grouped}
    choice = _FUSED_CHOICE(query, key, value, _one_mask(mask), 0.0, True, **options)
    return bool(choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


_FUSED_CHOICE = private(torch, "_fused_sdp_choice", -1)
_IN_TRANSFORM = private(torch._C, "_are_functorch_transforms_active", False)
