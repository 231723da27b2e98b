"""What the blocks share: the position-wise feed-forward and the choice of its activation and of the norms.

The linears are the block's own children with torch's names, so that torch's checkpoints fit. Axis letters: D width,
M feed-forward width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from headwise._checks import invalid, positive

Activation = Literal["gelu", "relu", "swiglu"] | Callable[[Tensor], Tensor]
Norm = Literal["layernorm", "rmsnorm"] | Callable[[int], nn.Module] | nn.Module

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "swiglu": F.silu}


class FeedForward(nn.Module):
    """Base of the blocks: `linear2(dropout(activation(linear1(x))))`.

    SwiGLU is `linear2(dropout(silu(linear1(x)) * linear3(x)))`.
    """

    activation: Callable[[Tensor], Tensor]
    _width_word = "feedforward_dim"  # what the constructor calls M

    def _build_feed_forward(
        self, embed_dim: int, feedforward_dim: int | None, activation: Activation, dropout: float, **factory: Any
    ) -> Callable[[Tensor], Tensor]:
        """Make the children; `factory` holds bias, device and dtype of the linears.

        Returns:
            The activation, which torch's layers register last.
        """
        name = type(self).__name__
        fits = activation in _ACTIVATIONS if isinstance(activation, str) else callable(activation)
        if not fits or isinstance(activation, type):
            rule = f"be one of {list(_ACTIVATIONS)}, a function or a module (nn.SiLU(), not nn.SiLU)"
            raise invalid(name, "activation", rule, repr(activation))
        gated = activation == "swiglu"
        if feedforward_dim is None:
            feedforward_dim = 8 * embed_dim // 3 if gated else 4 * embed_dim  # as many weights in both forms
        feedforward_dim = positive(name, self._width_word, feedforward_dim)
        self.linear1 = nn.Linear(embed_dim, feedforward_dim, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(feedforward_dim, embed_dim, **factory)
        if gated:
            self.linear3 = nn.Linear(embed_dim, feedforward_dim, **factory)
        return _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _feed_forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BLM = self.activation(self.linear1(x_BLD))
        if "linear3" in self._modules:
            hidden_BLM = hidden_BLM * self.linear3(x_BLD)
        out_BLD: Tensor = self.linear2(self.dropout(hidden_BLM))
        return out_BLD


def are_ours(block: nn.Module, *methods: str) -> bool:
    """Whether these methods are as headwise wrote them, not a subclass's and not set on the object."""
    kind = type(block)
    return all(name not in vars(block) and getattr(kind, name).__module__.startswith("headwise.") for name in methods)


def check_dropout(block: type[FeedForward], dropout: float) -> None:
    """Refuse what is no probability: torch's Dropout takes NaN, and others have the inner width in its place."""
    if not 0.0 <= dropout <= 1.0:
        raise invalid(block.__name__, "dropout", f"be in [0, 1]; the inner width is {block._width_word}", dropout)


def make_norm(name: str, norm: Norm, embed_dim: int, eps: float, bias: bool, **factory: Any) -> nn.Module:
    """Build a norm over D from a name, from a callable that takes D, or as a copy of a module.

    Raises:
        ValueError: an unknown name, or a callable that does not make a module.
    """
    if isinstance(norm, nn.Module):
        return _on(copy.deepcopy(norm), factory)
    if norm == "layernorm":
        return nn.LayerNorm(embed_dim, eps=eps, bias=bias, **factory)
    if norm == "rmsnorm":
        return nn.RMSNorm(embed_dim, eps=eps, **factory)
    made = norm(embed_dim) if callable(norm) else None
    if not isinstance(made, nn.Module):
        rule = "be 'layernorm', 'rmsnorm', a callable that makes a module of width embed_dim, or a module"
        raise invalid(name, "norm", rule, repr(norm))
    return _on(made, factory)


def _on(module: nn.Module, factory: dict[str, Any]) -> nn.Module:
    return module.to(**{word: value for word, value in factory.items() if value is not None})
