"""The one seam for kernels: each backend says what it cannot take, and one function chooses.

Letters: B batch, H query heads, G key/value heads, L query positions, S key positions, K head width.

A backend is an object with `name`, `why_not(request) -> list[str]`, `run(request)`. Nothing is switched globally:
the choice is made per call from the request alone, and by size or device in eager mode only, so that a compiled,
exported or vmapped call has one path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import _len_torch_dispatch_stack

from headwise.core.lowering import NOTHING_HIDDEN, Lowered, Size


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
    if request.mask.ragged is not None:
        return RAGGED
    return PLAIN if SDPA.why_not(request) or PLAIN.faster(request) else SDPA


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
        _teach_double_backward(out, (query, key, value, NOTHING_HIDDEN, None), view)
    return view


class _Plain:
    """Two matrix products and a softmax: takes everything, differentiates every way, holds the weights."""

    name = "plain"

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def why_not(self, request: Request) -> list[str]:
        return []

    def faster(self, request: Request) -> bool:
        """Whether it beats SDPA on a request that both can run."""
        unmasked = request.mask is NOTHING_HIDDEN  # a mask is two more passes over the scores here, and none there
        return unmasked and not needs_grad(request) and self.shorter(request.query, request.key, request.value)

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
        for first in range(0, L, rows):
            block = slice(first, first + rows)
            for head in range(H):
                out[:, head : head + 1, block], weight = self.run_with_weights(_part(request, head, block))
                if average is None:
                    average = weight.new_empty(B, L, S)
                if head == 0:
                    average[:, block] = weight[:, 0]
                else:
                    average[:, block] += weight[:, 0]
                del weight  # or it would live through the next block's softmax
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
            _teach_double_backward(out, request[:5])
        return out if dead is None else out.masked_fill(dead, 0)


class _Ragged:
    """SDPA on one sequence after the other: nothing that is padding, or of another sequence, is computed."""

    name = "ragged"

    def __repr__(self) -> str:
        return f"<backend {self.name}>"

    def why_not(self, request: Request) -> list[str]:
        if request.mask.ragged is not None:
            return []
        known = "lengths that can be read here and save enough: padding on the right, or documents"
        return [f"it needs a mask of {known}, with causal() at most"]

    def run(self, request: Request) -> Tensor:
        query, key, value, (causal, _, _, ragged) = request[:4]
        assert ragged is not None
        if ragged.packed:
            queries, keys, values = (
                query.split(ragged.queries, 2),
                key.split(ragged.keys, 2),
                value.split(ragged.keys, 2),
            )
        else:
            queries = query.split(1)
            keys, values = (
                tuple(sample[:, :, :length] for sample, length in zip(whole.split(1), ragged.keys, strict=True))
                for whole in (key, value)
            )
        one = request._replace(mask=Lowered(causal=causal))
        parts = [
            SDPA.run(one._replace(query=q, key=k, value=v)).transpose(1, 2)  # as the kernel lays it out
            for q, k, v in zip(queries, keys, values, strict=True)
        ]
        return torch.cat(parts, dim=1 if ragged.packed else 0).transpose(1, 2)


PLAIN = _Plain()
SDPA = _Sdpa()
RAGGED = _Ragged()
BACKENDS: tuple[Backend, ...] = (RAGGED, SDPA, PLAIN)

# Measured by benchmarks/run.py: below these SDPA wins or the two are within noise.
_FEW_PAIRS = 2**10  # of a head
_FEW_NUMBERS = 2**10  # of a head's queries
_SCORES_IN_CACHE = 2**21
_FEW_WEIGHTS = 2**18  # of all heads: a loop over heads takes longer than their memory is worth
_BLOCK = 2**20  # weights of one head held at a time while they are averaged: a few MiB, which stay in the cache
_MANY_HEADS = 2**22  # 128 of 32 numbers, 1024 of 16


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
    query, mask = request.query, request.mask
    scale = 1 / math.sqrt(query.shape[-1]) if request.scale is None else request.scale
    score = _products(query, request.key, scale)
    if request.softcap is not None:
        score = request.softcap * torch.tanh(score / request.softcap)
    hidden, bias = hidden_keys(mask, request.size)
    dead = None
    if bias is not None:
        score = score + bias
    if hidden is not None:
        if mask.keep is not None or bias is not None:
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


def hidden_keys(mask: Lowered, size: Size) -> tuple[Tensor | None, Tensor | None]:
    """(what is hidden, the bias with 0 in place of -inf), each broadcastable to (B, H, L, S) or None."""
    keep, bias = mask.whole_keep(size), mask.bias
    hidden = None if keep is None else ~keep
    if bias is not None:
        infinite = bias == -math.inf
        hidden = infinite if hidden is None else hidden | infinite
        bias = bias.masked_fill(infinite, 0)
    return hidden, bias


def _part(request: Request, head: int, rows: slice) -> Request:
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
    choice = _FUSED_CHOICE(
        query, key, value, _one_mask(mask), 0.0, True, scale=request.scale, enable_gqa=request.grouped
    )
    return bool(choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def _teach_double_backward(out: Tensor, call: tuple[Any, ...], view: Tensor | None = None) -> None:
    """Give the fused kernel the second derivative it lacks, at the cost of a hook when nobody asks for one.

    The hook runs after the kernel's backward. With `create_graph` it replaces the gradients by those of the plain
    formula, which can be differentiated again; otherwise it lets go of the tensors it kept alive, like the node itself.

    Args:
        out: the kernel's output.
        call: the beginning of a Request: query, key, value, mask and scale.
        view: the only use of `out`, if there is one. A hook on a tensor is cheaper than one on a node, and this one
            adds the other when it is needed; on `out` itself it would be a reference cycle.
    """
    node: Any = out.grad_fn  # there is one: whoever calls has asked
    kind = type(node)
    fused = _FUSED_NODES.get(kind)
    if fused is None:
        fused = _FUSED_NODES[kind] = kind.__name__.startswith("ScaledDotProduct")
    if not fused or _SAVED_HOOKS(True) is not None:
        return  # under activation checkpointing or offloading, to hold the inputs would undo it: torch's error stands
    held = [call]
    versions = None if view is not None else _versions(call)  # a view's inputs are nobody else's to change

    def after(grads: Sequence[Tensor | None], grad_outs: Sequence[Tensor]) -> Any:
        if torch.is_grad_enabled():
            if held and versions not in (None, _versions(held[0])):
                raise RuntimeError(
                    "attention: a query, key, value or mask was changed in place after the forward pass, so its "
                    "gradient cannot be built for a second derivative; change a clone instead"
                )
            return _plain_gradients(held[0], grads, grad_outs[0]) if held else None
        if not _KEEPS_GRAPH():
            held.clear()
        return None

    def before(_: Tensor) -> None:
        if torch.is_grad_enabled():
            handles.append(node.register_hook(after))
        elif not _KEEPS_GRAPH():
            held.clear()
        while len(handles) > 1:  # one is enough, however often the graph is walked
            handles.pop(0).remove()

    if view is None:
        node.register_hook(after)
        return
    handles: list[Any] = []
    view._backward_hooks = {0: before}  # what Tensor.register_hook does, without a handle to remove it by
    above: Any = view.grad_fn
    above._register_hook_dict(view)


def _versions(call: tuple[Any, ...]) -> list[int]:
    """How often the tensors of a call have been written to; the kernel saved some of them as copies."""
    tensors = (*call[:3], call[3].keep, call[3].bias)
    return [0 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def _plain_gradients(call: tuple[Any, ...], grads: Sequence[Tensor | None], grad_out: Tensor) -> Any:
    """The kernel's gradients by the plain formula, so that they can be differentiated; None to keep the kernel's."""
    *inputs, mask, scale = call
    if any(grad is not None and grad.shape != tensor.shape for grad, tensor in zip(grads, inputs, strict=False)):
        return None  # this kernel saw its inputs padded or repeated: its own gradients stand
    if mask.bias is not None:
        mask = mask._replace(bias=mask.bias.detach())
    # aliases, since the inputs may depend on each other and only partial derivatives are wanted
    dtype = grad_out.dtype  # autocast may have cast them for the kernel
    aliases = [tensor.view_as(tensor) if tensor.dtype == dtype else tensor.to(dtype) for tensor in inputs]
    plain = PLAIN.run(Request(aliases[0], aliases[1], aliases[2], mask, scale))
    asked = [grad is not None for grad in grads[:3]]
    wanted = [alias for alias, was in zip(aliases, asked, strict=True) if was]
    again = iter(torch.autograd.grad(plain, wanted, grad_out, create_graph=True) if wanted else ())
    return (*(next(again) if was else None for was in asked), *grads[3:])


def _private(owner: object, name: str, otherwise: object) -> Callable[..., Any]:
    """A private operator of torch; in a release that lacks it, an answer that takes the general path."""
    return getattr(owner, name, lambda *_, **__: otherwise)


_FUSED_NODES: dict[type, bool] = {}  # whether an autograd node is that of a fused kernel
_FUSED_CHOICE = _private(torch, "_fused_sdp_choice", -1)
_KEEPS_GRAPH = _private(torch._C._autograd, "_get_current_graph_task_keep_graph", True)
_SAVED_HOOKS = _private(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_IN_TRANSFORM = _private(torch._C, "_are_functorch_transforms_active", False)
