"""A classifier in other runtimes: how its file is written, what is said in it, and how it is run.

Axis letters: B batch, L positions, X channels, Y classes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise._checks import need
from headwise._files import whole
from headwise.data.samples import Series, pad
from headwise.export.doors import NotWrittenError
from headwise.export.executorch import Loaded, export_executorch
from headwise.export.onnx import export_onnx
from headwise.export.quiet import quiet_start
from headwise.models.classifier import SequenceClassifier, SeriesEmbedding
from headwise.quant.quantize import report

METADATA = "headwise"  # the key in an ONNX file whose value says, as JSON, what the numbers mean
SUFFIX = {"onnx": ".onnx", "executorch": ".pte"}  # by format, as RUNNERS at the end

Written = tuple[Any, dict[str, Any], tuple[Path, ...]]  # the exporter's report, what the file says, what was written


def write(file_format: str, model: SequenceClassifier, series: Series | None, output: Path) -> Written:
    """Write a classifier in a format, after the exporter tried it.

    Raises:
        NotWrittenError: the file does not do what the model does, in one line; what stood there before still does.
    """
    try:
        return (_to_onnx if file_format == "onnx" else _to_executorch)(model, series, output)
    except NotWrittenError as error:
        # A library may name the file by what it is called until it is whole
        line = re.sub(r"[^\s'\":]*\.[0-9a-f]{8}\.part(\.\w+)?", output.name, " ".join(str(error).split()))
        raise NotWrittenError(line) from error


def beside(output: Path, file_format: str) -> tuple[Path, ...]:
    """The other files that are written with that one."""
    return (output.with_name(f"{output.name}.json"),) if file_format == "executorch" else ()


def _to_onnx(model: SequenceClassifier, series: Series | None, output: Path) -> Written:
    says = _says(model, "(batch, length, channels)")
    says["inputs"]["padding_mask"] = "(batch, length) bool, True behind a series' end, where x may hold anything"
    metadata = {METADATA: json.dumps(says, ensure_ascii=False)}
    names = ["logits"]
    made = export_onnx(model, _example(model, series), output, output_names=names, metadata=metadata, verbose=False)
    return made, says, (output,)


def _to_executorch(model: SequenceClassifier, series: Series | None, output: Path) -> Written:
    """One series at a time: with a batch that stays 1, XNNPACK takes the encoder as one part."""
    x_BLX, padding_BL = _example(model, series)
    x_1LX = x_BLX[:1, : int((~padding_BL[0]).sum())]
    longest = max([512 * model.stride, *([] if series is None else map(len, series.values))])
    says = _says(model, "(1, length, channels)")
    says["inputs"]["x"] += f" and {longest} at most"
    (names,) = beside(output, "executorch")
    with whole(names) as part:  # written first, so that the two are there, or neither
        part.write_text(json.dumps(says, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        with quiet_start(again=True):
            made = export_executorch(model, x_1LX, output, max_size=longest, verbose=False)
    return made, says, (output, names)


def _says(model: SequenceClassifier, size: str) -> dict[str, Any]:
    return {
        "format": "headwise classifier",
        "version": 1,
        "class_names": list(model.class_names),
        "channel_names": list(model.channel_names),
        "interval": model.config["interval"],
        "unit": model.config["unit"],
        "kind": report(model).kind,
        "inputs": {"x": f"{size} float32, finite, channels in this order and as recorded, one step at least"},
        "outputs": {"logits": "(batch, classes) float32; their softmax gives a probability for each class"},
    }


def _example(model: SequenceClassifier, series: Series | None) -> tuple[Tensor, Tensor]:
    """A padded batch of two: real series, or made-up ones."""
    if series is not None:
        return pad([series.values[0], series.values[len(series) // 2]])
    return pad(made_up(model, (16 * model.stride, 11 * model.stride)))


def made_up(model: SequenceClassifier, lengths: Iterable[int]) -> list[Tensor]:
    """Noise with the means and scales of the training, (L, X) for each length."""
    embedding = model.embedding
    assert isinstance(embedding, SeriesEmbedding)
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(length, embedding.conv.in_channels, generator=generator) for length in lengths]
    return [one_LX * embedding.std_X + embedding.mean_X for one_LX in noise]


class Runner(Protocol):
    """x (B, L, X) float32 and which of it is padding, (B, L) bool, None: nothing -> logits (B, Y)."""

    takes_batches: bool  # or one series at a time, without padding

    def __call__(self, x_BLX: Tensor, padding_BL: Tensor | None = None, /) -> Tensor: ...


class Torch:
    """The model itself, in the call that is the quickest."""

    takes_batches = True

    def __init__(self, model: SequenceClassifier) -> None:
        self.model = model

    def __call__(self, x_BLX: Tensor, padding_BL: Tensor | None = None, /) -> Tensor:
        logits_BY = self.model(x_BLX, padding_BL)
        assert isinstance(logits_BY, Tensor)
        return logits_BY


def classes_of(run: Runner, series: Series) -> Tensor:
    """The class that it names for each series alone, (N,)."""
    return torch.stack([run(x_LX[None])[0].argmax() for x_LX in series.values])


class _Onnx:
    """By onnxruntime."""

    takes_batches = True

    def __init__(self, path: Path, threads: int) -> None:
        onnxruntime = need("onnxruntime", "onnx")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # it slows down what runs beside it
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def __call__(self, x_BLX: Tensor, padding_BL: Tensor | None = None, /) -> Tensor:
        if padding_BL is None:
            padding_BL = torch.zeros(x_BLX.shape[:2], dtype=torch.bool)
        (logits_BY,) = self.session.run(["logits"], {"x": x_BLX.numpy(), "padding_mask": padding_BL.numpy()})
        return torch.from_numpy(logits_BY)


class _Executorch:
    """By ExecuTorch."""

    takes_batches = False

    def __init__(self, path: Path, threads: int) -> None:
        with quiet_start(again=True):
            need("executorch.extension.pybindings.portable_lib", "edge")._unsafe_reset_threadpool(threads)
            self.file = Loaded(path)

    def __call__(self, x_1LX: Tensor, padding_1L: Tensor | None = None, /) -> Tensor:
        return self.file(x_1LX)[0]


RUNNERS: dict[str, Callable[[Path, int], Runner]] = {"onnx": _Onnx, "executorch": _Executorch}
