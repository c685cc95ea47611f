"""`python -m elsa.bench run PLAN`: what `elsa bench run` does, for hosts that have no click."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch

from elsa.bench.plans import PLANS
from elsa.bench.run import repeat_cell, run_plan
from elsa.bench.speed import measure_speed, measure_time_to, write_speed
from elsa.config import ElsaConfig, parse_settings
from elsa.data.parallel import available_cores
from elsa.errors import UserError


class OneLineParser(argparse.ArgumentParser):
    """Tells the user's mistake like the rest of the command does: in one line."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse."""
        raise UserError(f"{message}; see {self.prog} --help")


def main(arguments: list[str]) -> int:
    """Parse, run, print; 0 done, 2 the user's mistake."""
    try:
        given = _parser().parse_args(arguments)
        action: Callable[[argparse.Namespace], str] = given.action
        print(action(given))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="elsa bench", description="Every table of the paper on your card, and beside it.")
    commands = parser.add_subparsers(required=True)

    run = commands.add_parser("run", help="run the cells of PLAN that have no line in RESULTS yet")
    run.set_defaults(action=_run)
    run.add_argument("plans", metavar="PLAN", nargs="+", choices=sorted(PLANS), help=", ".join(PLANS))
    run.add_argument("--results", type=Path, default=Path("results/results.jsonl"))
    run.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no cell is started")
    run.add_argument("--cifar10", type=Path, help="folder cifar-10-batches-bin")
    run.add_argument("--data", type=Path, help="folder of the other sets: what pack wrote, or as published")
    run.add_argument("--engine", choices=["local", "ray"], default="local", help="ray: all of a cluster at once")
    run.add_argument("--encoders", type=Path, help="folder to keep pre-trained encoders in, so that none is made twice")

    repeat = commands.add_parser("repeat", help="fit one cell twice with one seed: how far do the scores differ?")
    repeat.set_defaults(action=_repeat)
    repeat.add_argument("--cifar10", type=Path, required=True, help="folder cifar-10-batches-bin")

    speed = commands.add_parser("speed", help="views/s of each stage, against the usual loop and the card's limits")
    speed.set_defaults(action=_speed)
    speed.add_argument("--results", type=Path, default=Path("results/speed.jsonl"))
    speed.add_argument("--size", type=int, default=32)
    speed.add_argument("--channels", type=int, default=3)
    speed.add_argument("--turns", type=int, default=5)
    speed.add_argument("--seconds", type=float, default=3.0, help="how long each variant runs in a turn")

    report = commands.add_parser("report", help="write docs/results.md and its plots from the results")
    report.set_defaults(action=_report)
    report.add_argument("--results", type=Path, default=Path("results"), help="folder of the .jsonl files")
    report.add_argument("--out", type=Path, default=Path("docs/results.md"), help="plots lie beside it in figures/")
    report.add_argument("--check", action="store_true", help="write nothing; fail if the page or a plot is stale")

    pack = commands.add_parser("pack", help="pack Parquet files of images for hosts that have no pyarrow")
    pack.set_defaults(action=_pack)
    pack.add_argument("source", metavar="SOURCE", type=Path, help="folder of the Parquet files")
    pack.add_argument("--out", type=Path, required=True)

    for command in (run, repeat, speed):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--preset", default="fast" if torch.cuda.is_available() else "cpu")
        command.add_argument("--set", dest="settings", action="append", default=[], metavar="NAME=VALUE")
    return parser


def _run(given: argparse.Namespace) -> str:
    if given.engine == "ray":
        return _run_on_ray(given)
    added = run_plan(
        given.plans,
        given.results,
        given.cifar10,
        given.budget,
        given.device,
        _settings(given),
        _print_now_and_then,
        data=given.data,
        encoders=given.encoders,
    )
    return f"{', '.join(given.plans)}: {added} cells added to {given.results}"


def _run_on_ray(given: argparse.Namespace) -> str:
    from elsa.bench.ray_run import run_plan_on_ray

    settings, places = _settings(given), (given.data, given.encoders)
    added = run_plan_on_ray(given.plans, given.results, given.cifar10, given.budget, given.device, settings, *places)
    return f"{', '.join(given.plans)}: {added} cells added to {given.results}"


def _repeat(given: argparse.Namespace) -> str:
    return repeat_cell(given.cifar10, given.device, _settings(given), _print_now_and_then)


def _speed(given: argparse.Namespace) -> str:
    settings = _settings(given)
    figures = measure_speed(given.device, settings, given.size, given.channels, given.turns, given.seconds)
    figures += measure_time_to(given.device, available_cores())
    lines = write_speed(figures, given.results, given.device, settings)
    try:
        from elsa.bench.speed_plot import write_speed_plot
    except ModuleNotFoundError as error:  # GPU hosts are often bare
        return "\n".join([*lines, f"no plot, {error.name} is missing: pip install elsa[bench]"])
    return "\n".join([*lines, write_speed_plot(figures, given.results.with_suffix(".svg"), given.device)])


def _report(given: argparse.Namespace) -> str:
    from elsa.bench.report import check_report, write_report

    return check_report(given.results, given.out) if given.check else write_report(given.results, given.out)


def _pack(given: argparse.Namespace) -> str:
    from elsa.bench.pack import pack

    return "\n".join(pack(given.source, given.out))


def _settings(given: argparse.Namespace) -> dict:
    return {"preset": given.preset, **parse_settings(ElsaConfig, given.settings)}


def _print_now_and_then(stage: str, done: int, total: int, figures: dict[str, float]) -> None:
    if stage != "score" and (done % max(1, total // 5) == 0 or done <= 2):
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{stage} {done}/{total}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
