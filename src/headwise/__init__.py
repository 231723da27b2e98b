"""headwise: the multi-head attention layer that PyTorch users switch to.

`headwise.MultiheadAttention` takes the place of `torch.nn.MultiheadAttention`, weights and all. Importing this loads
torch and the standard library only.
"""

from headwise.core import masks
from headwise.core.cache import CacheList, CrossCache, RollingCache, StaticCache
from headwise.core.flops import register_flop_formulas
from headwise.core.functional import attention, attention_weights, explain, top_attention_weights
from headwise.core.multihead import MultiheadAttention
from headwise.core.positions import Alibi, Rotary
from headwise.export.executorch import export_executorch
from headwise.export.onnx import export_onnx
from headwise.layers.blocks import Decoder, DecoderBlock, Encoder, EncoderBlock
from headwise.layers.transformer import (
    Transformer,
    TransformerDecoder,
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from headwise.layers.upgrade import downgrade, upgrade
from headwise.models.classifier import SequenceClassifier
from headwise.models.files import load, save
from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.monitor import watch
from headwise.quant.qat import convert, prepare_qat
from headwise.quant.quantize import quantize

__version__ = "0.1.0"

register_flop_formulas()

__all__ = [
    "Alibi",
    "AttentionMap",
    "CacheList",
    "CrossCache",
    "Decoder",
    "DecoderBlock",
    "Encoder",
    "EncoderBlock",
    "MultiheadAttention",
    "RollingCache",
    "Rotary",
    "SequenceClassifier",
    "StaticCache",
    "Transformer",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "attention",
    "attention_weights",
    "convert",
    "downgrade",
    "explain",
    "export_executorch",
    "export_onnx",
    "heatmap",
    "load",
    "masks",
    "prepare_qat",
    "quantize",
    "save",
    "top_attention_weights",
    "upgrade",
    "watch",
]
