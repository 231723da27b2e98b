"""The benchmarks' own code: every row builds and agrees in tiny sizes, and what disagrees or falls short is said.

No time is held to anything here: `make bench` does that.
"""

import dataclasses
import math

import pytest
import torch
from benchmarks import gpu, wasted, watched
from benchmarks.harness import Case, Product, agree, agree_in_low_precision, measure, peak_bytes

X = torch.linspace(-1, 1, 35).view(5, 7)


def case(theirs, **options):
    return Case("row", lambda: X + 0, {"torch": theirs}, 0.0, **options)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_every_row_agrees_with_its_baseline_and_its_peers():
    names = []
    for row in wasted.table(wasted.TINY):
        (row.same or (lambda row=row: agree(row)))()
        names.append(row.name)
    assert len(set(names)) == len(names) == 19


def test_every_length_of_the_growing_window_agrees_with_sdpa_by_hand():
    assert [length for length, _, _ in wasted.growth(wasted.TINY, 1)] == list(wasted.TINY.growth)


@pytest.mark.slow
def test_the_gpu_script_runs_on_a_cpu_and_says_where_there_is_no_gpu(capsys):
    assert gpu.main(["--device", "cpu", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "no claim" in out
    assert out.count("\n| ") == 1 + 21  # the header and the rows
    if not torch.cuda.is_available():
        assert gpu.main([]) == 2
        assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("part", [0, 1], ids=["output", "gradient"])
def test_a_wrong_number_is_found_in_outputs_and_gradients(part):
    wrong = [X + 0, X + 0]
    wrong[part][3, 5] += 1e-3
    both = Case("row", lambda: (X + 0, X + 0), {"torch": lambda: (X + 0, X + 0)}, 0.0, peers={"peer": lambda: wrong})
    with pytest.raises(AssertionError, match=f"row, peer, {'the output' if part == 0 else 'gradient 1'}"):
        agree(both)


def test_padding_is_not_compared_and_nested_tensors_are_in_their_padded_form():
    lengths = [5, 3]
    x = torch.arange(1.0, 21.0).view(2, 5, 2)
    padding = torch.arange(5) >= torch.tensor(lengths)[:, None]
    nested = torch.nested.nested_tensor_from_jagged(x[~padding], torch.tensor([0, 5, 8]))
    row = Case("row", lambda: x, {"torch": lambda: x.masked_fill(padding[..., None], math.nan)}, 0.0, padding=padding)
    row.peers = {"nested": lambda: nested}
    agree(row)
    row.peers = {"nested": lambda: nested + 1}
    with pytest.raises(AssertionError, match="row, nested"):
        agree(row)


def test_low_precision_may_be_twice_as_far_off_as_the_baseline():
    exact = Case("row", lambda: X.double(), {"torch": lambda: X.double()}, 0.0)
    rounded = X.bfloat16()
    off = (rounded.double() - X.double()).abs().max().item()
    fine = Case("row", lambda: rounded, {"torch": lambda: rounded}, 0.0)
    agree_in_low_precision(fine, exact)
    far = Case("row", lambda: rounded + 4 * off + 0.02, {"torch": lambda: rounded}, 0.0)
    with pytest.raises(AssertionError, match="row, headwise, part 0: error"):
        agree_in_low_precision(far, exact)


def test_a_row_says_what_fell_below_its_floor_or_could_not_be_measured():
    slow = measure(case(lambda: X + 0, floor=math.inf, share=math.inf), rounds=1, repeats=1, product=Product(8))
    assert [line.partition(":")[0] for line in slow.below("group")] == ["group row", "group row"]
    absent = measure(case("not installed", floor=1.0), rounds=1, repeats=1)
    assert absent.below("group") == ["group row: nan (not installed), floor 1.0"]
    assert measure(case(lambda: X + 0, floor=0.0), rounds=1, repeats=1).below("group") == []


def test_a_share_is_of_a_product_in_the_same_rounds():
    product = Product(8)

    def clock(call, repeats):
        return 3.0 if call is product else 2.0

    rows = [Case("row", lambda: X + 0, {}, flops) for flops in (2 * 8**3, 0.0)]
    assert [measure(row, rounds=3, repeats=1, product=product, clock=clock).share for row in rows] == [1.5, 0.0]
    assert measure(rows[0], rounds=3, repeats=1, clock=clock).share == 0
    torch.testing.assert_close(product(), product.sides[0] @ product.sides[1])


def test_a_peer_has_one_cell_for_all_its_ways():
    ways = {"by hand: slow": lambda: sum([X + 0 for _ in range(2000)]) / 2000, "by hand: quick": lambda: X + 0}
    row = measure(case(lambda: X + 0, peers={**ways, "other": "not installed"}), rounds=3, repeats=1)
    assert row.peers["by hand"].endswith(" (quick)")
    assert row.peers["other"] == "not installed"


def test_peak_bytes_counts_what_is_held_at_once():
    def call():
        first = torch.ones(1000)
        second = first + 1
        del first
        return second * 2

    assert 2 * 4000 <= peak_bytes(call) < 2 * 4000 + 100  # scalars count too


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's encoder makes one of a padded batch
def test_a_watched_model_gives_the_same_as_its_copy_and_says_what_it_missed():
    row = watched.compare("tiny", torch.nn, (2, 6, 8, 2, 1), 20, math.inf)  # asserts equal bits at every forward
    assert row.forwards == 20
    assert row.observed == 20
    assert row.overhead > 0
    within = dataclasses.replace(row, overhead=0.01, median=0.01, observed_median=0.0124)
    assert within.missed == []
    assert "overhead" in dataclasses.replace(within, overhead=0.02).missed[0]
    assert "observed forward" in dataclasses.replace(within, observed_median=0.0126).missed[0]
