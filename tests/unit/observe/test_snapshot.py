"""headwise.observe.snapshot: the table, whatever the names in it."""

from __future__ import annotations

from tests.unit.observe.readings import layer, snapshot, unseen


def test_names_cannot_steer_the_terminal() -> None:
    named = layer(0, name="a\x1b[2J\nb", fully_masked=1)
    text = str(snapshot(named, unseen(1), model="m\r\x07", skipped={"x\x1b": 1}, errors={"E\n": 2}))
    assert text.replace("\n", "").isprintable()
    assert text.startswith(r"m\r\x07: ")
    for line in (
        r"a\x1b[2J\nb: 1 query of 48 saw no key",
        r"1 call not looked at: x\x1b",
        r"2 errors of the observer: E\n",
    ):
        assert line in text.splitlines()


def test_long_names_keep_their_ends() -> None:
    names = [f"{'outer.' * 30}layers.{number}.self_attn" for number in range(2)]
    text = str(snapshot(*(layer(number, name=name, nonfinite=2) for number, name in enumerate(names)), model="m" * 99))
    first, _, *rows = text.splitlines()
    assert first.startswith(f"{'m' * 59}…: ")
    shown = [name[-59:] for name in names]
    assert [row.split()[0] for row in rows[:4]] == [f"…{shown[0]}"] * 2 + [f"…{shown[1]}"] * 2
    assert rows[4:6] == [f"…{name}: 2 queries of 48 had a NaN or +inf score" for name in shown]
    assert "a" * 60 in str(snapshot(layer(0, name="a" * 60)))
