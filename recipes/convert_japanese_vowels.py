"""Rebuild src/headwise/data/japanese_vowels.pt from the aeon wheel, which carries the data set as text.

Usage, in the root of the repository (aeon is only read, never installed):

    pip download --no-deps --dest downloads aeon==1.6.0
    python recipes/convert_japanese_vowels.py downloads/aeon-1.6.0-py3-none-any.whl src/headwise/data/japanese_vowels.pt

The same wheel always gives the same tensors, whose sha256 is printed beside that of the written file.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import struct
import zipfile
from pathlib import Path

import torch
from torch import Tensor

WHEEL_SHA256 = "d05227086706f80111ac5fee8de4d5d3115bb3bcfd1c786c8629393055816409"
MEMBER = "aeon/datasets/data/JapaneseVowels/JapaneseVowels_{}.ts"
CHANNELS = 12
DECIMALS = 6


def read_ts(text: str) -> tuple[list[list[tuple[float, ...]]], list[int]]:
    """Read aeon's text format: one utterance a line, `channel:channel:...:label`, a channel being comma-separated.

    Args:
        text: a whole .ts file.

    Returns:
        The utterances, each a list of frames of 12 values, and their speakers counted from 0.

    Raises:
        ValueError: a line is not 12 channels of one length, or float32 would not hold its printed decimals.
    """
    header, _, body = text.partition("@data\n")
    if not body:
        raise ValueError(f"read_ts: text must hold an @data line; got {header[:60]!r}")
    utterances, labels = [], []
    for number, line in enumerate(body.splitlines(), start=1):
        *channels, label = [field.split(",") for field in line.split(":")]
        if len(channels) != CHANNELS or len({len(channel) for channel in channels}) != 1:
            raise ValueError(f"read_ts: data line {number} must hold {CHANNELS} channels of one length")
        for printed in (value for channel in channels for value in channel):
            kept = struct.unpack("f", struct.pack("f", float(printed)))[0]
            if float(f"{kept:.{DECIMALS}f}") != float(printed):
                raise ValueError(f"read_ts: values must survive float32; got {printed} in data line {number}")
        utterances.append(list(zip(*(map(float, channel) for channel in channels), strict=True)))
        labels.append(int(label[0]) - 1)
    return utterances, labels


def convert(wheel: Path) -> dict[str, Tensor]:
    """Read both splits out of the wheel.

    Args:
        wheel: the downloaded aeon wheel.

    Returns:
        `values` (P, 12) float32, all frames one after the other, train before test; `lengths` (N,) int64;
        `labels` (N,) int64 in 0..8; `split_sizes` (2,) int64, the utterances of train and test.

    Raises:
        ValueError: it is not the wheel that this recipe was written for.
    """
    content = wheel.read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != WHEEL_SHA256:
        raise ValueError(f"convert: wheel must have sha256 {WHEEL_SHA256}; got {found}")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        splits = [read_ts(archive.read(MEMBER.format(name)).decode("ascii")) for name in ("TRAIN", "TEST")]
    utterances = [frames for split, _ in splits for frames in split]
    return {
        "values": torch.tensor([frame for frames in utterances for frame in frames], dtype=torch.float32),
        "lengths": torch.tensor([len(frames) for frames in utterances]),
        "labels": torch.tensor([label for _, labels in splits for label in labels]),
        "split_sizes": torch.tensor([len(labels) for _, labels in splits]),
    }


def contents_sha256(tensors: dict[str, Tensor]) -> str:
    """Hash the names, types, shapes and numbers, not the container, whose bytes may change with torch.

    Args:
        tensors: what `convert` returned, or what `torch.load` gave back.

    Returns:
        The sha256, in hexadecimal.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        code = "f" if tensor.is_floating_point() else "q"
        digest.update(struct.pack(f"<{tensor.numel()}{code}", *tensor.flatten().tolist()))
    return digest.hexdigest()


def main() -> None:
    """Convert, write, and print what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    tensors = convert(arguments.wheel)
    # Through a buffer: given a path, torch writes the file's own name into the archive.
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    arguments.output.write_bytes(buffer.getvalue())
    for name, tensor in tensors.items():
        print(f"{name:12} {tuple(tensor.shape)!s:12} {tensor.dtype}")
    print(f"contents sha256 {contents_sha256(tensors)}")
    print(f"file sha256     {hashlib.sha256(buffer.getvalue()).hexdigest()} ({len(buffer.getvalue()):,} bytes)")


if __name__ == "__main__":
    main()
