"""The two layouts of the input projections: converting, reading and writing one as the other, loading and saving.

Split: children `q_proj`, `k_proj`, `v_proj`. Fused: torch's Parameters. `state_dict` speaks torch's names for both.

Letters: D model width.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from headwise._checks import class_of, invalid
from headwise.core.backends import eager
from headwise.core.live import Live, stack

CHILDREN = ("q_proj", "k_proj", "v_proj")
WEIGHTS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_RESET = "reset_parameters"
TORCH_NAMES = frozenset(("in_proj_weight", "in_proj_bias", *WEIGHTS))


class Projected(Protocol):
    """What this module needs to know of an attention module."""

    embed_dim: int
    kdim: int
    vdim: int
    inner_dims: tuple[int, int] | None
    training: bool
    torch_names: bool
    _modules: dict[str, nn.Module | None]
    _parameters: dict[str, nn.Parameter | None]

    @property
    def fused_qkv(self) -> bool: ...


def one_width(module: Projected) -> bool:
    """Whether queries, keys and values are equally wide, so that their projections stack into one matrix."""
    return module.kdim == module.embed_dim == module.vdim


def rows(module: Projected) -> tuple[int, int, int]:
    """H*K, G*K and G*K: what the projections of queries, keys and values give, and how they lie in `in_proj_weight`."""
    query, key = module.inner_dims or (module.embed_dim, module.embed_dim)
    return query, key, key


def empty(*shape: int, **factory: Any) -> nn.Parameter:
    """A Parameter to be drawn later."""
    return nn.Parameter(torch.empty(*shape, **factory))


def linear(width_in: int, width_out: int, bias: bool, **factory: Any) -> nn.Linear:
    """An `nn.Linear` that draws no random numbers."""
    made = nn.Linear(width_in, width_out, bias=bias, device="meta", dtype=factory.get("dtype"))
    made.weight = empty(width_out, width_in, **factory)
    if bias:
        made.bias = empty(width_out, **factory)
    return made


def is_plain(tensor: object) -> bool:
    """Whether it is a tensor or Parameter and nothing more: not sharded, quantized or wrapped."""
    return type(tensor) in (Tensor, nn.Parameter) and type(cast(Tensor, tensor).data) is Tensor


def is_sharded(tensor: object) -> bool:
    """Whether it is a DTensor, asked without loading torch.distributed."""
    return hasattr(tensor, "to_local")


LOOKS_ONLY = "looks_only"  # marks what stands in for `forward`, shows what went in and changes nothing


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module does more than its class says, beyond letting someone look at what goes in."""
    state = module.__dict__
    return bool(
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or ("forward" in state and not hasattr(state["forward"], LOOKS_ONLY))
        or "_compiled_call_impl" in state
    )


class Reset:
    """`reset_parameters` of a projection: what it was under its parent.

    `stacked` is how many times as tall as this weight the matrix is that torch draws as one, by Xavier; None draws as
    `nn.Linear` does.
    A class, so that it pickles and copies; it holds its child weakly, so that a deleted module is freed at once.
    """

    def __init__(self, child: nn.Linear, stacked: float | None, zero_bias: bool = True) -> None:
        self.child, self.stacked, self.zero_bias = weakref.ref(child), stacked, zero_bias

    def __call__(self) -> None:
        child = self.child()
        if child is None:  # copy.copy shares this object, and what it was made for is gone
            raise RuntimeError("reset_parameters: this projection is a shallow copy; use copy.deepcopy")
        if self.stacked is None or not self.zero_bias:
            nn.Linear.reset_parameters(child)
        if self.stacked is not None:
            fan_out, fan_in = child.weight.shape
            bound = math.sqrt(3.0) * math.sqrt(2.0 / (fan_in + self.stacked * fan_out))  # rounded as torch's init does
            nn.init.uniform_(child.weight, -bound, bound)
        if child.bias is not None and self.zero_bias:
            nn.init.zeros_(child.bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Reset:
        child = copy.deepcopy(self.child(), memo)
        assert child is not None
        return Reset(child, self.stacked, self.zero_bias)

    def __getstate__(self) -> dict[str, Any]:
        return {"child": self.child(), "stacked": self.stacked, "zero_bias": self.zero_bias}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.child = weakref.ref(state["child"])
        self.stacked, self.zero_bias = state["stacked"], state["zero_bias"]


def own_child_resets(module: Projected) -> None:
    """Loops that reset every module reach the children last; they must not undo torch's distributions."""
    tall = dict(zip(CHILDREN, rows(module), strict=True))
    for name in ("out_proj", *(() if module.fused_qkv else CHILDREN)):
        child = module._modules[name]
        if not isinstance(child, nn.Linear) or (name == "out_proj" and isinstance(vars(child).get(_RESET), Reset)):
            continue  # an adapter or the like in its place, or a Transformer has said already
        stacked: float = 1
        if name in CHILDREN and one_width(module):
            stacked = 3 if module.inner_dims is None else sum(tall.values()) / tall[name]
        object.__setattr__(child, _RESET, Reset(child, None if name == "out_proj" else stacked))


def own_matrix_resets(transformer: nn.Module) -> None:
    """Loops that reset every module reach the layers last; they must not undo the Transformer's distributions."""
    for module in transformer.modules():
        if type(module) is nn.Linear:
            own = vars(module).setdefault(_RESET, Reset(module, 1, zero_bias=False))
            if isinstance(own, Reset) and own.stacked is None:
                own.stacked = 1


def drop_matrix_resets(transformer: nn.Module) -> None:
    """Undo `own_matrix_resets`, for torch's class."""
    for module in transformer.modules():
        own = vars(module).get(_RESET)
        if isinstance(own, Reset) and not own.zero_bias:
            del module.__dict__[_RESET]


def reset_children(module: Projected) -> None:
    """Draw the split projections: torch's numbers under the same seed where torch would stack them."""
    children = [cast(nn.Linear, module._modules[name]) for name in CHILDREN]
    if not draw_stacked(module):
        for child in children:
            child.reset_parameters()
        return
    for child in children:
        if child.bias is not None:
            nn.init.zeros_(child.bias)


def draw_stacked(module: Projected) -> bool:
    """Draw the three weights as torch draws the matrix that they are in its layout, (3D, D), if they are.

    Returns:
        Whether they are: of one width, and plain tensors.
    """
    weights = [cast(nn.Linear, module._modules[name]).weight for name in CHILDREN]
    if not one_width(module) or not all(is_plain(weight) for weight in weights):
        return False
    stacked = nn.init.xavier_uniform_(torch.empty_like(torch.cat(weights).detach()))
    with torch.no_grad():
        for weight, part in zip(weights, stacked.split(rows(module)), strict=True):
            weight.copy_(part)
    return True


def fuse(module: Projected) -> None:
    """Children to Parameters, in place."""
    children = [plain_child("fuse_projections", module, name) for name in CHILDREN]
    for part in ("weight", "bias"):
        held: list[nn.Parameter] = [parameter for child in children if (parameter := getattr(child, part)) is not None]
        where = f"{part} of q_proj, k_proj and v_proj"
        if len(held) not in (0, 3):
            raise invalid("fuse_projections", where, "be there for all or for none", f"{len(held)} of 3")
        if len({id(parameter) for parameter in held}) != len(held):
            raise invalid("fuse_projections", where, "be parameters of their own", "tied ones, which would come apart")
        if len({parameter.requires_grad for parameter in held}) > 1:
            raise invalid("fuse_projections", where, "be frozen all or none", "some")
        if len({(parameter.dtype, parameter.device) for parameter in held}) > 1:
            raise invalid("fuse_projections", where, "share one dtype and device", "several")
    weights = cast("list[nn.Parameter]", [child.weight for child in children])
    biases = cast("list[nn.Parameter]", [child.bias for child in children if child.bias is not None])
    for name in CHILDREN:
        del module._modules[name]
    own = {**module._parameters}
    module._parameters.clear()
    for name, weight in zip(WEIGHTS, weights, strict=True):
        module._parameters[name] = None if one_width(module) else weight
    module._parameters["in_proj_weight"] = _joined(weights) if one_width(module) else None
    module._parameters["in_proj_bias"] = _joined(biases) if biases else None
    module._parameters.update(own)  # bias_k and bias_v come after, as torch orders them


def check_split(module: Any) -> None:
    """Hold that fused projections can be cut, torch's own attention's too.

    Raises:
        ValueError: they are parametrized, sharded or carry hooks, or have another number of rows.
    """
    for name in ("in_proj_weight", *WEIGHTS, "in_proj_bias"):
        parameter = module._parameters.get(name, 0)
        if parameter is not None and not is_plain(parameter):
            raise invalid("split_projections", name, "be a plain Parameter", "a parametrized or sharded one")
        if isinstance(parameter, nn.Parameter) and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise invalid("split_projections", name, "carry no hooks", "some; remove them first")
    if isinstance(module, nn.MultiheadAttention):
        return  # its sizes are held when it is upgraded
    for name in ("in_proj_weight", "in_proj_bias"):
        held = module._parameters[name]
        if held is not None and held.shape[0] != sum(rows(module)):
            raise invalid("split_projections", name, f"have {sum(rows(module))} rows", held.shape[0])


def split(module: Projected) -> None:
    """Parameters to children, in place."""
    check_split(module)
    stacked, bias, tall = module._parameters["in_proj_weight"], module._parameters["in_proj_bias"], rows(module)
    weights = [module._parameters[name] for name in WEIGHTS] if stacked is None else _parts(stacked, tall)
    biases = [None] * 3 if bias is None else _parts(bias, tall)
    for name in TORCH_NAMES:
        del module._parameters[name]
    others = {**module._modules}
    module._modules.clear()
    for name, weight, part in zip(CHILDREN, weights, biases, strict=True):
        assert weight is not None
        child = nn.Linear(weight.shape[1], weight.shape[0], bias=part is not None, device="meta")
        child.weight = weight
        if part is not None:
            child.bias = part
        module._modules[name] = child.train(module.training)
    module._modules.update(others)
    own_child_resets(module)


def plain_child(function: str, module: Projected, name: str) -> nn.Linear:
    """The child, if it is an `nn.Linear` of this layout that nothing has been attached to."""
    child = module._modules[name]
    shape = _shapes(module)[CHILDREN.index(name)]
    if type(child) is not nn.Linear:
        raise invalid(function, name, "be exactly an nn.Linear", class_of(child))
    if is_hooked(child) or child._modules or child._buffers:
        raise invalid(function, name, "carry no hooks, buffers or children", "some; remove them first")
    for parameter in child.parameters():
        if not is_plain(parameter):
            raise invalid(
                function, name, "hold plain tensors", f"{type(parameter.data).__name__}, sharded or quantized"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise invalid(function, name, "carry no hooks on its parameters", "some; remove them first")
    if tuple(child.weight.shape) != shape:
        raise invalid(function, name, f"have a weight {shape}", tuple(child.weight.shape))
    return child


def _shapes(module: Projected) -> list[tuple[int, int]]:
    """Of the weights of q_proj, k_proj and v_proj."""
    return list(zip(rows(module), (module.embed_dim, module.kdim, module.vdim), strict=True))


def _joined(parameters: list[nn.Parameter]) -> nn.Parameter:
    joined = nn.Parameter(torch.cat([p.detach() for p in parameters]), requires_grad=parameters[0].requires_grad)
    if any(parameter.grad is not None for parameter in parameters):
        joined.grad = torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]).detach()
    return joined


def _parts(parameter: nn.Parameter, tall: Sequence[int]) -> list[nn.Parameter]:
    """Three Parameters of their own memory, so many rows each."""
    frozen = not parameter.requires_grad
    parts = [nn.Parameter(part.clone(), requires_grad=not frozen) for part in parameter.detach().split(list(tall))]
    if parameter.grad is not None:
        for part, grad in zip(parts, parameter.grad.split(list(tall)), strict=True):
            part.grad = grad.clone()
    return parts


def read_as_torch(module: Projected, name: str) -> Any:
    """A torch name while split: None where torch has None, the child's own weight, or the three as one (`live.py`).

    `in_proj_bias` is None too where it cannot be joined (adapted or quantized children): torch's encoder layers ask
    whether it is None, in eval, before they call their attention.
    """
    if name in WEIGHTS:
        return None if one_width(module) else cast(nn.Linear, module._modules[name.removesuffix("_weight")]).weight
    if name == "in_proj_weight" and not one_width(module):
        return None
    part = name.removeprefix("in_proj_")
    tensors = [getattr(module._modules[child], part, None) for child in CHILDREN]
    shapes: list[tuple[int, ...]] = [shape if part == "weight" else shape[:1] for shape in _shapes(module)]
    fits = [isinstance(t, Tensor) and tuple(t.shape) == shape for t, shape in zip(tensors, shapes, strict=True)]
    if not all(fits):
        if part == "bias":
            return None
        kinds = ", ".join(type(module._modules[child]).__name__ for child in CHILDREN)
        what = f"{shapes[0]} each" if len(set(shapes)) == 1 else ", ".join(map(str, shapes))
        raise AttributeError(f"{name}: the projections ({kinds}) do not hold a weight {what} that could be joined")
    if _can_live(tensors):
        # of pruned or parametrized projections the weight is no Parameter, and a write would reach nothing
        computed = not all(isinstance(tensor, nn.Parameter) for tensor in tensors)
        return stack(cast("list[Tensor]", tensors), computed)
    try:
        whole = torch.cat(cast("list[Tensor]", tensors))
    except (RuntimeError, NotImplementedError) as error:
        raise AttributeError(f"{name}: the projections cannot be joined: {error}") from error
    if eager() and (is_sharded(whole) or len({cast(Tensor, tensor).dtype for tensor in tensors}) > 1):
        if part == "bias":
            return None
        raise AttributeError(
            f"{name}: the projections are sharded or of several dtypes: use q_proj.weight and its like"
        )
    return whole


def write_as_torch(module: Projected, name: str, value: object) -> None:
    """Assign a Parameter to a torch name while split: its parts become the children's own."""
    if isinstance(value, Live) and _stands_for(value, module, name):
        return  # `module.in_proj_weight += x`: written already
    if not isinstance(value, nn.Parameter):
        got, cure = type(value).__name__, "fuse_projections() first to replace it by something else"
        if isinstance(value, Live):
            got, cure = (
                "that of another split module",
                "tie q_proj.weight and its like, or call fuse_projections() on both",
            )
        rule = "only an nn.Parameter can be assigned while the projections are split, and is copied into them"
        raise TypeError(f"{name}: {rule}; got {got}: {cure}")
    part = "bias" if name == "in_proj_bias" else "weight"
    names = (name.removesuffix("_weight"),) if name in WEIGHTS else CHILDREN
    children = [plain_child("__setattr__", module, child) for child in names]
    tall = [child.out_features for child in children]
    shape = (sum(tall), *(() if part == "bias" else (children[0].in_features,)))
    misplaced = part == "weight" and (name in WEIGHTS) == one_width(module)
    if misplaced or tuple(value.shape) != shape or getattr(children[0], part) is None:
        raise invalid(
            "__setattr__", name, f"fit a module of kdim {module.kdim}, vdim {module.vdim}", tuple(value.shape)
        )
    for child, own in zip(children, [value] if name in WEIGHTS else _parts(value, tall), strict=True):
        setattr(child, part, own)


def _stands_for(value: Live, module: Projected, name: str) -> bool:
    part = name.removeprefix("in_proj_")
    own = [getattr(module._modules[child], part, None) for child in CHILDREN]
    return len(own) == len(value.home.parts) and all(a is b for a, b in zip(own, value.home.parts, strict=True))


def speak_torch(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """After `state_dict()`: torch's names in torch's order, while the children hold plain tensors and nothing else."""
    projected = cast(Projected, module)
    if projected.fused_qkv or not projected.torch_names:
        return
    own = {key: state_dict[key] for key in state_dict if key.startswith(prefix)}
    found = []
    for child in CHILDREN:
        start = f"{prefix}{child}."
        held = {key.removeprefix(start): value for key, value in own.items() if key.startswith(start)}
        if set(held) not in ({"weight"}, {"weight", "bias"}) or not all(map(is_plain, held.values())):
            return
        found.append(held)
    if len({len(held) for held in found}) != 1:
        return
    if len({(value.dtype, value.device) for held in found for value in held.values()}) != 1:
        return  # joined, they would be copies
    weights = [held["weight"] for held in found]
    spoken = {"in_proj_weight": _spoken(weights)} if one_width(projected) else dict(zip(WEIGHTS, weights, strict=True))
    if "bias" in found[0]:
        spoken["in_proj_bias"] = _spoken([held["bias"] for held in found])
    for key in own:
        del state_dict[key]
    state_dict.update({f"{prefix}{name}": value for name, value in spoken.items()})
    starts = tuple(f"{prefix}{child}." for child in CHILDREN)
    state_dict.update({key: value for key, value in own.items() if not key.startswith(starts)})


def _can_live(parts: Sequence[Any]) -> bool:
    """Whether tensors can be stacked so that writes reach them."""
    return eager() and all(map(is_plain, parts)) and len({(part.dtype, part.device) for part in parts}) == 1


def _spoken(parts: list[Tensor]) -> Tensor:
    """Three values of `state_dict()` as one: alive, as each of them is."""
    return stack(parts) if eager() else torch.cat(parts)


def spell(
    module: Projected,
    state_dict: dict[str, Any],
    prefix: str,
    assign: bool,
    missing_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Before loading: respell whatever names came (torch's, `q_proj_weight`, `q_proj.weight`) as the layout's own.

    Each fault is noted once, and the module's own values are fed in its place, so that torch's loader adds none.
    """
    own = dict(cast(nn.Module, module).named_parameters(remove_duplicate=False))
    for part in ("weight", "bias"):
        children = [f"{child}.{part}" for child in CHILDREN]
        flat = list(WEIGHTS) if part == "weight" else []
        packed = [f"in_proj_{part}"]
        as_torch = flat if part == "weight" and not one_width(module) else packed
        target = as_torch if module.fused_qkv else children
        if not all(name in own for name in target):
            continue  # adapted, quantized or parametrized projections keep their own names
        present = [names for names in (packed, flat, children) if any(prefix + name in state_dict for name in names)]
        if len(present) > 1 and not module.fused_qkv and _are_own(state_dict, prefix, children, own):
            for name in children:  # a tool adds what the module holds itself to what it was given
                del state_dict[prefix + name]
            present = present[:-1]
        if len(present) > 1:
            both = ", ".join(prefix + name for names in present for name in names if prefix + name in state_dict)
            error_msgs.append(f"one weight is present under two spellings: {both}; keep one of them")
        elif not present:
            missing_keys.extend(prefix + name for name in (as_torch if module.torch_names else target))
        elif present[0] == target or (len(target) == 1 and not all(prefix + name in state_dict for name in present[0])):
            continue  # loads, or is reported, like any Parameter
        named = [name for names in present for name in names if prefix + name in state_dict]
        came = {name: state_dict.pop(prefix + name) for name in named}
        fallback: dict[str, Tensor] = {prefix + name: own[name] for name in target}
        if len(present) == 1:
            shapes: list[tuple[int, ...]] = [shape if part == "weight" else shape[:1] for shape in _shapes(module)]
            wrong = _misfits(module, present[0], came, shapes, prefix)
            error_msgs.extend(wrong)
            missing_keys.extend(prefix + name for name in present[0] if name not in came)
            if not wrong:
                fallback.update(_respelled(present[0], came, [prefix + name for name in target], assign, rows(module)))
        state_dict.update(fallback)


def _are_own(state_dict: dict[str, Any], prefix: str, names: list[str], own: dict[str, nn.Parameter]) -> bool:
    """Whether all these values are the module's own memory, so that loading them would change nothing."""

    def is_own(name: str) -> bool:
        value: Any = state_dict.get(prefix + name)
        if not is_plain(value) or value.device.type == "meta":
            return value is own[name]
        return bool(value.data_ptr() == own[name].data_ptr() and value.shape == own[name].shape)

    return all(map(is_own, names))


def _misfits(
    module: Projected, names: list[str], came: dict[str, Any], shapes: list[tuple[int, ...]], prefix: str
) -> list[str]:
    """What torch would say of values that do not fit."""
    packed = len(names) == 1
    if packed and len({shape[1:] for shape in shapes}) > 1:
        return [f"{prefix}{names[0]} cannot hold projections of different widths {shapes}; pass {', '.join(WEIGHTS)}"]
    wanted = [(sum(rows(module)), *shapes[0][1:])] if packed else shapes
    return [
        f"While copying the parameter {prefix + name!r}, expected torch.Tensor from checkpoint, got {type(came[name])}"
        if not isinstance(came[name], Tensor)
        else f"size mismatch for {prefix + name}: copying a param with shape {came[name].shape} from checkpoint, "
        f"the shape in current model is {torch.Size(shape)}."
        for name, shape in zip(names, wanted, strict=True)
        if name in came and not (isinstance(came[name], Tensor) and tuple(came[name].shape) == shape)
    ]


def _respelled(
    names: list[str], came: dict[str, Tensor], target: list[str], assign: bool, tall: tuple[int, ...]
) -> dict[str, Tensor]:
    """The values that came, under the layout's names; one that is missing among three stays missing."""
    if len(names) == len(target) == 3:
        return {new: came[old] for old, new in zip(names, target, strict=True) if old in came}
    if len(target) == 1:
        return {target[0]: torch.cat([came[name] for name in names])}
    # assigned as they are, views would become three Parameters in one piece of memory
    parts = came[names[0]].split(tall)
    return dict(zip(target, [part.clone() for part in parts] if assign else parts, strict=True))
