"""surogate verify: every byte of checkpoints and results against their manifests."""

import json
from pathlib import Path

from surogate.errors import UserError, reason
from surogate.manifest import MANIFEST, faults, summary


def verify_command(directory: str, *, as_json: bool = False) -> None:
    """Prints a line for each fault, or for each folder that has none; with as_json an object with
    both. Raises UserError when there is a fault or nothing to look at.
    """
    root = Path(directory)
    if not root.is_dir():
        raise UserError(f"{root}: is not a folder")
    folders = sealed_folders(root)
    if not folders:
        raise UserError(f"{root}: neither it nor a folder in it has a {MANIFEST}")
    results = []
    for folder in folders:
        try:
            found = faults(folder)
        except PermissionError as error:
            found = [f"{error.filename}: {reason(error)}"]
        what = "" if found else summary(folder)
        results.append({"folder": str(folder), "faults": found, "summary": what})
        if not as_json:
            print(*(found or [f"ok: {folder}: {what}"]), sep="\n")
    count = sum(len(result["faults"]) for result in results)
    if as_json:
        print(json.dumps({"ok": count == 0, "folders": results}, indent=1))
    if count:
        raise UserError(f"{root}: {count} fault{'s' if count > 1 else ''}, named above")


def sealed_folders(root: Path) -> list[Path]:
    """The folder and those in it that have a manifest, or should have one: all checkpoints."""

    def step(folder: Path) -> bool:
        return folder.name.startswith("step_") and folder.name[5:].isdigit()

    inside = [root, *sorted(path for path in root.glob("*") if path.is_dir())]
    inside += sorted(path for path in root.glob("*/step_*") if path.is_dir())
    return [path for path in inside if (path / MANIFEST).exists() or step(path)]
