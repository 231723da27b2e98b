"""The commands that bring a classifier to a small machine: quantize, export, benchmark."""

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from headwise import pipelines
from headwise.cli import show

# No `from __future__ import annotations` here: typer reads annotations, and some name what exists only inside.


class Format(StrEnum):
    """What `export` writes."""

    onnx = "onnx"
    executorch = "executorch"


def commands(
    option: Callable[..., Any], typer: Any, program: Callable[[], str], *, model: Any, as_json: Any
) -> list[Callable[..., None]]:
    """The commands as typer takes them.

    Args:
        option: makes an option of its help, its names and its rules.
        typer: the library, which is loaded late.
        program: how the user calls this program.
        model: the argument that names a model, as other commands have it.
        as_json: the option `--json`, likewise.
    """
    any_model = typer.Argument(help="Folder of a trained model, float or int8.", show_default=False, metavar="DIR")
    calibration = "Series like those to come, .ts or .csv, as calibration. Without: each call takes its own scale."
    tested = "Score both models on these labelled series. Default: --data, if it has labels."
    timed = "Series, .ts or .csv: timed, calibrated with, and scored by their labels."

    def quantize(
        model: Annotated[Path, model],
        output: Annotated[Path, option("Folder for the int8 model.", "--output", show_default=False)],
        data: Annotated[Path | None, option(calibration, "--data")] = None,
        test: Annotated[Path | None, option(tested, "--test")] = None,
        equalize: Annotated[bool, option("Even out the ranges of channels first: for outliers.", "--equalize")] = False,
        reduce_range: Annotated[bool, option("7-bit weights: for x86 without VNNI.", "--reduce-range")] = False,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Make a trained classifier int8, and say what that did to it.

        With --data, inputs get fixed scales (static); some hundred series are enough. Without, each call takes its own
        (dynamic).
        """
        found = pipelines.quantize_classifier(
            model, output, data=data, test=test, equalize=equalize, reduce_range=reduce_range
        )
        show.quantization(found, as_json)
        if not as_json:
            print(f"\nNext: a file that runs without torch:\n  {program()} export {output} --output model.onnx")

    def export(
        model: Annotated[Path, any_model],
        output: Annotated[Path, option("The file, .onnx or .pte.", "--output", show_default=False)],
        file_format: Annotated[Format | None, option("Default: by the suffix.", "--format", show_default=False)] = None,
        data: Annotated[Path | None, option("Try the file on these series too, .ts or .csv.", "--data")] = None,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Write a trained classifier as a file for onnxruntime or ExecuTorch, and run the file beside it.

        Scales, strides and padding are inside. A file that does not do what the model does is not written.
        """
        found = pipelines.export_classifier(model, output, file_format=file_format and file_format.value, data=data)
        show.export(found, as_json)

    def benchmark(
        model: Annotated[Path, model],
        data: Annotated[Path | None, option(timed, "--data")] = None,
        threads: Annotated[int, option("For each form.", "--threads", min=1)] = 1,
        rounds: Annotated[int, option("Turns that each form gets.", "--rounds", min=1)] = 15,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Run a trained float classifier beside its int8 and exported forms: size, speed, accuracy.

        All take turns in one process. What counts are the ratios; milliseconds are this machine's.
        """
        with show.status(as_json) as progress:
            found = pipelines.benchmark_classifier(model, data=data, threads=threads, rounds=rounds, progress=progress)
        show.comparison(found, as_json)

    return [quantize, export, benchmark]
