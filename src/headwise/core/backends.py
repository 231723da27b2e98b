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
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from headwise.core.masks import Lowered, Size


class Request(NamedTuple):
    """One call of attention, shapes checked and masks lowered.

    Attributes:
        query, key, value: (B, H, L, K), (B, G, S, K), (B, G, S, V).
        mask: what is hidden and added.
        scale: factor on the scores.
        dropout: probability on the weights, already 0 outside training.
        drop: a module or function called on the weights (B, H, L, S) in place of `dropout`.
        softcap, sink: as in `attention`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Lowered
    scale: float
    dropout: float = 0.0
    drop: Callable[[Tensor], Tensor] | None = None
    softcap: float | None = None
    sink: Tensor | None = None

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
    if torch.compiler.is_compiling():
        return False
    return _functorch_active() or forward_ad._current_level >= 0


def choose(request: Request) -> Backend:
    """The backend for a request: torch's SDPA, or the plain one where SDPA cannot run it or is slower."""
    if SDPA.why_not(request) or PLAIN.faster(request):
        return PLAIN
    return SDPA


class _Plain:
    """Two matrix products and a softmax: takes everything, differentiates every way, holds the weights."""

    name = "plain"

    def why_not(self, request: Request) -> list[str]:
        return []

    def faster(self, request: Request) -> bool:
        """Whether it beats SDPA: many short heads in inference on a CPU, where a fused kernel's set-up dominates."""
        if torch.compiler.is_compiling():
            return False  # first: a symbolic size must not be compared
        query = request.query
        B, H, L, K = query.shape
        return (
            L <= _SHORT
            and query.device.type == "cpu"
            and query.dtype == torch.float32
            and request.key.shape[-2] <= _SHORT
            and B * H >= _MANY_HEADS
            and K >= _WIDE_HEAD
            and not needs_grad(request)
            and eager()
        )

    def run(self, request: Request) -> Tensor:
        return self.run_with_weights(request)[0]

    def run_with_weights(self, request: Request) -> tuple[Tensor, Tensor]:
        """Output, and the weights (B, H, L, S) before dropout."""
        weight, dead = softmax_scores(request)
        used = weight.to(request.value.dtype)
        if request.drop is not None:
            used = request.drop(used)
        elif request.dropout > 0:
            used = functional.dropout(used, request.dropout)
        out = _times_heads(used, request.value)
        if dead is not None:
            out, weight = out.masked_fill(dead, 0), weight.masked_fill(dead, 0)
        return out, weight

    def run_with_average(self, request: Request) -> tuple[Tensor, Tensor]:
        """Output, and the weights averaged over heads (B, L, S), one head at a time where nothing keeps them alive."""
        H = request.query.shape[1]
        if H == 1 or request.drop is not None or needs_grad(request) or not eager():
            out, weight = self.run_with_weights(request)
            return out, weight.mean(dim=1)
        outs, total = [], None
        for head in range(H):
            out, weight = self.run_with_weights(one_head(request, head))
            outs.append(out)
            total = weight if total is None else total.add_(weight)
        assert total is not None
        return torch.cat(outs, dim=1), total[:, 0].div_(H)


class _Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention`, with the flag or a broadcast view, never an expanded mask."""

    name = "sdpa"

    def why_not(self, request: Request) -> list[str]:
        reasons = []
        if request.softcap is not None:
            reasons.append("softcap changes the scores, which the kernel keeps to itself")
        if request.sink is not None:
            reasons.append("a sink adds a logit without a key")
        if request.drop is not None:
            reasons.append("a module is called on the weights in place of dropout")
        if transformed():
            reasons.append("a function transform (torch.func, forward-mode AD) needs rules the kernel lacks")
        return reasons

    def run(self, request: Request) -> Tensor:
        query, key, value, mask, scale, dropout = request[:6]
        grouped = query.shape[1] != key.shape[1]
        flag, attn_mask, dead = mask.causal, None, None
        if mask.keep is not None or mask.bias is not None:
            if flag and not _takes_flag_and_mask(request, grouped):
                flag, mask = False, mask._replace(causal=False, keep=mask.whole_keep(request.size))
            if query.device.type != "cpu":  # torch promises 0 for a row without a key only there
                mask, dead = revive(mask, request.size)
            attn_mask = _one_mask(mask)
        out = functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout, flag, scale=scale, enable_gqa=grouped
        )
        if out.requires_grad and not torch.compiler.is_compiling():
            _teach_double_backward(out, request)
        return out if dead is None else out.masked_fill(dead, 0)


PLAIN = _Plain()
SDPA = _Sdpa()
BACKENDS: tuple[Backend, ...] = (SDPA, PLAIN)

# Measured by benchmarks/run.py: below these SDPA wins or the two are within noise.
_SHORT = 64
_MANY_HEADS = 32
_WIDE_HEAD = 32


def needs_grad(request: Request) -> bool:
    """Whether autograd will keep the intermediates of this call."""
    if not torch.is_grad_enabled():
        return False
    bias, sink = request.mask.bias, request.sink
    return (
        request.query.requires_grad
        or request.key.requires_grad
        or request.value.requires_grad
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
    score = _times_heads(query * request.scale, request.key.transpose(-1, -2))
    if score.dtype in (torch.float16, torch.bfloat16):
        score = score.float()
    if request.softcap is not None:
        score = request.softcap * torch.tanh(score / request.softcap)
    hidden, bias = hidden_keys(mask, request.size)
    dead = None
    if bias is not None:
        score = score + bias
    if hidden is not None:
        if request.sink is None and (mask.keep is not None or bias is not None):
            dead = hidden.all(dim=-1, keepdim=True)
            hidden = hidden & ~dead  # softmax over nothing is NaN, in the gradient too: let it see all, drop it later
        score = score.masked_fill(hidden, -math.inf)
    if request.sink is None:
        return torch.softmax(score, dim=-1), dead
    B, H, L, _ = score.shape
    sink = request.sink.to(score.dtype).view(1, H, 1, 1).expand(B, H, L, 1)
    return torch.softmax(torch.cat([score, sink], dim=-1), dim=-1)[..., :-1], None


def hidden_keys(mask: Lowered, size: Size) -> tuple[Tensor | None, Tensor | None]:
    """(what is hidden, the bias with 0 in place of -inf), each broadcastable to (B, H, L, S) or None."""
    keep, bias = mask.whole_keep(size), mask.bias
    hidden = None if keep is None else ~keep
    if bias is not None:
        infinite = bias == -math.inf
        hidden = infinite if hidden is None else hidden | infinite
        bias = bias.masked_fill(infinite, 0)
    return hidden, bias


def one_head(request: Request, head: int) -> Request:
    """The same request for a single head, as views."""
    H, G = request.query.shape[1], request.key.shape[1]
    pick = slice(head, head + 1)
    shared = slice(head // (H // G), head // (H // G) + 1)

    def of(part: Tensor | None) -> Tensor | None:
        return part if part is None or part.shape[1] == 1 else part[:, pick]

    mask = request.mask
    return request._replace(
        query=request.query[:, pick],
        key=request.key[:, shared],
        value=request.value[:, shared],
        mask=mask._replace(keep=of(mask.keep), bias=of(mask.bias)),
        sink=None if request.sink is None else request.sink[pick],
    )


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


def _takes_flag_and_mask(request: Request, grouped: bool) -> bool:
    """torch's CPU flash kernel applies both, and skips half the work; every other kernel refuses the pair."""
    query, key, value, mask = request[:4]
    if request.dropout > 0 or query.device.type != "cpu" or _FUSED_CHOICE is None or not eager():
        return False
    if type(query) is not Tensor or (mask.bias is not None and mask.bias.requires_grad):
        return False
    choice = _FUSED_CHOICE(query, key, value, _one_mask(mask), 0.0, True, scale=request.scale, enable_gqa=grouped)
    return bool(choice == torch.nn.attention.SDPBackend.FLASH_ATTENTION.value)


def _teach_double_backward(out: Tensor, request: Request) -> None:
    """Give the fused kernel the second derivative it lacks, at the cost of a hook when nobody asks for one.

    The hook runs after the kernel's backward. With `create_graph` it replaces the gradients by those of the plain
    formula, which can be differentiated again; otherwise it lets go of the tensors it kept alive, like the node itself.
    """
    node = out.grad_fn
    if node is None or not node.name().startswith("ScaledDotProduct"):
        return
    if _SAVED_HOOKS is not None and _SAVED_HOOKS(True) is not None:
        return  # activation checkpointing or offloading: holding the inputs would undo it
    held: list[Request] = [request._replace(mask=_detached(request.mask))]

    def hook(grads: Sequence[Tensor | None], grad_outs: Sequence[Tensor]) -> Any:
        if not torch.is_grad_enabled():
            if _KEEPS_GRAPH is not None and not _KEEPS_GRAPH():
                held.clear()
            return None
        if not held:
            return None
        inputs = held[0][:3]
        if any(grad is not None and grad.shape != tensor.shape for grad, tensor in zip(grads, inputs, strict=False)):
            return None  # this kernel saw its inputs padded or repeated: its own gradients stand
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        again = iter(torch.autograd.grad(PLAIN.run(held[0]), wanted, grad_outs[0], create_graph=True))
        return (*(next(again) if tensor.requires_grad else None for tensor in inputs), *grads[3:])

    node.register_hook(hook)


def _detached(mask: Lowered) -> Lowered:
    return mask if mask.bias is None else mask._replace(bias=mask.bias.detach())


def _private(owner: object, name: str) -> Callable[..., Any] | None:
    """A private operator of torch, or None in a release that lacks it: then the general path runs."""
    return getattr(owner, name, None)


_FUSED_CHOICE = _private(torch, "_fused_sdp_choice")
_KEEPS_GRAPH = _private(torch._C._autograd, "_get_current_graph_task_keep_graph")
_SAVED_HOOKS = _private(torch._C._autograd, "_top_saved_tensors_default_hooks")
_ACTIVE = _private(torch._C, "_are_functorch_transforms_active")


def _functorch_active() -> bool:
    return _ACTIVE is not None and bool(_ACTIVE())
