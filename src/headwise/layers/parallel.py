"""Tensor parallelism: which projection is cut how, and what else attention needs for the answer of one process.

Axis letters: B batch, D width, H heads, L query positions, S key positions, K head width, M feed-forward width.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwise._checks import class_of, invalid
from headwise.core import algebra
from headwise.core.algebra import Given, Mask
from headwise.core.layouts import CHILDREN, is_hooked, is_plain, is_sharded
from headwise.core.lowering import Size
from headwise.core.multihead import Attend, MultiheadAttention
from headwise.core.positions import Alibi, Rotary
from headwise.layers.feedforward import FeedForward, are_ours

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

__all__ = ["tp_plan"]

# What treats each number by itself: it makes no difference which process holds which part of the width M
_MODULES = frozenset((nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Sigmoid, nn.Identity))
_FUNCTIONS = (F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, F.mish, torch.relu, torch.tanh, torch.sigmoid)

_TORCHS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_STEPS = ("forward", "_project")  # of an attention: what a subclass may not change
_SINK = 5  # where among the arguments of `attend` after the mask


def tp_plan(model: nn.Module) -> dict[str, ParallelStyle]:
    """How to shard a model's attentions and feed-forwards over the processes of a mesh, for `parallelize_module`.

    Each process computes its share of the heads and of the feed-forward's inner width; an all-reduce after each
    attention and each feed-forward puts the shares together. What is not in the plan stays whole on each process.

    Args:
        model: holds layers of ours; not sharded and not wrapped yet. `upgrade` it first if they are torch's.

    Returns:
        A style for each name: of every `MultiheadAttention`, q_proj, k_proj, v_proj and gate_proj `ColwiseParallel`,
        out_proj `RowwiseParallel`, and the attention itself one of ours, which shards `bias_k` and `bias_v`, gives each
        process the masks of its heads, and puts the weights together; of every block's feed-forward, linear1 and
        linear3 `ColwiseParallel`, linear2 `RowwiseParallel`. Modules that are shared come once. A feed-forward is left
        out, and so computed whole on each process, where its activation is not one of torch's elementwise ones.

    Raises:
        ValueError: the model holds none of our layers; an attention is fused, a subclass with another forward, or has
            another dropout on its weights than `nn.Dropout`; a projection is adapted, quantized, sharded already, or
            has parameters or a place in common with something else; queries and keys are normed with learned weights.
            And, from `parallelize_module` on each process alike and before anything is sharded: the size of the mesh
            divides not every H, G and M.

    Outputs, gradients, returned weights and trained parameters are those of one process, in train and in eval, with all
    masks. A hook on `attend`, and one on `attn_dropout`, sees the H / n heads of its process.

    Dropout: seed the n processes of a mesh alike (and those that see other data differently). What is dropped after
    out_proj and linear2 has to be the same on each of them. On the weights, the same places are then dropped in the
    shares of heads of all processes.

    Build the optimizer afterwards. `clip_grad_norm_` raises, since it takes sharded or whole gradients, not both: take
    the norm of each kind with `get_total_norm`. `state_dict` has the names of `named_parameters()` then; a checkpoint
    of one process fits after `own_names` there: `torch.distributed.checkpoint.state_dict.set_model_state_dict`.

    Unlike torch: `ColwiseParallel` on `nn.MultiheadAttention` raises; on a packed (3D, D) linear it is silently wrong.

    Cost: reads the structure only. Sharded: 1/n of the projections', attention's and feed-forward's FLOPs and
    parameters; all-reduces of (B, L, D), forward one an attention and feed-forward, backward one a column-wise linear.
    Source: arXiv 1909.08053 section 3; torch.distributed.tensor.parallel.
    Checked in: tests/tools/test_distributed.py.

    Example:
        >>> from headwise import EncoderBlock
        >>> from headwise.layers import tp_plan
        >>> plan = tp_plan(EncoderBlock(64, 4))
        >>> list(plan)[:3], list(plan)[3:]
        (['linear1', 'linear2', 'self_attn'],
         ['self_attn.q_proj', 'self_attn.k_proj', 'self_attn.v_proj', 'self_attn.out_proj'])

        In each process, `parallelize_module(model, init_device_mesh("cuda", (2,)), tp_plan(model))`.
    """
    if not isinstance(model, nn.Module):
        raise invalid("tp_plan", "model", "be a module", type(model).__name__)
    parts = [part for name, module in model.named_modules() for part in _parts(name, module)]
    if not parts:
        theirs = [
            f"{name or 'the model'} ({type(m).__name__})" for name, m in model.named_modules() if isinstance(m, _TORCHS)
        ]
        found = ", ".join(theirs) or "no attention and no feed-forward that it knows"
        raise invalid("tp_plan", "model", "hold layers of headwise's; call upgrade(model) first", found)
    _check_owners(model, parts)
    made = _styles()
    sizes = tuple((part.name, part.width, part.size) for part in parts if part.width)
    plan: dict[str, ParallelStyle] = {}
    seen: set[int] = set()
    for part in parts:
        if id(part.module) not in seen:
            plan[part.name] = made[part.kind](sizes)
            seen.add(id(part.module))
    return plan


class _Part(NamedTuple):
    """A module and how it is to be cut; `width` names what must be a multiple of the number of processes, `size`."""

    name: str
    module: nn.Module
    kind: str
    width: str = ""
    size: int = 0


def _parts(name: str, module: nn.Module) -> list[_Part]:
    start = f"{name}." if name else ""
    if isinstance(module, MultiheadAttention):
        _check_attention(name, module)
        columns = [*CHILDREN, "gate_proj"] if "gate_proj" in module._modules else CHILDREN
        children = [_Part(start + child, cast(nn.Module, module._modules[child]), "columns") for child in columns]
        if module.num_kv_heads != module.num_heads:
            children[1] = children[1]._replace(width="num_kv_heads", size=module.num_kv_heads)
        rows = _Part(f"{start}out_proj", module.out_proj, "rows")
        parts = [_Part(name, module, "heads", "num_heads", module.num_heads), *children, rows]
    elif isinstance(module, FeedForward) and _is_elementwise(module):
        width = module.linear1.out_features if isinstance(module.linear1, nn.Linear) else 0
        parts = [_Part(f"{start}linear1", module.linear1, "columns", module._width_word, width)]
        if "linear3" in module._modules:
            parts.append(_Part(f"{start}linear3", module.linear3, "columns"))
        parts.append(_Part(f"{start}linear2", module.linear2, "rows"))
    else:
        return []
    for part in parts:
        if part.kind != "heads":
            _check_linear(part.name, part.module)
    return parts


def _is_elementwise(block: FeedForward) -> bool:
    """Whether the block's feed-forward is ours, and nothing between its linears looks at more than one number."""
    activation = block.activation
    methods = [name for name in ("forward", "_encode", "_decode", "_feed_forward") if hasattr(block, name)]
    if not are_ours(block, *methods) or type(block.dropout) is not nn.Dropout:
        return False
    if isinstance(activation, nn.Module) and is_hooked(activation):
        return False
    return type(activation) in _MODULES or any(activation is known for known in _FUNCTIONS)


def _check_attention(name: str, attention: MultiheadAttention) -> None:
    shown = name or "the model"
    if attention.fused_qkv:
        rule = "have split projections; call split_projections() on it, or upgrade(model, fused_qkv=False)"
        raise invalid("tp_plan", shown, rule, "a fused in_proj_weight, whose rows are not in the order of heads")
    changed = [step for step in _STEPS if getattr(type(attention), step) is not getattr(MultiheadAttention, step)]
    changed += ["forward" for module in (attention, attention.attend) if "forward" in vars(module)]
    if changed or type(attention.attend) is not Attend:
        what = f"{type(attention).__name__}.{changed[0]}" if changed else f"attend {type(attention.attend).__name__}"
        raise invalid("tp_plan", shown, "compute what MultiheadAttention does; write the plan of what differs", what)
    if type(attention.attn_dropout) is not nn.Dropout:
        rule = "be an nn.Dropout: it would see the heads of one process"
        raise invalid("tp_plan", f"{shown}.attn_dropout", rule, type(attention.attn_dropout).__name__)
    for norm in ("q_norm", "k_norm"):
        child = attention._modules.get(norm)
        if child is not None and any(True for _ in child.parameters()):
            rule = "have no parameters, whose gradients are of all heads; pass a qk_norm that makes norms without any"
            raise invalid("tp_plan", f"{shown}.{norm}", rule, repr(child))
    positions = attention._modules.get("positions")
    if positions is not None and type(positions) not in (Rotary, Alibi):
        raise invalid("tp_plan", f"{shown}.positions", "be a Rotary or an Alibi", class_of(positions))
    for bias in ("bias_k", "bias_v"):
        if getattr(attention, bias) is not None and not is_plain(attention._parameters.get(bias)):
            raise invalid("tp_plan", f"{shown}.{bias}", "be a plain Parameter", "a parametrized or sharded one")
    if attention.attend.shards != 1:
        raise invalid("tp_plan", shown, "not be sharded yet", f"one that is, over {attention.attend.shards} processes")


def _check_linear(name: str, child: nn.Module) -> None:
    kind, parameters = class_of(child), list(child.parameters())
    if any(map(is_sharded, parameters)):
        raise invalid("tp_plan", name, "not be sharded yet; shard by tp_plan before all else", f"{kind} of DTensors")
    if type(child) is not nn.Linear or "forward" in child.__dict__ or child._modules:
        raise invalid("tp_plan", name, "be exactly an nn.Linear; merge adapters first", kind)
    plain = set(child._parameters) == {"weight", "bias"} and all(map(is_plain, parameters))
    if not plain or child._buffers:
        held = ", ".join([*child._parameters, *child._buffers])
        raise invalid("tp_plan", name, "hold a plain weight and bias; remove what was made of them", held)


def _check_owners(model: nn.Module, parts: list[_Part]) -> None:
    """What is sharded here must not be at work elsewhere, where nobody would know."""
    planned: dict[int, _Part] = {}
    for part in parts:
        before = planned.setdefault(id(part.module), part)
        if before.kind != part.kind:
            raise invalid("tp_plan", part.name, "have one place", f"the module of {before.name} too, cut otherwise")
    places = {(start, child) for start, _, child in (part.name.rpartition(".") for part in parts)}
    names = [part.name for part in parts]
    for name, module in model.named_modules():
        start = f"{name}." if name else ""
        for child, held in module._modules.items():
            part_of = None if held is None else planned.get(id(held))
            if part_of is not None and part_of.kind != "heads" and (name, child) not in places:
                raise invalid("tp_plan", part_of.name, "have no place in other modules", f"{start}{child} is it too")
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for word, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(f"{name}.{word}" if name else word)
    for tied in owners.values():
        mine = [owner for owner in tied if owner.rpartition(".")[0] in names]
        if mine and len(tied) > 1:
            raise invalid("tp_plan", mine[0], "be a parameter of its own: tied ones would come apart", ", ".join(tied))


@functools.cache
def _styles() -> dict[str, Any]:
    """Our styles: made here, since `torch.distributed` is loaded only where it is used."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

    class HeadParallel(ParallelStyle):
        """An attention whose projections are sharded by head: its masks, biases and weights."""

        def __init__(self, sizes: tuple[tuple[str, str, int], ...]) -> None:
            super().__init__()
            self.sizes = sizes

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            _check_sizes(self.sizes, device_mesh)
            if not isinstance(module, MultiheadAttention):
                raise invalid("tp_plan", "the plan", "be used on the model it was made of", type(module).__name__)
            _check_attention("the model's attention", module)
            for name in ("bias_k", "bias_v"):
                bias = getattr(module, name)
                if bias is not None:
                    cut = distribute_tensor(bias, device_mesh, [Shard(2)], src_data_rank=self.src_data_rank)
                    module.register_parameter(name, nn.Parameter(cut, requires_grad=bias.requires_grad))
            module.attend.shards = device_mesh.size()
            # not partial objects: a copy of the model would copy the mesh with them
            module.attend.register_forward_pre_hook(lambda _, given: _before(device_mesh, given))
            module.attend.register_forward_hook(lambda _, given, result: _after(device_mesh, result))
            return module

    class EvenColwise(ColwiseParallel):
        def __init__(self, sizes: tuple[tuple[str, str, int], ...]) -> None:
            super().__init__()
            self.sizes = sizes

        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            _check_sizes(self.sizes, device_mesh)
            return super()._apply(module, device_mesh)

    return {"heads": HeadParallel, "columns": EvenColwise, "rows": lambda _: RowwiseParallel()}


def _check_sizes(sizes: tuple[tuple[str, str, int], ...], mesh: DeviceMesh) -> None:
    """Hold that the mesh fits all that the plan shards, before the first of it is.

    Raises:
        ValueError: it does not.
    """
    if mesh.ndim != 1:
        raise invalid("tp_plan", "the mesh", 'have one dimension; take mesh["tp"] of a larger one', mesh)
    processes = mesh.size()
    uneven = [f"{name or 'the model'} has {width} {size}" for name, width, size in sizes if size % processes]
    if uneven:
        rule = "divide the heads of every attention and the inner width of every feed-forward"
        raise invalid("tp_plan", "the size of the mesh", rule, f"{processes}, and {'; '.join(uneven)}")


def _before(mesh: DeviceMesh, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The masks of this process's heads, and their sinks."""
    query, key, value, mask, *rest = given
    if len(rest) > _SINK and rest[_SINK] is not None:
        H = query.shape[1]
        rest[_SINK] = _summed(mesh, rest[_SINK]).narrow(0, mesh.get_local_rank() * H, H)
    return (query, key, value, None if mask is None else _own(mesh, mask), *rest)


def _after(mesh: DeviceMesh, result: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    """The weights of all heads, or averaged over all; a loss that each process computes of them counts once."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    out, weights = result
    if weights is None:
        return result
    if weights.dim() == 4:
        here = DTensor.from_local(weights, mesh, [Shard(1)], run_check=False)
    else:
        here = DTensor.from_local(weights / mesh.size(), mesh, [Partial()], run_check=False)
    return out, here.redistribute(placements=[Replicate()]).to_local()


def _own(mesh: DeviceMesh, mask: Mask) -> Mask:
    """The mask for this process's heads, its structure kept, so that kernels see the same flags and lengths."""
    if not isinstance(mask, (Given, algebra.Alibi)):
        if not mask.parts:
            return mask
        changed = copy.copy(mask)
        changed.parts = tuple(_own(mesh, part) for part in mask.parts)
        return changed
    tensor, *others = mask.tensors
    if tensor.requires_grad and torch.is_grad_enabled():
        mask = copy.copy(mask)
        mask.tensors = (_summed(mesh, tensor), *others)
    speaks = isinstance(mask, algebra.Alibi) or tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[1] != 1)
    return _OwnHeads(mask, mesh.get_local_rank(), mesh.size()) if speaks else mask


def _summed(mesh: DeviceMesh, tensor: Tensor) -> Tensor:
    """The same; its gradient is the sum of what the heads of all processes give."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    whole = DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


class _OwnHeads(Mask):
    """The part of a mask that speaks of each head that speaks of this process's."""

    def __init__(self, inner: Mask, rank: int, shards: int) -> None:
        self.parts, self.rank, self.shards = (inner,), rank, shards

    def keep(self, size: Size) -> Tensor | None:
        return self._cut(self.parts[0].keep(self._whole(size)), size)

    def score(self, size: Size) -> Tensor | None:
        return self._cut(self.parts[0].score(self._whole(size)), size)

    def _whole(self, size: Size) -> Size:
        return size._replace(heads=size.heads * self.shards)

    def _cut(self, tensor: Tensor | None, size: Size) -> Tensor | None:
        if tensor is None or tensor.shape[1] == 1:
            return tensor
        return tensor.narrow(1, self.rank * size.heads, size.heads)

    def __repr__(self) -> str:
        return f"own_heads({self.parts[0]!r}, {self.rank} of {self.shards})"
