"""Second derivatives of torch's fused kernels, which have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from headwise.core.lowering import version


def teach(out: Tensor, call: tuple[Any, ...], plain: Callable[..., Tensor], view: Tensor | None = None) -> None:
    """Give the fused kernel the second derivative it lacks, at the cost of a hook when nobody asks for one.

    The hook runs after the kernel's backward. With `create_graph` it replaces the gradients by those of the plain
    formula, which can be differentiated again; otherwise it lets go of the tensors it kept alive, like the node itself.

    Args:
        out: the kernel's output.
        call: query, key, value, mask and scale.
        plain: gives the output of such a call by the plain formula.
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
            return _plain_gradients(held[0], plain, grads, grad_outs[0]) if held else None
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
    return [version(tensor) for tensor in tensors]


def _plain_gradients(
    call: tuple[Any, ...], plain: Callable[..., Tensor], grads: Sequence[Tensor | None], grad_out: Tensor
) -> Any:
    """The kernel's gradients by the plain formula, so that they can be differentiated; None to keep the kernel's."""
    *inputs, mask, scale = call
    if any(grad is not None and grad.shape != tensor.shape for grad, tensor in zip(grads, inputs, strict=False)):
        return None  # this kernel saw its inputs padded or repeated: its own gradients stand
    if mask.bias is not None:
        mask = mask._replace(bias=mask.bias.detach())
    # aliases, since the inputs may depend on each other and only partial derivatives are wanted
    dtype = grad_out.dtype  # autocast may have cast them for the kernel
    aliases = [tensor.view_as(tensor) if tensor.dtype == dtype else tensor.to(dtype) for tensor in inputs]
    out = plain(*aliases, mask, scale)
    asked = [grad is not None for grad in grads[:3]]
    return (*partial(out, aliases, asked, grad_out, create_graph=True), *grads[3:])


def partial(
    out: Tensor, inputs: Sequence[Tensor | None], asked: Sequence[bool], grad_out: Tensor, *, create_graph: bool
) -> list[Tensor | None]:
    """The gradient of each input that is asked for, in the places of the inputs."""
    wanted = [tensor for tensor, was in zip(inputs, asked, strict=True) if was and tensor is not None]
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=create_graph) if wanted else ())
    return [next(grads) if was else None for was in asked]


def private(owner: object, name: str, otherwise: object) -> Callable[..., Any]:
    """A private operator of torch; in a release that lacks it, an answer that takes the general path."""
    return getattr(owner, name, lambda *_, **__: otherwise)


_FUSED_NODES: dict[type, bool] = {}  # whether an autograd node is that of a fused kernel
_KEEPS_GRAPH = private(torch._C._autograd, "_get_current_graph_task_keep_graph", True)
_SAVED_HOOKS = private(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
