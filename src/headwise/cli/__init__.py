"""The `headwise` command: a thin shell over `headwise.pipelines`, drawn with the `cli` extra's libraries."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import headwise
from headwise import pipelines
from headwise._checks import need

# No `from __future__ import annotations` here: typer reads annotations, and some name what exists only inside `_app`.


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: the entry point of the `headwise` script.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Raises:
        SystemExit: always: 0 done, 1 the picture could not be written, 2 wrong usage or no extra, 130 interrupted.
    """
    try:
        app = _app()
    except ImportError as error:
        _fail(str(error), 2)
    app(args=argv, prog_name="headwise")


def _app() -> Any:
    """Build the typer application; typer and rich come with an extra, so they are loaded here and not at import."""
    typer = need("typer", "cli")
    need("rich", "cli")
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Multi-head attention that replaces torch.nn.MultiheadAttention.",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"headwise {headwise.__version__}")
            raise typer.Exit

    def root(
        version: Annotated[
            bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show the version and exit.")
        ] = False,
    ) -> None:
        pass

    def demo(
        output: Annotated[Path, typer.Option(file_okay=False, help="Folder for the picture.")] = Path("demo-output"),
        seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Decides everything random.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")] = False,
    ) -> None:
        """Train a small classifier of real speech on the CPU, test it and draw its attention."""
        _demo(output, seed, as_json)

    app.callback()(root)
    app.command()(demo)
    return app


def _demo(output: Path, seed: int, as_json: bool) -> None:
    console, progress, table = (need(f"rich.{module}", "cli") for module in ("console", "progress", "table"))
    columns = (
        "training",
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        "epochs, accuracy in training {task.fields[accuracy]}",
    )
    try:
        # On stderr: stdout holds the result alone.
        with progress.Progress(*columns, console=console.Console(stderr=True), disable=as_json) as bar:
            task = bar.add_task("", total=None, visible=False, accuracy="")

            def update(epoch: int, epochs: int, accuracy: float) -> None:
                bar.update(task, total=epochs, completed=epoch, visible=True, accuracy=f"{accuracy:.1%}")

            result = pipelines.demo(output, seed=seed, progress=update)
    except (ImportError, ValueError) as error:
        _fail(str(error), 2)
    except OSError as error:
        _fail(f"the picture could not be written: {error}", 1)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    if as_json:
        print(json.dumps(dataclasses.asdict(result), default=str))
        return
    rows = table.Table.grid(padding=(0, 2))
    rows.add_row("test accuracy", f"{result.test_accuracy:.1%}")
    rows.add_row("parameters", f"{result.parameters:,}")
    rows.add_row("seconds", f"{result.seconds:.1f}")
    console.Console().print(rows)
    # The table would break a long path, which is to be copied in one piece.
    for path in result.files:
        print(f"file written   {path}")
    print("\nNext: use headwise.MultiheadAttention in place of torch.nn.MultiheadAttention in your own model.")


def _fail(message: str, code: int) -> NoReturn:
    print(f"headwise: {message}", file=sys.stderr)
    raise SystemExit(code)
