"""The four projections of attention in two explicit layouts, and torch's names for both.

Letters: B batch, L query positions, S key positions, D model width, H heads, K head width.

*Split* (default): `q_proj, k_proj, v_proj, out_proj` are exactly `nn.Linear` and always called, so that adapters, hooks,
pruning, quantizers and tensor parallelism find them. *Fused*: Parameters named and ordered as `nn.MultiheadAttention`'s,
one product for self-attention. The two are converted on request; nothing is a view of something else and nothing is
cached, because every such design was silently wrong for some tool. `state_dict` speaks torch's names in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as _hooks

from headwise._checks import invalid

_LINEAR_FORWARD, _MODULE_CALL = nn.Linear.forward, nn.Module.__call__
_ANY_FORWARD_HOOK, _ANY_FORWARD_PRE_HOOK = _hooks._global_forward_hooks, _hooks._global_forward_pre_hooks
_ANY_BACKWARD_HOOK, _ANY_BACKWARD_PRE_HOOK = _hooks._global_backward_hooks, _hooks._global_backward_pre_hooks
_CHILDREN = ("q_proj", "k_proj", "v_proj")
_WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_PACKED_BATCH_FIRST, _PACKED_LENGTH_FIRST = (2, 0, 3, 1, 4), (2, 1, 3, 0, 4)  # (.., .., 3, H, K) to (3, B, H, L, K)
_TORCH_NAMES = frozenset(("in_proj_weight", "in_proj_bias", *_WEIGHTS))


class ProjectedAttention(nn.Module):
    """Base of attention modules: owns the query, key, value and output projections.

    Parameters, split: q_proj.weight (D, D), k_proj.weight (D, kdim), v_proj.weight (D, vdim), out_proj.weight (D, D),
    and a bias (D,) each. Parameters, fused: in_proj_weight (3D, D), or q_proj_weight, k_proj_weight, v_proj_weight where
    kdim or vdim differ from D; in_proj_bias (3D,); out_proj.
    """

    embed_dim: int
    kdim: int
    vdim: int
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    def _build_projections(self, *, bias: bool, fused: bool, add_bias_kv: bool, **factory: Any) -> None:
        D, widths = self.embed_dim, (self.embed_dim, self.kdim, self.vdim)
        if fused:
            packed = self._one_width
            for name, width in zip(_WEIGHTS, widths, strict=True):
                self.register_parameter(name, None if packed else _empty(D, width, **factory))
            self.register_parameter("in_proj_weight", _empty(3 * D, D, **factory) if packed else None)
            self.register_parameter("in_proj_bias", _empty(3 * D, **factory) if bias else None)
        else:
            for name, width in zip(_CHILDREN, widths, strict=True):
                self.add_module(name, _linear(width, D, bias, **factory))
        self.out_proj = _linear(D, D, bias, **factory)
        self.bias_k = _empty(1, 1, D, **factory) if add_bias_kv else None
        self.bias_v = _empty(1, 1, D, **factory) if add_bias_kv else None
        self._own_child_resets()
        self.register_state_dict_post_hook(_speak_torch)

    @property
    def fused_qkv(self) -> bool:
        """Whether the input projections are Parameters of this module rather than three `nn.Linear` children."""
        return "q_proj" not in self._modules

    @property
    def _one_width(self) -> bool:
        return self.kdim == self.embed_dim == self.vdim

    def reset_parameters(self) -> None:
        """Draw all parameters anew: torch's distributions, and torch's numbers under the same seed.

        Xavier uniform for the input projections (over the stacked (3D, D) matrix where the widths agree), Kaiming
        uniform for the output's, biases 0, Xavier normal for `bias_k` and `bias_v`.

        Raises:
            ValueError: a projection was replaced by something that is not an `nn.Linear`.
        """
        for name in ("out_proj", *(() if self.fused_qkv else _CHILDREN)):
            if not isinstance(self._modules[name], nn.Linear):
                raise invalid("reset_parameters", name, "be an nn.Linear", type(self._modules[name]).__name__)
        nn.Linear.reset_parameters(self.out_proj)  # draws the bias too, as torch's constructor does
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)
        if self.fused_qkv:
            for weight in (self.in_proj_weight, *(getattr(self, name) for name in _WEIGHTS)):
                if weight is not None:
                    nn.init.xavier_uniform_(weight)
            if self.in_proj_bias is not None:
                nn.init.zeros_(self.in_proj_bias)
        else:
            self._reset_children()
        for extra in (self.bias_k, self.bias_v):
            if extra is not None:
                nn.init.xavier_normal_(extra)

    def _reset_children(self) -> None:
        children = [self._modules[name] for name in _CHILDREN]
        weights = [child.weight for child in children]  # type: ignore[union-attr]
        if self._one_width and all(_is_plain(weight) for weight in weights):
            stacked = nn.init.xavier_uniform_(torch.empty_like(torch.cat(weights).detach()))
            with torch.no_grad():
                for weight, part in zip(weights, stacked.chunk(3), strict=True):
                    weight.copy_(part)
            for child in children:
                if child.bias is not None:  # type: ignore[union-attr]
                    nn.init.zeros_(child.bias)  # type: ignore[union-attr, arg-type]
        else:
            for child in children:
                child.reset_parameters()  # type: ignore[union-attr, operator]

    def _own_child_resets(self) -> None:
        """Loops that reset every module reach the children last; they must not undo torch's distributions."""
        for name in ("out_proj", *(() if self.fused_qkv else _CHILDREN)):
            child = self._modules[name]
            assert isinstance(child, nn.Linear)
            stacked = 3 if name in _CHILDREN and self._one_width else 1
            object.__setattr__(child, "reset_parameters", _Reset(child, None if name == "out_proj" else stacked))

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, head_dim: int, batch_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(B, H, L, K), (B, H, S, K), (B, H, S, K) from (B, L, D), or (L, B, D) not batch first, and so on.

        One product where all three inputs are one tensor and the layout is fused.
        """
        modules = self._modules
        if "q_proj" in modules:
            q, k, v = call(modules["q_proj"], query), call(modules["k_proj"], key), call(modules["v_proj"], value)
        else:
            own = self._parameters
            # parametrized ones are not among its own
            weight = own["in_proj_weight"] if "in_proj_weight" in own else self.in_proj_weight
            bias = own["in_proj_bias"] if "in_proj_bias" in own else self.in_proj_bias
            if weight is not None and query is key and key is value:
                qkv = functional.linear(query, weight, bias)
                first, second, _ = qkv.shape
                qkv = qkv.view(first, second, 3, self.embed_dim // head_dim, head_dim)
                q, k, v = qkv.permute(_PACKED_BATCH_FIRST if batch_first else _PACKED_LENGTH_FIRST).unbind(0)
                return q, k, v
            q, k, v = self._project_apart(query, key, value, weight, bias)
        return to_heads(q, head_dim, batch_first), to_heads(k, head_dim, batch_first), to_heads(v, head_dim, batch_first)

    def _project_apart(
        self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The fused layout on inputs that differ: two products where key and value are one tensor, else three."""
        D = self.embed_dim
        if weight is not None and key is value:
            weight_q, weight_kv = weight.split((D, 2 * D))
            bias_q, bias_kv = (None, None) if bias is None else bias.split((D, 2 * D))
            k, v = functional.linear(key, weight_kv, bias_kv).chunk(2, dim=-1)
            return functional.linear(query, weight_q, bias_q), k, v
        weights = [getattr(self, name) for name in _WEIGHTS] if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = (functional.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def fuse_projections(self) -> ProjectedAttention:
        """Turn the three input projections into torch's Parameters: one product, torch's optimizer layout.

        Returns:
            This module, changed in place; unchanged if it is fused already.

        Raises:
            ValueError: a projection is hooked, replaced, parametrized, sharded or only partly frozen: it could not be
                found afterwards.

        An optimizer built before holds the old parameters and would train nothing: build it afterwards.
        """
        if self.fused_qkv:
            return self
        children = [_plain_child("fuse_projections", name, self._modules[name]) for name in _CHILDREN]
        for part in ("weight", "bias"):
            frozen = {p.requires_grad for child in children if (p := getattr(child, part)) is not None}
            if len(frozen) > 1:
                raise invalid("fuse_projections", f"{part} of q_proj, k_proj and v_proj", "be frozen all or none", "some")
        weights: list[nn.Parameter] = [child.weight for child in children]
        biases: list[nn.Parameter] = [child.bias for child in children if child.bias is not None]
        for name in _CHILDREN:
            del self._modules[name]
        own = {**self._parameters}
        self._parameters.clear()
        for name, weight in zip(_WEIGHTS, weights, strict=True):
            self.register_parameter(name, None if self._one_width else weight)
        self.register_parameter("in_proj_weight", _joined(weights) if self._one_width else None)
        self.register_parameter("in_proj_bias", _joined(biases) if biases else None)
        self._parameters.update(own)  # bias_k and bias_v come after, as torch orders them
        return self

    def split_projections(self) -> ProjectedAttention:
        """Turn torch's Parameters into three `nn.Linear` children that tools can find.

        Returns:
            This module, changed in place; unchanged if it is split already.

        Raises:
            ValueError: the Parameters are parametrized, sharded or otherwise not plain tensors.

        An optimizer built before holds the old parameters and would train nothing: build it afterwards.
        """
        if not self.fused_qkv:
            return self
        names = ("in_proj_weight",) if self._one_width else _WEIGHTS
        for name in (*names, "in_proj_bias"):
            if name not in self._parameters or not (self._parameters[name] is None or _is_plain(self._parameters[name])):
                raise invalid("split_projections", name, "be a plain Parameter", "a parametrized or sharded one")
        weights = _parts(self.in_proj_weight) if self._one_width else [self._parameters[name] for name in names]
        biases = [None] * 3 if self.in_proj_bias is None else _parts(self.in_proj_bias)
        for name in _TORCH_NAMES:
            del self._parameters[name]
        others = {**self._modules}
        self._modules.clear()
        for name, weight, bias in zip(_CHILDREN, weights, biases, strict=True):
            assert weight is not None
            child = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
            child.weight = weight
            if bias is not None:
                child.bias = bias
            self.add_module(name, child.train(self.training))
        self._modules.update(others)
        self._own_child_resets()
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in _CHILDREN and "out_proj" in self._modules:
                raise AttributeError(
                    f"{name}: the projections of this module are fused; call split_projections() first"
                ) from None
            if name not in _TORCH_NAMES or "q_proj" not in self._modules:
                raise
        return _read_as_torch(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _TORCH_NAMES and "q_proj" in self.__dict__.get("_modules", {}):
            _write_as_torch(self, name, value)
        else:
            super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        _, missing_keys, _, error_msgs = rest
        _spell(self, state_dict, prefix, bool(local_metadata.get("assign_to_params_buffers")), missing_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class ReadOnly(torch.Tensor):
    """What `in_proj_weight` gives while the projections are split: fresh, differentiable, not for writing.

    A write would change a copy and nothing else, so every way of writing raises; what shares its memory is read-only too.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _writes(func, args, kwargs):
            raise TypeError(
                "in_proj_weight and in_proj_bias are computed from q_proj, k_proj and v_proj while the projections are "
                "split, so writing to them would change nothing: write to the children, assign an nn.Parameter, or call "
                "fuse_projections()"
            )
        if func is torch.Tensor.__iter__:
            return iter(args[0].unbind(0))
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.__reduce_ex__:  # pickled, it is an ordinary tensor
                return args[0].detach().as_subclass(torch.Tensor).clone().__reduce_ex__(*args[1:])
            result = func(*args, **kwargs)
            given = [a for a in _flatten((*args, *kwargs.values())) if isinstance(a, ReadOnly)]
            return _protected(result, {a.untyped_storage().data_ptr() for a in given})


def _writes(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "").split(".")[0]
    if name in ("untyped_storage", "storage", "_typed_storage", "__dlpack__"):
        return True  # a way to the memory itself
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    schema = getattr(func, "_schema", None)
    if in_place or operator or name in ("__setitem__", "__set__", "__delete__") or (schema and schema.is_mutable):
        # to be the source of a write to another tensor is fine: the target comes first
        targets = _flatten(args[:1] or kwargs.values())
        return any(isinstance(target, ReadOnly) for target in targets)
    return any(isinstance(target, ReadOnly) for target in _flatten((kwargs.get("out"),)))


def _protected(result: Any, memory: set[int]) -> Any:
    if isinstance(result, Tensor):
        shares = result.layout == torch.strided and result.untyped_storage().data_ptr() in memory
        return result.as_subclass(ReadOnly) if shares else result
    if isinstance(result, (list, tuple)):
        parts = [_protected(part, memory) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
    if hasattr(result, "flags") and hasattr(result.flags, "writeable"):
        result.flags.writeable = False  # a numpy view
    return result


def _flatten(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flatten(value)
        else:
            yield value


def to_heads(projected: Tensor, head_dim: int, batch_first: bool) -> Tensor:
    """(B, L, H*K), or (L, B, H*K) not batch first, as a view (B, H, L, K)."""
    first, second, width = projected.shape
    heads = projected.view(first, second, width // head_dim, head_dim)
    return heads.transpose(1, 2) if batch_first else heads.permute(1, 2, 0, 3)


def call(child: Any, x: Tensor) -> Any:
    """`child(x)`; without the detour through `nn.Module.__call__` where only `nn.Linear`'s own forward would run.

    Four such detours are a third of a short call. Hooks (its own and global ones), a replaced or patched forward, any other
    class, tracing and compiling all take the ordinary call.
    """
    if (
        type(child) is nn.Linear
        and nn.Linear.forward is _LINEAR_FORWARD
        and nn.Module.__call__ is _MODULE_CALL
        and not is_hooked(child)
        and not (_ANY_FORWARD_HOOK or _ANY_FORWARD_PRE_HOOK or _ANY_BACKWARD_HOOK or _ANY_BACKWARD_PRE_HOOK)
        and not torch.compiler.is_compiling()
    ):
        own = child._parameters
        return functional.linear(x, own["weight"], own["bias"])  # type: ignore[arg-type]
    return child(x)


class _Reset:
    """`reset_parameters` of a projection: what it was under its parent. A class, so that it pickles and copies."""

    def __init__(self, linear: nn.Linear, stacked: int | None) -> None:
        self.linear, self.stacked = linear, stacked

    def __call__(self) -> None:
        if self.stacked is None:
            nn.Linear.reset_parameters(self.linear)
        else:
            fan_out, fan_in = self.linear.weight.shape
            bound = math.sqrt(6 / (fan_in + self.stacked * fan_out))
            nn.init.uniform_(self.linear.weight, -bound, bound)
        if self.linear.bias is not None:
            nn.init.zeros_(self.linear.bias)


def _empty(*shape: int, **factory: Any) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, **factory))


def _linear(width_in: int, width_out: int, bias: bool, **factory: Any) -> nn.Linear:
    """An `nn.Linear` that draws no random numbers."""
    linear = nn.Linear(width_in, width_out, bias=bias, device="meta", dtype=factory.get("dtype"))
    linear.weight = _empty(width_out, width_in, **factory)
    if bias:
        linear.bias = _empty(width_out, **factory)
    return linear


def _is_plain(tensor: object) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and type(tensor.data) is Tensor  # type: ignore[attr-defined]


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    )


def _plain_child(function: str, name: str, child: nn.Module | None) -> nn.Linear:
    if type(child) is not nn.Linear:
        raise invalid(function, name, "be exactly an nn.Linear", type(child).__name__)
    if is_hooked(child):
        raise invalid(function, name, "carry no hooks", "one with hooks; remove them first")
    if not all(_is_plain(parameter) for parameter in child.parameters()):
        raise invalid(function, name, "hold plain tensors", "sharded or quantized ones")
    return child


def _joined(parameters: list[nn.Parameter]) -> nn.Parameter:
    joined = nn.Parameter(torch.cat(parameters).detach(), requires_grad=parameters[0].requires_grad)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if len(grads) == len(parameters):
        joined.grad = torch.cat(grads)
    return joined


def _parts(parameter: nn.Parameter) -> list[nn.Parameter]:
    """Three Parameters of their own memory."""
    parts = [
        nn.Parameter(part.clone(), requires_grad=parameter.requires_grad) for part in parameter.detach().chunk(3)
    ]
    if parameter.grad is not None:
        for part, grad in zip(parts, parameter.grad.chunk(3), strict=True):
            part.grad = grad.clone()
    return parts


def _read_as_torch(module: ProjectedAttention, name: str) -> Any:
    """A torch name while split: None where torch has None, the child's own weight, or the read-only whole."""
    if name in _WEIGHTS:
        child = module._modules[name.removesuffix("_weight")]
        return None if module._one_width else child.weight  # type: ignore[union-attr]
    if name == "in_proj_weight" and not module._one_width:
        return None
    part = name.removeprefix("in_proj_")
    tensors = [getattr(module._modules[child], part, None) for child in _CHILDREN]
    if all(tensor is None for tensor in tensors):
        return None
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        kinds = ", ".join(type(module._modules[child]).__name__ for child in _CHILDREN)
        raise AttributeError(f"{name}: the projections ({kinds}) do not hold a {part} each that could be joined")
    whole = torch.cat(tensors)  # type: ignore[arg-type]
    return whole if torch.compiler.is_compiling() or type(whole) is not Tensor else whole.as_subclass(ReadOnly)


def _write_as_torch(module: ProjectedAttention, name: str, value: object) -> None:
    if not isinstance(value, nn.Parameter):
        raise TypeError(f"{name}: only an nn.Parameter can be assigned while the projections are split; got {type(value)}")
    part = "bias" if name == "in_proj_bias" else "weight"
    names = (name.removesuffix("_weight"),) if name in _WEIGHTS else _CHILDREN
    children = [_plain_child("__setattr__", child, module._modules[child]) for child in names]
    shape = (sum(child.out_features for child in children), *(() if part == "bias" else (children[0].in_features,)))
    if tuple(value.shape) != shape or (name in _WEIGHTS) == module._one_width or getattr(children[0], part) is None:
        raise invalid("__setattr__", name, f"fit a module of kdim {module.kdim}, vdim {module.vdim}", tuple(value.shape))
    for child, own in zip(children, [value] if name in _WEIGHTS else _parts(value), strict=True):
        setattr(child, part, own)


def _speak_torch(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """After `state_dict()`: torch's names in torch's order, while the children hold plain tensors and nothing else."""
    assert isinstance(module, ProjectedAttention)
    if module.fused_qkv:
        return
    own = {key: state_dict[key] for key in state_dict if key.startswith(prefix)}
    found = {}
    for child in _CHILDREN:
        start = f"{prefix}{child}."
        held = {key.removeprefix(start): value for key, value in own.items() if key.startswith(start)}
        if not set(held) <= {"weight", "bias"} or "weight" not in held or not all(map(_is_plain, held.values())):
            return
        found[child] = held
    if len({len(held) for held in found.values()}) != 1:
        return
    weights = [held["weight"] for held in found.values()]
    spoken = {"in_proj_weight": torch.cat(weights)} if module._one_width else dict(zip(_WEIGHTS, weights, strict=True))
    if "bias" in found["q_proj"]:
        spoken["in_proj_bias"] = torch.cat([held["bias"] for held in found.values()])
    for key in own:
        del state_dict[key]
    state_dict.update({f"{prefix}{name}": value for name, value in spoken.items()})
    starts = tuple(f"{prefix}{child}." for child in _CHILDREN)
    state_dict.update({key: value for key, value in own.items() if not key.startswith(starts)})


def _spell(
    module: ProjectedAttention,
    state_dict: dict[str, Any],
    prefix: str,
    assign: bool,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Before loading: respell whatever names came (torch's, split, `q_proj.weight`-style) as the layout's own."""
    whole = not module.fused_qkv and not all(type(module._modules[child]) is nn.Linear for child in _CHILDREN)
    if whole:
        return  # adapted or quantized children keep their own names
    has_bias = module.in_proj_bias is not None
    D, widths = module.embed_dim, (module.embed_dim, module.kdim, module.vdim)
    for part in ("weight", "bias") if has_bias else ("weight",):
        split = [f"{prefix}{child}.{part}" for child in _CHILDREN]
        flat = [f"{prefix}{name}" for name in _WEIGHTS] if part == "weight" else []
        packed = f"{prefix}in_proj_{part}"
        present = [names for names in ([packed], flat, split) if any(name in state_dict for name in names)]
        shapes = [(D, width) if part == "weight" else (D,) for width in widths]
        target = split
        if module.fused_qkv:
            target = [packed] if part == "bias" or module._one_width else flat
        if len(present) > 1:
            both = ", ".join(name for names in present for name in names if name in state_dict)
            error_msgs.append(f"one weight is present under two spellings: {both}; keep one of them")
        if len(present) != 1:
            if not present:
                missing_keys.extend([packed] if part == "bias" or module._one_width else flat)
            _keep_own(module, state_dict, prefix, present, target)
            continue
        came = present[0]
        if came == target or not all(name in state_dict for name in came):
            continue  # loads, or is reported, as any Parameter
        tensors = [state_dict.pop(name) for name in came]
        joint = ((3 * D, *shapes[0][1:]),) if len(came) == 1 else tuple(shapes)
        wrong = [(n, t) for n, t, shape in zip(came, tensors, joint, strict=True) if tuple(t.shape) != shape]
        if wrong or (len({shape for shape in shapes}) > 1 and len(came) == 1 and part == "weight"):
            error_msgs.extend(
                f"size mismatch for {n}: copying a param with shape {tuple(t.shape)} from checkpoint, "
                f"the projections need {shapes}."
                for n, t in wrong or zip(came, tensors, strict=True)
            )
            _keep_own(module, state_dict, prefix, [], target)
            continue
        thirds = list(tensors[0].chunk(3)) if len(came) == 1 else tensors
        if len(target) == 1:
            state_dict[target[0]] = torch.cat(thirds)
        else:
            # assigned as they are, chunks would be three Parameters in one piece of memory
            copies = [third.clone() for third in thirds] if assign and len(came) == 1 else thirds
            state_dict.update(zip(target, copies, strict=True))


def _keep_own(
    module: ProjectedAttention, state_dict: dict[str, Any], prefix: str, present: list[list[str]], target: list[str]
) -> None:
    """Drop the names that cannot be used and feed the module its own values: the one complaint is already noted."""
    for name in (name for names in present for name in names):
        state_dict.pop(name, None)
    own = dict(module.named_parameters(remove_duplicate=False))
    state_dict.update({name: own[name.removeprefix(prefix)] for name in target})
