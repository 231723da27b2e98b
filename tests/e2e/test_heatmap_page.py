"""The page of heatmaps in a real browser: it draws, answers the pointer and the keyboard, and runs nothing of the data.

A copy of the page gets a second script that plays the user and writes what it saw into the document; the browser then
prints the document, or a picture of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from tests.e2e.browser import SIZE, browse, played, player
from torch import Tensor

from headwise import masks
from headwise.data.samples import japanese_vowels
from headwise.observe.heatmap import AttentionMap, heatmap
from headwise.observe.probes import pooled_attention_weights
from headwise.observe.snapshot import LiveMap

pytestmark = [pytest.mark.integration, pytest.mark.e2e]

Play = Callable[..., list[Any]]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run scripts in a copy of the page, one after the other, each a function body that returns what JSON can hold."""

    def run(page: Path, *scripts: str) -> list[Any]:
        copy = tmp_path / "played.html"
        copy.write_text(page.read_text("utf-8").replace("</body>", player(*scripts)), "utf-8")
        return played(browse(copy.as_uri(), "--dump-dom", profile=tmp_path / "profile"))

    return run


def weights(*shape: int) -> Tensor:
    return (3 * torch.randn(*shape)).softmax(-1)


def speech(title: str = "an utterance") -> AttentionMap:
    _, test = japanese_vowels()
    values = test.values[7]
    length = len(values)
    layers = [weights(4, length, length), weights(4, length, length)]
    return AttentionMap(layers, title=title, signal=values, interval=6.4, unit="ms")


CANVASES = """
        const count = node => new Set(pixels(node).map((_, i, all) => i % 4 ? 0 : all.slice(i, i + 4).join())).size;
        return { maps: [...document.querySelectorAll(".map canvas")].map(count),
                 signals: [...document.querySelectorAll(".signal canvas")].map(count),
                 scale: count(document.querySelector("#scale canvas")),
                 ticks: [...document.querySelectorAll(".tick")].map(node => node.textContent),
                 labels: [...document.querySelectorAll(".label")].map(node => node.textContent),
                 captions: [...document.querySelectorAll(".caption")].map(node => node.textContent),
                 rows: document.querySelectorAll("#table tr").length,
                 wide: document.documentElement.scrollWidth <= innerWidth }
        """
POINTING = """
        const hint = text("readout");
        move(panel("1,2"), 10.5 / 29, 3.5 / 29);
        const first = text("readout");
        const lines = [...document.querySelectorAll(".panel")].map(node => {
          const style = getComputedStyle(node, "::after");
          return style.display === "none" ? null : parseFloat(style.left) / node.clientWidth; });
        panel("1,2").dispatchEvent(new PointerEvent("pointerleave"));
        const outside = getComputedStyle(panel("0,0"), "::after").display;
        move(document.querySelector(".signal"), 10.5 / 29, 0.5);
        return [hint, first, lines, outside, text("readout")]
        """
FLIPPING = """
        const look = () =>
          [text("title"), document.querySelectorAll(".map").length, document.getElementById("sample").value];
        const all = [look()];
        press("ArrowRight"); all.push(look());
        move(panel("0,1"), 0.25, 0.4); const token = text("readout");
        move(panel("0,1"), 0.9, 0.1); const hidden = text("readout");
        const names = [...document.querySelectorAll(".tick")].map(node => node.textContent);
        document.getElementById("next").click(); all.push(look());
        press("ArrowRight"); all.push(look());
        document.getElementById("sample").value = 0;
        document.getElementById("sample").dispatchEvent(new Event("change")); all.push(look());
        const small = panel("1,3").clientWidth;
        panel("1,3").click(); all.push(look());
        const large = panel("1,3").clientWidth, focus = document.activeElement.dataset.head;
        press("Escape"); all.push(look());
        panel("0,2").focus(); press("Enter"); all.push(look());
        document.getElementById("back").click(); all.push(look());
        const before = pixels(panel("0,0").firstChild).join();
        document.getElementById("log").click();
        const logged = pixels(panel("0,0").firstChild).join(), pressed = document.getElementById("log").ariaPressed;
        const numbers = text("scale");
        document.getElementById("log").click();
        const after = pixels(panel("0,0").firstChild).join();
        return { all, token, hidden, names, grows: large > 1.5 * small, focus, pressed, numbers,
                 changes: before !== logged, returns: before === after }
        """


def test_what_one_does_with_a_page(tmp_path: Path, play: Play) -> None:
    """One start of the browser for all of it; the scripts follow each other on one page."""
    each, words = speech("speech"), ["the", "cat", "sat", "on", "the", "mat"]
    causal = torch.randn(3, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf).softmax(-1)
    tokens = AttentionMap([causal], title="words", key_names=words, query_names=words)
    page = heatmap([each, tokens, AttentionMap([weights(5, 7)])], tmp_path / "a.html")
    drawn, pointed, flipped = play(page, CANVASES, POINTING, FLIPPING)
    check_canvases(drawn)
    check_pointing(pointed, each)
    check_flipping(flipped, words)


def check_canvases(seen: Any) -> None:
    assert len(seen["maps"]) == 8
    assert min(seen["maps"]) > 40
    assert len(seen["signals"]) == 4
    assert min(seen["signals"]) > 40
    assert seen["scale"] > 200
    assert {"0", "100", "150"} <= set(seen["ticks"])
    assert seen["labels"] == ["signal", "query: time (ms)", "key: time attended to (ms)"]
    assert seen["captions"] == [f"layer {layer}, head {head}" for layer in (0, 1) for head in (0, 1, 2, 3)]
    assert seen["rows"] == 9
    assert seen["wide"]


def check_pointing(seen: Any, each: AttentionMap) -> None:
    hint, readout, lines, outside, signal = seen
    assert "log scale" in hint
    found = re.fullmatch(r"layer 1, head 2 · query 19\.2 ms → key 64 ms · weight ([\d.e-]+) ± ([\d.e-]+)", readout)
    assert found is not None, readout
    value, slack = map(float, found.groups())
    assert value == pytest.approx(float(each.weights[1][2, 3, 10]), abs=1.1 * slack + 0.01 * value)
    assert lines == [pytest.approx(10.5 / 29, abs=0.01)] * 12  # on four signals and eight maps alike
    assert outside == "none"
    assert each.signal is not None
    assert signal.startswith(f"key 64 ms · signal 1: {float(each.signal[10, 0]):.3f}"), signal


def check_flipping(seen: Any, words: list[str]) -> None:
    whole, words_view, last = ["speech", 8, "0"], ["words", 3, "1"], ["", 1, "2"]
    one = ["speech", 1, "0"]
    assert seen["all"] == [whole, words_view, last, last, whole, one, whole, one, whole]
    assert re.match(r"layer 0, head 1 · query “sat” \(2\) → key “cat” \(1\) · weight 0\.\d+ ± ", seen["token"])
    assert seen["hidden"].endswith("weight exactly 0")
    assert sorted(seen["names"]) == sorted(words * 4)  # the queries once, the keys below each head
    assert seen["grows"]
    assert seen["focus"] == "1,3"
    assert seen["pressed"] == "true"
    assert seen["numbers"].startswith("≤")
    assert seen["changes"]
    assert seen["returns"]


def test_texts_are_shown_and_never_run(tmp_path: Path, play: Play) -> None:
    evil = "</script><img src=x onerror=\"document.title='run'\"><script>document.title='run'</script><!-- '\" &amp;"
    each = AttentionMap(
        [weights(1, 3, 3)],
        title=evil,
        signal=torch.randn(3, 2),
        channel_names=[evil, "b"],
        key_names=[evil, "k", "日本"],
        query_names=["a", "b", "c"],
        unit="<b>",
    )
    page = heatmap([each, each], tmp_path / "a.html")
    (seen,) = play(
        page,
        """
        move(panel("0,0"), 0.1, 0.1);
        return { title: text("title"), images: document.images.length,
                 bold: document.querySelectorAll("#grid b").length,
                 readout: text("readout"), label: panel("0,0").ariaLabel, legend: text("legend"),
                 options: [...document.querySelectorAll("#sample option")].map(node => node.textContent.slice(0, 14)),
                 scripts: document.scripts.length, tab: document.title,
                 ticks: [...document.querySelectorAll(".tick.name.x")].map(node => node.textContent) }
        """,
    )
    assert seen["title"] == seen["tab"] == evil
    assert seen["images"] == 0
    assert seen["bold"] == 0
    assert seen["scripts"] == 3  # the data, the page's and the test's
    assert "</script><img" in seen["readout"]
    assert "</script><img" in seen["legend"]
    assert seen["options"] == ["1. </script><i", "2. </script><i"]
    assert seen["ticks"] == ["</script><img…", "k", "日本"]


def test_a_broken_page_says_so(tmp_path: Path) -> None:
    page = heatmap(speech(), tmp_path / "a.html")
    text, number = re.subn(r'"layers":', '"lairs":', page.read_text("utf-8"))
    assert number == 1
    page.write_text(text, "utf-8")
    with pytest.raises(AssertionError, match="CONSOLE"):
        browse(page.as_uri(), "--dump-dom", profile=tmp_path / "profile")


@pytest.mark.parametrize("dark", [False, True])
def test_what_one_sees(tmp_path: Path, dark: bool) -> None:
    page = heatmap([speech(), speech("another")], tmp_path / "a.html")
    picture = tmp_path / "a.png"
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browse(page.as_uri(), f"--screenshot={picture}", *theme, profile=tmp_path / "profile")
    pixels = torch.from_numpy(image.imread(picture))[..., :3]
    assert (pixels.shape[1], pixels.shape[0]) == SIZE
    # The page's ground is at its left edge, and where the maps are there is hardly any of it.
    assert (pixels[:, :8].mean() < 0.2) == dark
    codes = (255 * pixels[320:560, 110:1240]).round().long() @ torch.tensor([1 << 16, 1 << 8, 1])
    colors, counts = codes.unique(return_counts=True)
    assert len(colors) > 100
    assert counts.max() < 0.6 * counts.sum()


def test_other_shapes_draw(tmp_path: Path, play: Play) -> None:
    """What is drawn for samples of every shape, and at the ends of the numbers that are taken, in one page."""
    exact = torch.zeros(1, 3, 4)
    exact[0, 0, 3] = exact[0, 1, 0] = exact[0, 2, 1] = 1.0
    rounding = torch.tensor([[0.3], [0.1 + 0.2]] * 3, dtype=torch.float64)
    tiny, great = (torch.tensor(values, dtype=torch.float64) for values in ([[5e-324] * 2] * 2, [[-1e100], [1e100]]))
    cases = [
        (AttentionMap([exact], signal=torch.randn(13, 1), stride=4), "query 2 → key 12 · weight exactly 0"),
        (AttentionMap([weights(1, 1, 1)], signal=torch.full((1, 1), torch.nan)), "query 0 → key 0 · weight 1 ±"),
        (
            AttentionMap([weights(2, 244, 244)], signal=torch.randn(1460, 1), stride=6, unit="day"),
            "query 1458 to 1459 day → key 1458 to 1459 day · weight ",
        ),
        (
            AttentionMap([weights(1, 300, 521), weights(300, 521)], key_names=["word"] * 521),
            "query 298 to 299 → key “word” … “word” (519 to 520) · weight ",
        ),
        (AttentionMap([weights(13, 4, 5)] * 2, signal=torch.randn(5, 40)), "query 3 → key 4 "),
        # Loops from tick to tick must end: where a step is lost in rounding, and where numbers are at their ends.
        (AttentionMap([weights(1, 6, 6)], signal=rounding), "query 5 → key 5 "),
        (AttentionMap([weights(1, 6, 6)], signal=1e9 + torch.arange(6).double()[:, None]), "query 5 → key 5 "),
        (AttentionMap([weights(1, 2, 2)], signal=great), "query 1 → key 1 "),
        (AttentionMap([weights(1, 2, 2)], interval=1e100, stride=2**31, unit="s"), "e+109 s → key "),
        (AttentionMap([weights(1, 2, 2)], interval=1e-100, unit="s"), "query 1e-100 s → key 1e-100 s "),
        (AttentionMap([tiny]), "weight 0 ±"),
    ]
    page = heatmap([each for each, _ in cases], tmp_path / "a.html")
    script = """
        const all = [];
        for (let i = 0; i < NUMBER; i++) {
          go(i);
          const ticks = [...document.querySelectorAll(".tick.y")];
          move(document.querySelector(".map"), 0.9999, 0.9999);
          const one = [document.querySelectorAll(".map").length, text("readout"), ticks.map(node => node.textContent),
            Math.max(0, ...ticks.map(node => node.getBoundingClientRect().left < 24 ? 1 : 0))];
          document.getElementById("log").click(); document.getElementById("log").click();
          all.push(one);
        }
        return all
    """
    exactly = """const canvas = document.querySelector(".map canvas");
        return [pixels(canvas), [canvas, canvas.parentElement].map(node => node.getBoundingClientRect().width)]"""
    (values, widths), seen = play(page, exactly, script.replace("NUMBER", str(len(cases))))
    for (each, edge), (num_maps, readout, ticks, covered) in zip(cases, seen, strict=True):
        assert num_maps == sum(weight.shape[0] if weight.dim() == 3 else 1 for weight in each.weights)
        assert edge in readout
        assert 2 <= len(ticks) <= 60 or num_maps == 2
        assert each.signal is None or float(each.signal.max()) != 1e9 + 5 or "1000000004" in ticks
        assert not covered  # no number stands where the label does
    shown = torch.tensor(values).reshape(3, 4, 4)
    assert (shown[exact[0] == 1] == torch.tensor([0, 0, 4, 255])).all()
    assert (shown[exact[0] == 0] == torch.tensor([0xC3, 0xC8, 0xD0, 255])).all()
    assert widths[0] / widths[1] == pytest.approx(16 / 13, rel=0.01)  # the last key covers one step of its four


# --- One head at a time, zoomed, pooled, and of some rows -----------------------------------------------------------

FLIP_HEADS = """
        const look = () => [...document.querySelectorAll(".map")].map(node => node.dataset.head).join(" ");
        const seen = [];
        panel("0,1").click(); seen.push(look());
        for (const key of ["ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "ArrowLeft", "ArrowUp"]) {
          press(key); seen.push(look()); }
        for (const id of ["left", "down", "right", "up"]) { click(id); seen.push(look()); }
        go(1, "layer"); seen.push(look());
        go(0, "head"); seen.push(look());
        press("n"); seen.push(look() + " of " + text("title"));
        press("p"); seen.push(look() + " of " + text("title"));
        const names = ["layer", "head"].map(id => [...document.getElementById(id).options].map(node => node.text));
        const ends = ["up", "down", "left", "right"].map(id => document.getElementById(id).disabled);
        const notes = text("notes"), label = panel("1,0").ariaLabel;
        press("Escape"); seen.push(document.querySelectorAll(".map").length);
        go(2, "note");
        const caption = document.querySelectorAll(".caption")[1].textContent;
        return { seen, names, ends, notes, label, caption, focus: document.activeElement.dataset.head,
                 table: [...document.querySelectorAll("#table tr")].map(row => row.textContent) }
"""
ZOOM = """
        const at = "1,2", canvas = () => panel(at).firstChild, size = () => [canvas().width, canvas().height];
        const names = () => [...document.querySelectorAll(".tick.x")].map(node => node.textContent);
        panel(at).click();
        const whole = size(), before = pixels(canvas());
        drag(at, 0.26, 0.51, 0.49, 0.99);
        const zoomed = size(), inside = pixels(canvas()), shown = names();
        move(panel(at), 0.01, 0.01); const corner = text("readout");
        move(panel(at), 0.99, 0.99); const other = text("readout");
        const lines = parseFloat(getComputedStyle(panel(at), "::after").left) / panel(at).clientWidth;
        press("ArrowDown", { shiftKey: true }); const edge = text("readout");
        press("ArrowUp"); const flipped = [text("readout"), document.querySelector(".map").dataset.head];
        press("ArrowDown");
        press("Escape"); const out = size();
        wheel(panel(at), 0.5, 0.5, -1); const turned = size();
        move(panel(at), 0.999, 0.001); const wheeled = text("readout");
        wheel(panel(at), 0.5, 0.5, 1); wheel(panel(at), 0.5, 0.5, 1); const unturned = size();
        for (let i = 0; i < 20; i++) press("+");
        const closest = size();
        press("0"); const reset = size(), after = pixels(canvas());
        click("closer"); const button = size();
        click("whole"); const undone = size();
        return { whole, zoomed, shown, corner, other, lines, edge, flipped, out, turned, wheeled, unturned, closest,
                 reset, button, undone, same: before.join() === after.join(), pixels: inside.length }
"""


def value_of(readout: str) -> tuple[float, float]:
    found = re.search(r"weight ([\d.e-]+) ± ([\d.e-]+)$", readout)
    assert found is not None, readout
    return float(found[1]), float(found[2])


def test_flipping_and_zooming(tmp_path: Path, play: Play) -> None:
    words = [f"w{i}" for i in range(16)]
    layers = [weights(3, 16, 16), weights(3, 16, 16)]
    notes = {"sink": [[0.125, 0.25, 0.5]] * 2, "max logit": [[1.0, 2.0, float("inf")], [None, 31.25, 6.0]]}
    names = ["encoder.0", "encoder.1"]
    one = AttentionMap(layers, title="a", key_names=words, query_names=words, notes=notes, layer_names=names)
    page = heatmap([one, AttentionMap([weights(4, 4), weights(1, 4, 4)], title="b")], tmp_path / "a.html")
    flipped, zoomed = play(page, FLIP_HEADS, ZOOM)
    assert flipped["seen"] == [
        *("0,1", "0,2", "0,2", "1,2", "1,2", "1,1", "0,1"),
        *("0,0", "1,0", "1,1", "0,1", "1,1", "1,0", "1,0 of b", "1,0 of a", 6),
    ]
    assert flipped["names"] == [names, ["head 0", "head 1", "head 2"]]
    assert flipped["ends"] == [False, True, True, False]
    assert flipped["notes"] == "sink 0.125max logit \u2013"
    assert flipped["label"].endswith(", sink 0.125, max logit \u2013")
    assert flipped["caption"] == "encoder.0, head 1 · 2"
    assert flipped["focus"] == "1,0"
    assert flipped["table"][0].endswith("queriessinkmax logit")
    assert flipped["table"][5].endswith("0.2531.3")
    assert zoomed["whole"] == zoomed["out"] == zoomed["unturned"] == zoomed["reset"] == zoomed["undone"] == [16, 16]
    assert zoomed["same"]
    assert zoomed["zoomed"] == [4, 8]
    assert zoomed["pixels"] == 4 * 4 * 8
    assert zoomed["shown"] == words[4:8]
    assert zoomed["turned"] == [12, 12]
    assert zoomed["closest"] == [4, 4]
    assert zoomed["button"] == [8, 8]
    assert zoomed["lines"] == pytest.approx(7 / 8, abs=0.01)
    assert zoomed["flipped"][1] == "0,2"
    for readout, layer, query, key in [
        (zoomed["corner"], 1, 8, 4),
        (zoomed["other"], 1, 15, 7),
        (zoomed["edge"], 1, 15, 7),
        (zoomed["flipped"][0], 0, 15, 7),
        (zoomed["wheeled"], 1, 2, 13),
    ]:
        assert readout.startswith(
            f"encoder.{layer}, head 2 · query “w{query}” ({query}) → key “w{key}” ({key}) · weight"
        )
        value, slack = value_of(readout)
        assert value == pytest.approx(float(layers[layer][2, query, key]), abs=1.1 * slack + 0.01 * value)


def test_pooled_weights_and_some_rows(tmp_path: Path, play: Play) -> None:
    x = torch.randn(2, 2, 700, 8)
    x[:, :, 333] *= 6  # a key that stands out
    pooled = pooled_attention_weights(x, x, mask=masks.causal(), cells=100)
    long = AttentionMap.pooled([pooled], num_queries=700, num_keys=700, sample=1, interval=5.0, unit="ms")
    live = LiveMap(0, (3, 77, 512), 600, 501, 50, weights(2, 3, 11), ("c", "d", "e"))
    page = heatmap([long, AttentionMap.sampled(live)], tmp_path / "a.html")
    mass, greatest, rows = play(
        page,
        """panel("0,1").click(); move(panel("0,1"), 47.5 / 100, 99.5 / 100);
           return [text("readout"), panel("0,1").firstChild.width, text("about"), panel("0,1").ariaLabel]""",
        """click("greatest"); move(panel("0,1"), 47.5 / 100, 99.5 / 100);
           return [text("readout"), document.getElementById("greatest").ariaPressed, text("about")]""",
        """go(1); move(panel("0,0"), 0.999, 0.5);
           const ticks = [...document.querySelectorAll(".tick.y")].map(node => node.textContent);
           return [text("readout"), ticks, document.getElementById("greatest").hidden]""",
    )
    # Cells of 7: queries 693 to 699, keys 329 to 335, each 5 ms from the next.
    assert mass[0].startswith("layer 0, head 1 · query 3465 to 3495 ms → key 1645 to 1675 ms · weight ")
    assert greatest[0].startswith("layer 0, head 1 · query 3465 to 3495 ms → key 1645 to 1675 ms · greatest weight ")
    for readout, cells in [(mass[0], pooled.mass), (greatest[0], pooled.peak)]:
        value, slack = value_of(readout)
        assert value == pytest.approx(float(cells[1, 1, 99, 47]), abs=1.1 * slack + 0.01 * value)
    assert mass[1] == 100
    assert "keys in a cell 7 (summed), queries 7 (averaged)" in mass[2]
    most = int(pooled.mass[1, 1].mean(0).argmax()) * 7
    assert f"most attended key {5 * most} to {5 * (most + 6)} ms" in mass[3]
    assert greatest[1] == "true"
    assert "greatest single attention weight in each cell" in greatest[2]
    value, slack = value_of(rows[0])
    assert rows[0].startswith("layer 0, head 0 · query “d” (77) → key 500 · weight ")  # the last cell holds one key
    assert value == pytest.approx(float(live.mass[0, 1, 10]), abs=1.1 * slack + 0.01 * value)
    assert rows[1] == ["c", "d", "e"]
    assert rows[2]
