"""int8 for attention and every other linear: quantize, quantization-aware training, and the state that export reads."""

from headwise.quant.equalize import equalize
from headwise.quant.fake import FakeQuantLinear
from headwise.quant.linear import Int8Linear
from headwise.quant.qat import convert, prepare_qat
from headwise.quant.quantize import Report, quantize, report
from headwise.quant.saved import from_state_dict
from headwise.quant.state import Int8State, make_state, scale_of

__all__ = [
    "FakeQuantLinear",
    "Int8Linear",
    "Int8State",
    "Report",
    "convert",
    "equalize",
    "from_state_dict",
    "make_state",
    "prepare_qat",
    "quantize",
    "report",
    "scale_of",
]
