#!/usr/bin/env python3
"""Breaks the method on purpose, one line at a time, and names every mutant that the tests let live.

python tools/mutants.py [FILE ...]      works on a copy; exit code 1 if a mutant lived or a line is gone
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]

# test file -> source file -> (what stands there, what is put in its place)
MUTANTS = {
    "test_energy.py": {
        "energy.py": [
            ("return -torch.logsumexp(z_BD", "return torch.logsumexp(z_BD"),
            ("prototypes_KD.T / tau, dim=1)", "prototypes_KD.T * tau, dim=1)"),
            (
                "torch.logsumexp(z_BD @ prototypes_KD.T / tau, dim=1)",
                "(z_BD @ prototypes_KD.T / tau).exp().sum(1).log()",
            ),
            ("-(math.log(num_prototypes) - 1 / tau)", "-(math.log(num_prototypes) + 2 / tau)"),
            ("-(math.log(num_prototypes) + 1 / tau)", "-math.log(num_prototypes + 1 / tau)"),
            ("raw_VRBD.mean(dim=0), dim=-1)", "F.normalize(raw_VRBD, dim=-1).mean(dim=0), dim=-1)"),
            ("for z_BD in mean_RBD]).sum(dim=0)", "for z_BD in mean_RBD]).mean(dim=0)"),
            ("for z_BD in views]).mean(dim=0)", "for z_BD in views]).sum(dim=0)"),
        ]
    },
    "test_losses.py": {
        "losses.py": [
            ("ANOMALY, energy_B - lowest, -energy_B", "ANOMALY, -energy_B, energy_B - lowest"),
            ("label_B == ANOMALY, energy_B", "label_B != 1, energy_B"),
            ("room_B.reciprocal()", "room_B.neg()"),
            ("room_B.reciprocal().mean()", "room_B.reciprocal().sum()"),
            (".roll(num_views // 2)", ".roll(1)"),
            ("-torch.inf)", "0.0)"),
            ("(z_ND @ z_ND.T / tau)", "(z_ND @ z_ND.T * tau)"),
            ("(label_N != ANOMALY).to", "(label_N == 0).to"),
            ("/ counted_N.sum().clamp(min=1)", "/ len(label_N)"),
            ("(each_N * counted_N)", "each_N"),
        ]
    },
    "test_prototypes.py": {
        "prototypes.py": [
            ("updated_KD = F.normalize(sums_KD, dim=1)", "updated_KD = sums_KD"),
            ("best_N.argsort(stable=True)", "best_N.argsort(stable=True, descending=True)"),
            ("torch.minimum(distance_N,", "torch.maximum(distance_N,"),
            ("similarity_NK.max(dim=1)", "similarity_NK.min(dim=1)"),
            ("if num_prototypes > len(z_ND)", "if num_prototypes > 10**9"),
            ("clamp(max=len(z_ND) - 1)", "clamp(max=len(z_ND))"),
        ]
    },
    "test_augment.py": {
        "augment.py": [
            ("< 0.8, jittered, x)", "< 0.5, jittered, x)"),
            ("GREY) < 0.2", "GREY) < 0.5"),
            ("torch.rot90(block, i % shifts", "torch.rot90(block, i // 2"),
            ("torch.rot90(block, i % shifts", "torch.rot90(block, -(i % shifts)"),
            ("draws[:, FLIP] < 0.5", "draws[:1, FLIP] < 0.5"),
            ("0.2 * draws[:, HUE, None, None] - 0.1", "0.4 * draws[:, HUE, None, None] - 0.2"),
            ("(area / ratio)", "(area * ratio)"),
            ("draws[:, TOP] * (1 - scale_y)", "draws[:, LEFT] * (1 - scale_y)"),
            ("* size - 0.5", "* size"),
            ("torch.where(first, 1, contrast)", "torch.where(first, 1, 1)"),
            ("x.mean(dim=(2, 3))", "x.mean(dim=(2, 3)).mean(dim=0, keepdim=True).expand(len(x), -1)"),
            ("(area_max - area_min) * draws[:, AREA]", "(area_max - area_min) * draws[0, AREA]"),
        ]
    },
    "test_strong.py": {
        "strong.py": [
            ("0.3 - 0.03 * level", "0.03 * level"),
            ("(0.01 + 0.99 * level / 10)", "(0.1 + 0.99 * level / 10)"),
            ("< APPLY_PROBABILITY", "< 1.1"),
            ("+ step // 2)", "+ 0)"),
            ("images < threshold", "images <= threshold"),
            ("order[:, position] == number", "order[0, position] == number"),
            ("CUTOUT_SHARE = 0.5", "CUTOUT_SHARE = 0.25"),
        ]
    },
    "test_early_stop.py": {
        "early_stop.py": [
            ("0.5 * (difference_AB == 0)", "1.0 * (difference_AB == 0)"),
            ("(images, distorted)", "(distorted, images)"),
            (".view(config.shifts, len(x)).sum(dim=0)", ".view(len(x), config.shifts).sum(dim=1)"),
            ("anomalous_B[None, :] - normal_A[:, None]", "normal_A[:, None] - anomalous_B[None, :]"),
        ]
    },
    "test_training.py": {
        "lars.py": [
            ('grad_norm + group["weight_decay"] * weight_norm', "grad_norm"),
            ("(weight_norm > 0) & (grad_norm > 0), ratio, 1", "(weight_norm > 0) & (grad_norm > 0), ratio, 0"),
            ('torch._foreach_mul_(buffers, group["momentum"])', "pass"),
        ],
        "training.py": [
            ("0.5 * (1 + math.cos", "0.5 * (1 - math.cos"),
            ("(step + 1) / warmup", "step / warmup"),
        ],
        "muon.py": [
            ("beta=b, alpha=c), x, beta=a)", "beta=a, alpha=c), x, beta=b)"),
            ("torch._foreach_lerp(grads, buffers,", "torch._foreach_lerp(buffers, grads,"),
            ("value=-size)", "value=-1.0)"),
            ("update.permute(0, 2, 3, 1).flatten(1)", "update.flatten(1)"),
            ("torch._foreach_lerp_(squares, torch._foreach_mul(grads, grads), 0.01)", "pass"),
            ('1 - group["lr"] * group["weight_decay"]', "1"),
        ],
        "seeds.py": [("repr((seed, *purpose))", "repr((seed,))")],
        "nets.py": [("uniform_(-bound, bound, generator=generator)", "uniform_(-bound, bound)")],
    },
    "test_nets.py": {
        "nets.py": [
            ("x[:, :, ::stride, ::stride]", "x"),
            (".permute(0, 2, 3, 1, 4, 5).flatten(3)", ".permute(0, 2, 3, 4, 5, 1).flatten(3)"),
            ("(padding,) * 4", "(0,) * 4"),
            ("- mean_C * mean_C", "- mean_C"),
            ("variance_C * (count / (count - 1))", "variance_C"),
            ("self.bias - mean_C * scale_C", "self.bias - mean_C"),
            ("self.num_batches_tracked.add_(1)", "pass"),
        ],
        "inference.py": [
            ("torch.rsqrt(norm.running_var + norm.eps)", "torch.rsqrt(norm.running_var + 1)"),
            ("norm.bias - norm.running_mean * scale", "norm.bias"),
            ("            y += shortcut\n", "            pass\n"),
            ("y.relu_() if self.relu else y", "y.relu_()"),
            ("copy.deepcopy(net).eval()", "net.eval()"),
            ("[:, :: self.stride[0], :: self.stride[1]]", "[:, 1 :: self.stride[0], 1 :: self.stride[1]]"),
        ],
    },
    "test_elsa.py": {
        "finetune.py": [
            ("label_N = label_B.repeat(2 * config.shifts)", "label_N = label_B.repeat_interleave(2 * config.shifts)"),
            (".repeat_interleave(len(images)).repeat(2)", ".repeat(2 * len(images))"),
            ("score > max(", "score < max("),
            ("trained_on = (~is_held_back)", "trained_on = (is_held_back | ~is_held_back)"),
            ("epoch % config.prototypes_every == 0", "True"),
            ("normal_side = (label_N != ANOMALY)", "normal_side = (label_N != 9)"),
            ("    net.load_state_dict(best)", "    pass"),
            ('"current prototypes": prototypes_KD', '"current prototypes": best["prototypes"]'),
        ],
        "pretrain.py": [
            (".repeat_interleave(len(images)).repeat(2)", ".repeat(2 * len(images))"),
            ('generator(seed, "pretrain draws", epoch, device=device)', "torch.Generator(device)"),
        ],
        "checkpoint.py": [
            ('if self.state.get("fingerprint") != fingerprint:', "if False:"),
            ('    part.load_state_dict({"state"', '    dict({"state"'),
        ],
        "elsa.py": [
            ("unlabelled = (label_N == UNLABELLED)", "unlabelled = (label_N != ANOMALY)"),
            ('generator(self.seed, "score")', "torch.Generator()"),
            ("elif not checkpoint.passed", "elif True or checkpoint.passed"),
        ],
    },
    "test_model_file.py": {
        "model_file.py": [
            ('about.get("sha256_json") == digest_of(about)', "True"),
            ('!= about["sha256"]:', "== 0:"),
            ("if hashlib.sha256(payload).digest() != digest:", "if False:"),
            ("    _recover(folder)\n", "    pass\n"),
            ("tensor = tensor.clone()", "pass"),
        ]
    },
    "test_config.py": {
        "config.py": [
            (
                "if not self.tau * math.log(self.num_prototypes) > 1:",
                "if self.tau * math.log(self.num_prototypes) < 0:",
            ),
            ("isinstance(value, bool) or not", "not"),
        ]
    },
}


def main(only: list[str]) -> int:
    """Run the tests of every mutant; a mutant lives if they still pass."""
    alive, count = [], 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("elsa", "tests", "pyproject.toml"):
            source = ROOT / name
            shutil.copytree(source, copy / name) if source.is_dir() else shutil.copy(source, copy / name)
        for test, files in MUTANTS.items():
            for file, changes in files.items():
                if only and file not in only:
                    continue
                for old, new in changes:
                    count += 1
                    verdict = lives(copy, test, copy / "elsa" / file, old, new)
                    print(f"{verdict:8} {file}: {old.strip()}  ->  {new.strip()}", flush=True)
                    if verdict != "caught":
                        alive.append(old)
    print(f"{count} mutants, {len(alive)} not caught")
    return bool(alive)


def lives(copy: Path, test: str, path: Path, old: str, new: str) -> str:
    """'caught', 'ALIVE', or 'GONE' if the line to break no longer stands there."""
    text = path.read_text()
    if old not in text:
        return "GONE"
    path.write_text(text.replace(old, new, 1))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        f"tests/method/{test}",
    ]
    done = subprocess.run(command, cwd=copy, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    path.write_text(text)
    return "ALIVE" if done.returncode == 0 else "caught"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
