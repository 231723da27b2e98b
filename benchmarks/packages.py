"""Models of published packages on torch's attention, beside themselves after `headwise.upgrade`; ratios of their times.

`make test-packages` installs the packages of requirements-packages.txt; tests/parity/test_packages.py holds that each
model gives the same numbers and gradients before and after. Weights are random: no package downloads anything here.

Letters: B batch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import logging
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise
from benchmarks.harness import Call, Case, Row, machine, measure

KINDS = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
    nn.TransformerDecoderLayer,
    nn.TransformerDecoder,
    nn.Transformer,
)
Forward = Callable[[Any], Any]


@dataclass(frozen=True)
class Example:
    """A model of a package: `build(large)` gives the model and a call of it on an input of its own kind."""

    package: str
    model: str
    build: Callable[[bool], tuple[nn.Module, Forward]]
    layers: int  # how many of its modules are exactly of one of KINDS, in the small size

    def missing(self) -> str | None:
        """Why it cannot be built here."""
        if importlib.util.find_spec(self.package) is None:
            return f"needs the package {self.package}; run `make test-packages`"
        return None

    def make(self, *, large: bool = False) -> tuple[nn.Module, Forward]:
        """The model in training mode without dropout, no parameter at a value that hides its absence; and its call."""
        with warnings.catch_warnings():  # packages warn of their own imports
            warnings.simplefilter("ignore")
            model, call = self.build(large)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
        return model.train(), call


def rt_detr(large: bool) -> tuple[nn.Module, Forward]:
    """Object detection: attention over the last feature map, sequence first, and over the queries of the decoder."""
    from kornia.models.rt_detr import RTDETR, RTDETRConfig

    if large:
        images = torch.randn(1, 3, 224, 224)
        # 300 of 1,029 positions become queries, by scores that random weights put so close that rounding changes their
        # order, and with it the order of the output.
        model = RTDETR.from_config(RTDETRConfig("resnet18d", 80))
        return model, lambda model: [part.sort(dim=1).values for part in model(images)]
    sizes = {"neck_hidden_dim": 32, "neck_dim_feedforward": 56, "head_hidden_dim": 40, "head_num_queries": 7}
    images = torch.randn(2, 3, 64, 96)
    return RTDETR.from_config(RTDETRConfig("resnet18d", 5, **sizes)), lambda model: model(images)


def siglip2(large: bool) -> tuple[nn.Module, Forward]:
    """An image encoder whose attention pooling gets padded patches as a float mask; one image is all padding."""
    from kornia.models.siglip2.config import SigLip2VisionConfig
    from kornia.models.siglip2.vision_encoder import SigLip2VisionModel

    B, side, patch, width, depth = (8, 224, 16, 384, 4) if large else (3, 40, 8, 44, 2)
    config = SigLip2VisionConfig(side, patch, 3, width, depth, 4, 2 * width)
    images = torch.randn(B, 3, side, side)
    keep = torch.arange((side // patch) ** 2) < torch.randint(1, (side // patch) ** 2, (B, 1))
    keep[0] = False
    return SigLip2VisionModel(config), lambda model: model(images, attention_mask=keep)


def set_transformer(large: bool) -> tuple[nn.Module, Forward]:
    """Pooling of the nodes of each graph: padded sets, whose padded rows are overwritten in place."""
    from torch_geometric.nn.aggr import SetTransformerAggregation

    B, most, width = (64, 60, 128) if large else (5, 11, 24)
    model = SetTransformerAggregation(width, num_seed_points=3, num_encoder_blocks=2, heads=4, layer_norm=True)
    index = torch.arange(B).repeat_interleave(torch.randint(1, most, (B,)))
    nodes = torch.randn(len(index), width)
    return model, lambda model: model(nodes, index)


def q_former(large: bool) -> tuple[nn.Module, Forward]:
    """Queries through a Transformer encoder, with an activation that is a module."""
    from torch_geometric.nn.attention import QFormer

    B, length, width = (16, 128, 256) if large else (3, 7, 20)
    model = QFormer(width, 2 * width, 13, num_heads=4, num_layers=2)
    x = torch.randn(B, length, width)
    return model, lambda model: model(x)


def viet_ocr(large: bool) -> tuple[nn.Module, Forward]:
    """Text from pictures: `nn.Transformer`, sequence first, with a causal float mask and a padding mask of 0.0 and 1.0.

    Those numbers are added to the scores and hide nothing: surely not what was meant, but it is what torch computes.
    """
    with torchvision_or_nothing():
        from vietocr.model.seqmodel.transformer import LanguageTransformer

    B, source, target, width, words = (16, 128, 48, 256, 233) if large else (3, 11, 7, 20, 31)
    model = LanguageTransformer(words, width, 4, 2, 2, 2 * width, 1024, 0.0, 0.0)
    memory, text = torch.randn(source, B, width) / 4, torch.randint(words, (target, B))
    padding = torch.arange(target) >= torch.randint(2, target, (B, 1))
    return model, lambda model: model(memory, text, tgt_key_padding_mask=padding)


@contextlib.contextmanager
def torchvision_or_nothing() -> Iterator[None]:
    """An empty torchvision while vietocr's module is imported: it asks for `torchvision.models` and makes no use of it.

    The torchvision that registries hold for Linux needs a torch with CUDA.
    """
    names = ("torchvision", "torchvision.models")
    if names[0] in sys.modules:
        yield
        return
    empty, models = map(types.ModuleType, names)
    empty.models = models  # type: ignore[attr-defined]
    sys.modules.update(zip(names, (empty, models), strict=True))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def ft_transformer(large: bool) -> tuple[nn.Module, Forward]:
    """A table: each column is a token."""
    from torch_frame import TensorFrame, stype
    from torch_frame.data.stats import StatType
    from torch_frame.nn.models import FTTransformer

    B, width = (256, 128) if large else (7, 24)
    names = {stype.numerical: [f"n{i}" for i in range(11)], stype.categorical: [f"c{i}" for i in range(3)]}
    stats: dict[str, dict[Any, Any]] = {
        name: {StatType.MEAN: 0.0, StatType.STD: 1.0} for name in names[stype.numerical]
    }
    stats.update({name: {StatType.COUNT: (list("abcde"), [1] * 5)} for name in names[stype.categorical]})
    features = {stype.numerical: torch.randn(B, 11), stype.categorical: torch.randint(5, (B, 3))}
    frame = TensorFrame(features, names)
    return FTTransformer(width, 5, 2, stats, names), lambda model: model(frame)


EXAMPLES = (
    Example("kornia", "RTDETR", rt_detr, 4),
    Example("kornia", "SigLip2VisionModel", siglip2, 1),
    Example("torch_geometric", "SetTransformerAggregation", set_transformer, 4),
    Example("torch_geometric", "QFormer", q_former, 7),
    Example("vietocr", "LanguageTransformer", viet_ocr, 13),
    Example("torch_frame", "FTTransformer", ft_transformer, 5),
)


def tensors(output: Any) -> list[Tensor]:
    """All tensors with numbers in what a model returns."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    return [tensor for part in output for tensor in tensors(part)]


def loss(output: Any) -> Tensor:
    """A number that every number of the output moves, each by another amount."""
    parts = [tensor.flatten() for tensor in tensors(output)]
    flat = torch.cat(parts)
    return flat @ torch.linspace(-1.0, 1.0, len(flat)).cos()


def cases(example: Example) -> Iterator[Case]:
    """Eval and a whole training step of the large model, in both layouts; torch's side is the model as published."""
    theirs, call = example.make(large=True)
    for mode, wrap in (("eval", evaluation), ("train", step)):
        for layout in ("split", "fused"):
            ours = headwise.upgrade(copy.deepcopy(theirs), fused_qkv=layout == "fused")
            other = copy.deepcopy(theirs)
            yield Case(f"{mode} {layout}", wrap(ours, call), {"as published": wrap(other, call)}, 0.0)


def evaluation(model: nn.Module, call: Forward) -> Call:
    """A call in eval and inference mode, which is torch at its best."""
    model.eval()

    def run() -> Tensor:
        with torch.inference_mode():
            return joined(call(model))

    return run


def step(model: nn.Module, call: Forward) -> Call:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def run() -> Tensor:
        output = call(model)
        optimizer.zero_grad()
        loss(output).backward()
        optimizer.step()
        return joined(output).detach()

    return run


def joined(output: Any) -> Tensor:
    """All numbers of an output."""
    return torch.cat([tensor.flatten() for tensor in tensors(output)])


def line(example: Example, rounds: int) -> str:
    """A row of the table."""
    rows: list[Row] = [measure(case, rounds=rounds, repeats=1) for case in cases(example)]
    cells = " | ".join(f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})" for row in rows)
    return f"| {example.package} | {example.model} | {cells} |"


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packages", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds a number")
    parser.add_argument("--only", choices=[example.model for example in EXAMPLES], help="one of the models")
    args = parser.parse_args()
    logging.getLogger("headwise").setLevel(logging.ERROR)  # it names each upgrade
    warnings.filterwarnings("ignore", message=".*holds only 0 and 1")  # vietocr's padding masks
    torch.manual_seed(0)
    print(f"# Models of published packages beside themselves after `headwise.upgrade`\n\n{machine()}. float32,")
    print(
        f"{args.rounds} interleaved rounds, median (quartiles) of the published model's time over the upgraded one's:"
    )
    print("above 1, the upgraded one is faster. Eval is in inference mode; train is forward, backward and AdamW.\n")
    print("| package | model | eval split | eval fused | train split | train fused |\n|---|---|---|---|---|---|")
    for example in EXAMPLES:
        if args.only in (None, example.model):
            without = example.missing()
            print(f"| {example.package} | {example.model} | {without} ||||" if without else line(example, args.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
