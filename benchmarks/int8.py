"""An encoder layer in int8, beside float: eager, onnxruntime, OpenVINO with NNCF, ExecuTorch; one thread, one run.

Letters: B batch, T length, D model width.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise
from benchmarks import peers
from benchmarks.harness import times
from headwise.pipelines.runners import RUNNERS
from headwise.pipelines.shared import in_threads

D, HEADS, M = 256, 8, 1024
SIZES = ((1, 1), (1, 16), (1, 128), (1, 512), (8, 64))  # B, T
FLOAT = "torch"
EAGER = ("eager dynamic", "eager static")
RUNTIME = ("onnxruntime dynamic", "onnxruntime static")
EXECUTORCH, NNCF = "ExecuTorch", "OpenVINO NNCF"
WAYS = ("headwise float", *EAGER, "onnxruntime float", *RUNTIME, "OpenVINO static", NNCF, EXECUTORCH)
FLOORS = ((EAGER, 128, 1.6), (RUNTIME, 128, 1.9), (RUNTIME, 1, 3.5), ((EXECUTORCH,), 128, 2.5))
MOST_BYTES, MOST_ERROR = 0.3, 0.03  # of float's
Run = Callable[[Tensor], Any]


@dataclass
class Lineup:
    """The layer in every way that this machine can run; a string says why there is none.

    Attributes:
        runs: by way, from (B, T, D) to the output.
        bytes: of the files, by way.
    """

    runs: dict[str, Run | str]
    bytes: dict[str, int]


def lineup(folder: Path) -> Lineup:
    """Make all of them of one torch layer."""
    layer = nn.TransformerEncoderLayer(D, HEADS, M, batch_first=True).eval()
    samples = [torch.randn(4, T, D) for T in (128, 16, 1)]
    ours = headwise.upgrade(copy.deepcopy(layer), fused_qkv=True)
    dynamic, static = headwise.quantize(layer), headwise.quantize(layer, samples)
    runs: dict[str, Run | str] = {FLOAT: layer, "headwise float": ours, EAGER[0]: dynamic, EAGER[1]: static}
    sizes: dict[str, int] = {}
    example = torch.randn(2, 16, D)
    with contextlib.redirect_stdout(io.StringIO()):
        for way, model in (("onnxruntime float", layer), (RUNTIME[0], dynamic), (RUNTIME[1], static)):
            path = folder / f"{way}.onnx"
            runs[way] = _try("onnxruntime", lambda model=model, path=path: _onnxruntime(model, example, path))
            if path.exists():
                sizes[way] = path.stat().st_size
        runs["OpenVINO static"] = _try("openvino", lambda: _openvino(folder / f"{RUNTIME[1]}.onnx"))
        runs[NNCF] = _try("nncf", lambda: _nncf(layer, samples, folder))
        path = folder / "layer.pte"
        runs[EXECUTORCH] = _try("executorch", lambda: _executorch(dynamic, example, path))
        if path.exists():
            sizes[EXECUTORCH] = path.stat().st_size
    return Lineup(runs, sizes)


def lines(rounds: int) -> Iterator[tuple[list[str], list[str]]]:
    """A row for each size: the ratios of torch's time to that of each way."""
    logger = logging.getLogger("headwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), in_threads(1):
        warnings.simplefilter("ignore")  # of the other libraries
        try:
            field = lineup(Path(folder))
            with torch.inference_mode():
                for B, T in SIZES:
                    yield _line(field, B, T, rounds)
            yield _size_line(field)
        finally:
            logger.setLevel(level)


def _line(field: Lineup, B: int, T: int, rounds: int) -> tuple[list[str], list[str]]:
    x = torch.randn(B, T, D)
    want = torch.as_tensor(field.runs[FLOAT](x))
    calls = {way: (lambda run=run: run(x)) for way, run in field.runs.items() if not isinstance(run, str)}
    errors = {}
    for way, call in calls.items():
        got = torch.as_tensor(call())
        errors[way] = ((got - want).norm() / want.norm()).item()
        assert got.shape == want.shape, way
        assert way == NNCF or errors[way] < MOST_ERROR, f"{way} is {errors[way]:.3f} off"  # theirs is told
    seconds = times(calls, rounds=3 * rounds, repeats=5 if B * T < 512 else 2)
    ratios = {way: statistics.median(seconds[FLOAT]) / statistics.median(taken) for way, taken in seconds.items()}
    cells = [str(field.runs[way]) if way not in ratios else f"{ratios[way]:.2f}" for way in WAYS]
    if errors.get(NNCF, 0) >= MOST_ERROR:
        cells[WAYS.index(NNCF)] += f" (error {errors[NNCF]:.2f})"
    missed = []
    for ways, length, floor in FLOORS:
        best = max((ratios[way] for way in ways if way in ratios), default=None)
        if B == 1 and length == T and best is not None and best < floor:
            missed.append(f"int8 T={T}: {' or '.join(ways)} {best:.2f}, floor {floor}")
    return [f"B={B}, T={T}", *cells], missed


def _size_line(field: Lineup) -> tuple[list[str], list[str]]:
    whole = field.bytes.get("onnxruntime float")
    shares = {way: size / whole for way, size in field.bytes.items() if whole}
    small = (*RUNTIME, EXECUTORCH)
    missed = [f"int8 {way}: {shares[way]:.2f} of float's file" for way in small if shares.get(way, 0) > MOST_BYTES]
    return ["file, of float's", *(f"{shares[way]:.2f}" if way in shares else "" for way in WAYS)], missed


def _try(library: str, make: Callable[[], Run]) -> Run | str:
    return peers.MISSING if peers.missing(library) else make()


def _onnxruntime(model: nn.Module, example: Tensor, path: Path) -> Run:
    import onnxruntime

    headwise.export_onnx(model, example, path, verbose=False)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: session.run(None, {name: x.numpy()})[0]


def _openvino(path: Path) -> Run:
    import openvino

    return _compiled(openvino.Core().read_model(path))


def _compiled(model: Any) -> Run:
    """OpenVINO in one thread, its floats float32 as everybody's here (it takes bfloat16 by itself).

    Compiled for each size: a request of OpenVINO 2026.4.1 that has run a sequence of length 1 gives wrong numbers for
    longer ones after it, of torch's own export as of ours.
    """
    import openvino

    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
    requests: dict[torch.Size, Any] = {}

    def run(x: Tensor) -> Any:
        if x.shape not in requests:
            requests[x.shape] = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        return requests[x.shape].infer([x.numpy()])[0].copy()

    return run


def _nncf(layer: nn.Module, samples: list[Tensor], folder: Path) -> Run:
    import nncf
    import openvino

    program = torch.export.export(
        copy.deepcopy(layer),
        (torch.randn(2, 16, D),),
        dynamic_shapes=({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},),
    )
    data = nncf.Dataset([one.numpy() for one in samples])
    model = nncf.quantize(openvino.convert_model(program), data, model_type=nncf.ModelType.TRANSFORMER)
    openvino.save_model(model, folder / "nncf.xml")
    return _compiled(model)


def _executorch(model: nn.Module, example: Tensor, path: Path) -> Run:
    headwise.export_executorch(model, example, path, verbose=False)
    return RUNNERS["executorch"](path, 1)
