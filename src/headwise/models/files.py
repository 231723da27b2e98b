"""Models as files: a readable `config.json` and the weights as safetensors, in one folder.

No code and no import path is ever read from a file: a config names one of the classes registered here. `config.json` is
the truth: it names the weights by their hash and is replaced last, in one step, so that a folder holds the old model or
the new one, whenever a save is interrupted. A config of version 2 says which linears are int8; a float model is of
version 1, as it always was.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise._checks import invalid, need
from headwise._files import whole
from headwise.models.classifier import SequenceClassifier
from headwise.models.int8 import Kinds, check_kinds, kinds_of, make_int8, wrong_numbers
from headwise.quant.fake import FakeQuantLinear

_CLASSES: dict[str, type[nn.Module]] = {"SequenceClassifier": SequenceClassifier}
_FORMAT = "headwise model"
_FLOAT, _INT8 = 1, 2  # versions: a headwise that does not know int8 says that a newer one may read it
_WEIGHTS = re.compile(r"weights-[0-9a-f]{16}\.safetensors")
_PART = re.compile(r"\.(weights-[0-9a-f]{16}|config)\.[0-9a-f]{8}\.part\.\w+")
_KEYS = {"format", "version", "class", "arguments", "weights"}


def save(model: nn.Module, directory: str | os.PathLike[str]) -> Path:
    """Write a model of headwise to a folder, whole or not at all.

    Args:
        model: a `SequenceClassifier`, in any dtype and on any device, or one that `headwise.quantize` or
            `headwise.convert` made int8; not changed.
        directory: the folder, made if needed. A model that it holds is replaced; other files are left alone.

    Returns:
        The folder. In it: `config.json`, the class, its arguments and which linears are int8, and
        `weights-HASH.safetensors`, where an int8 weight takes one byte.

    Raises:
        ImportError: safetensors is missing; nothing was written.
        OSError: the disk is full, and the like; a model that stood there before still does.
        ValueError: another class, a model whose parameters are no longer those its arguments make or hold no numbers,
            one between `headwise.prepare_qat` and `headwise.convert`, an int8 model with other numbers or dtypes than
            quantizing makes (by `.half()`), or a `directory` that is a file. What stood there before still does.

    Cost: two copies of the weights in memory.
    """
    codec = need("safetensors.torch", "models")
    name = type(model).__name__
    if _CLASSES.get(name) is not type(model):
        raise invalid("save", "model", f"be one of {sorted(_CLASSES)}", f"{type(model).__module__}.{name}")
    folder = Path(directory)
    if folder.exists() and not folder.is_dir():
        raise invalid("save", "directory", "be a folder", folder)
    arguments: Any = model.config
    state: dict[str, Any] = model.state_dict()
    if any(isinstance(module, FakeQuantLinear) for module in model.modules()):
        rule = "be trained to its end: convert it first (headwise.convert), or save its state_dict() to go on later"
        raise invalid("save", "model", rule, "one that headwise.prepare_qat prepared")
    kinds = kinds_of(model)
    bare = _bare(name, arguments, kinds).state_dict()
    _same_parameters("save", "model", state, bare, name)
    if any(value.is_meta for value in state.values()):
        raise invalid("save", "model", "hold numbers", "a model on the meta device")
    cure = "; quantize it in float32, and change nothing of it after that"
    _same_numbers("save", "model", state, bare, kinds, cure)
    state = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in state.items()}
    weights: bytes = codec.save(state)
    digest = hashlib.sha256(weights).hexdigest()
    file_name = f"weights-{digest[:16]}.safetensors"
    config = {
        "format": _FORMAT,
        "version": _INT8 if kinds else _FLOAT,
        "class": name,
        "arguments": arguments,
        "weights": {"file": file_name, "sha256": digest},
        **({"int8": kinds} if kinds else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights_file, config_file = folder / file_name, folder / "config.json"
    before, is_new = weights_of(folder), not weights_file.exists()
    try:
        with whole(weights_file) as part:
            part.write_bytes(weights)
        with whole(config_file) as part:
            part.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except BaseException:
        # Interrupted: weights that no config names are nobody's, unless the config got its name just before.
        if is_new and weights_of(folder) != weights_file:
            weights_file.unlink(missing_ok=True)
        raise
    if before is not None and before != weights_file:
        before.unlink(missing_ok=True)
    _sweep(folder)
    return folder


def load(directory: str | os.PathLike[str], *, device: torch.device | str | int = "cpu") -> nn.Module:
    """Read a model that `save` wrote.

    Args:
        directory: the folder that was given to `save`.
        device: to put the model on.

    Returns:
        The model, in eval mode, in the dtype that it was saved in, its numbers equal to the bit. An int8 model is int8
        again, without calibration, and gives the same outputs to the bit.

    Raises:
        ImportError: safetensors is missing.
        ValueError: no such folder, no model in it, a file of another program or of a newer headwise, a config that was
            changed so that it does not fit, or weights that are truncated or changed: with the file and the reason.

    Example:
        >>> import tempfile
        >>> import headwise
        >>> model = headwise.SequenceClassifier(2, num_channels=1, class_names=["rest", "walk"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     again = headwise.load(headwise.save(model, folder))
        >>> again.class_names
        ('rest', 'walk')
    """
    codec = need("safetensors.torch", "models")
    folder = Path(directory)
    config_file = folder / "config.json"
    config = _read_config(config_file)
    weights_file = folder / config["weights"]["file"]
    if not weights_file.exists():  # another process may have saved since the config was read
        config = _read_config(config_file)
        weights_file = folder / config["weights"]["file"]
    try:
        weights = weights_file.read_bytes()
    except OSError as error:
        raise _refused(weights_file, f"be readable; config.json names it as the weights ({error.strerror})") from error
    if hashlib.sha256(weights).hexdigest() != config["weights"]["sha256"]:
        rule = "be as it was saved; it is truncated or was changed, take it from a copy or train again"
        raise _refused(weights_file, rule, f"{len(weights)} bytes with another SHA-256 than config.json has")
    try:
        state: dict[str, Tensor] = codec.load(weights)
    except (
        Exception
    ) as error:  # whatever a file that was made by hand brings out of the library: it is the file's fault
        raise _refused(weights_file, "be a safetensors file", str(error)) from error
    kinds: Kinds = config.get("int8", {})
    try:
        _possible(config["class"], config["arguments"], state)
        model = _bare(config["class"], config["arguments"], kinds)
    except (TypeError, ValueError) as error:
        rule = f"hold arguments that {config['class']} takes"
        raise _refused(config_file, rule, str(error)) from error
    bare = model.state_dict()
    _same_parameters("load", str(weights_file), state, bare, config["class"])
    _same_numbers("load", str(weights_file), state, bare, kinds)
    model.load_state_dict(state, assign=True)
    return model.to(device).eval()


def weights_of(directory: str | os.PathLike[str]) -> Path | None:
    """Return the file of weights that a folder's config names now; None if no model is there."""
    folder = Path(directory)
    try:
        return folder / str(_read_config(folder / "config.json")["weights"]["file"])
    except ValueError:
        return None


def _bare(name: str, arguments: dict[str, Any], kinds: Kinds) -> nn.Module:
    """The model without memory for its weights; draws no random numbers either."""
    with torch.device("meta"):
        model = _CLASSES[name](**arguments)
    if kinds:
        make_int8(model, kinds)
    return model


def _possible(class_name: str, arguments: dict[str, Any], state: dict[str, Tensor]) -> None:
    """Refuse what a saved config never holds, and sizes that the weights cannot have, before anything is built."""
    known = set(inspect.signature(_CLASSES[class_name]).parameters) - {"device", "dtype"}
    if unknown := sorted(arguments.keys() - known):
        raise ValueError(f"unknown arguments {unknown}")
    num_values = sum(value.numel() for value in state.values())
    for name, value in arguments.items():
        most = len(state) if name == "num_layers" else num_values
        if isinstance(value, int) and value > most:
            raise ValueError(f"{name}={value}, while the weights hold {num_values} values in {len(state)} tensors")


def _sweep(folder: Path) -> None:
    """Remove what killed processes left half written, once it is too old to be another process at work."""
    for part in folder.glob(".*.part*"):
        if _PART.fullmatch(part.name) and time.time() - part.stat().st_mtime > 3600:
            part.unlink(missing_ok=True)


def _same_parameters(
    function: str, argument: str, state: dict[str, Any], bare: dict[str, Tensor], class_name: str
) -> None:
    """Hold that `state` has the names and shapes of the bare model's."""
    wanted = {key: tuple(value.shape) for key, value in bare.items()}
    # What is no tensor belongs to a quantized child.
    got = {
        key: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for key, value in state.items()
    }
    if wanted != got:
        different = sorted(key for key in wanted.keys() | got.keys() if wanted.get(key) != got.get(key))
        key = different[0]
        rule = f"hold the parameters that {class_name} has with these arguments"
        what = f"{len(different)} that differ, first {key!r}: {got.get(key)} instead of {wanted.get(key)}"
        raise invalid(function, argument, rule, what)


def _same_numbers(
    function: str, argument: str, state: dict[str, Any], bare: dict[str, Tensor], kinds: Kinds, cure: str = ""
) -> None:
    """Hold that parameters are floating, in any dtype, and that int8 linears hold what a quantization makes."""
    for key, wanted in bare.items():
        dtype = state[key].dtype
        if key.rpartition(".")[0] in kinds:
            if dtype != wanted.dtype:
                raise invalid(function, argument, f"hold {key!r} as {wanted.dtype}{cure}", dtype)
        elif not dtype.is_floating_point or (kinds and dtype != torch.float32):
            rule = "hold float32 parameters beside int8 ones" if kinds else "hold floating parameters"
            raise invalid(function, argument, rule + cure, f"{dtype} for {key!r}")
    if wrong := wrong_numbers(state, kinds):
        rule = f"hold int8 weights in +-127, scales above 0 and zero points in [0, 255]{cure}"
        raise invalid(function, argument, rule, wrong)


def _read_config(path: Path) -> dict[str, Any]:
    """Read and check the config down to what is used of it."""
    if not path.parent.is_dir():
        raise invalid("load", "directory", "be the folder of a saved model", f"{path.parent}, which is not a folder")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        rule = "be the folder of a saved model (headwise train, headwise.save)"
        raise invalid("load", "directory", rule, f"{path.parent}, which has no config.json") from error
    except OSError as error:
        raise _refused(path, "be readable", error.strerror) from error
    except (ValueError, RecursionError) as error:
        raise _refused(path, "be JSON", f"{error}") from error
    if not isinstance(config, dict) or config.get("format") != _FORMAT:
        raise _refused(path, f"be written by headwise.save and hold 'format': {_FORMAT!r}", "another file")
    if type(config.get("version")) is not int or config["version"] not in (_FLOAT, _INT8):
        rule = f"be of version {_FLOAT} or {_INT8}, those that this headwise reads; a newer headwise may read it"
        raise _refused(path, rule, repr(config.get("version")))
    keys = _KEYS | {"int8"} if config["version"] == _INT8 else _KEYS
    if set(config) != keys or not isinstance(config["arguments"], dict) or not isinstance(config["weights"], dict):
        raise _refused(path, f"hold exactly {sorted(keys)}, arguments and weights as objects", sorted(config))
    if "int8" in keys and not check_kinds(config["int8"]):
        raise _refused(path, "name its int8 linears, each 'static' or 'dynamic'", f"{config['int8']!r:.80}")
    if config["class"] not in list(_CLASSES):
        raise _refused(path, f"name a class that is registered: {sorted(_CLASSES)}", repr(config["class"]))
    file_name, digest = config["weights"].get("file"), config["weights"].get("sha256")
    if not isinstance(file_name, str) or not _WEIGHTS.fullmatch(file_name):
        raise _refused(path, "name the weights as weights-HASH.safetensors, beside it", repr(file_name))
    if not isinstance(digest, str):
        raise _refused(path, "hold the SHA-256 of the weights", repr(digest))
    return config


def _refused(path: Path, rule: str, got: object = "none") -> ValueError:
    return invalid("load", str(path), rule, got)
