"""Modules that become modules of another class: the same objects, with another `__class__` and the state it wants.

Each `plan_*` checks, makes what is new, changes nothing, and returns a function that carries it out and cannot fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from headwise._checks import class_of, invalid
from headwise.core import layouts
from headwise.core.layouts import CHILDREN, TORCH_NAMES, WEIGHTS
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.core.options import HELD
from headwise.layers import transformer
from headwise.layers.exchange import Exchanges

Commit = Callable[[], None]

TARGETS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: transformer.TransformerEncoderLayer,
    nn.TransformerEncoder: transformer.TransformerEncoder,
    nn.TransformerDecoderLayer: transformer.TransformerDecoderLayer,
    nn.TransformerDecoder: transformer.TransformerDecoder,
    nn.Transformer: transformer.Transformer,
}

# What a class statement leaves in a class by itself, and what changes nothing of what its instances do.
_NOISE = {"__constants__", "__parameters__", "__orig_bases__", "__abstractmethods__", "_abc_impl", "__init__"}
_NOISE |= vars(type("Empty", (), {"__annotations__": {}})).keys()
_NOISE |= {"__annotate__", "__annotate_func__", "__annotations_cache__", "__static_attributes__", "__firstlineno__"}
_NOISE |= {"__qualname__", "__type_params__"}
# What torch's attention holds that ours has as a property or class attribute.
_DROPPED = ("_qkv_same_embed_dim", "dropout", "head_dim")
_OWN: dict[type[nn.Module], frozenset[str]] = {  # names of attributes and children that ours has and torch's does not
    MultiheadAttention: frozenset(
        (*CHILDREN, *HELD, "attn_dropout", "attend", "average_attn_weights", "torch_names", "_warned_of_zero_one")
    ),
    transformer.TransformerEncoderLayer: frozenset(("linear3",)),
    transformer.TransformerDecoderLayer: frozenset(("linear3",)),
}
# What torch's constructors set and ours read; models pickled by old versions of torch lack some.
_STATE: dict[type[nn.Module], frozenset[str]] = {
    MultiheadAttention: frozenset(
        ("embed_dim", "num_heads", "kdim", "vdim", "batch_first", "add_zero_attn", *_DROPPED)
    ),
    transformer.TransformerEncoderLayer: frozenset(("norm_first",)),
    transformer.TransformerEncoder: frozenset(("num_layers", "enable_nested_tensor", "use_nested_tensor")),
    transformer.TransformerDecoderLayer: frozenset(("norm_first",)),
    transformer.TransformerDecoder: frozenset(("num_layers",)),
    transformer.Transformer: frozenset(("d_model", "nhead", "batch_first")),
}
_LINEAR_KEYS = frozenset((*vars(nn.Module()), "in_features", "out_features"))


def changed_by(kind: type, base: type) -> list[str]:
    """What the classes of `kind` that `base` does not have define besides a constructor, as `Class.name`."""
    above = [one for one in kind.__mro__ if one not in base.__mro__]  # a mixin may come after the base
    return [f"{one.__name__}.{name}" for one in above for name in vars(one) if name not in _NOISE]


def check_unpatched(function: str, base: type[nn.Module]) -> None:
    """Hold that torch's class is as its file defines it: what a patch does to all its objects, ours would not do.

    Raises:
        ValueError: a method was replaced.
    """
    home = sys.modules[base.__module__].__file__
    for name, value in vars(base).items():
        here = isinstance(value, FunctionType) and value.__code__.co_filename == home
        if not here and (name == "forward" or (isinstance(value, FunctionType) and name != "__init__")):
            rule = "be torch's own, not patched for all modules; undo the patch first, or leave these out by where="
            raise invalid(function, f"{base.__name__}.{name}", rule, getattr(value, "__module__", type(value).__name__))


def parametrized_base(module: nn.Module) -> type[nn.Module] | None:
    """The class that `torch.nn.utils.parametrize` made a subclass of for this one module; None if it did not."""
    kind = type(module)
    made = parametrize.is_parametrized(module) and kind.__name__ == f"Parametrized{kind.__bases__[0].__name__}"
    return kind.__bases__[0] if made else None


def target_class(module: nn.Module, target: type[nn.Module]) -> type[nn.Module]:
    """`target`, or for a parametrized module a subclass of it that has the same properties."""
    if parametrized_base(module) is None:
        return target
    own = {name: value for name, value in vars(type(module)).items() if name not in ("__dict__", "__weakref__")}
    return type(f"Parametrized{target.__name__}", (target,), own)


def check_own(function: str, module: nn.Module, path: str, target: type[nn.Module]) -> None:
    """Hold that nothing stands in for a method, that nothing has a name of the new class, and nothing is missing.

    Raises:
        ValueError: something does.
    """
    kind, state = type(module), module.__dict__
    for name in state:
        if name == "_compiled_call_impl":
            if state[name] is not None:
                rule = f"not be compiled in place; {function} first and call .compile() then"
                raise invalid(function, path, rule, "a module after module.compile()")
        elif callable(getattr(kind, name, None)):
            rule = "be the method of its class; remove what stands in for it (accelerate's hooks, a patch) first"
            raise invalid(function, f"{path}.{name}", rule, "one of this object's own")
    if missing := sorted(_STATE.get(target, frozenset()) - state.keys()):
        raise invalid(function, path, "have all attributes that torch's constructor sets", f"no {missing[0]}")
    stock = frozenset(dir(kind)) | frozenset(dir(nn.Module))
    taken = (frozenset(dir(target)) - stock) | _OWN.get(target, frozenset())
    if target is MultiheadAttention:
        taken -= {*_DROPPED, *TORCH_NAMES}
    for holder in (state, module._parameters, module._buffers, module._modules):
        if clash := sorted(taken & holder.keys()):
            rule = f"not exist, as {target.__module__.partition('.')[0]}'s {target.__name__} uses the name; rename it"
            raise invalid(function, f"{path}.{clash[0]}", rule, type(holder[clash[0]]).__name__)


def plan_layer(function: str, module: nn.Module, path: str, target: type[nn.Module]) -> Commit:
    """One of the five: another class, and whether torch's encoder layer may take its fast path."""
    check_own(function, module, path, target)
    kind = target_class(module, target)
    if target in TARGETS:
        _check_torch_can(function, module, path)
    flag = _fast_path(module) if target is nn.TransformerEncoderLayer else 0

    def commit() -> None:
        object.__setattr__(module, "__class__", kind)
        if target not in TARGETS.values():
            layouts.drop_matrix_resets(module)
        if target is nn.TransformerEncoderLayer:
            module.__dict__["activation_relu_or_gelu"] = flag
        else:
            module.__dict__.pop("activation_relu_or_gelu", None)

    return commit


def plan_attention(function: str, module: nn.Module, path: str, *, fused: bool, exchanges: Exchanges) -> Commit:
    """torch's attention becomes ours, in the layout that is asked for.

    Raises:
        ValueError: it carries what ours cannot keep; the message holds the cure.
    """
    check_own(function, module, path, MultiheadAttention)
    _check_sizes(function, module, path, fused)
    kind = target_class(module, MultiheadAttention)
    state = module.__dict__
    linears = {} if fused else _linears(module, path, exchanges)
    extra = {
        "attn_dropout": nn.Dropout(state["dropout"]).train(module.training),
        "attend": Attend().train(module.training),
    }

    def commit() -> None:
        for name in _DROPPED:
            del state[name]
        object.__setattr__(module, "__class__", kind)
        state.update(average_attn_weights=True, _warned_of_zero_one=False)
        if linears:
            for name in TORCH_NAMES:
                del module._parameters[name]
        others = {**module._modules}
        module._modules.clear()
        module._modules.update({**linears, **others, **extra})
        if type(module._modules["out_proj"]) is NonDynamicallyQuantizableLinear:
            object.__setattr__(module._modules["out_proj"], "__class__", nn.Linear)
        _set_resets(module)
        hooks = {**module._state_dict_hooks}
        module._state_dict_hooks.clear()
        module.register_state_dict_post_hook(layouts.speak_torch)  # first: the user's own expect torch's names
        module._state_dict_hooks.update(hooks)

    return commit


def plan_torch_attention(function: str, module: nn.Module, path: str, *, exchanges: Exchanges) -> Commit:
    """Our attention becomes torch's.

    Raises:
        ValueError: it does what torch's cannot do.
    """
    check_own(function, module, path, nn.MultiheadAttention)
    ours = cast(MultiheadAttention, module)
    _check_options(function, ours, path)
    kind = target_class(module, nn.MultiheadAttention)
    same = layouts.one_width(ours)
    probability, head_dim = ours.dropout, ours.head_dim
    found: dict[str, nn.Parameter | None] = {}
    if not ours.fused_qkv:
        found = _torch_parameters(function, ours, path, exchanges)

    def commit() -> None:
        for name in (*CHILDREN, "attn_dropout", "attend"):
            module._modules.pop(name, None)
        for name in ("average_attn_weights", "_warned_of_zero_one", "torch_names"):
            module.__dict__.pop(name, None)
        for key, hook in list(module._state_dict_hooks.items()):
            if hook is layouts.speak_torch:
                del module._state_dict_hooks[key]
        own = {**module._parameters}
        if found:
            module._parameters.clear()
            module._parameters.update({**found, **own})
        object.__setattr__(module, "__class__", kind)
        module.__dict__.update(_qkv_same_embed_dim=same, dropout=probability, head_dim=head_dim)
        out = cast(nn.Module, module._modules["out_proj"])
        if type(out) is nn.Linear:
            object.__setattr__(out, "__class__", NonDynamicallyQuantizableLinear)
        if isinstance(out.__dict__.get("reset_parameters"), layouts.Reset):
            del out.__dict__["reset_parameters"]

    return commit


def _set_resets(module: nn.Module) -> None:
    """The projections draw as torch's attention does; one that the user changed keeps its own way."""
    out = vars(module._modules["out_proj"])
    its_own = out.get("reset_parameters")
    layouts.own_child_resets(cast(layouts.Projected, module))
    if its_own is not None:
        out["reset_parameters"] = its_own
    elif type(module._modules["out_proj"]) is not nn.Linear:
        out.pop("reset_parameters", None)


def _check_sizes(function: str, module: nn.Module, path: str, fused: bool) -> None:
    """torch's attention as its constructor left it: sizes that fit, and Parameters where they are to be cut."""
    state = module.__dict__
    D, H = state["embed_dim"], state["num_heads"]
    if H < 1 or D % H:
        raise invalid(function, f"{path}.embed_dim", f"be a multiple of num_heads {H}", D)
    if not isinstance(state["dropout"], (int, float)) or not 0 <= state["dropout"] <= 1:
        raise invalid(function, f"{path}.dropout", "be in [0, 1]", repr(state["dropout"]))
    same = state["kdim"] == D == state["vdim"]
    if bool(state["_qkv_same_embed_dim"]) != same:
        rule = f"be {same}, as the widths {D, state['kdim'], state['vdim']} say"
        raise invalid(function, f"{path}._qkv_same_embed_dim", rule, state["_qkv_same_embed_dim"])
    wanted: dict[str, tuple[int, ...] | None] = dict.fromkeys(WEIGHTS)
    wanted["in_proj_weight"] = (3 * D, D) if same else None
    if not same:
        wanted.update(zip(WEIGHTS, ((D, D), (D, state["kdim"]), (D, state["vdim"])), strict=True))
    wanted["in_proj_bias"] = None if getattr(module, "in_proj_bias", None) is None else (3 * D,)
    for name, shape in wanted.items():
        where = f"{path}.{name}"
        if not fused and name not in module._parameters:
            rule = (
                "be a Parameter of the module itself to become part of an nn.Linear; pass fused_qkv=True, which keeps "
                "it as it is, or remove the pruning, weight norm or parametrization first"
            )
            raise invalid(function, where, rule, "a computed one")
        value = getattr(module, name, None)
        got = tuple(value.shape) if isinstance(value, Tensor) else None
        if got != shape:
            raise invalid(function, where, f"be {shape} in a module of these widths", got)
    if not isinstance(module._modules.get("out_proj"), nn.Module):
        raise invalid(function, f"{path}.out_proj", "be a module", type(getattr(module, "out_proj", None)).__name__)


def _linears(module: nn.Module, path: str, exchanges: Exchanges) -> dict[str, nn.Linear]:
    """`q_proj`, `k_proj`, `v_proj` over the module's Parameters: its own where they are apart, else parts."""
    weights: list[Any] = [module._parameters[name] for name in WEIGHTS]
    if module._parameters["in_proj_weight"] is not None:
        weights = list(exchanges.cut(module, "in_proj_weight", f"{path}.in_proj_weight"))
    biases: list[Any] = [None] * 3
    if module._parameters["in_proj_bias"] is not None:
        biases = list(exchanges.cut(module, "in_proj_bias", f"{path}.in_proj_bias"))
    made = {}
    for name, weight, bias in zip(CHILDREN, weights, biases, strict=True):
        made[name] = linear = nn.Linear.__new__(nn.Linear)
        nn.Module.__init__(linear)  # nn.Linear's own constructor would draw numbers
        linear.out_features, linear.in_features = weight.shape
        linear._parameters.update(weight=weight, bias=bias)
        linear.train(module.training)
    return made


def _torch_parameters(
    function: str, module: MultiheadAttention, path: str, exchanges: Exchanges
) -> dict[str, nn.Parameter | None]:
    """torch's Parameters in torch's order, of the children's."""
    children: list[nn.Module] = [layouts.plain_child(function, module, name) for name in CHILDREN]
    exchanges.drop(module, children, path)
    for name, child in zip(CHILDREN, children, strict=True):
        where = f"{path}.{name}"
        if more := sorted(vars(child).keys() - _LINEAR_KEYS - {"reset_parameters"}):
            raise invalid(function, where, f"have no attribute {more[0]}, which would be lost", "one")
        hooks = (child._state_dict_hooks, child._state_dict_pre_hooks)
        if any((*hooks, child._load_state_dict_pre_hooks, child._load_state_dict_post_hooks)):
            raise invalid(function, where, "carry no hooks, which would be lost; remove them first", "some")
    biased = [child._parameters["bias"] is not None for child in children]
    if any(biased) and not all(biased):
        raise invalid(function, f"bias of {path}.*_proj", "be there for all or for none", f"{sum(biased)} of 3")
    bias = exchanges.join(children, "bias", path) if any(biased) else None
    if layouts.one_width(module):
        whole = exchanges.join(children, "weight", path)
        return {"in_proj_weight": whole, **dict.fromkeys(WEIGHTS), "in_proj_bias": bias}
    weights = [child._parameters["weight"] for child in children]
    return {**dict(zip(WEIGHTS, weights, strict=True)), "in_proj_weight": None, "in_proj_bias": bias}


def _check_options(function: str, module: MultiheadAttention, path: str) -> None:
    """Hold that our attention does no more than torch's can."""
    if module.extended:
        rule = "have none of the options that torch's layer lacks (grouped heads, positions, a gate and so on)"
        raise invalid(function, path, rule, repr(module).partition("\n")[0])
    if not module.average_attn_weights:
        raise invalid(function, f"{path}.average_attn_weights", "be True, as torch's layer always is", False)
    drop, attend = module._modules.get("attn_dropout"), module._modules.get("attend")
    for name, kind, child in (("attn_dropout", nn.Dropout, drop), ("attend", Attend, attend)):
        where = f"{path}.{name}"
        if child is None or type(child) is not kind:
            raise invalid(function, where, f"be a plain {kind.__name__}: torch has no such child", type(child).__name__)
        if getattr(child, "shards", 1) != 1:
            rule = "not be sharded: load the whole state_dict into a model of one process, and downgrade that"
            raise invalid(function, path, rule, f"an attention over {child.shards} processes")
        if layouts.is_hooked(child):
            raise invalid(function, where, "carry no hooks: torch has no such child; remove them first", "some")
    assert drop is not None
    if drop.training != module.training and module.dropout:
        rule = f"have training={module.training}, as its parent: torch has one flag for both"
        raise invalid(function, f"{path}.attn_dropout", rule, drop.training)
    out = module._modules.get("out_proj")
    if not isinstance(out, nn.Linear) or not _is_what_it_holds(out) or layouts.is_hooked(out):
        rule = "be an nn.Linear without hooks or adapters (merge these first): torch reads its weight, never calls it"
        raise invalid(function, f"{path}.out_proj", rule, class_of(out))


def _is_what_it_holds(module: nn.Module | None) -> bool:
    """Whether weight and bias say all about a linear or layer norm, as torch's fast path takes for granted."""
    if module is None or type(module).forward not in (nn.Linear.forward, nn.LayerNorm.forward):
        return False
    return "forward" not in vars(module) and vars(module).get("_compiled_call_impl") is None


def _check_torch_can(function: str, module: nn.Module, path: str) -> None:
    if "linear3" in module._modules:
        rule = "not exist: torch's layers have no gated feed-forward"
        raise invalid(function, f"{path}.linear3", rule, type(module._modules["linear3"]).__name__)


def _fast_path(module: nn.Module) -> int:
    """What torch's encoder layer notes of its activation for the eval fast path; 0 keeps it off that path.

    torch notes 2 for the tanh form of GELU too, and then computes the exact one in eval. It also passes by adapters on
    the linears and cannot take other norms. 0 is right for all of these.
    """
    if not all(_is_what_it_holds(module._modules.get(name)) for name in ("linear1", "linear2", "norm1", "norm2")):
        return 0
    activation = getattr(module, "activation", None)
    if activation is F.relu or isinstance(activation, nn.ReLU):
        return 1
    exact = activation is F.gelu or (isinstance(activation, nn.GELU) and activation.approximate == "none")
    return 2 if exact else 0
