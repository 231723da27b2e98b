"""The four projections of attention in two explicit layouts, and torch's names for both.

Letters: B batch, L query positions, S key positions, D model width, H heads, K head width.

*Split* (default): `q_proj, k_proj, v_proj, out_proj` are exactly `nn.Linear`, so that adapters, hooks, pruning,
quantizers and tensor parallelism find them. *Fused*: Parameters named and ordered as `nn.MultiheadAttention`'s, one
product for self-attention. The two are converted on request (`layouts.py`); nothing is a view of something else and
nothing is cached: every such design was silently wrong for some tool. `state_dict` speaks torch's names in both.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as _hooks

from headwise._checks import invalid
from headwise.core import layouts, options
from headwise.core.layouts import CHILDREN, TORCH_NAMES, WEIGHTS, is_hooked, one_width

_LINEAR_FORWARD, _MODULE_CALL = nn.Linear.forward, nn.Module.__call__
_ANY_FORWARD_HOOK, _ANY_FORWARD_PRE_HOOK = _hooks._global_forward_hooks, _hooks._global_forward_pre_hooks
_ANY_BACKWARD_HOOK, _ANY_BACKWARD_PRE_HOOK = _hooks._global_backward_hooks, _hooks._global_backward_pre_hooks
_PACKED_BATCH_FIRST, _PACKED_LENGTH_FIRST = (2, 0, 3, 1, 4), (2, 1, 3, 0, 4)  # (.., .., 3, H, K) to (3, B, H, L, K)


class ProjectedAttention(nn.Module):
    """Base of attention modules: owns the query, key, value and output projections.

    Parameters, split: q_proj.weight (H*K, D), k_proj.weight (G*K, kdim), v_proj.weight (G*K, vdim), out_proj.weight
    (D, H*K), and a bias each; H*K and G*K are D unless said otherwise. Parameters, fused: in_proj_weight
    ((H + 2G)*K, D), or q_proj_weight, k_proj_weight, v_proj_weight where kdim or vdim differ from D; in_proj_bias
    ((H + 2G)*K,); out_proj.
    """

    embed_dim: int
    kdim: int
    vdim: int
    inner_dims: tuple[int, int] | None = None  # (H*K, G*K); None: both are D
    extended: bool = False  # whether any option of `core/options.py` is on
    torch_names: bool = True  # in state_dict() while split; `headwise.layers.own_names` turns it off
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def _build_projections(self, *, bias: bool, fused: bool, add_bias_kv: bool, **factory: Any) -> None:
        D, widths, tall = self.embed_dim, (self.embed_dim, self.kdim, self.vdim), layouts.rows(self)
        if fused:
            packed = one_width(self)
            for name, width, height in zip(WEIGHTS, widths, tall, strict=True):
                self.register_parameter(name, None if packed else layouts.empty(height, width, **factory))
            self.register_parameter("in_proj_weight", layouts.empty(sum(tall), D, **factory) if packed else None)
            self.register_parameter("in_proj_bias", layouts.empty(sum(tall), **factory) if bias else None)
        else:
            for name, width, height in zip(CHILDREN, widths, tall, strict=True):
                self.add_module(name, layouts.linear(width, height, bias, **factory))
        self.out_proj = layouts.linear(tall[0], D, bias, **factory)
        self.bias_k = layouts.empty(1, 1, tall[1], **factory) if add_bias_kv else None
        self.bias_v = layouts.empty(1, 1, tall[2], **factory) if add_bias_kv else None
        layouts.own_child_resets(self)
        self.register_state_dict_post_hook(layouts.speak_torch)

    @property
    def fused_qkv(self) -> bool:
        """Whether the input projections are Parameters of this module rather than three `nn.Linear` children."""
        return "q_proj" not in self._modules

    def reset_parameters(self) -> None:
        """Draw all parameters anew: torch's distributions, and torch's numbers under the same seed.

        Xavier uniform for the input projections (over the stacked (3D, D) matrix where the widths agree), Kaiming
        uniform for the output's, biases 0, Xavier normal for `bias_k` and `bias_v`; then what the options hold.

        Raises:
            ValueError: a projection was replaced by something that is not an `nn.Linear` with a weight of its own.
        """
        for name in ("out_proj", "gate_proj", *CHILDREN):
            child = self._modules.get(name)
            if child is None:
                continue
            if not isinstance(child, nn.Linear) or "weight" not in child._parameters:
                raise invalid("reset_parameters", name, "be an nn.Linear with its own weight", type(child).__name__)
        self.out_proj.reset_parameters()  # as nn.Linear, but in a Transformer
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        if self.fused_qkv:
            for weight in (*(getattr(self, name) for name in WEIGHTS), self.in_proj_weight):
                if weight is not None:
                    nn.init.xavier_uniform_(weight)
            if self.in_proj_bias is not None:
                nn.init.zeros_(self.in_proj_bias)
        else:
            layouts.reset_children(self)
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)
        if self.extended:
            options.reset(self)

    def _reset_parameters(self) -> None:
        """`reset_parameters` under torch's private name, which other libraries call."""
        self.reset_parameters()

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, head_dim: int, batch_first: bool, is_direct: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, K), (B, G, S, K), (B, G, S, K) from (B, L, D), or (L, B, D) not batch first, and so on.

        One product where all three inputs are one tensor and the layout is fused.
        """
        modules = self._modules
        if "q_proj" in modules:
            joined = None
            if type(modules["q_proj"]) is not nn.Linear and query is key and key is value:
                joined = _together([modules[name] for name in CHILDREN], query)
            if joined is None:
                q = call(modules["q_proj"], query, is_direct)
                k = call(modules["k_proj"], key, is_direct)
                v = call(modules["v_proj"], value, is_direct)
            else:
                q, k, v = joined
        else:
            own = self._parameters
            if "in_proj_weight" in own and "in_proj_bias" in own:
                weight, bias = own["in_proj_weight"], own["in_proj_bias"]
            else:  # parametrized
                weight, bias = self.in_proj_weight, self.in_proj_bias
            if weight is not None and query is key and key is value:
                qkv = functional.linear(query, weight, bias)
                if self.inner_dims is None:
                    first, second, _ = query.shape
                    qkv = qkv.view(first, second, 3, self.embed_dim // head_dim, head_dim)
                    q, k, v = qkv.permute(_PACKED_BATCH_FIRST if batch_first else _PACKED_LENGTH_FIRST).unbind(0)
                    return q, k, v
                q, k, v = qkv.split(layouts.rows(self), dim=-1)
            else:
                q, k, v = self._project_apart(query, key, value, weight, bias)
        return (
            to_heads(q, head_dim, batch_first),
            to_heads(k, head_dim, batch_first),
            to_heads(v, head_dim, batch_first),
        )

    def _project_apart(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The fused layout on inputs that differ: two products where key and value are one tensor, else three."""
        tall = layouts.rows(self)
        if weight is not None and key is value:
            weight_q, weight_kv = weight.split((tall[0], 2 * tall[1]))
            bias_q, bias_kv = (None, None) if bias is None else bias.split((tall[0], 2 * tall[1]))
            k, v = functional.linear(key, weight_kv, bias_kv).chunk(2, dim=-1)
            return functional.linear(query, weight_q, bias_q), k, v
        # not chunk(3), which would cut a part of these rows somewhere
        weights = [getattr(self, name) for name in WEIGHTS] if weight is None else weight.split(tall)
        biases = (None, None, None) if bias is None else bias.split(tall)
        q, k, v = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _project_query(self, query: Tensor, head_dim: int, batch_first: bool) -> Tensor:
        """(B, H, L, K) from (B, L, D), or (L, B, D) not batch first: the query alone, where the keys are known."""
        if "q_proj" in self._modules:
            projected = self.q_proj(query)
        else:
            wide, bias = layouts.rows(self)[0], self.in_proj_bias
            weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight[:wide]
            projected = functional.linear(query, weight, None if bias is None else bias[:wide])
        return to_heads(projected, head_dim, batch_first)

    def fuse_projections(self) -> ProjectedAttention:
        """Turn the three input projections into torch's Parameters: one product, torch's optimizer layout.

        Returns:
            This module, changed in place; unchanged if it is fused already.

        Raises:
            ValueError: a projection is hooked, replaced, parametrized, sharded, of another shape or only partly frozen:
                what was attached to it would be lost.

        An optimizer built before holds the old parameters and would train nothing: build it afterwards.
        """
        if not self.fused_qkv:
            layouts.fuse(self)
        return self

    def split_projections(self) -> ProjectedAttention:
        """Turn torch's Parameters into three `nn.Linear` children that tools can find.

        Returns:
            This module, changed in place; unchanged if it is split already.

        Raises:
            ValueError: the Parameters are parametrized, sharded or otherwise not plain tensors.

        An optimizer built before holds the old parameters and would train nothing: build it afterwards.
        """
        if self.fused_qkv:
            layouts.split(self)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in CHILDREN and "out_proj" in self._modules:
                raise AttributeError(
                    f"{name}: the projections of this module are fused; call split_projections() first"
                ) from None
            if name not in TORCH_NAMES or "q_proj" not in self._modules:
                raise
        return layouts.read_as_torch(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        modules = self.__dict__.get("_modules", {})
        if name in TORCH_NAMES and "q_proj" in modules:
            layouts.write_as_torch(self, name, value)
        elif name in CHILDREN and "out_proj" in modules and name not in modules:
            raise AttributeError(f"{name}: the projections of this module are fused; call split_projections() first")
        else:
            super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        _, missing_keys, _, error_msgs = rest
        hooks = self._load_state_dict_pre_hooks
        for hook in hooks.values():  # first: a user's hook may rename keys to torch's
            hook(state_dict, prefix, local_metadata, *rest)
        assign = bool(local_metadata.get("assign_to_params_buffers"))
        layouts.spell(self, state_dict, prefix, assign, missing_keys, error_msgs)
        try:
            self._load_state_dict_pre_hooks = OrderedDict()
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        finally:
            self._load_state_dict_pre_hooks = hooks


def to_heads(projected: Tensor, head_dim: int, batch_first: bool) -> Tensor:
    """(B, L, H*K), or (L, B, H*K) not batch first, as a view (B, H, L, K)."""
    first, second, width = projected.shape
    heads = projected.view(first, second, width // head_dim, head_dim)
    return heads.transpose(1, 2) if batch_first else heads.permute(1, 2, 0, 3)


def direct() -> bool:
    """Whether `module.forward(...)` is all that `module(...)` does, for a module that carries nothing of its own.

    The detour through `nn.Module.__call__` is a tenth of a short call, and an attention makes five. Global hooks, a
    patched class, tracing and compiling all need it.
    """
    return not (
        torch.compiler.is_compiling()
        or _ANY_FORWARD_HOOK
        or _ANY_FORWARD_PRE_HOOK
        or _ANY_BACKWARD_HOOK
        or _ANY_BACKWARD_PRE_HOOK
        or nn.Linear.__call__ is not _MODULE_CALL
        or nn.Linear.forward is not _LINEAR_FORWARD
    )


def _together(children: list[Any], x: Tensor) -> list[Tensor] | None:
    """The three projections of x as one product, where their class knows how (`together`) and nobody watches them."""
    make = getattr(type(children[0]), "together", None)
    if make is None or any(map(is_hooked, children)):
        return None
    if _ANY_FORWARD_HOOK or _ANY_FORWARD_PRE_HOOK or _ANY_BACKWARD_HOOK or _ANY_BACKWARD_PRE_HOOK:
        return None
    joined: list[Tensor] | None = make(children, x)
    return joined


def call(child: Any, x: Tensor, is_direct: bool) -> Any:
    """`child(x)`, without the detour if it is exactly an `nn.Linear`, carries nothing, and `direct()` said so."""
    if is_direct and type(child) is nn.Linear and not is_hooked(child):
        own = child._parameters
        if "weight" in own and "bias" in own:  # not so in replicas of DataParallel
            return functional.linear(x, own["weight"], own["bias"])  # type: ignore[arg-type]
    return child(x)
