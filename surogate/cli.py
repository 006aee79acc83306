"""The command line: verbs that read a configuration and hand it to the modules that do the work.

Those modules are imported inside the verbs, so that `surogate --help` answers at once. What a
user can put right is printed as one line on stderr with exit status 1; a wrong command line exits
with 2; any other exception is a bug of ours and keeps its traceback.
"""

import sys
from collections.abc import Callable
from typing import Any, Literal

import click

from surogate import __version__
from surogate.errors import UserError


class _Command(click.Command):
    """A command that prints a UserError on one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)


def _with_config(command: Callable[..., None]) -> Callable[..., None]:
    """The argument and options of every verb that reads a configuration."""
    decorations = (
        click.argument("config", type=click.Path()),
        click.option(
            "--set",
            "overrides",
            metavar="KEY=VALUE",
            multiple=True,
            help="Set a key over the file; dots reach inside: datasets.0.path=rows.jsonl.",
        ),
        click.option("--recipe", metavar="NAME", help="Number formats; the key recipe."),
    )
    for decorate in reversed(decorations):
        command = decorate(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="surogate")
def main() -> None:
    """Train and fine-tune language models."""


@main.command(cls=_Command)
@_with_config
def sft(config: str, overrides: tuple[str, ...], recipe: str | None) -> None:
    """Fine-tune on the data sets of CONFIG."""
    _train(config, overrides, recipe, "sft")


@main.command(cls=_Command)
@_with_config
def pt(config: str, overrides: tuple[str, ...], recipe: str | None) -> None:
    """Pre-train on raw text: all weights, unless CONFIG sets lora."""
    _train(config, overrides, recipe, "pt")


@main.command(cls=_Command)
@_with_config
def tokenize(config: str, overrides: tuple[str, ...], recipe: str | None) -> None:
    """Write the tokens that training on CONFIG would read."""
    from surogate.config import load_config

    loaded = load_config(config, overrides=overrides, recipe=recipe, verb="run")

    from surogate.train import tokenize as write_tokens

    write_tokens(loaded)


@main.command(cls=_Command)
@_with_config
def plan(config: str, overrides: tuple[str, ...], recipe: str | None) -> None:
    """Predict the memory that training on CONFIG needs."""
    from surogate.config import load_config

    loaded = load_config(config, overrides=overrides, recipe=recipe, verb="run", need_data=False)

    from surogate.plan import plan_command

    plan_command(loaded)


@main.command(cls=_Command)
@click.argument("model", metavar="MODEL_DIR", type=click.Path())
@click.option("--adapter", metavar="DIR", type=click.Path(), help="LoRA adapter to apply.")
@click.option("--prompt", metavar="TEXT", help="What to answer; read from stdin when not given.")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.7,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(min=0, max=1, min_open=True),
    default=0.9,
    show_default=True,
    help="Sample among the likeliest tokens that hold this share of the probability.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True
)
@click.option("--raw", is_flag=True, help="Continue the text itself: no chat template.")
def generate(model: str, prompt: str | None, **options: Any) -> None:
    """Write text with the model in MODEL_DIR."""
    text: str = sys.stdin.read().removesuffix("\n") if prompt is None else prompt
    if not text.strip():
        raise UserError("--prompt: is empty; give the text there or on stdin")

    from surogate.sample import generate_command

    generate_command(model=model, prompt=text, **options)


@main.command(cls=_Command)
def info() -> None:
    """Show the devices, libraries and versions that a run would use."""
    from surogate.info import info_command

    info_command()


@click.command(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="surogate-run")
@_with_config
def run(config: str, overrides: tuple[str, ...], recipe: str | None) -> None:
    """Train on CONFIG: pre-training when every data set is text, fine-tuning otherwise."""
    _train(config, overrides, recipe, "run")


def _train(
    path: str, overrides: tuple[str, ...], recipe: str | None, verb: Literal["sft", "pt", "run"]
) -> None:
    # The file is read before the trainer is imported: a mistake in it shows at once.
    from surogate.config import load_config

    config = load_config(path, overrides=overrides, recipe=recipe, verb=verb)

    from surogate.train import train

    train(config)


if __name__ == "__main__":
    sys.exit(main())
