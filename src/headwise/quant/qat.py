"""Quantization-aware training: `prepare_qat` before it, `convert` after it."""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import nn

from headwise._checks import class_of, counted, invalid, positive
from headwise.core.projections import ProjectedAttention
from headwise.layers.optimizers import Optimizers, check_holds, listed
from headwise.layers.upgrade import Where, wrapper_kinds
from headwise.quant.fake import FakeQuantLinear
from headwise.quant.finding import check_own, open_up, plan
from headwise.quant.linear import Int8Linear
from headwise.quant.quantize import copied_model, turned

_LOG = logging.getLogger("headwise")
_FREEZE_AFTER = 1000
_MOST_STEPS = torch.iinfo(torch.int64).max


def prepare_qat(
    model: nn.Module,
    *,
    where: Where = None,
    freeze_after: int = _FREEZE_AFTER,
    reduce_range: bool = False,
    optimizer: Optimizers = None,
) -> nn.Module:
    """Prepare a model, in place, to be trained for int8: linears round as int8 will, gradients pass straight through.

    Train it on as ever, some epochs at a low learning rate, and `convert` it. Each `nn.Linear`, attention's projections
    included, *becomes* a `headwise.quant.FakeQuantLinear`: the same object, Parameters, hooks and ties.

    Args:
        model: a trained float32 model with attention of headwise or torch, or with an `nn.Linear`. Torch's layers are
            upgraded and fused projections split first.
        where: `where(name, module)` says of each `nn.Linear` whether to turn it, one with several names by any of
            them. It is asked before anything is changed: for a projection that is still fused, of a linear that is like
            it. None: all.
        freeze_after: training forwards of a layer after which the range of its input stays as it is: the last part of a
            training is done with the very scale that is shipped. Until then it is the mean of the batches' least and
            greatest numbers, of the last hundred or so.
        reduce_range: weights of 7 bits, as in `headwise.quantize`.
        optimizer: one or several that were built over the model and train on; see `headwise.upgrade`. None: build them
            afterwards.

    Returns:
        `model` itself, in the mode it was in. A line in the logger "headwise" says what was turned, as a warning where
        Parameters were cut that an optimizer built before still holds.

    Raises:
        ValueError: nothing to turn (what there is instead), a model that is prepared or int8 already, that is wrapped
            in DistributedDataParallel or FSDP (wrap it afterwards), a linear that is not float32, is lazy, has weights
            that something computes (pruning, weight_norm), a `forward` that is not its class's, or an attribute of a
            name that int8 needs; fused projections that anything else uses too; an optimizer that holds fused
            projections of headwise's attention, or nothing of the model; a call in inference mode. Nothing is changed
            then.

    Works with autocast (rounding stays in float32, the product is as autocast says), `torch.compile`, gradient
    checkpointing (a recomputed forward counts once; it rounds with the latest range, where a layer is called several
    times in a pass), and DistributedDataParallel (the ranges of the first process are sent to all). A row that holds
    NaN or infinity stays NaN, and so do loss and gradients, as without rounding; ranges do not see it. Within
    `torch.func`'s transforms it rounds and differentiates, and ranges stay as they are.

    Cost: a training step took 1.6 to 2.2 times as long on the CPU, for blocks 512 to 64 wide.
    Source: arXiv 1712.05877 section 3; docs/edge.md.

    Example:
        >>> import torch
        >>> import headwise
        >>> model = headwise.prepare_qat(headwise.EncoderBlock(16, 4)).train()
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        >>> x, target = torch.randn(8, 5, 16), torch.randn(8, 5, 16)
        >>> for _ in range(3):
        ...     optimizer.zero_grad()
        ...     torch.nn.functional.mse_loss(model(x), target).backward()
        ...     optimizer.step()
        >>> small = headwise.convert(model)
        >>> with torch.no_grad():
        ...     torch.testing.assert_close(small(x), model.eval()(x), rtol=0, atol=0.02)
    """
    function = "prepare_qat"
    freeze_after = positive(function, "freeze_after", freeze_after)
    if freeze_after > _MOST_STEPS:
        raise invalid(function, "freeze_after", f"be at most {_MOST_STEPS}, what steps can count", freeze_after)
    if not isinstance(reduce_range, bool):
        raise invalid(function, "reduce_range", "be True or False", repr(reduce_range))
    _check(function, model)
    _check_optimizers(function, model, optimizer)
    names = list(_trainable(function, plan(function, model, where, optimizer)))
    before = {id(parameter) for parameter in model.parameters()}
    open_up(function, model, optimizer)
    for name in names:
        FakeQuantLinear.become(cast(nn.Linear, model.get_submodule(name)), freeze_after, reduce_range)
    number = counted(len(names), "linear")
    said = f"{number} rounded as in int8, ranges fixed after {freeze_after:,} training forwards"
    cut = optimizer is None and not before <= {id(parameter) for parameter in model.parameters()}
    if cut:
        said += "; projections were cut: optimizers and EMA copies built before hold parameters that are gone"
    _LOG.log(logging.WARNING if cut else logging.INFO, "%s: %s", function, said)
    return model


def convert(model: nn.Module, *, dynamic: bool = False) -> nn.Module:
    """Make an int8 copy of a model that was trained after `prepare_qat`.

    Args:
        model: the trained model. Not changed.
        dynamic: True gives the same integer weights with scales that follow each call's input; the ranges of the
            training are left out. False: *static*, what was trained.

    Returns:
        The copy, in eval mode, its parameters without gradients, as `headwise.quantize` makes it. Static, a layer
        computes what it does in eval, up to half a unit of its int32 bias and float32's own rounding; over a whole
        model, where such a difference decides a number half way between two steps, up to a step there.

    Raises:
        ValueError: no `prepare_qat` before, a layer that saw no training forward, a wrapped model, weights that are not
            finite, or that something computes that was attached since (pruning: `prune.remove` first).

    Cost: the model once more in memory.
    Source: arXiv 1712.05877; docs/edge.md.

    Example: see `headwise.prepare_qat`.
    """
    function = "convert"
    if not isinstance(dynamic, bool):
        raise invalid(function, "dynamic", "be True or False", repr(dynamic))
    _check_wrapper(function, model, "be what was wrapped: model.module")
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear):
            check_own(function, name, module)
    copied = copied_model(function, model)
    linears: dict[str, nn.Linear] = {}
    states = {}
    for name, module in copied.named_modules():
        if isinstance(module, FakeQuantLinear):
            linears[name] = module
            states[name] = module.state(dynamic, function, name or "model")
    if not linears:
        rule = "come from headwise.prepare_qat; headwise.quantize turns a model that was not trained for it"
        raise invalid(function, "model", rule, f"{class_of(model)} without a FakeQuantLinear")
    return turned(function, copied, linears, states)


def _check(function: str, model: nn.Module) -> None:
    """Refuse what cannot be prepared, before anything is changed."""
    if torch.is_inference_mode_enabled():
        raise invalid(function, "model", "be prepared outside of torch.inference_mode, to be trained", "a call in it")
    _check_wrapper(function, model, f"be wrapped after {function}, not before")
    for name, module in model.named_modules():
        if isinstance(module, FakeQuantLinear):
            rule = "be prepared once; where= can select all that is wanted, and freeze_after is an attribute"
            raise invalid(function, "model", rule, f"{name or 'model'}, a FakeQuantLinear already")
        if isinstance(module, Int8Linear):
            rule = "be the float model that was quantized: int8 cannot be trained"
            raise invalid(function, "model", rule, f"{name or 'model'}, an Int8Linear")


def _trainable(function: str, linears: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    """Hold that these linears can be trained in float32."""
    for name, linear in linears.items():
        for own, parameter in linear.named_parameters(name, recurse=False):
            if parameter.dtype != torch.float32:
                rule = "be float32; model.float() converts it, and torch.autocast trains it in a lower precision"
                raise invalid(function, "model", rule, f"{parameter.dtype} in {own}")
            if parameter.is_inference():
                rule = "be built outside of torch.inference_mode, to be trained; copy.deepcopy makes one that is"
                raise invalid(function, "model", rule, f"{own}, an inference tensor")
    return linears


def _check_wrapper(function: str, model: nn.Module, rule: str) -> None:
    if not isinstance(model, nn.Module):
        raise invalid(function, "model", "be an nn.Module", class_of(model))
    kinds: tuple[type, ...] = (nn.DataParallel, *wrapper_kinds())
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise invalid(function, "model", rule, f"a {class_of(module)}{f' at {name}' if name else ''}")


def _check_optimizers(function: str, model: nn.Module, optimizer: Optimizers) -> None:
    """Refuse an optimizer over other parameters, and over projections that are to be cut and that it cannot follow."""
    optimizers = listed(function, optimizer)
    if optimizer is not None:
        check_holds(function, optimizers, model)
    held = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    for name, module in model.named_modules():
        fused = isinstance(module, ProjectedAttention) and module.fused_qkv
        if fused and any(id(parameter) in held for parameter in module._parameters.values()):
            rule = "be built afterwards, or over projections that split_projections() has cut before"
            raise invalid(function, "optimizer", rule, f"one that holds the fused ones of {name or 'model'}")
