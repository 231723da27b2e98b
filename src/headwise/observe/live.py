"""What the live page at `/attention` shows: a snapshot as JSON's types, its maps in a byte a cell.

Letters: H query heads, R rows that were looked at, m cells of neighbouring keys.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.observe.picture import LEAST, codes, text_of
from headwise.observe.probes import in_cells
from headwise.observe.snapshot import LiveMap, Snapshot

__all__ = ["payload"]

MOST_CELLS = 2**18  # of all maps together, which a page fetches every two seconds
FEWEST_COLUMNS = 16  # of a map, however many maps there are
UNSEEN = ("row_entropy", "queries", "keys")  # of a layer; the page draws no histogram


def payload(snapshot: Snapshot) -> dict[str, Any]:
    """What `live.html` fetches as `attention/data.json`.

    Args:
        snapshot: what a monitor has seen so far.

    Returns:
        `snapshot.as_dict()` without its histograms, and in each layer `live`: None, or its last rows as a dict of
        `sample`, `queries` (R positions), `num_queries`, `num_keys`, `keys_a_cell`, `query_names`, `key_names`, `top`
        (the greatest mass in a cell) and `mass`: for each head a text in base64, R x m bytes, 0 for exactly 0, else
        1 + 254 * sqrt(mass / top), rounded. Numbers are finite or None. Texts of tokens are there only if the snapshot
        has them.

        Above 2**18 cells of all maps together, neighbouring cells are added, down to 16 a row.
    """
    data = {name: value for name, value in snapshot.as_dict().items() if name != "observer_duration"}
    rows = sum(_rows(layer.live) for layer in snapshot.layers)
    most = max(FEWEST_COLUMNS, MOST_CELLS // max(1, rows))
    data["layers"] = [
        {name: value for name, value in layer.items() if name not in UNSEEN} | {"live": _live(read.live, most)}
        for layer, read in zip(data["layers"], snapshot.layers, strict=True)
    ]
    return data


def _rows(live: LiveMap | None) -> int:
    return 0 if live is None else live.mass.shape[0] * live.mass.shape[1]


def _live(live: LiveMap | None, most: int) -> dict[str, Any] | None:
    if live is None:
        return None
    mass_HRm, run = _joined(live.mass.detach().double().cpu().nan_to_num(0.0, 0.0, 0.0).clamp(min=0), most)
    top = float(mass_HRm.max()) if mass_HRm.numel() else 0.0
    top = top if top >= LEAST else 1.0
    told, size = codes(mass_HRm, top), mass_HRm[0].numel() if len(mass_HRm) else 0
    return {
        "sample": live.sample,
        "queries": list(live.queries),
        "num_queries": live.num_queries,
        "num_keys": live.num_keys,
        "keys_a_cell": live.keys_a_cell * run,
        "query_names": list(live.query_names),
        "key_names": list(live.key_names),
        "top": top,
        "mass": [text_of(told[head * size : (head + 1) * size]) for head in range(len(mass_HRm))],
    }


def _joined(mass_HRm: Tensor, most: int) -> tuple[Tensor, int]:
    """The same mass in at most `most` cells a row, and how many old ones a new one holds."""
    m = mass_HRm.shape[-1]
    run = max(1, -(-m // most))
    return in_cells(mass_HRm, run).sum(dim=-1) if m else mass_HRm, run
