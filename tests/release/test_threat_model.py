"""The threat model is held by tests: every one it names exists, and every claim names one or says that it is none."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
NOT_CLAIMED = ("**not prevented**", "as trustworthy as who made them")


def test_every_test_that_the_page_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) > 30
    missing = [f"{file}::{test}" for file, test in named if f"def {test}(" not in (ROOT / file).read_text()]
    assert not missing


def test_every_claim_of_the_page_has_a_test():
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("|") and "---" not in line]
    claims = [cells for cells in rows if cells[-1].strip() != "test"]
    assert len(claims) > 25
    for _, claim, test in claims:
        assert "`tests/" in test or any(words in claim for words in NOT_CLAIMED), claim
