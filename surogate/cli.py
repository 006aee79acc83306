"""The command line: verbs that read a configuration and hand it to the modules that do the work.

Those modules are imported inside the verbs, so that `surogate --help` answers at once. What a
user can put right is printed as one line on stderr with exit status 1; a wrong command line exits
with 2; any other exception is a bug of ours and keeps its traceback.
"""

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import click

from surogate import __version__
from surogate.errors import UserError


class _Command(click.Command):
    """A command that prints a UserError on one line, and ends by Ctrl-C as shells expect it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:  # while nothing else takes the signal: at the start of a run
            ctx.exit(128 + signal.SIGINT)


def _with_config(command: Callable[..., None]) -> Callable[..., None]:
    """The argument and options of every verb that reads a configuration."""
    return click.argument("config", type=click.Path())(_overrides(command))


def _overrides(command: Callable[..., None]) -> Callable[..., None]:
    """The options that win over a configuration file."""
    decorations = (
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
@click.option("--rows", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--html", metavar="FILE", type=click.Path(), help="Write a page instead.")
def preview(
    config: str, overrides: tuple[str, ...], recipe: str | None, rows: int, html: str | None
) -> None:
    """Show the first rows that training on CONFIG would read, and what is learned in them."""
    from surogate.config import load_config

    loaded = load_config(config, overrides=overrides, recipe=recipe, verb="run")

    from surogate.preview import preview_command

    preview_command(loaded, rows=rows, html=html)


@main.command(cls=_Command)
@_with_config
def plan(config: str, overrides: tuple[str, ...], recipe: str | None) -> None:
    """Predict the memory that training on CONFIG needs."""
    from surogate.config import load_config

    loaded = load_config(config, overrides=overrides, recipe=recipe, verb="run", need_data=False)

    from surogate.plan import plan_command

    plan_command(loaded)


@main.command("config", cls=_Command)
@click.argument("config", type=click.Path(), required=False)
@_overrides
@click.option("--explain", is_flag=True, help="Every key, not only those that are set.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of configuration files.")
def config_verb(
    config: str | None,
    overrides: tuple[str, ...],
    recipe: str | None,
    explain: bool,
    as_json: bool,
    schema: bool,
) -> None:
    """Check CONFIG and show what a run would use, and where each value comes from."""
    if schema:
        import json

        from surogate.config_schema import config_schema

        click.echo(json.dumps(config_schema(), indent=1))
        return
    if config is None:
        raise click.UsageError("give CONFIG, or --schema")
    from surogate.config import load_config

    loaded = load_config(config, overrides=overrides, recipe=recipe, verb="run", need_data=False)

    from surogate.explain import explain_command

    explain_command(loaded, Path(config), everything=explain, as_json=as_json)


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
@click.argument("directory", metavar="DIR", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def verify(directory: str, as_json: bool) -> None:
    """Check every byte of the checkpoints and results in DIR."""
    from surogate.verify import verify_command

    verify_command(directory, as_json=as_json)


@main.command(cls=_Command)
@click.argument("adapter", metavar="ADAPTER_OR_RUN", type=click.Path())
@click.option("--output", metavar="DIR", type=click.Path(), required=True, help="Where to write.")
@click.option("--base", metavar="MODEL", help="The model, if not the one that the adapter names.")
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Where the weights of a QLoRA run are decoded.",
)
def merge(adapter: str, output: str, base: str | None, device: str) -> None:
    """Write the model that an adapter and its base make."""
    from surogate.merge import merge_command

    merge_command(adapter, output, base, device)


@main.command(cls=_Command)
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--output", metavar="DIR", type=click.Path(), help="Where to write; by default RUN.")
@click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Load the result again and compare its logits.",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), help="If not the run's.")
def export(run: str, output: str | None, verify: bool, device: str | None) -> None:
    """Write the result of RUN, the output_dir of a run, as its newest checkpoint has it."""
    from surogate.train import export_run

    export_run(run, output=output, verify=verify, device=device)


@main.command(cls=_Command)
def info() -> None:
    """Show the devices, libraries and versions that a run would use."""
    from surogate.info import info_command

    info_command()


@main.command(cls=_Command)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def doctor(as_json: bool) -> None:
    """Try out everything that training needs here; exit status 1 when something is wrong."""
    from surogate.doctor import doctor_command

    sys.exit(doctor_command(as_json=as_json))


@main.command(cls=_Command)
@click.argument("folder", metavar="DIR", type=click.Path())
@click.option("--port", type=click.IntRange(0, 65535), default=8420, show_default=True)
def watch(folder: str, port: int) -> None:
    """Show the runs below DIR on a local page, as they go on."""
    from surogate.watch import watch_command

    watch_command(folder, port)


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

    try:
        train(config)
    except UserError:
        raise
    except Exception as error:
        # What CUDA itself says where it is not CuPy's pool that has no more.
        if not isinstance(error, MemoryError) and "cudaErrorMemoryAllocation" not in str(error):
            raise
        from surogate.out_of_memory import explained

        raise explained(config, error) from None


if __name__ == "__main__":
    sys.exit(main())
