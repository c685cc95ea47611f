"""`python -m elsa.bench run PLAN`: what `elsa bench run` does, for hosts that have no click."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import torch

from elsa.bench.plans import PLANS
from elsa.bench.run import repeat_cell, run_plan
from elsa.bench.speed import measure_speed, write_speed
from elsa.config import ElsaConfig, parse_settings
from elsa.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Tells the user's mistake like the rest of the command does: in one line."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: list[str]) -> int:
    """Parse, run, print; 0 done, 2 the user's mistake."""
    parser = OneLineParser(prog="elsa bench", description="Fill the missing cells of a table of the paper.")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run the cells of PLAN that have no line in RESULTS yet")
    run.add_argument("plan", choices=sorted(PLANS))
    run.add_argument("--results", type=Path, default=Path("results/results.jsonl"))
    run.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is started")
    repeat = commands.add_parser("repeat", help="fit one cell twice with one seed: how far do the scores differ?")
    repeat.set_defaults(plan="pilot")
    speed = commands.add_parser("speed", help="views/s of each stage, against the usual loop and the card's limits")
    speed.set_defaults(plan="speed")
    speed.add_argument("--results", type=Path, default=Path("results/speed.jsonl"))
    speed.add_argument("--size", type=int, default=32)
    speed.add_argument("--channels", type=int, default=3)
    speed.add_argument("--turns", type=int, default=5)
    speed.add_argument("--seconds", type=float, default=3.0, help="how long each variant runs in a turn")
    for command in (run, repeat):
        command.add_argument("--cifar10", type=Path, required=True, help="folder cifar-10-batches-bin")
    for command in (run, repeat, speed):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--preset", default="fast" if torch.cuda.is_available() else "cpu")
        command.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    try:
        given = parser.parse_args(arguments)
        settings = {"preset": given.preset, **parse_settings(ElsaConfig, given.settings)}
        if given.plan == "speed":
            figures = measure_speed(given.device, settings, given.size, given.channels, given.turns, given.seconds)
            print("\n".join(write_speed(figures, given.results, given.device, settings)))
            return 0
        if "results" not in given:
            print(repeat_cell(given.cifar10, given.device, settings, _print_now_and_then))
            return 0
        added = run_plan(
            given.plan, given.results, given.cifar10, given.budget, given.device, settings, _print_now_and_then
        )
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"{given.plan}: {added} cells added to {given.results}")
    return 0


def _print_now_and_then(stage: str, done: int, total: int, figures: dict[str, float]) -> None:
    if stage != "score" and (done % max(1, total // 5) == 0 or done <= 2):
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{stage} {done}/{total}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
