"""The names that a model's `state_dict()` gives its attention weights: torch's, or those of its own parameters."""

from __future__ import annotations

from torch import nn

from headwise._checks import invalid, kind_of
from headwise.core.multihead import MultiheadAttention

__all__ = ["own_names"]


def own_names(model: nn.Module) -> nn.Module:
    """Let `state_dict()` name attention weights as `named_parameters()` does, for tools that need the two to match.

    With split projections `state_dict()` says `in_proj_weight`, as torch's layers do, where the parameters are
    `q_proj.weight`, `k_proj.weight` and `v_proj.weight`. A sharded model (FSDP, tensor parallel) has the latter names
    anyway, and so have optimizer states: distributed checkpoints of sharded and whole models match after this call, and
    accelerate can offload the model.

    Args:
        model: any module; every `headwise.MultiheadAttention` in it is switched, in place, for good (a copy and a
            pickle too). Those with fused projections have torch's names for both and need nothing.

    Returns:
        The model.

    Raises:
        ValueError: not a module, or one without a `headwise.MultiheadAttention`.

    `load_state_dict` takes torch's names as well as these, before and after. `headwise.downgrade` undoes it.

    Example:
        >>> import headwise
        >>> from headwise.layers import own_names
        >>> list(own_names(headwise.MultiheadAttention(8, 2, bias=False)).state_dict())
        ['q_proj.weight', 'k_proj.weight', 'v_proj.weight', 'out_proj.weight']
    """
    if not isinstance(model, nn.Module):
        raise invalid("own_names", "model", "be a module", kind_of(model))
    found = [module for module in model.modules() if isinstance(module, MultiheadAttention)]
    if not found:
        rule = "hold a headwise.MultiheadAttention; call headwise.upgrade(model) first"
        raise invalid("own_names", "model", rule, type(model).__name__)
    for attention in found:
        attention.torch_names = False
    return model
