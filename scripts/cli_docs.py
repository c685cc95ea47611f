"""Write docs/cli.md from the commands themselves; with --check, fail if the file is stale."""

import sys
from pathlib import Path

import click

from elsa.cli import cli

TARGET = Path(__file__).parent.parent / "docs" / "cli.md"
HEAD = "# The `elsa` command\n\n<!-- Written by scripts/cli_docs.py (make format) from elsa/cli.py; edit that. -->\n"


def commands(command: click.Command, context: click.Context) -> list[tuple[str, str]]:
    """(name, help text) of a command and all below it."""
    found = [(context.command_path, command.get_help(context))]
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            found += commands(below, click.Context(below, info_name=name, parent=context, **settings()))
    return found


def settings() -> dict:
    """The same width on every terminal."""
    return {"terminal_width": 100, "max_content_width": 100, "help_option_names": ["-h", "--help"]}


def text() -> str:
    """The whole of docs/cli.md."""
    found = commands(cli, click.Context(cli, info_name="elsa", **settings()))
    return HEAD + "".join(f"\n## {name}\n\n```text\n{words}\n```\n" for name, words in found)


if __name__ == "__main__":
    if "--check" not in sys.argv:
        TARGET.write_text(text())
    elif not TARGET.exists() or TARGET.read_text() != text():
        sys.exit("docs/cli.md is stale: run make format")
