"""Side-by-side measurements; `make bench` runs them. Not part of the wheel."""
