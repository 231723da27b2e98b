"""Whole jobs as functions; the command line is a thin shell over them.

Each job reads all that it needs before it computes, and checks where it will write, so that a mistake costs no time and
leaves no file.
"""

from headwise.export.doors import NotWrittenError
from headwise.pipelines.bench import Comparison, Form, benchmark_classifier
from headwise.pipelines.classify import (
    Inspection,
    Prediction,
    Progress,
    TrainResult,
    demo,
    draw_attention,
    evaluate,
    inspect_attention,
    predict,
    train_classifier,
)
from headwise.pipelines.edge import Exported, Quantization, export_classifier, quantize_classifier
from headwise.pipelines.shared import ClassScore, Evaluation

__all__ = [
    "ClassScore",
    "Comparison",
    "Evaluation",
    "Exported",
    "Form",
    "Inspection",
    "NotWrittenError",
    "Prediction",
    "Progress",
    "Quantization",
    "TrainResult",
    "benchmark_classifier",
    "demo",
    "draw_attention",
    "evaluate",
    "export_classifier",
    "inspect_attention",
    "predict",
    "quantize_classifier",
    "train_classifier",
]
