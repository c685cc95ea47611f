#!/usr/bin/env python3
"""Feed mutants to a target until one breaks it: python fuzz/run.py TARGET --seconds 3600 --corpus DIR

Needs atheris (pip install atheris). An input that raises, takes over 5 s or over 1 GB ends the run and is written to
DIR.found/; once mended, it belongs into fuzz/corpus/TARGET, which the tests replay.
"""

import argparse
import logging
import sys
from pathlib import Path

import atheris

HERE = Path(__file__).parent
# A Parquet page may lie about its size: pyarrow takes up to 2 GB for it before it refuses the file (docs/security.md).
MEMORY_MB = {"source": 3072, "labels": 3072, "imported": 3072}
sys.path.insert(0, str(HERE.parent))
with atheris.instrument_imports(include=["elsa", "fuzz", "PIL"]):
    from fuzz.seeds import seeds
    from fuzz.targets import TARGETS


def main() -> None:
    """Seed the corpus, then fuzz."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--timeout", type=int, default=5, help="of one input, by the clock: more on a busy machine")
    given = parser.parse_args()
    given.corpus.mkdir(parents=True, exist_ok=True)
    found = given.corpus.with_name(f"{given.corpus.name}.found")
    found.mkdir(exist_ok=True)
    for number, content in enumerate(seeds()[given.target]):
        (given.corpus / f"seed-{number}").write_bytes(content)
        TARGETS[given.target](content)  # imports and caches are no input's fault
    kept = HERE / "corpus" / given.target
    memory = MEMORY_MB.get(given.target, 1024)
    logging.disable()  # a library's remarks on each mutant
    memories = [f"-rss_limit_mb={memory}", f"-malloc_limit_mb={memory}"]
    limits = [f"-timeout={given.timeout}", "-report_slow_units=5", "-max_len=65536", *memories]
    options = [f"-max_total_time={given.seconds}", "-print_final_stats=1", f"-artifact_prefix={found}/"]
    folders = [str(given.corpus), *([str(kept)] if kept.is_dir() else [])]
    atheris.Setup([sys.argv[0], *limits, *options, *folders], TARGETS[given.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
