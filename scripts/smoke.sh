#!/usr/bin/env bash
# What a user of the wheel gets: built, installed into an empty environment, used from another folder.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-.venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf "$root/build" # what an earlier build left there would end up in this wheel
"$python" -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/wheel" "$root"
"$python" -m venv "$work/venv"
bin=$work/venv/bin
"$bin/python" -m pip --disable-pip-version-check install --quiet --constraint "$root/constraints.txt" "$work"/wheel/*.whl

mkdir "$work/elsewhere"
cd "$work/elsewhere"
"$bin/python" - <<'EOF'
import random
from pathlib import Path
from PIL import Image
dice = random.Random(0)
Path("photos").mkdir()
rows = ["path,label"]
for number in range(60):
    odd = number % 3 == 0
    shade = dice.randrange(150, 200) if odd else dice.randrange(20, 90)
    Image.effect_noise((32, 32), 20).point(lambda v, shade=shade: max(0, min(255, v - 128 + shade))).save(f"photos/{number:02}.png")
    rows.append(f"{number:02}.png,{'anomaly' if odd else 'normal'}")
Path("labels.csv").write_text("\n".join(rows) + "\n")
EOF
"$bin/elsa" --version
"$bin/elsa" --help > help.txt
"$bin/elsa" data check photos --labels labels.csv
"$bin/elsa" fit photos --labels labels.csv --out model --encoder tiny --device cpu \
    --set pretrain_epochs=1 --set finetune_epochs=1 --set num_prototypes=8
"$bin/elsa" score model photos --out scores.parquet --device cpu
"$bin/elsa" evaluate model photos --labels labels.csv --json --device cpu > figures.json
"$bin/python" -c "
import json, elsa, pyarrow.parquet as pq
assert elsa.__file__.startswith('$work'), elsa.__file__
assert pq.read_table('scores.parquet').num_rows == 60
assert 0 <= json.load(open('figures.json'))['auroc']['value'] <= 1
from elsa.data.demo import load_demo
assert len(load_demo(0).images) == 1530"
echo "clean install: works"
