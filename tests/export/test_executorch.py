"""`export_executorch`: the file does what the model does, in ExecuTorch's own runtime.

What is marked `edge` needs ExecuTorch (`make test-edge`); the rest is what a caller meets at the door without it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise
from headwise.export import executorch as module
from headwise.export.executorch import ExecutorchReport, export_executorch

D, L, S = 32, 7, 5
HIDDEN = pytest.mark.filterwarnings("ignore:This API is experimental")  # ExecuTorch's own, where a test loads a file


def in_runtime(path: Path, tensors: Sequence[Tensor]) -> list[Tensor]:
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(path)
    return [one.clone() for one in program.load_method("forward").execute([x.contiguous() for x in tensors])]


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


# --- At the door: no ExecuTorch -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"path": "nowhere/at/all.pte"}, "path must lie in a folder that exists"),
        ({"path": "."}, "path must be the path of a file"),
        ({"path": ""}, "path must be the path of a file"),
        ({"path": 3}, "path must be the path of a file"),
        ({"model": 3}, "model must be an nn.Module"),
        ({"example": None}, "example must be a tensor, a tuple of arguments or a dict of keywords"),
        ({"example": ()}, "example must"),
        ({"example": torch.full((1, L, D), torch.nan)}, "must hold no NaN"),
        ({"example": torch.randn(1, L, D + 1)}, "example must be a call that the model takes"),
        ({"example": (torch.nested.nested_tensor([torch.randn(L, D)], layout=torch.jagged),)}, "must be padded"),
        ({"max_size": 0}, "max_size must be an int of at least 2"),
        ({"tolerance": 2}, "tolerance must be above 0 and below 1"),
        ({"dynamic_shapes": {"y": {1: "length"}}}, r"dynamic_shapes must name inputs \(x\); got y"),
        ({"dynamic_shapes": {"x": {5: "length"}}}, "must name dimensions 0 to 2"),
    ],
)
def test_a_callers_mistake(words: dict[str, Any], said: str, tmp_path: Path) -> None:
    given = {"model": headwise.EncoderBlock(D, 4), "example": torch.randn(1, L, D), "path": tmp_path / "x.pte"} | words
    with pytest.raises(ValueError, match=f"^export_executorch: .*{said}"):
        export_executorch(given.pop("model"), given.pop("example"), given.pop("path"), **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "value", "said"),
    [
        ("cache", headwise.StaticCache(9), "a cache cannot be exported"),
        ("mask", headwise.masks.padding(torch.tensor([3])), "be a mask of rules alone"),
    ],
)
def test_what_no_file_can_hold(word: str, value: Any, said: str, tmp_path: Path) -> None:
    x = torch.randn(1, L, D)
    example = {"query": x, "key": x, "value": x, word: value}
    with pytest.raises(ValueError, match=said):
        export_executorch(headwise.MultiheadAttention(D, 4, batch_first=True), example, tmp_path / "x.pte")


def test_a_model_in_training_of_int8(tmp_path: Path) -> None:
    model = headwise.prepare_qat(nn.Sequential(nn.Linear(D, D)))
    with pytest.raises(ValueError, match=r"headwise\.convert makes an int8 copy.*; got 0 in quantization-aware"):
        export_executorch(model, torch.randn(1, D), tmp_path / "x.pte")


def test_without_executorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.delitem(sys.modules, "executorch.exir", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'headwise\[edge\]'"):
        export_executorch(headwise.EncoderBlock(D, 4), torch.randn(1, L, D), tmp_path / "x.pte")
    assert not list(tmp_path.iterdir())


def test_a_report_reads_well() -> None:
    report = ExecutorchReport(
        Path("a/b.pte"), "int8", ("x float32 (1, length 1..512, 32)",), 1, 48, {"where": 2}, 6, 6,
        (module.Trial({"length": 7}, 1e-3),), 0.05, 250, 1000, 64, ("a note",),
    )  # fmt: skip
    assert (report.size_ratio, report.error) == (0.25, 1e-3)
    said = str(report).splitlines()
    assert said[0] == "b.pte: int8, 250 bytes, 0.25 of the float model"
    assert said[2] == "  XNNPACK runs 48 operators in 1 part, 6 int8 products among them"
    assert said[3:] == ["  left to portable kernels: 2 where", "  beside the model (at most 5e-02): length 7: 1.0e-03",
                        "  a note"]  # fmt: skip


# --- With ExecuTorch ----------------------------------------------------------------------------------------------

edge = [pytest.mark.edge, pytest.mark.integration, pytest.mark.export]


class _Edge:
    pytestmark = edge

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("executorch")


@HIDDEN
class TestFiles(_Edge):
    @pytest.mark.parametrize(("kind", "stock"), [("float", True), ("static", False), ("dynamic", True)])
    def test_encoder_layer_is_one_part(self, stock: bool, kind: str, tmp_path: Path) -> None:
        words = {"dropout": 0.1, "batch_first": True}
        maker = nn.TransformerEncoderLayer if stock else headwise.TransformerEncoderLayer
        model, x = maker(64, 4, 256, **words).eval(), torch.randn(1, L, 64)
        small = model if kind == "float" else headwise.quantize(model, [x] if kind == "static" else None)
        report = export_executorch(small, x, tmp_path / "x.pte", verbose=False)
        assert (report.num_parts, dict(report.left)) == (1, {})
        assert report.num_int8 == (0 if kind == "float" else 6)
        assert report.num_static == (6 if kind == "static" else 0)
        assert report.kind == ("float" if kind == "float" else "int8")
        assert [trial.sizes for trial in report.trials] == [{"length": size} for size in (7, 8, 1, 67)]
        for length in (1, 3, 7, 64, 512):
            other = torch.randn(1, length, 64)
            with torch.no_grad():
                want = model(other)
            assert error(in_runtime(report.path, [other])[0], want) < (1e-5 if kind == "float" else 0.02)
        assert [one.name for one in tmp_path.iterdir()] == ["x.pte"]

    @pytest.mark.parametrize("static", [True, False])
    def test_the_files_integers_are_the_models(self, static: bool, tmp_path: Path) -> None:
        x = torch.randn(1, L, 64)
        small = headwise.quantize(headwise.EncoderBlock(64, 4).eval(), [x] if static else None)
        report = export_executorch(small, x, tmp_path / "x.pte", verbose=False)
        written = report.path.read_bytes()
        layers = [one for one in small.modules() if isinstance(one, headwise.quant.Int8Linear)]
        assert len(layers) == 6
        for layer in layers:
            assert layer.state.weight.numpy().tobytes() in written
            assert layer.state.weight_scale.numpy().tobytes() in written

    def test_size(self, tmp_path: Path) -> None:
        x = torch.randn(1, L, 256)
        small = headwise.quantize(nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True).eval(), [x])
        assert export_executorch(small, x, tmp_path / "x.pte", verbose=False).size_ratio < 0.3

    @pytest.mark.parametrize(("batch", "int8"), [(1, False), (1, True), (2, True)])
    def test_masks_are_inputs(self, batch: int, int8: bool, tmp_path: Path) -> None:
        model = headwise.EncoderBlock(D, 4).eval()
        small = headwise.quantize(model) if int8 else model

        def call(length: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
            padding = torch.arange(length).expand(batch, -1) >= length - 2
            return torch.randn(batch, length, D), padding, torch.ones(length, length).triu(1).bool()

        report = export_executorch(small, call(L, batch), tmp_path / "x.pte", verbose=False)
        assert len(report.inputs) == 3
        for length, other in ((4, batch), (11, 1 if batch == 1 else 3)):
            given = call(length, other)
            with torch.no_grad():
                want = model(*given)
            keep = ~given[1]
            assert error(in_runtime(report.path, given)[0][keep], want[keep]) < (0.02 if int8 else 1e-5)

    def test_a_row_without_a_key_and_nan_in_padding(self, tmp_path: Path) -> None:
        model = headwise.MultiheadAttention(D, 4, batch_first=True).eval()
        nn.init.normal_(model.out_proj.bias)
        x, pairs = torch.randn(1, L, D), torch.zeros(L, L, dtype=torch.bool)
        words = {"query": x, "key": x, "value": x, "need_weights": False}
        padding = torch.zeros(1, L, dtype=torch.bool)
        words |= {"key_padding_mask": padding, "attn_mask": pairs}
        report = export_executorch(model, words, tmp_path / "x.pte", verbose=False)
        assert "need_weights=False" in str(report)
        pairs[3], padding[:, -1] = True, True
        key = x.clone()
        key[:, -1] = torch.nan
        with torch.no_grad():
            want = model(x, key, key, key_padding_mask=padding, attn_mask=pairs, need_weights=False)[0]
        names = [one.partition(" ")[0] for one in report.inputs]
        given = {"query": x, "key": key, "value": key, "key_padding_mask": padding, "attn_mask": pairs}
        (got,) = in_runtime(report.path, [given[name] for name in names])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got[0, 3], model.out_proj.bias)

    @pytest.mark.parametrize("average", [True, False])
    def test_weights_of_grouped_heads_across(self, average: bool, tmp_path: Path) -> None:
        model = headwise.MultiheadAttention(D, 4, batch_first=True, num_kv_heads=2, kdim=6, vdim=3).eval()
        words: dict[str, Any] = {"query": torch.randn(1, L, D), "key": torch.randn(1, S, 6)}
        words |= {"value": torch.randn(1, S, 3), "average_attn_weights": average}
        report = export_executorch(model, words, tmp_path / "x.pte", verbose=False)
        given = [torch.randn(1, 3, D), torch.randn(1, 8, 6), torch.randn(1, 8, 3)]
        with torch.no_grad():
            wanted = model(*given, average_attn_weights=average)
        for got, want in zip(in_runtime(report.path, given), wanted, strict=True):
            torch.testing.assert_close(got, want)

    def test_grouped_heads_are_one_part(self, tmp_path: Path) -> None:
        attention = headwise.MultiheadAttention(D, 4, batch_first=True, num_kv_heads=2)
        model = headwise.EncoderBlock(D, attention=attention).eval()
        assert export_executorch(model, torch.randn(1, L, D), tmp_path / "x.pte", verbose=False).num_parts == 1

    def test_transformer(self, tmp_path: Path) -> None:
        model = nn.Transformer(D, 4, 1, 1, 64, batch_first=True, activation="gelu").eval()
        example = {"src": torch.randn(1, L, D), "tgt": torch.randn(1, S, D)}
        example["tgt_mask"] = torch.ones(S, S).triu(1).bool()
        report = export_executorch(headwise.quantize(model), example, tmp_path / "x.pte", verbose=False)
        assert report.num_int8 == 16
        given = [torch.randn(1, 4, D), torch.randn(1, 9, D), torch.ones(9, 9).triu(1).bool()]
        with torch.no_grad():
            want = model(given[0], given[1], tgt_mask=given[2])
        assert error(in_runtime(report.path, given)[0], want) < 0.03

    def test_options_of_attention(self, tmp_path: Path) -> None:
        options = {"positions": "rotary", "qk_norm": True, "gate": True, "sink": True, "softcap": 20.0}
        attention = headwise.MultiheadAttention(D, 4, batch_first=True, **options)
        model = headwise.EncoderBlock(D, attention=attention, norm="rmsnorm")
        x = torch.randn(1, L, D)
        for one in (model, headwise.quantize(model)):
            report = export_executorch(one.eval(), x, tmp_path / "x.pte", verbose=False)
            assert report.error <= report.tolerance

    def test_classifier_takes_tokens(self, tmp_path: Path) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(50, D)
                self.block = headwise.EncoderBlock(D, 4)
                self.head = nn.Linear(D, 3)

            def forward(self, ids: Tensor) -> dict[str, Tensor]:
                hidden = self.block(self.embed(ids), ids == 0)
                return {"logits": self.head(hidden.mean(dim=1))}

        ids = torch.randint(1, 50, (1, L))
        report = export_executorch(headwise.quantize(Model().eval()), ids, tmp_path / "x.pte", verbose=False)
        assert report.inputs == ("ids int64 (1, length 1..512)",) or "1..512" in report.inputs[0]
        assert report.num_int8 == 7

    @pytest.mark.parametrize(
        ("shapes", "said"),
        [
            ({}, "x float32 (1, 7, 32)"),
            ({"x": {1: "time"}}, "x float32 (1, time 1..40, 32)"),
            ({"x": {0: "batch"}}, "x float32 (batch 1..8, 7, 32)"),
            (None, "x float32 (1, length 1..40, 32)"),
        ],
    )
    def test_free_sizes(self, shapes: Any, said: str, tmp_path: Path) -> None:
        model, x = headwise.EncoderBlock(D, 4), torch.randn(1, L, D)
        report = export_executorch(model, x, tmp_path / "x.pte", dynamic_shapes=shapes, max_size=40, verbose=False)
        assert report.inputs == (said,)

    def test_the_model_stays_what_it_is(self, tmp_path: Path) -> None:
        model = nn.TransformerEncoderLayer(D, 4, 64, batch_first=True).train()
        before = {name: one.clone() for name, one in model.state_dict().items()}
        export_executorch(model, torch.randn(1, L, D), tmp_path / "x.pte", verbose=False)
        assert model.training
        assert type(model.self_attn) is nn.MultiheadAttention
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert all(one.requires_grad for one in model.parameters())


@HIDDEN
class TestWhatIsWrong(_Edge):
    def test_other_numbers_leave_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "x.pte"
        path.write_bytes(b"what was there")
        monkeypatch.setattr(module.verify, "difference", lambda *_: 0.5)
        with pytest.raises(
            RuntimeError, match=r"x\.pte was not written: it differs from the model at length 7: 5\.0e-01"
        ):
            export_executorch(headwise.EncoderBlock(D, 4), torch.randn(1, L, D), path)
        assert [one.name for one in tmp_path.iterdir()] == ["x.pte"]
        assert path.read_bytes() == b"what was there"

    def test_an_example_beyond_the_calibration(self, tmp_path: Path) -> None:
        x = torch.randn(1, L, D)
        linear = nn.Linear(D, D).eval()  # without a norm, which makes all sizes one
        small = headwise.quantize(linear, [0.01 * x])
        with pytest.raises(RuntimeError, match="let the example be like the calibration"):
            export_executorch(small, x, tmp_path / "x.pte")
        assert not list(tmp_path.iterdir())

    def test_a_size_that_is_not_int8s(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_SPARE_BYTES", -(10**7))
        with pytest.raises(RuntimeError, match=r"more than the .* that its weights explain"):
            export_executorch(headwise.quantize(headwise.EncoderBlock(D, 4)), torch.randn(1, L, D), tmp_path / "x.pte")
        assert not list(tmp_path.iterdir())

    def test_a_branch_on_numbers(self, tmp_path: Path) -> None:
        class Branch(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + 1 if x.sum() > 0 else x

        with pytest.raises(ValueError, match=r"be one that torch\.export can follow"):
            export_executorch(Branch(), torch.randn(2, 3), tmp_path / "x.pte")


@pytest.mark.edge
@pytest.mark.integration
def test_nothing_is_said_and_nothing_changed(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    code = f"""
import logging, os, torch, headwise, warnings
root = logging.getLogger()
def state():
    return (list(root.handlers), root.level, dict(os.environ), torch.get_num_threads(), torch.is_grad_enabled(),
            list(warnings.filters))
before = state()
block = headwise.quantize(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval())
headwise.export_executorch(block, torch.randn(1, 5, 16), {str(tmp_path / "x.pte")!r})
assert state() == before, (before, state())
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("x.pte: int8, ")
    assert len(done.stdout.splitlines()) == 5


@pytest.mark.edge
@pytest.mark.integration
def test_greatest_size_of_a_dim(tmp_path: Path) -> None:
    """A torch.export.Dim says the greatest size of one input."""
    shapes = {"input": {0: torch.export.Dim("rows", max=9)}}
    path = tmp_path / "x.pte"
    report = export_executorch(nn.Linear(D, D), torch.randn(3, D), path, dynamic_shapes=shapes, verbose=False)
    assert report.inputs == (f"input float32 (rows 1..9, {D})",)
