"""Write elsa/bench/paper.json, the published figures that the report compares with, from the paper's tables.json.

python tools/paper_numbers.py TABLES.json
"""

import json
import re
import sys
from pathlib import Path

TARGET = Path(__file__).parent.parent / "elsa" / "bench" / "paper.json"


def figures(tables: dict) -> dict:
    """Only numbers, by the names that results lines use; matrices are lists of rows in the order of the classes."""
    classes = tables["classes"]
    matrices = {}
    for name, table in tables["cifar10_pairs"].items():
        gamma_l, gamma_p = (f"{float(part.split('=')[1]):g}" for part in name.split(","))
        rows = [[table["auroc"][normal][other] for other in classes] for normal in classes]
        matrices[f"{gamma_l} {gamma_p}"] = {"mean": table["mean"], "rows": rows}
    ablation = tables["ablation_table4"]["auroc"]
    imagenet = tables["imagenet10"]
    return {
        "classes": classes,
        "matrices": matrices,
        "table1": _known(tables["scenario1_table1"]["auroc"]),
        "table2": _known(tables["scenario2_table2"]["auroc"]),
        "table3": tables["scenario3_table3"]["auroc"],
        "table4": {
            "watched": ablation["elsa+"],
            "cosine score": ablation["score: cosine"],
            "contrastive score": ablation["score: energy from CL objective"],
            "naive loss": ablation["loss: naive"],
            "deep-sad loss": ablation["loss: deep-sad"],
        },
        "early stop": {
            "correlation": tables["early_stopping"]["pearson_correlation_with_test_auroc"],
            "deviation": tables["early_stopping"]["std"],
        },
        # printed as fractions
        "imagenet10": {
            gamma_p: {name: round(100 * imagenet[key][f"{name}_mean"], 1) for name in ("elsa+", "csi")}
            for gamma_p, key in (("0", "gl=0.10,gp=0.00"), ("0.1", "gl=0.10,gp=0.10"))
        },
    }


def _known(table: dict) -> dict:
    return {
        f"{float(gamma):g}": {name: value for name, value in column.items() if value is not None}
        for gamma, column in table.items()
    }


def text(source: Path) -> str:
    """The whole of paper.json; a row of a matrix is a line."""
    spread = json.dumps(figures(json.loads(source.read_text())), indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda row: " ".join(row[0].split()), spread) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(Path(sys.argv[1])))
