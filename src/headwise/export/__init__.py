"""Models as files for other runtimes: `export_onnx` (onnxruntime, OpenVINO); `check_onnx` for files of others."""

from headwise.export.onnx import export_onnx
from headwise.export.onnx_file import OnnxFile, check_onnx
from headwise.export.reports import OnnxReport, OnnxValue
from headwise.export.verify import Trial

__all__ = ["OnnxFile", "OnnxReport", "OnnxValue", "Trial", "check_onnx", "export_onnx"]
