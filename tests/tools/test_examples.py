"""The code of docs/tools.md runs, with the packages that it is about."""

from __future__ import annotations

import pytest
from tests.contract.test_readme import readme_blocks, run


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("block", readme_blocks("docs/tools.md", "python"), ids=str)
def test_block_runs(block, monkeypatch, tmp_path):
    run(block, monkeypatch, tmp_path)
