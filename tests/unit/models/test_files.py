"""headwise.save and headwise.load: equal to the bit, whole or not at all, and nothing foreign gets in."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as read_tensors
from tests.unit.models.harming import change_weights, edit, key, put_weights
from torch import nn

import headwise
from headwise import SequenceClassifier

X = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(5))
IDS = torch.tensor([[1, 4, 2], [0, 3, 3]])


def made(**changed: Any) -> SequenceClassifier:
    settings: dict[str, Any] = {"num_channels": 3, "embed_dim": 10, "num_heads": 2, "num_layers": 1, **changed}
    model = SequenceClassifier(3, **settings)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.copy_(torch.randn_like(value).abs() + 0.1)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    headwise.save(made(class_names=["a", "b", "ж"]), tmp_path / "model")
    return tmp_path / "model"


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": torch.float64},
        {"dtype": torch.bfloat16},
        {"activation": "swiglu", "norm": "rmsnorm", "pooling": "max", "stride": 2, "kernel_size": 5},
        {"norm_first": False, "feedforward_dim": 7, "dropout": 0.5, "attention_dropout": 0.25},
        {"num_channels": None, "vocab_size": 5},
        {"class_names": ["yes", "no", "可能"], "channel_names": ["$x$", "</script>", '"']},
    ],
    ids=str,
)
def test_loaded_is_equal_to_the_bit(changed: dict[str, Any], tmp_path: Path) -> None:
    model = made(**changed).eval()
    state = torch.get_rng_state()
    assert headwise.save(model, tmp_path / "deep" / "er") == tmp_path / "deep" / "er"
    again = headwise.load(tmp_path / "deep" / "er")
    assert torch.equal(torch.get_rng_state(), state)
    assert type(again) is SequenceClassifier
    assert not again.training
    assert again.config == model.config
    assert again.class_names == model.class_names
    assert again.channel_names == model.channel_names
    wanted, found = model.state_dict(), again.state_dict()
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    x = IDS if "vocab_size" in changed else X.to(changed.get("dtype", torch.float32))
    assert torch.equal(again(x), model(x))
    # What came is a model like any other: it trains, and its parameters are its own.
    again.train()(x).sum().backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


def test_files_are_few_and_readable(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["format"] == "headwise model"
    assert config["class"] == "SequenceClassifier"
    assert config["arguments"]["class_names"] == ["a", "b", "ж"]
    assert "ж" in (folder / "config.json").read_text("utf-8")
    weights = folder / config["weights"]["file"]
    assert set(folder.iterdir()) == {folder / "config.json", weights}
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == config["weights"]["sha256"]
    assert "encoder.layers.0.self_attn.in_proj_weight" in read_tensors(weights.read_bytes())


def test_the_model_is_not_changed_and_the_fused_layout_is_saved_too(tmp_path: Path) -> None:
    model = made().eval()
    headwise.save(model, tmp_path / "split")
    model.encoder.layers[0].self_attn.fuse_projections()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    headwise.save(model.train(), tmp_path / "fused")
    assert model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert files(tmp_path / "split") == files(tmp_path / "fused")


def test_saving_again_replaces_the_model_and_leaves_other_files(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / "weights-of-mine.safetensors").write_text("mine")
    first = files(folder)
    model = made(num_layers=2)
    headwise.save(model, folder)
    headwise.save(model, folder)  # the same again: the weights keep their name
    assert len(files(folder)) == len(first)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "weights-of-mine.safetensors").read_text() == "mine"
    assert torch.equal(headwise.load(folder)(X), model.eval()(X))


def test_a_save_stopped_right_after_its_last_step_has_saved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace, model = Path.replace, made(num_layers=2)

    def stopping(self: Path, target: Path) -> Path:
        replace(self, target)
        if target.name == "config.json":
            raise KeyboardInterrupt
        return target

    monkeypatch.setattr(Path, "replace", stopping)
    with pytest.raises(KeyboardInterrupt):
        headwise.save(model, folder)
    assert torch.equal(headwise.load(folder)(X), model.eval()(X))


@pytest.mark.parametrize("stop_at", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_interrupted_save_leaves_the_old_model(
    stop_at: int, error: type[BaseException], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while the weights, or then the config, get their names."""
    wanted, before = headwise.load(folder)(X), files(folder)
    replace, calls = Path.replace, []

    def stopping(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == stop_at:
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", stopping)
    with pytest.raises(error):
        headwise.save(made(num_layers=2), folder)
    assert torch.equal(headwise.load(folder)(X), wanted)
    assert files(folder) == before


def test_load_puts_the_model_on_the_device(folder: Path) -> None:
    assert all(value.is_meta for value in headwise.load(folder, device="meta").state_dict().values())


# --- What cannot be saved ---------------------------------------------------------------------------------------------


class Heir(SequenceClassifier):
    pass


def replaced_head() -> nn.Module:
    model = made()
    model.head = nn.Linear(10, 4)
    return model


def with_adapter() -> nn.Module:
    model = made()
    model.head = nn.Sequential(model.head, nn.Linear(3, 3))
    return model


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(made().eval(), {nn.Linear})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (quantized, r"^save: model must hold the parameters .* that differ, first "),
        (lambda: made().to("meta"), r"^save: model must hold numbers; got a model on the meta device$"),
        (lambda: nn.Linear(2, 2), r"^save: model must be one of \['SequenceClassifier'\]; got torch\.nn\.\S+\.Linear$"),
        (lambda: Heir(3, num_channels=3), r"^save: model must be one of .*Heir$"),
        (replaced_head, r"^save: model must hold the parameters .* got 2 that differ, first 'head\.bias': \(4,\) inst"),
        (with_adapter, r"^save: model must hold the parameters .* 'head\.0\.bias': \(3,\) instead of None$"),
    ],
)
def test_what_cannot_be_loaded_is_not_saved(make: Callable[[], nn.Module], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        headwise.save(make(), tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_may_not_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"^save: directory must be a folder; got .*file$"):
        headwise.save(made(), tmp_path / "file")


# --- What cannot be loaded --------------------------------------------------------------------------------------------


def truncate(folder: Path) -> None:
    (path,) = folder.glob("weights-*")
    path.write_bytes(path.read_bytes()[:-100])


def flip(folder: Path) -> None:
    (path,) = folder.glob("weights-*")
    weights = bytearray(path.read_bytes())
    weights[-1] ^= 1
    path.write_bytes(weights)


def text(content: str | bytes) -> Callable[[Path], None]:
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "config.json").write_bytes(raw) and None


def argument(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda config: config["arguments"].__setitem__(name, value))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"directory must be the folder of a saved model .*no",
    ),
    "config is a folder": (
        lambda folder: ((folder / "config.json").unlink(), (folder / "config.json").mkdir()),
        r"config\.json must be readable; got Is a directory",
    ),
    "empty config": (text(""), r"config\.json must be JSON; got Expecting value"),
    "truncated config": (text('{"format": "head'), r"config\.json must be JSON; got "),
    "binary config": (text(b"\x89PNG\r\n\x1a\n\x00\xff"), r"config\.json must be JSON; got "),
    "deep config": (text("[" * 100_000), r"config\.json must be JSON; got "),
    "a list": (text("[]"), r"config\.json must be written by headwise\.save"),
    "foreign config": (text('{"model_type": "bert"}'), r"config\.json must be written by headwise\.save"),
    "newer": (key("version", 3), r"config\.json must be of version 1 or 2, .* a newer headwise may read it; got 3"),
    "int8 without its names": (key("version", 2), r"config\.json must hold exactly .*'int8'.*; got \['arguments', 'c"),
    "other keys": (key("run", "rm"), r"config\.json must hold exactly \['arguments', .*got \[.*'run'"),
    "arguments are a list": (key("arguments", [3]), r"config\.json must hold exactly "),
    "unknown class": (
        key("class", "Linear"),
        r"must name a class that is registered: \['SequenceClassifier'\]; got 'Li",
    ),
    "import path": (key("class", "os.system"), r"must name a class that is registered: .*; got 'os\.system'"),
    "class is no text": (key("class", ["SequenceClassifier"]), r"must name a class that is registered"),
    "unknown argument": (
        argument("banana", 1),
        r"must hold arguments that Seq.* takes; got .*\['banana'\]",
    ),
    "bad argument": (argument("num_heads", 3), r"must hold arguments that SequenceClassifier takes; got .*embed_dim"),
    "text for a size": (
        argument("num_layers", "two"),
        r"must hold arguments .*num_layers must be an int of at least 1",
    ),
    "absurd layers": (argument("num_layers", 10**9), r"must hold arguments .*num_layers=1000000000, while the weights"),
    "absurd width": (
        argument("embed_dim", 2 * 10**12),
        r"must hold arguments .*embed_dim=2000000000000, while the wei",
    ),
    "other sizes": (argument("embed_dim", 12), r"safetensors must hold the parameters .*instead of"),
    "many layers": (argument("num_layers", 3_000), r"must hold arguments .*num_layers=3000, while the weights hold"),
    "a device": (argument("device", "cuda"), r"must hold arguments .*unknown arguments \['device'\]"),
    "classes are numbers": (
        argument("class_names", [1, 2, 3]),
        r"must hold arguments .*class_names must be 3 dif",
    ),
    "norm_first is text": (argument("norm_first", "no"), r"must hold arguments .*norm_first must be one of"),
    "version is true": (key("version", True), r"must be of version 1 or 2, .*got True"),
    "no hash": (
        lambda folder: edit(folder, lambda config: config["weights"].pop("sha256")),
        r"config\.json must hold the SHA-256 of the weights; got None",
    ),
    "weights elsewhere": (
        key("weights", {"file": "../weights-0123456789abcdef.safetensors", "sha256": ""}),
        r"config\.json must name the weights as weights-HASH\.safetensors, beside it; got '\.\./",
    ),
    "weights missing": (
        lambda folder: next(folder.glob("weights-*")).unlink(),
        r"weights-\w+\.safetensors must be readable; config\.json names it",
    ),
    "weights truncated": (
        truncate,
        r"weights-\w+\.safetensors must be as it was saved; it is truncated or was changed",
    ),
    "a bit flipped": (flip, r"must be as it was saved; it is truncated or was changed.* got \d+ bytes with another"),
    "weights are a pickle": (
        lambda folder: put_weights(folder, pickle.dumps({"a": 1})),
        r"weights-\w+\.safetensors must be a safetensors file",
    ),
    "weights with a huge header": (
        lambda folder: put_weights(folder, struct.pack("<Q", 1 << 60) + b"{}"),
        r"weights-\w+\.safetensors must be a safetensors file",
    ),
    "a tensor missing": (
        lambda folder: change_weights(folder, lambda state: state.pop("head.bias")),
        r"must hold the parameters .* 1 that differ, first 'head\.bias': None instead of \(3,\)",
    ),
    "a tensor more": (
        lambda folder: change_weights(folder, lambda state: state.update(more=torch.ones(1))),
        r"must hold the parameters .* 1 that differ, first 'more': \(1,\) instead of None",
    ),
    "a tensor of ints": (
        lambda folder: change_weights(folder, lambda state: state.update({"head.bias": torch.ones(3).int()})),
        r"must hold floating parameters; got torch\.int32 for 'head\.bias'",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_foreign_is_refused(name: str, folder: Path) -> None:
    harm, message = BROKEN[name]
    harm(folder)
    with pytest.raises(ValueError, match=r"^load: .*" + message):
        headwise.load(folder)


def test_load_of_no_folder(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^load: directory must be the folder of a saved model; got .*none, which is n"
    ):
        headwise.load(tmp_path / "none")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'headwise\[models\]'"):
        headwise.save(made(), tmp_path / "new")
    with pytest.raises(ImportError, match=r"pip install 'headwise\[models\]'"):
        headwise.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- Several processes ------------------------------------------------------------------------------------------------


def test_another_save_in_between_is_not_undone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A begins, B saves whole, A goes on: the folder holds A's model, loadable."""
    first, second = made(num_layers=2), made(num_layers=3)
    replace, calls = Path.replace, []

    def interleaved(self: Path, target: Path) -> Path:
        calls.append(target)
        moved = replace(self, target)
        if len(calls) == 1:  # A's weights have their name, its config has not
            headwise.save(second, folder)
            assert torch.equal(headwise.load(folder)(X), second.eval()(X))
        return moved

    monkeypatch.setattr(Path, "replace", interleaved)
    headwise.save(first, folder)
    assert torch.equal(headwise.load(folder)(X), first.eval()(X))


def test_load_reads_again_when_a_save_comes_between(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = made(num_layers=2)
    read, calls = Path.read_text, []

    def then_saved(self: Path, *args: Any, **kwargs: Any) -> str:
        content = read(self, *args, **kwargs)
        calls.append(self)
        if len(calls) == 1:
            headwise.save(model, folder)
        return content

    monkeypatch.setattr(Path, "read_text", then_saved)
    assert torch.equal(headwise.load(folder)(X), model.eval()(X))


def test_what_killed_processes_left_is_swept(folder: Path) -> None:
    old, new = folder / ".weights-0123456789abcdef.01234567.part.safetensors", folder / ".config.89abcdef.part.json"
    foreign = folder / ".notes.01234567.part.txt"
    for path in (old, new, foreign):
        path.write_text("half")
    for path in (old, foreign):
        os.utime(path, (time.time() - 7200,) * 2)
    headwise.save(made(), folder)
    assert not old.exists()
    assert new.exists()
    assert foreign.exists()
