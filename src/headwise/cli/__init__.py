"""The `headwise` command: a thin shell over `headwise.pipelines`, drawn with the `cli` extra's libraries."""

import io
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import headwise
from headwise import pipelines
from headwise._checks import need
from headwise.cli import edge, show
from headwise.observe import dashboards

# No `from __future__ import annotations` here: typer reads annotations, and some name what exists only inside `_app`.


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line: the entry point of the `headwise` script.

    Args:
        argv: the arguments after the program's name; None takes the process's own.

    Raises:
        SystemExit: always: 0 done, 1 a file could not be written, or does not do what the model does, 2 wrong usage,
            wrong input or no extra, 130 interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that a terminal cannot show is no reason to fail
    with _one_line_errors():
        app = _app()
    app(args=argv, prog_name="headwise")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """What a user or a disk can do wrong ends in one line and a code, not in a traceback."""
    try:
        yield
        sys.stdout.flush()
        return
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's own flush at the end would fail
        raise SystemExit(0) from None
    except (ImportError, ValueError) as error:
        # The function's name in front is for those who call it.
        message, code = re.sub(r"^(headwise|\w+:) ", "", str(error)), 2
    except OSError as error:
        message, code = f"a file could not be read or written: {error}", 1
    except pipelines.NotWrittenError as error:
        message, code = re.sub(r"^\w+: ", "", str(error)), 1
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    print(f"headwise: {message}", file=sys.stderr)
    raise SystemExit(code)


def _program() -> str:
    """How the user can call this program again: by its name, if a shell finds it so."""
    program, found = Path(sys.argv[0]), shutil.which("headwise")
    if program.name != "headwise" or (found is not None and Path(found).resolve() == program.resolve()):
        return "headwise"
    return str(program)


def _app() -> Any:
    """Build the typer application; typer and rich come with an extra, so they are loaded here and not at import."""
    typer = need("typer", "cli")
    need("rich", "cli")

    def path_of(given: str | Path) -> Path:
        if not str(given):  # of a variable that is not set, for instance: it would be the current folder
            raise typer.BadParameter("must name a file or a folder; got an empty path")
        return Path(given)

    def option(text: str, *names: str, **rules: Any) -> Any:
        if "--output" in names:
            rules |= {"parser": path_of, "metavar": "PATH"}
        return typer.Option(*names, help=text, **rules)

    # Words that several commands share.
    data = option("Labelled time series, .ts or .csv.", "--data", show_default=False)
    unlabelled = option("Time series, .ts or .csv, with the channels of the training.", "--data", show_default=False)
    model = typer.Argument(help="Folder of a trained model.", show_default=False, metavar="DIR")
    drawn = option(
        "Name of a series to draw; in .ts and wide .csv its number, counted from 0. May be given again. "
        "Default: the first of each class, six at most.",
        "--series",
    )
    seed = option("Decides everything random.", "--seed", min=0, max=2**63 - 1)
    as_json = option("Print the result as JSON and nothing else.", "--json")
    settings = {"no_args_is_help": True, "pretty_exceptions_enable": False, "add_completion": False}
    app = typer.Typer(help="Multi-head attention one can see: train, test and look inside.", **settings)
    train = typer.Typer(help="Train a model on your own files.", **settings)
    app.add_typer(train, name="train")

    def show_version(wanted: bool) -> None:
        if wanted:
            print(f"headwise {headwise.__version__}")
            raise typer.Exit

    def root(
        version: Annotated[
            bool, option("Show the version and exit.", "--version", callback=show_version, is_eager=True)
        ] = False,
    ) -> None:
        pass

    def demo(
        output: Annotated[Path, option("Folder for the model and the pictures.", "--output")] = Path("demo-output"),
        seed: Annotated[int, seed] = 0,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Train a classifier of real speech on the CPU, test it, save it and show its attention, in numbers and drawn.

        Nine speakers, 12 channels, 7 to 29 frames each; the data comes with headwise. Takes less than a minute.
        """
        with show.progress(as_json) as progress:
            result = pipelines.demo(output, seed=seed, progress=progress)
        show.training(result, as_json)
        if not as_json:
            if result.attention is not None:
                print()
                show.attention(result.attention, result.evaluation.num_series)
                print()
            print(
                "saved model   loaded again, gives the same numbers to the bit\n"
                f"\nNext: open {output / 'attention.html'} in a browser, then train on your own recordings:\n"
                f"  {_program()} train classify --data YOURS.csv --output my-model"
            )

    def classify(
        data: Annotated[Path, data],
        output: Annotated[Path, option("Folder for the model.", "--output", show_default=False)],
        test: Annotated[
            Path | None, option("Test on this file. Without it, a fifth of the data is held out.", "--test")
        ] = None,
        epochs: Annotated[
            int | None, option("Passes over the data. Default: 30, or as many as 400 steps need.", "--epochs", min=1)
        ] = None,
        seed: Annotated[int, seed] = 0,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Train a classifier of time series, test it and save it.

        A .csv file has one row a time step; series may differ in length, and the time column may be left out:

        \b
            series,label,time (ms),acc_x,acc_y
            walk-1,walk,0,0.12,-0.98
            walk-1,walk,20,0.31,-1.02
            rest-7,rest,0,0.01,-1.00

        A .ts file is in the format of the UCR and UEA archives.
        """
        with show.progress(as_json) as progress:
            result = pipelines.train_classifier(data, output, test=test, seed=seed, epochs=epochs, progress=progress)
        show.training(result, as_json)
        if not as_json:
            print(
                f"\nNext: see what it attends to, or let it name new series (no labels needed):\n"
                f"  {_program()} inspect {output} --data {test or data} --output my-heatmaps\n"
                f"  {_program()} predict {output} --data NEW.csv"
            )

    def evaluate(
        model: Annotated[Path, model], data: Annotated[Path, data], as_json: Annotated[bool, as_json] = False
    ) -> None:
        """Test a trained model on labelled time series that it was not trained on."""
        show.evaluation(pipelines.evaluate(model, data), as_json)

    def predict(
        model: Annotated[Path, model],
        data: Annotated[Path, unlabelled],
        output: Annotated[Path | None, option("Write them to this CSV file as well.", "--output")] = None,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Name the class of each time series."""
        show.predictions(pipelines.predict(model, data, output), as_json)
        if output is not None:
            show.files((output,), as_json)

    def heatmap(
        model: Annotated[Path, model],
        data: Annotated[Path, unlabelled],
        output: Annotated[Path, option("Folder for the pictures.", "--output")] = Path("heatmaps"),
        series: Annotated[list[str] | None, drawn] = None,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Draw which time steps each head attends to: the page of `inspect`, and a PNG of each series, for a report."""
        show.files(pipelines.draw_attention(model, data, output, series=series or ()), as_json, alone=True)

    def dashboard(
        directory: Annotated[str, typer.Argument(help="Where to.", show_default=False, metavar="DIR")],
        overwrite: Annotated[bool, option("Also over files that were changed since.", "--overwrite")] = False,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Write files for Prometheus and Grafana beside a watched model: a dashboard, alert rules, settings."""
        new = dashboards.outdated(directory)
        files = dashboards.write(directory, overwrite=overwrite)
        show.files(files, as_json, alone=True, kept={*files} - {*new})
        if not as_json:
            print(
                f"\nNext: headwise.watch(model, port=9464) in your code, and in {directory}:\n"
                "  prometheus --config.file=prometheus.yml"
            )

    def inspect(
        model: Annotated[Path, model],
        data: Annotated[Path, unlabelled],
        output: Annotated[Path, option("Folder for the page.", "--output")] = Path("heatmaps"),
        series: Annotated[list[str] | None, drawn] = None,
        page: Annotated[bool, option("Draw the page as well, or print the numbers alone.", "--page/--no-page")] = True,
        as_json: Annotated[bool, as_json] = False,
    ) -> None:
        """Say what each head does over all series, in numbers, and draw some of them on a page to open in a browser.

        A row a head, over every step of every series. For pictures to put into a report, see `heatmap`.

        \b
        entropy    1: it looks at all alike, 0: at one key
        keys       that it is spread over
        max logit  the greatest score before the softmax
        peak       the greatest weight of a step
        sink       the weight of the first four keys
        distance   from a step to what it looks at, in positions
        spread     of what it looks at, in positions
        """
        found = pipelines.inspect_attention(model, data, output if page else None, series=series or ())
        show.inspection(found, as_json)

    app.callback()(root)
    commands: tuple[tuple[Any, Any], ...] = (
        (app, demo),
        (train, classify),
        (app, evaluate),
        (app, predict),
        (app, inspect),
        (app, heatmap),
        (app, dashboard),
        *((app, command) for command in edge.commands(option, typer, _program, model=model, as_json=as_json)),
    )
    for group, command in commands:
        # Inside of typer, which has a word of its own for an interruption; a ContextDecorator keeps the signature.
        group.command()(_one_line_errors()(command))
    train.callback()(lambda: None)  # with a callback, `classify` stays a word of its own while it is the only one
    return app
