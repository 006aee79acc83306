"""python -m bench.report FILE ...: prints the tables of a sitting and writes them to RESULTS.md.

Files are those of ``pytest bench --benchmark-json`` (ops, matrix products, steps, in any number of
files; of two results of one case the later file's counts) and, as .csv, durations from Nsight
Compute (profile_table.py). What lies between the two markers of RESULTS.md is replaced by exactly
what the files hold; the notes around it stay.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from bench.profile_table import by_kernel, by_kind, durations
from bench.rows import OURS
from surogate.errors import UserError

RESULTS = Path(__file__).parent / "RESULTS.md"
BEGIN = "<!-- bench.report writes from here -->"
END = "<!-- to here -->"
TOP_KERNELS = 12


class Table(NamedTuple):
    """A titled table of text; columns after the first are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]

    def markdown(self) -> str:
        """As a section of a page."""
        rule = ("---", *("---:",) * (len(self.columns) - 1))
        lines = (f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows))
        return "\n".join((f"### {self.title}", "", *lines))

    def rich(self) -> RichTable:
        """For the terminal."""
        made = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            made.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in self.rows:
            made.add_row(*row)
        return made


class Result:
    """One benchmark of a file. Reading a key that it lacks is a UserError of one line."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self._path, self._raw = path, raw

    def __getitem__(self, dotted: str) -> Any:
        value: Any = self._raw
        for key in dotted.split("."):
            if not isinstance(value, Mapping) or key not in value:
                name = self._raw.get("fullname", "a benchmark")
                raise UserError(f"{self._path}: {name} has no {dotted}; measure it again")
            value = value[key]
        return value

    def info(self, name: str) -> Any:
        """What the suite wrote beside the times."""
        return self[f"extra_info.{name}"]


def read(path: Path) -> tuple[str, list[Result]]:
    """When a file was written, and its benchmarks."""
    try:
        raw = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict) or not raw.get("benchmarks"):
        raise UserError(f"{path}: holds no benchmarks; write it with pytest --benchmark-json")
    return str(raw.get("datetime", "")), [Result(path, each) for each in raw["benchmarks"]]


def sitting(path: Path, date: str, results: Sequence[Result]) -> str:
    """A line on where a file's numbers come from. Its results must be of one card and commit."""
    cards = sorted({result.info("card") for result in results})
    commits = sorted({result.info("commit") for result in results})
    if len(cards) > 1 or len(commits) > 1:
        found = ", ".join(cards + commits)
        raise UserError(f"{path}: mixes sittings ({found}); measure each in a file of its own")
    versions: dict[str, str] = {}
    for result in results:
        versions |= result.info("versions")
    facts = [f"`{path.name}`: {cards[0]}", f"commit {commits[0]}", date[:16].replace("T", " ")]
    for result in [each for each in results if each["group"] != "steps"][:1]:
        facts.append(f"copy {result.info('ceilings.copy') / 1e12:.2f} TB/s")
        facts.append(f"products {result.info('ceilings.matmul') / 1e12:.0f} TFLOP/s")
    facts += [f"{name} {version}" for name, version in versions.items()]
    return "- " + ", ".join(facts)


def ops_table(results: Iterable[Result]) -> Table:
    """Every op: time, rate, and the share of this sitting's copy or product rate; of what moves
    bytes, also of a copy of as many.
    """
    rows = []
    for result in results:
        moved = "bytes" in result["extra_info"]
        rate, unit = result.info("rate") / 1e12, "TB/s" if moved else "TFLOP/s"
        rows.append(
            (
                result.info("case"),
                microseconds(result["stats.median"]),
                f"{rate:.2f} {unit}" if moved else f"{rate:.0f} {unit}",
                percent(result.info("share")),
                percent(result.info("equal_copy")) if moved and result.info("equal_copy") else "",
            )
        )
    return Table("Ops", ("op", "time", "rate", "of the ceiling", "of an equal copy"), rows)


def gemm_table(results: Iterable[Result]) -> Table:
    """A shape a row: TFLOP/s and share of the product rate of y, dx and dweight."""
    shapes: dict[tuple[Any, ...], dict[str, str]] = {}
    for result in results:
        shape = result.info("shape")
        key = (*(shape[name] for name in ("tokens", "inner", "outer")), ", ".join(shape["places"]))
        cell = f"{result.info('rate') / 1e12:.0f} ({percent(result.info('share'))})"
        shapes.setdefault(key, {})[result.info("product")] = cell
    products = ("y", "dx", "dweight")
    rows = [
        (places, f"{tokens} x {inner} x {outer}", *(found.get(name, "") for name in products))
        for (tokens, inner, outer, places), found in shapes.items()
    ]
    columns = ("product of", "tokens x inner x outer", *products)
    return Table("Matrix products, TFLOP/s and share of the sitting's rate", columns, rows)


def steps_table(results: Iterable[Result]) -> Table:
    """A shape a row: ours, and beside it each peer's speed and memory."""
    shapes: dict[str, dict[str, Result]] = {}
    for result in results:
        shapes.setdefault(result.info("shape"), {})[result.info("variant")] = result
    peers = sorted({variant for found in shapes.values() for variant in found} - {OURS})
    rows = []
    for shape, found in shapes.items():
        cells = [
            f"{speed(found[peer])}, {memory(found[peer])}" if peer in found else ""
            for peer in peers
        ]
        if peers:
            cells.append(ratio(found))
        rows.append((shape, *our_cells(found.get(OURS)), *cells))
    first = ("step", "tokens/s", "of the ceiling", "speed of light")
    columns = (*first, "memory", "planned", "host a step")
    beside = (*(f"transformers, {peer}" for peer in peers), "against the best") if peers else ()
    return Table("Training steps", (*columns, *beside), rows)


def our_cells(result: Result | None) -> tuple[str, ...]:
    """Our part of a row, empty where only a peer was run."""
    if result is None:
        return ("",) * 6
    return (
        speed(result),
        percent(result.info("ceiling")),
        percent(result.info("speed_of_light")),
        memory(result),
        f"{result.info('planned_gib'):.1f} GiB",
        f"{result.info('host_ms'):.2f} ms",
    )


def ratio(found: Mapping[str, Result]) -> str:
    """Our tokens/s over the fastest peer's."""
    peers = [each.info("tokens_per_second") for name, each in found.items() if name != OURS]
    if OURS not in found or not peers:
        return ""
    return f"{found[OURS].info('tokens_per_second') / max(peers):.2f} x"


def speed(result: Result) -> str:
    return f"{result.info('tokens_per_second'):,.0f}"


def memory(result: Result) -> str:
    return f"{result.info('memory_gib'):.1f} GiB"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"


def profile_tables(path: Path) -> list[Table]:
    """Where the time of a profiled step goes."""
    try:
        times = durations(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    total = sum(map(sum, times.values())) / 1e3
    tables = []
    for title, groups in (("kind", by_kind(times)), ("kernel", by_kernel(times)[:TOP_KERNELS])):
        rows = [
            (
                f"`{each.name[:60]}`" if title == "kernel" else each.name,
                f"{each.us:,.0f} us",
                str(each.count),
                percent(each.share),
            )
            for each in groups
        ]
        heading = f"Profile of {path.stem} by {title}, {total:.2f} ms of kernels"
        tables.append(Table(heading, (title, "time", "launches", "share"), rows))
    return tables


TABLES = {"steps": steps_table, "ops": ops_table, "gemm": gemm_table}


def tables_of(paths: Sequence[Path]) -> tuple[list[str], list[Table]]:
    """A line a file on its sitting, and the tables of all files."""
    lines, profiles = [], []
    groups: dict[str, dict[str, Result]] = {name: {} for name in TABLES}
    for path in paths:
        if path.suffix == ".csv":
            profiles += profile_tables(path)
            continue
        date, results = read(path)
        lines.append(sitting(path, date, results))
        for result in results:
            group = result["group"]
            if group not in groups:
                raise UserError(f"{path}: {result['fullname']} is of no suite of bench/")
            groups[group][result["fullname"]] = result
    tables = [TABLES[name](found.values()) for name, found in groups.items() if found]
    return lines, tables + profiles


def generated(lines: Sequence[str], tables: Sequence[Table]) -> str:
    """The part of RESULTS.md between the markers."""
    return "\n\n".join((*(["\n".join(lines)] if lines else []), *(t.markdown() for t in tables)))


def write(path: Path, text: str) -> None:
    """Replaces what stands between the markers of a file."""
    page = path.read_text(encoding="utf8")
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(END) < page.index(BEGIN):
        raise UserError(f"{path}: must hold {BEGIN!r} once and {END!r} once after it")
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{after}", encoding="utf8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the page to write to")
    args = parser.parse_args()
    try:
        lines, tables = tables_of(args.files)
        console = Console()
        for line in lines:
            console.print(line, highlight=False)
        for table in tables:
            console.print(table.rich())
        write(args.results, generated(lines, tables))
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
