"""`Int8Linear`: what an `nn.Linear` becomes.

Letters: N output width, K input width.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from headwise._checks import invalid, kind_of
from headwise.core.backends import eager
from headwise.core.nested import read_samples
from headwise.quant.backends import BACKENDS, REFERENCE, X86, Packed
from headwise.quant.state import Int8State, float_linear

_NAME = "Int8Linear"
_NO_WEIGHT = f"{_NAME} has no weight: int_weight and weight_scale are what it has, state.weights() what they stand for"
_DYNAMIC = ("int_weight", "weight_scale", "bias")
_STATIC = ("int_weight", "weight_scale", "int_bias", "input_scale", "input_zero_point")
_FLOATS = ("weight_scale", "bias", "input_scale")
_FAKE = ("input_low", "input_high", "steps")  # buffers of what a layer was in training
_FAKE_SETTINGS = ("freeze_after", "reduce_range")  # and its attributes


class Int8Linear(nn.Module):
    """A linear layer with int8 weights: float32 in and out, integer products inside.

    Made by `headwise.quantize` and `headwise.convert`, or from a state by `Int8Linear.of`. Not trained: the way to
    train is `headwise.prepare_qat`.

    Buffers: `int_weight` (N, K) int8, `weight_scale` (N,) float32; static: `int_bias` (N,) int32 or None,
    `input_scale` and `input_zero_point` (float32 and int32, no dimensions); dynamic: `bias` (N,) float32 or None. There
    is no `weight`.

    Attributes:
        in_features: K.
        out_features: N.
        backend: None or "x86": integer products, or an error where they cannot run; "reference": float arithmetic.

    `half()`, `double()` and the like leave its scales in float32. Packed weights are made at the first call, and anew
    after `load_state_dict`, `to` and writes to the buffers; not after writes through `.data` or numpy, which torch does
    not see.
    """

    int_weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor
    in_features: int
    out_features: int
    _backend: str | None = None
    _kept: dict[tuple[int, str], _Held]

    @classmethod
    def of(cls, state: Int8State) -> Int8Linear:
        """A layer with this state."""
        layer = nn.Linear(1, 1, bias=False, device="meta")
        return cls.become(layer, state)

    @classmethod
    def become(cls, layer: nn.Linear, state: Int8State) -> Int8Linear:
        """Turn a linear layer into this, the same object: hooks, attributes and whatever holds it stay.

        Args:
            layer: exactly a linear layer, or one of fake quantization.
            state: what it holds from now on.

        Returns:
            The layer.
        """
        made: Any = layer
        for name in ("weight", "bias"):
            made._parameters.pop(name, None)
        for name in (*_DYNAMIC, *_STATIC, *_FAKE):
            made._buffers.pop(name, None)
        for name in ("reset_parameters", *_FAKE_SETTINGS):  # the first: of a projection in attention
            made.__dict__.pop(name, None)
        made.__class__ = cls
        made.out_features, made.in_features = state.weight.shape
        buffers: dict[str, Tensor | None] = {"int_weight": state.weight, "weight_scale": state.weight_scale}
        if state.input_scale is None:
            buffers["bias"] = state.bias
        else:
            device = state.weight.device
            buffers["int_bias"] = state.bias
            buffers["input_scale"] = torch.tensor(state.input_scale, dtype=torch.float32, device=device)
            buffers["input_zero_point"] = torch.tensor(state.input_zero_point, dtype=torch.int32, device=device)
        for name, tensor in buffers.items():
            made.register_buffer(name, tensor)
        made._kept = {}
        return made  # type: ignore[no-any-return]

    @property
    def backend(self) -> str | None:
        """What computes it."""
        return self._backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        known = [backend.name for backend in BACKENDS]
        if name is not None and name not in known:
            raise invalid(_NAME, "backend", f"be {' or '.join(map(repr, known))}, or None", repr(name))
        self._backend = name

    @property
    def is_static(self) -> bool:
        """Whether the input's scale is known beforehand."""
        return "input_scale" in self._buffers

    @property
    def has_bias(self) -> bool:
        """Whether it adds one."""
        return self._buffers["int_bias" if self.is_static else "bias"] is not None

    @property
    def state(self) -> Int8State:
        """The layer's int8 state; its tensors are the layer's own."""
        own: Any = self._buffers
        if not self.is_static:
            return Int8State(own["int_weight"], own["weight_scale"], own["bias"])
        scale, zero_point = own["input_scale"].item(), own["input_zero_point"].item()
        return Int8State(own["int_weight"], own["weight_scale"], own["int_bias"], scale, zero_point)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as nn.Linear calls it
        """Multiply by the weights and add the bias.

        Args:
            input: (..., K) float32; nested: (B, *, K).

        Returns:
            (..., N) float32, under autocast too. A row of the input that holds NaN or infinity comes out as NaN and
            touches no other. Dynamic: the scale is that of the whole input, so that by rounding a row depends on the
            others of its call.

        Raises:
            ValueError: another width or dtype, an input that asks for a gradient, or no backend that can run here: on
                another processor than x86, or, where the layer is static and not of reduced range, one without VNNI.

        Compiled or exported by torch it is float arithmetic on the same rounded numbers.
        """
        x = input
        if isinstance(x, Tensor) and x.is_nested:
            samples = read_samples(_NAME, "input", x)
            return samples.like(self.forward(samples.values))
        _check(self, x)
        if x.is_meta:
            return x.new_empty(*x.shape[:-1], self.out_features)
        if self._backend == REFERENCE.name or not eager() or self.in_features == 0:
            return self._by_float(x)
        out = _run((self,), x if x.dim() > 1 else x[None])
        assert out is not None, "one layer has one scale"
        return out if x.dim() > 1 else out[0]

    @staticmethod
    def together(children: Sequence[Any], x: Tensor) -> list[Tensor] | None:
        """The outputs of several layers for one input, as one product; None where they do not fit each other."""
        first = children[0]
        if not eager() or x.is_meta or x.dim() < 2 or x.is_nested:
            return None
        for child in children:
            if type(child) is not Int8Linear or child._backend == REFERENCE.name:
                return None
            if child.in_features != first.in_features or not first.in_features or child.is_static != first.is_static:
                return None
        _check(first, x)
        out = _run(children, x)
        return None if out is None else list(out.split([child.out_features for child in children], dim=-1))

    def _by_float(self, x: Tensor) -> Tensor:
        own = self._buffers
        bias = own["int_bias"] if self.is_static else own["bias"]
        scale, zero_point = own.get("input_scale"), own.get("input_zero_point")
        return float_linear(x, self.int_weight, self.weight_scale, bias, scale, zero_point)

    def extra_repr(self) -> str:
        """Widths, and whether the input's scale is known."""
        return f"{self.in_features}, {self.out_features}, {'static' if self.is_static else 'dynamic'}"

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        if name == "bias" and self.is_static:
            return self.state.biases()
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(_NO_WEIGHT)
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        # Packed weights are made again when it is called: the operator's own order is its own
        return {**super().__getstate__(), "_kept": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = {name: self._buffers.get(name) for name in _FLOATS}
        super()._apply(fn, recurse)
        for name, own in before.items():
            now = self._buffers.get(name)
            if own is not None and now is not None and now.dtype != own.dtype:
                self._buffers[name] = own.to(now.device)
        self._kept = {}
        return self

    def _load_from_state_dict(self, *given: Any) -> None:
        super()._load_from_state_dict(*given)
        self._kept = {}


def _check(layer: Int8Linear, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype != torch.float32 or x.dim() == 0 or x.shape[-1] != layer.in_features:
        rule = f"be float32 and {layer.in_features} wide; autocast and half precision do not go with int8"
        raise invalid(_NAME, "input", rule, kind_of(x))
    if x.layout is not torch.strided:
        raise invalid(_NAME, "input", "be dense; x.to_dense()", x.layout)
    asks = x.requires_grad and torch.is_grad_enabled()
    if asks or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None):
        cure = "train with headwise.prepare_qat, or call under torch.no_grad()"
        raise invalid(_NAME, "input", f"ask for no gradient, int8 has none; {cure}", "one that does")


class _Held(NamedTuple):
    """Packed weights, and the buffers that they were made of as those were then."""

    buffers: tuple[Tensor | None, ...]
    writes: int
    packed: Packed | None


def _run(layers: Sequence[Int8Linear], x: Tensor) -> Tensor | None:
    """The outputs of layers of one kind side by side; None where their inputs have several scales."""
    first = layers[0]
    wide = first.in_features
    engine = X86.engine(first.is_static, x.numel() // wide, wide * sum([one.out_features for one in layers]))
    packed = _packed(layers, x, engine)
    if packed is None:
        return None
    out = X86.run(packed, x)
    if out is not None:
        return out
    packed = _packed(layers, x, "fbgemm")
    assert packed is not None, "their inputs have one scale, as above"
    return X86.run_any(packed, x)


def _packed(layers: Sequence[Int8Linear], x: Tensor, engine: str) -> Packed | None:
    """The weights of layers as one, kept in the first of them for as long as their buffers are what they were.

    None: their inputs have several scales.
    """
    kept: dict[tuple[int, str], _Held] = layers[0].__dict__["_kept"]
    held = kept.get((len(layers), engine))
    names = _STATIC if layers[0].is_static else _DYNAMIC
    buffers = [layer._buffers[name] for layer in layers for name in names]
    if held is not None and x.is_cpu and len(buffers) == len(held.buffers):
        same = all(map(operator.is_, buffers, held.buffers))
        if same and _writes(buffers) == held.writes:
            return held.packed
    states = [layer.state for layer in layers]
    for state in states:
        if why := X86.why_not(state, x.device):
            cure = "layer.backend = 'reference' computes the same by float arithmetic, export_onnx runs elsewhere"
            raise invalid(_NAME, "backend", "be able to run here", f"{X86.name}, but {why} ({cure})")
    fit = len({(state.input_scale, state.input_zero_point) for state in states}) == 1
    packed = X86.pack(states, engine) if fit else None
    kept[len(layers), engine] = _Held(tuple(buffers), _writes(buffers), packed)
    return packed


def _writes(tensors: Sequence[Tensor | None]) -> int:
    """Counts writes to them; those to tensors made in inference mode are not counted."""
    return sum([t._version for t in tensors if t is not None and not t.is_inference()])
