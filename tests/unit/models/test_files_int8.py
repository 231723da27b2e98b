"""headwise.save and headwise.load of int8 models: int8 again to the bit, small, and refused where a file lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.models.harming import change_weights, edit, key

import headwise
from headwise import SequenceClassifier
from headwise.quant import report

X = torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(5))
PADDING = torch.arange(7) >= torch.tensor([[7], [5], [3], [1]])
Q = "encoder.layers.0.self_attn.q_proj"


def made(**changed: Any) -> SequenceClassifier:
    settings: dict[str, Any] = {"num_channels": 3, "embed_dim": 10, "num_heads": 2, "num_layers": 1, **changed}
    return SequenceClassifier(3, **settings).eval()


def int8(static: bool = True, **settings: Any) -> Any:
    return headwise.quantize(made(), [(X, PADDING)] if static else None, **settings)


KINDS: dict[str, Callable[[], Any]] = {
    "static": int8,
    "dynamic": lambda: int8(static=False),
    "some": lambda: int8(where=lambda name, _: name.endswith("q_proj") or name == "head"),
    "feed-forward only": lambda: int8(where=lambda name, _: "linear" in name),
    "reduced range": lambda: int8(reduce_range=True),
    "swiglu, stride": lambda: headwise.quantize(
        made(activation="swiglu", norm="rmsnorm", stride=2, kernel_size=3, pooling="max")
    ),
    "mixed": lambda: headwise.quantize(
        int8(where=lambda name, _: name == "head"), where=lambda name, _: name.endswith("q_proj")
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_loaded_is_int8_again_to_the_bit(kind: str, tmp_path: Path) -> None:
    model = KINDS[kind]()
    wanted = model.state_dict()
    headwise.save(model, tmp_path)
    again = headwise.load(tmp_path)
    assert report(again) == report(model)
    assert report(again).kind == (kind if kind in ("dynamic", "mixed") else report(model).kind)
    assert again.config == model.config
    found = again.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    assert not any(parameter.requires_grad for parameter in again.parameters())
    for x, padding in ((X, PADDING), (X[:1], None), (X[:, :1], None)):
        assert torch.equal(again(x, padding), model(x, padding))
    # And once more: what was loaded is saved as the same files
    headwise.save(again, tmp_path / "again")
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == {
        path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()
    }


def test_of_tokens_too(tmp_path: Path) -> None:
    model = headwise.quantize(made(num_channels=None, vocab_size=5))
    ids = torch.tensor([[1, 4, 2], [0, 3, 3]])
    assert torch.equal(headwise.load(headwise.save(model, tmp_path))(ids), model(ids))


def test_the_file_is_small_and_says_what_is_int8(tmp_path: Path) -> None:
    model = headwise.SequenceClassifier(3, num_channels=3, embed_dim=128).eval()
    headwise.save(model, tmp_path / "float")
    headwise.save(headwise.quantize(model, [X], where=lambda name, _: name != "head"), tmp_path / "int8")
    sizes = [next((tmp_path / name).glob("weights-*")).stat().st_size for name in ("float", "int8")]
    assert sizes[1] < 0.28 * sizes[0]
    config = json.loads((tmp_path / "int8" / "config.json").read_text("utf-8"))
    assert config["version"] == 2
    assert len(config["int8"]) == 12
    assert config["int8"][Q] == "static"
    # A float model's folder is what it was before there was int8
    assert json.loads((tmp_path / "float" / "config.json").read_text("utf-8")).keys() == config.keys() - {"int8"}
    assert json.loads((tmp_path / "float" / "config.json").read_text("utf-8"))["version"] == 1


def test_int8_takes_the_place_of_float_and_float_of_int8(tmp_path: Path) -> None:
    for model in (made(), int8(), made(num_layers=2), int8(static=False)):
        headwise.save(model, tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
        with torch.no_grad():
            assert torch.equal(headwise.load(tmp_path)(X), model(X))


def test_what_was_changed_after_quantizing_is_not_saved(tmp_path: Path) -> None:
    model = int8()
    model.head = torch.nn.Linear(10, 4)
    with pytest.raises(ValueError, match=r"^save: model must hold the parameters .* first .head\.bias.: \(4,\) "):
        headwise.save(model, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


CHANGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "half": (lambda model: model.half(), r"hold float32 parameters beside int8 ones; .*float16"),
    "double": (
        lambda model: model.double(),
        r"hold float32 parameters beside int8 ones; .*float64",
    ),
    "-128": (
        lambda model: part(model).int_weight.fill_(-128),
        r"hold int8 weights in \+-127.*quantize it in .*-128 in",
    ),
    "scale 0": (lambda model: part(model).weight_scale.zero_(), r"a scale that is not above 0 and finite in .*q_proj"),
    "zero point": (lambda model: part(model).input_zero_point.fill_(300), r"got 300 in .*q_proj\.input_zero_point"),
    "zero point below": (lambda model: part(model).input_zero_point.fill_(-1), r"got -1 in .*input_zero_point"),
    "tiny input": (lambda model: part(model).input_scale.fill_(1e-38), r"got 1e-38, whose reciprocal .*\.input_scale"),
    "infinite product": (
        lambda model: part(model).weight_scale.fill_(1e38),
        r"product with a sum .* is infinite in .*q_",
    ),
    "bias": (lambda model: part(model).int_bias.fill_(-(2**31)), r"got 2147483648, too great .* in .*q_proj\.int_bias"),
    "norm of ints": (
        lambda model: setattr(norm(model), "weight", torch.nn.Parameter(torch.ones(10).int(), requires_grad=False)),
        r"hold float32 parameters beside int8 ones.*; got torch\.int32 for 'encoder\.layers\.0\.norm1\.weight'",
    ),
}


def part(model: Any) -> Any:
    return model.get_submodule(Q)


def norm(model: Any) -> Any:
    return model.get_submodule("encoder.layers.0.norm1")


@pytest.mark.parametrize("name", CHANGED)
def test_what_load_refuses_is_not_saved_and_the_good_model_stays(name: str, tmp_path: Path) -> None:
    change, message = CHANGED[name]
    good, model = int8(), int8()
    headwise.save(good, tmp_path)
    change(model)
    with pytest.raises(ValueError, match=r"^save: model must .*" + message):
        headwise.save(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(headwise.load(tmp_path)(X), good(X))


@pytest.mark.parametrize("static", [True, False])
def test_another_default_dtype_reads_the_same_file(static: bool, tmp_path: Path) -> None:
    model = int8(static)
    headwise.save(model, tmp_path)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        again = headwise.load(tmp_path)
        headwise.save(again, tmp_path)
        again = headwise.load(tmp_path)
    finally:
        torch.set_default_dtype(before)
    assert {name: tensor.dtype for name, tensor in again.state_dict().items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }
    assert torch.equal(again(X), model(X))


# --- What cannot be loaded --------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return headwise.save(int8(), tmp_path / "model")


def kind(name: str, value: Any) -> Callable[[Path], object]:
    return lambda folder: edit(folder, lambda config: config["int8"].__setitem__(name, value))


def tensor(name: str, value: Any) -> Callable[[Path], object]:
    return lambda folder: change_weights(folder, lambda state: state.__setitem__(f"{Q}.{name}", value))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "int8 in version 1": (key("version", 1), r"config\.json must hold exactly .*got .*'int8'"),
    "no linear named": (key("int8", {}), r"config\.json must name its int8 linears, each .*; got \{\}"),
    "a list of names": (key("int8", [Q]), r"config\.json must name its int8 linears, each .*; got \['enc"),
    "another kind": (kind(Q, "int4"), r"config\.json must name its int8 linears, each 'static' or 'dynamic'"),
    "kind is no text": (kind(Q, ["static"]), r"config\.json must name its int8 linears"),
    "unknown linear": (kind("os.system", "static"), r"hold arguments .*int8: 'os\.system', which is no linear"),
    "the model itself": (kind("", "static"), r"hold arguments .*int8: '', which is no linear"),
    "a norm": (kind("encoder.layers.0.norm1", "static"), r"'encoder\.layers\.0\.norm1', which is no linear"),
    "said to be dynamic": (kind(Q, "dynamic"), r"safetensors must hold the parameters .* first '.*q_proj\.bias': None"),
    "said to be float": (
        lambda folder: edit(folder, lambda config: config["int8"].pop(Q)),
        r"safetensors must hold the parameters .* first '.*q_proj\.",
    ),
    "float weights": (tensor("int_weight", torch.zeros(10, 10)), r"hold '.*int_weight' as torch\.int8; got torch\.flo"),
    "another size": (tensor("int_weight", torch.zeros(10, 9).char()), r"hold the parameters .*\(10, 9\) instead of"),
    "weights of -128": (tensor("int_weight", torch.full((10, 10), -128).char()), r"got -128 in .*q_proj\.int_weight"),
    "no scale": (tensor("weight_scale", torch.zeros(10)), r"a scale that is not above 0 and finite in .*weight_scale"),
    "scale is NaN": (tensor("weight_scale", torch.full((10,), torch.nan)), r"not above 0 and finite in .*weight_scale"),
    "input scale": (tensor("input_scale", torch.tensor(torch.inf)), r"not above 0 and finite in .*q_proj\.input_scale"),
    "tiny input scale": (tensor("input_scale", torch.tensor(1e-40)), r"got 1e-40, whose reciprocal .*\.input_scale"),
    "infinite product": (
        tensor("weight_scale", torch.full((10,), 1e38)),
        r"product with a sum of int32 is infinite in",
    ),
    "bias of 2**31": (
        tensor("int_bias", torch.full((10,), -(2**31)).int()),
        r"got 2147483648, too great to add sums to",
    ),
    "zero point": (tensor("input_zero_point", torch.tensor(256).int()), r"got 256 in .*q_proj\.input_zero_point"),
    "a wide bias": (tensor("int_bias", torch.zeros(10).long()), r"hold '.*int_bias' as torch\.int32; got torch\.int64"),
    "norm of ints": (
        lambda folder: change_weights(
            folder, lambda state: state.update({"encoder.layers.0.norm1.weight": torch.ones(10).int()})
        ),
        r"must hold float32 parameters beside int8 ones; got torch\.int32 for 'encoder\.layers\.0\.norm1\.weight'",
    ),
    "absurd width": (
        lambda folder: edit(folder, lambda config: config["arguments"].update(embed_dim=2 * 10**12)),
        r"must hold arguments .*embed_dim=2000000000000, while the weights",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_hostile_is_refused(name: str, folder: Path) -> None:
    harm, message = BROKEN[name]
    harm(folder)
    with pytest.raises(ValueError, match=r"^load: .*" + message):
        headwise.load(folder)
