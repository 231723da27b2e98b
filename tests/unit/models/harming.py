"""Changes to the files of a saved model, for the tests that load what was changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load as read_tensors
from safetensors.torch import save as tensors_to_bytes
from torch import Tensor


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    change(config)
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def key(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, lambda config: config.__setitem__(name, value))


def put_weights(folder: Path, weights: bytes) -> None:
    """Other weights, to which the config agrees."""
    digest = hashlib.sha256(weights).hexdigest()
    name = f"weights-{digest[:16]}.safetensors"
    (folder / name).write_bytes(weights)
    edit(folder, lambda config: config.update(weights={"file": name, "sha256": digest}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    (path,) = folder.glob("weights-*")
    state = read_tensors(path.read_bytes())
    change(state)
    put_weights(folder, tensors_to_bytes(state))
