"""`quantize`: an int8 copy of a model, without training."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from headwise._checks import class_of, counted, invalid
from headwise.layers.upgrade import Where
from headwise.quant.calibrate import Calibration, ranges_of
from headwise.quant.equalize import equalized
from headwise.quant.fake import FakeQuantLinear
from headwise.quant.finding import check_own, find_linears, open_up
from headwise.quant.linear import Int8Linear
from headwise.quant.state import REDUCED, Int8State, make_state

_LOG = logging.getLogger("headwise")


@dataclass(frozen=True)
class Report:
    """What of a model is int8; `print` it.

    Attributes:
        num_int8: linears that are int8.
        num_float: linears that are not.
        kind: "static", "dynamic", "mixed" or "float".
        float_bytes: of all parameters and buffers, were the int8 weights float32, each on its own: a weight that was
            tied to another counts here.
        int8_bytes: of all that it holds now.
        names: of the linears that are int8.
        weight_bits: 8, or 7 where all weights are of reduced range: safe on processors without VNNI.
    """

    num_int8: int
    num_float: int
    kind: str
    float_bytes: int
    int8_bytes: int
    names: tuple[str, ...]
    weight_bits: int = 8

    def __str__(self) -> str:
        share = self.int8_bytes / max(1, self.float_bytes)
        return (
            f"{self.num_int8} of {counted(self.num_int8 + self.num_float, 'linear')} in int8 ({self.kind}"
            f"{', 7-bit weights' if self.weight_bits == 7 else ''}), "
            f"{self.float_bytes:,} bytes with float weights, {self.int8_bytes:,} now ({share:.2f})"
        )


def quantize(
    model: nn.Module,
    calibration: Calibration | None = None,
    *,
    where: Where = None,
    equalize: bool = False,
    reduce_range: bool = False,
) -> nn.Module:
    """Make an int8 copy of a model: attention's projections and every other `nn.Linear`.

    Scores, softmax, norms, embeddings and convolutions stay float32. Weights get one scale for each output channel,
    inputs one for the whole tensor, as u8 with a zero point.

    Args:
        model: any model in float32 with attention of headwise or torch, or with an `nn.Linear`. Not changed. Torch's
            layers are upgraded in the copy.
        calibration: some hundred samples like those to come, as an iterable of tensors, tuples of arguments or dicts of
            keywords. The greatest and least numbers that a projection sees there fix its input's scale: *static*, what
            OpenVINO and NPUs want. What padding holds counts too. None: *dynamic*, the scale follows each call's
            input; a sample then depends, by rounding, on the others of its batch.
        where: `where(name, module)` says of each `nn.Linear` whether to turn it. None: all.
        equalize: True first brings the channels between two linears to one size where that changes nothing else, which
            helps where a few of them are far greater than the others; see `headwise.quant.equalize`.
        reduce_range: weights of 7 bits, for x86 processors without VNNI: their 16-bit sums cannot overflow then. Files
            for such processors need it, dynamic ones too: onnxruntime has no guard, and gives wrong sums there.

    Returns:
        The copy, in eval mode, its parameters without gradients. `headwise.quant.report(copy)` says what was turned; a
        line in the logger "headwise" says it too.

    Raises:
        ValueError: nothing to turn (what there is instead), a model that is not float32, or is prepared for training
            (`headwise.convert` turns that), nothing to equalize where that is asked for, NaN in weights or in the
            calibration, an empty calibration or one that the model does not take, or that leaves a projection unused.

    Cost: one forward for each input of the calibration, and the model once more in memory; twice while it calibrates.
    Unlike torch: `quantize_dynamic` turns nothing in `nn.MultiheadAttention`; inputs of any magnitude keep 8 bits,
        where torch's rounds small ones (below about 1e-2) to a few levels and tiny ones to 0; NaN stays NaN.
    Source: arXiv 1712.05877; docs/edge.md.

    Example:
        >>> import torch
        >>> import headwise
        >>> block = headwise.EncoderBlock(64, 4).eval()
        >>> x = torch.randn(8, 10, 64)
        >>> small = headwise.quantize(block, [x])
        >>> with torch.no_grad():
        ...     error = (small(x) - block(x)).norm() / block(x).norm()
        >>> bool(error < 0.02)
        True
        >>> from headwise.quant import report
        >>> report(small).num_int8, report(small).kind
        (6, 'static')
    """
    for name, flag in (("equalize", equalize), ("reduce_range", reduce_range)):
        if not isinstance(flag, bool):
            raise invalid("quantize", name, "be True or False", repr(flag))
    copied = copied_model("quantize", model)
    if prepared := [name for name, module in copied.named_modules() if isinstance(module, FakeQuantLinear)]:
        rule = "not be prepared for training; headwise.convert turns one that is"
        raise invalid("quantize", "model", rule, f"{prepared[0] or 'model'}, a FakeQuantLinear")
    open_up("quantize", copied)
    if equalize:
        equalized("quantize", copied)
    try:
        linears = find_linears("quantize", copied, where)
    except ValueError:
        kinds = {type(module) for module in copied.modules() if isinstance(module, (nn.Linear, Int8Linear))}
        if kinds == {Int8Linear}:
            got = f"one that is int8 already: {report(copied)}"
            raise invalid("quantize", "model", "be a float model", got) from None
        raise
    ranges = {} if calibration is None else ranges_of("quantize", copied, linears, calibration)
    states = {
        name: make_state(
            linear.weight,
            linear.bias,
            ranges.get(name),
            reduce_range=reduce_range,
            function="quantize",
            name=name or "model",
        )
        for name, linear in linears.items()
    }
    return turned("quantize", copied, linears, states)


def report(model: nn.Module) -> Report:
    """Say what of a model is int8.

    Args:
        model: any.

    Returns:
        Counts, names and sizes.
    """
    if not isinstance(model, nn.Module):
        raise invalid("report", "model", "be an nn.Module", class_of(model))
    small = {name: module for name, module in model.named_modules() if isinstance(module, Int8Linear)}
    kinds = {"static" if module.is_static else "dynamic" for module in small.values()}
    kind = "mixed" if len(kinds) == 2 else next(iter(kinds), "float")
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    held = sum(t.numel() * t.element_size() for t in tensors.values())
    own = sum(t.numel() * t.element_size() for module in small.values() for t in module.buffers())
    as_float = sum(4 * (m.in_features + m.has_bias) * m.out_features for m in small.values())
    others = sum(isinstance(module, nn.Linear) for module in model.modules())
    bits = 7 if small and all(map(_is_reduced, small.values())) else 8
    return Report(len(small), others, kind, held - own + as_float, held, tuple(small), bits)


def _is_reduced(layer: Int8Linear) -> bool:
    weight = layer.int_weight
    return not weight.is_meta and (not weight.numel() or int(weight.abs().amax()) <= REDUCED)


def copied_model(function: str, model: nn.Module) -> nn.Module:
    """A copy in eval mode without gradients.

    Raises:
        ValueError: no module, or one that cannot be copied.
    """
    if not isinstance(model, nn.Module):
        raise invalid(function, "model", "be an nn.Module", class_of(model))
    try:
        copied = copy.deepcopy(model)
    except Exception as error:  # a module's own __deepcopy__ may raise anything
        for name, module in model.named_modules():
            if type(module) is nn.Linear and not _copies(module):  # pruned: its computed weight cannot be copied
                check_own(function, name, module, can_leave=False)
        rule = "be one that copy.deepcopy can copy; detach what it keeps of a forward, remove what it cannot copy"
        raise invalid(function, "model", rule, f"{class_of(model)}: {str(error) or type(error).__name__}") from error
    own = {id(module) for module in model.modules()}
    if shared := [name or "model" for name, module in copied.named_modules() if id(module) in own]:
        rule = "be copied whole by copy.deepcopy, or the original would be changed too"
        raise invalid(function, "model", rule, f"{shared[0]}, whose __deepcopy__ gives itself")
    for parameter in copied.parameters():
        if not is_lazy(parameter):  # which find_linears and the exporters refuse by name
            parameter.requires_grad_(False)
    return copied.eval()


def _copies(module: nn.Module) -> bool:
    try:
        copy.deepcopy(module)
    except Exception:  # which one does not matter: the caller has the whole model's
        return False
    return True


def turned(function: str, model: nn.Module, linears: dict[str, nn.Linear], states: dict[str, Int8State]) -> nn.Module:
    """The model with these linears in int8, in place; says so to the logger."""
    for name, linear in linears.items():
        Int8Linear.become(linear, states[name])
    tell(function, model)
    return model


def tell(function: str, model: nn.Module) -> None:
    """Say to the logger what of a model is int8; counted only if somebody listens."""
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s: %s", function, report(model))
