"""The page of heatmaps in a real browser: it draws, answers the pointer and the keyboard, and runs nothing of the data.

A copy of the page gets a second script that plays the user and writes what it saw into the document; the browser then
prints the document, or a picture of it.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib import image
from torch import Tensor

from headwise.data.samples import japanese_vowels
from headwise.observe.heatmap import AttentionMap, heatmap

pytestmark = [pytest.mark.integration, pytest.mark.e2e]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SIZE = (1280, 900)

Play = Callable[..., list[Any]]


def browse(page: Path, *arguments: str, profile: Path) -> str:
    """Open the page, let 3 s of its own clock pass, return what the browser printed; nothing may reach its console."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium; on Debian: apt-get install chromium")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    command += [f"--user-data-dir={profile}", f"--window-size={SIZE[0]},{SIZE[1]}", "--virtual-time-budget=3000"]
    command += ["--enable-logging=stderr", "--v=0", "--force-device-scale-factor=1", *arguments, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return done.stdout


@pytest.fixture
def play(tmp_path: Path) -> Play:
    """Run scripts in a copy of the page, one after the other, each a function body that returns what JSON can hold."""

    def run(page: Path, *scripts: str) -> list[Any]:
        # The result goes into the title: it is text, whatever it holds.
        helper = """
        const panel = at => document.querySelector(`[data-head="${at}"]`);
        const move = (node, x, y) => { const box = node.getBoundingClientRect();
          node.dispatchEvent(new PointerEvent("pointermove", { bubbles: true,
            clientX: box.left + x * box.width, clientY: box.top + y * box.height })); };
        const press = key => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        const text = id => document.getElementById(id).textContent;
        const go = at => { const node = document.getElementById("sample");
          node.value = at; node.dispatchEvent(new Event("change")); };
        const pixels = canvas => [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
        """
        calls = ", ".join(f"(() => {{{script}}})()" for script in scripts)
        body = f"<script>{{{helper} const done = [{calls}]; "
        body += "const node = document.createElement('output'); node.id = 'played'; "
        body += "node.textContent = JSON.stringify(done); document.body.append(node); }</script></body>"
        copy = tmp_path / "played.html"
        copy.write_text(page.read_text("utf-8").replace("</body>", body), "utf-8")
        dom = browse(copy, "--dump-dom", profile=tmp_path / "profile")
        opening = re.search(r"<html[^>]*>", dom)
        assert opening is not None
        assert 'data-ready="true"' in opening[0]
        assert "data-error" not in opening[0], opening[0]
        found = re.search(r'<output id="played">(.*?)</output>', dom, re.S)
        assert found is not None, "the script did not end"
        results: list[Any] = json.loads(html.unescape(found[1]))
        return results

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
    assert seen["captions"] == [f"layer {layer}, head {head}" for layer in (1, 2) for head in (1, 2, 3, 4)]
    assert seen["rows"] == 9
    assert seen["wide"]


def check_pointing(seen: Any, each: AttentionMap) -> None:
    hint, readout, lines, outside, signal = seen
    assert "log scale" in hint
    found = re.fullmatch(r"layer 2, head 3 · query 19\.2 ms → key 64 ms · weight ([\d.e-]+) ± ([\d.e-]+)", readout)
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
    assert re.match(r"layer 1, head 2 · query “sat” \(2\) → key “cat” \(1\) · weight 0\.\d+ ± ", seen["token"])
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
                 options: [...document.querySelectorAll("option")].map(node => node.textContent.slice(0, 14)),
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
        browse(page, "--dump-dom", profile=tmp_path / "profile")


@pytest.mark.parametrize("dark", [False, True])
def test_what_one_sees(tmp_path: Path, dark: bool) -> None:
    page = heatmap([speech(), speech("another")], tmp_path / "a.html")
    picture = tmp_path / "a.png"
    theme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browse(page, f"--screenshot={picture}", *theme, profile=tmp_path / "profile")
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
