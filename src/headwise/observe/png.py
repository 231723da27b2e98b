"""A picture as a PNG, by matplotlib.

Letters: L queries, S keys, X channels, P points of a drawn line.
"""

from __future__ import annotations

import io
import math
import textwrap
import threading
from collections.abc import Sequence
from typing import Any

from headwise._checks import invalid, need
from headwise.observe.picture import FEW_HUES, Axis, Line, Picture, hues, plain

MOST_ROWS = 32  # of panels: 4,000 pixels
MOST_NAMES = 64  # tick labels of one axis; above it only every k-th name is written

# Fonts that come with systems and hold what matplotlib's own lacks.
MORE_FONTS = "Noto Sans CJK JP;Noto Sans CJK SC;Hiragino Sans;Yu Gothic;PingFang SC;Microsoft YaHei;Malgun Gothic"
MORE_FONTS += ";WenQuanYi Zen Hei;IPAexGothic;Droid Sans Fallback;Arial Unicode MS;Noto Sans;Segoe UI Symbol;Symbola"
SIDEWAYS: dict[str, Any] = {"fontsize": 10, "rotation": 90, "va": "center", "ha": "left"}

_one_at_a_time = threading.RLock()


def draw(picture: Picture) -> bytes:
    """Return the PNG, drawn under matplotlib's own defaults.

    Nearly every setting of a user can change the picture or break it, and newer versions of matplotlib bring more, so
    they are all set aside, not each overruled. Settings belong to the process: hence the lock, without which two
    threads could leave the defaults behind for good.
    """
    with _one_at_a_time, need("matplotlib.style", "observe").context("default"):
        return Sheet(picture).draw()


class Sheet:
    """A figure laid out in inches from its upper left corner, so that nothing overlaps whatever the numbers are.

    The object API alone: pyplot would keep the figure and pick a backend for the whole process.
    """

    def __init__(self, picture: Picture) -> None:
        self.ticker, colors = need("matplotlib.ticker", "observe"), need("matplotlib.colors", "observe")
        families, self.squares = _letters(picture)
        # No text is read as mathematics or TeX.
        self.plain = {"parse_math": False, "usetex": False, "fontfamily": families}
        self.picture, columns, names = picture, picture.columns, picture.channel_names
        self.rows = [(layer, i) for layer, heads in enumerate(picture.layers) for i in range(0, len(heads), columns)]
        if len(self.rows) > MOST_ROWS:
            rule = f"need at most {MOST_ROWS} rows of panels in a PNG; give fewer layers or heads, or write .html"
            raise invalid("heatmap", "maps", rule, len(self.rows))
        self.panel_width, self.panel_height = _panel(picture.query, picture.key, columns)
        self.panel_height = max(self.panel_height, 1.5 / len(self.rows))  # room for the label beside them
        # Where rows do not hold the same heads, a title over the first row would be wrong for the others.
        kinds = set(zip(map(len, picture.layers), picture.averaged, strict=True))
        self.titled = len(self.rows) > len(picture.layers) or len(kinds) > 1
        self.pitch, self.gap_y = self.panel_width + 0.12, 0.3 if self.titled else 0.12
        # A few named channels are told apart by their names, others by their numbers.
        self.named = 1 < len(names) <= len(FEW_HUES[0]) and names != tuple(str(1 + i) for i in range(len(names)))
        self.hues = colors.ListedColormap(hues(len(names)) or ["#000000"])
        self.shades = need("matplotlib", "observe").colormaps["magma_r"].with_extremes(bad="#c3c8d0")
        self.left = 0.7 + max(0.45, _width(picture.query.names, 12))
        self.right = max(1.35, 0.2 + _width(names, 18) if self.named else 0.0)
        self.maps_width = columns * self.pitch - 0.12
        self.maps_height = len(self.rows) * (self.panel_height + self.gap_y) - self.gap_y
        self.width = self.left + self.maps_width + self.right
        self.title = textwrap.wrap(picture.title, int(self.width / 0.115), max_lines=2, placeholder=" …")
        self.signal_top = 0.15 + 0.25 * len(self.title) + 0.27
        self.signal_height = max(1.1, min(1.6, 0.6 * self.panel_width), 0.17 * len(names) if self.named else 0.0)
        self.maps_top = self.signal_top + (0.0 if picture.line is None else self.signal_height + self.gap_y + 0.04)
        self.height = self.maps_top + self.maps_height + 0.4 + max(0.2, _width(picture.key.names, 12))
        self.figure = need("matplotlib.figure", "observe").Figure(figsize=(self.width, self.height), dpi=100)

    def draw(self) -> bytes:
        picture, center = self.picture, self.left + self.maps_width / 2
        for line, text in enumerate(self.title):
            self.write(self.width / 2, 0.3 + 0.25 * line, text, fontsize=13, ha="center")
        if picture.line is not None:
            self.draw_signals(picture.line, picture.channel_names)
        self.draw_maps()
        height, middle = min(6.0, self.maps_height), self.maps_top + self.maps_height / 2
        self.bar(middle - height / 2, height, self.shades, 256, (0.0, picture.top), picture.label)
        query = "\n".join(textwrap.wrap(picture.query.label, max(18, int(self.maps_height / 0.085))))
        self.write(0.07, middle, query, **SIDEWAYS, multialignment="center")
        self.write(center, self.height - 0.1, picture.key.label, fontsize=10, ha="center", va="bottom")
        content = io.BytesIO()
        self.figure.savefig(content, format="png", dpi=100)
        return content.getvalue()

    def write(self, x: float, y: float, text: str, **how: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, text.translate(self.squares), **self.plain, **how)

    def axes(self, x: float, y: float, width: float, height: float) -> Any:
        box = (x / self.width, 1 - (y + height) / self.height, width / self.width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.set_title("", y=1.0)  # a fixed place: looking for a free one took half of the time
        axes.tick_params(labelsize=8, grid_alpha=0.0)
        return axes

    def bar(self, y: float, height: float, hues: Any, number: int, ends: tuple[float, float], label: str) -> None:
        axes = self.axes(self.left + self.maps_width + 0.15, y, 0.16, height)
        axes.imshow([[i] for i in range(number)], hues, aspect="auto", origin="lower", extent=(0.0, 1.0, *ends))
        axes.yaxis.set(ticks_position="right", label_position="right")
        most = max(2, min(10, int(height / 0.2)))
        axes.yaxis.set_major_locator(self.ticker.MaxNLocator(most, integer=ends[0] > 0, min_n_ticks=1))
        axes.set_xticks([])
        axes.set_ylabel("\n".join(textwrap.wrap(label, max(20, int(height / 0.075)))), fontsize=9, **self.plain)

    def draw_signals(self, line: Line, names: Sequence[str]) -> None:
        """Draw the signal above each column and say which line is which channel."""
        times_P = [(line.first + line.step * point) * self.picture.key.interval for point in range(len(line.values_PX))]
        channels = [list(zip(times_P, values_P, strict=True)) for values_P in line.values_PX.T.tolist()]
        if len(times_P) == 1:
            channels = [points * 2 for points in channels]  # a line of no length has round ends: a dot
        collections = need("matplotlib.collections", "observe")
        colors, width = [self.hues(channel) for channel in range(len(names))], 1.2 if len(names) <= 12 else 0.7
        for column in range(self.picture.columns):
            axes = self.axes(self.left + column * self.pitch, self.signal_top, self.panel_width, self.signal_height)
            lines = collections.LineCollection(channels, linewidths=width, colors=colors, capstyle="round")
            axes.add_collection(lines)
            axes.set(xlim=self.picture.key.ends, ylim=line.frame)
            self.tick(axes.xaxis, self.picture.key, self.panel_width, shown=False)
            axes.yaxis.set_major_locator(self.ticker.MaxNLocator(5) if column == 0 else self.ticker.NullLocator())
        x, y, middle = self.left + self.maps_width, self.signal_top, self.signal_top + self.signal_height / 2
        self.write(0.1, middle, plain(names[0], 18) if len(names) == 1 and names[0] != "1" else "signal", **SIDEWAYS)
        if self.named:
            for i, name in enumerate(names):
                self.write(x + 0.12, y + 0.1 + 0.17 * i, plain(name, 18), color=colors[i], fontsize=9, va="center")
        elif len(names) > 1:
            self.bar(y, self.signal_height, self.hues, len(names), (0.5, len(names) + 0.5), "channel")

    def draw_maps(self) -> None:
        picture, query, key = self.picture, self.picture.query, self.picture.key
        counts = [min(picture.columns, len(picture.layers[layer]) - first) for layer, first in self.rows]
        for row, (layer, first) in enumerate(self.rows):
            y = self.maps_top + row * (self.panel_height + self.gap_y)
            name = picture.layer_names[layer] if picture.layer_names else f"layer {layer}"
            name = name if len(name) <= 24 else f"…{name[-23:]}"  # dotted names differ at the end
            self.write(0.44, y + self.panel_height / 2, name, **SIDEWAYS)
            for column in range(counts[row]):
                cells_LS = picture.layers[layer][first + column]
                axes = self.axes(self.left + column * self.pitch, y, self.panel_width, self.panel_height)
                grid = cells_LS.masked_fill(cells_LS == 0, math.nan).numpy()
                extent = (key.ends[0], key.full, query.full, query.ends[0])
                look: dict[str, Any] = {"vmin": 0.0, "vmax": picture.top, "aspect": "auto", "origin": "upper"}
                axes.imshow(grid, self.shades, extent=extent, interpolation="nearest", **look)
                axes.set(xlim=key.ends, ylim=query.ends[::-1])  # cuts last cells that hold fewer positions than others
                title = "mean of heads" if picture.averaged[layer] else f"head {first + column}"
                if self.titled or row == 0:
                    x, above = (
                        self.left + column * self.pitch + self.panel_width / 2,
                        y if self.titled else self.signal_top,
                    )
                    self.write(x, above - 0.07, title, fontsize=9, ha="center")
                self.tick(axes.yaxis, query, self.panel_height, shown=column == 0)
                lowest = all(column >= count for count in counts[row + 1 :])
                self.tick(axes.xaxis, key, self.panel_width, shown=lowest)

    def tick(self, axis: Any, side: Axis, room: float, *, shown: bool) -> None:
        """Put ticks on one axis of a map: as many names as fit, where there are any; else round numbers."""
        across = axis.axis_name == "x"
        if not shown:
            axis.set_ticks([])
        elif names := side.names or side.marks:
            step = -(-side.num // max(1, min(MOST_NAMES, int(room / 0.125))))
            starts = range(0, side.num * side.stride, step * side.stride)
            lasts = [min(start + side.stride, side.steps) - 1 for start in starts]
            middles = [0.5 * (start + last) * side.interval for start, last in zip(starts, lasts, strict=True)]
            texts = [plain(name, 12).translate(self.squares) for name in names[::step]]
            axis.set_ticks(middles, texts, rotation=90 if across else 0, **self.plain)
        else:
            wide = 0.09 * len(f"{side.ends[1]:.0f}") + 0.25 if across else 0.3
            most, integer = max(1, min(8, int(room / wide))), side.unit in ("", "step")
            axis.set_major_locator(self.ticker.MaxNLocator(most, integer=integer, min_n_ticks=1))


def _panel(query: Axis, key: Axis, columns: int) -> tuple[float, float]:
    """Return a panel's width and height in inches: large if there are few, larger where that shows every name."""
    width = max(1.3, min(4.2, 12.0 / columns))
    height = max(0.9, width * max(0.4, min(1.0, query.num / key.num)))
    wide, high = (0.13 * len(side.names) * (len(side.names) <= MOST_NAMES) for side in (key, query))
    return max(width, wide * (columns * wide <= 18)), max(height, high * (columns * high <= 18))


def _width(names: Sequence[str], most: int) -> float:
    """Return the inches that the longest of these names takes, cut at `most` characters of 8 points."""
    return 0.1 + 0.08 * max((min(most, len(name)) for name in names), default=0)


def _letters(picture: Picture) -> tuple[list[str], dict[int, str]]:
    """Return the font families to write with, and what to write for each letter that none of them has."""
    fonts = need("matplotlib.font_manager", "observe")

    def missing(letters: set[str], families: list[str]) -> set[str]:
        paths = [fonts.findfont(fonts.FontProperties(family=[family])) for family in families]
        return {c for c in letters if not any(fonts.get_font(path).get_char_index(ord(c)) for path in paths)}

    query, key = picture.query, picture.key
    texts = (picture.title, query.label, key.label, *query.names, *key.names, *picture.channel_names)
    families = list(fonts.FontProperties().get_family())
    lacking = missing(set("".join(texts)), families)
    if lacking:
        installed = {font.name for font in fonts.fontManager.ttflist}
        families += [family for family in MORE_FONTS.split(";") if family in installed]
        lacking = missing(lacking, families)
    return families, str.maketrans(dict.fromkeys(lacking, "?" if missing({"\u25a1"}, families) else "\u25a1"))
