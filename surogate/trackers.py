"""Trackers beside the log: TensorBoard, W&B and Aim (the key report_to).

A run must never wait for a tracker nor fail with it. So each has a thread and a queue of its own:
the run puts numbers in and goes on, and whatever the tracker raises, also while it is opened, is
kept as one fault that the run reports once; what comes after is left out. Only what a user can put
right before the first step is an error: a package that is not there, or W&B without a login.

Steps may come a second time after a resumption. TensorBoard is told where a run goes on and hides
what it had after that; W&B and Aim go on in the run of before, which they find by a file:

    output_dir/tensorboard/      event files
    output_dir/wandb_id.txt      the W&B run; its files are in output_dir/wandb/
    output_dir/aim_run_hash.txt  the Aim run; its repository is output_dir/.aim, or aim_repo
"""

import importlib.util
import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from surogate.config import Config, config_to_dict
from surogate.errors import UserError

PATIENCE = 30.0  # seconds that the end of a run waits for a tracker
OPENING = 90.0  # seconds that W&B tries to open a run, also while a process would end
ROOM = 10_000  # entries that may wait for a tracker
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "aim": "aim"}


class Tracker(Protocol):
    """Where numbers and texts go. Any method may raise anything."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def text(self, step: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


def require_trackers(config: Config) -> None:
    """Raises UserError for a tracker that cannot be used: at once, before anything is loaded."""
    for name in _chosen(config):
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(
                f"report_to = {name}: the package is not installed: pip install 'surogate[{name}]'"
            )
    if "wandb" in config.report_to:
        _require_login(config)


def open_trackers(config: Config, directory: Path, resumed_step: int) -> "Trackers":
    """The trackers of a run that goes on after ``resumed_step``, 0 for a new one."""
    made: dict[str, Callable[..., Tracker]] = {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "aim": Aim,
    }
    return Trackers(
        {name: partial(made[name], config, directory, resumed_step) for name in _chosen(config)}
    )


def _chosen(config: Config) -> list[str]:
    return [name for name in PACKAGES if name in config.report_to]


class Trackers:
    """All trackers of a run, each behind its thread. No method waits or raises, but ``close`` waits
    up to PATIENCE seconds.
    """

    def __init__(self, opening: Mapping[str, Callable[[], Tracker]]) -> None:
        self._threads = [_Thread(name, make) for name, make in opening.items()]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.scalars(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        """A text of a step, such as what the model wrote."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.text(step, name, text))

    def new_faults(self) -> list[str]:
        """A line for each tracker that has failed since the last call."""
        found = [thread.fault for thread in self._threads if thread.fault and not thread.told]
        for thread in self._threads:
            thread.told = bool(thread.fault)
        return found

    def close(self) -> None:
        """Lets the trackers finish. A second call does nothing."""
        for thread in self._threads:
            thread.put(None)
        end = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.wait(max(0.0, end - time.monotonic()))


class _Thread(threading.Thread):
    """Opens a tracker and hands it what is put in, until None comes or something is raised."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.fault, self.told = "", False
        self._what, self._make = name, make
        self._waiting: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(ROOM)
        self.start()

    def put(self, entry: Callable[[Tracker], None] | None) -> None:
        if self.fault:
            return
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._fail("does not keep up")

    def wait(self, seconds: float) -> None:
        self.join(seconds)
        if self.is_alive() and not self.fault:
            self._fail(f"did not finish in {PATIENCE:.0f} s")

    def run(self) -> None:
        try:
            tracker = self._make()
            while (entry := self._waiting.get()) is not None and not self.fault:
                entry(tracker)
            tracker.close()
        except BaseException as error:  # foreign code, which may raise anything
            first = next(iter(str(error).strip().splitlines()), "").rstrip(".")
            self._fail(first or type(error).__name__)

    def _fail(self, reason: str) -> None:
        self.fault = f"{self._what}: {reason}; nothing more is sent there, log.jsonl has everything"


class TensorBoard:
    """Event files, by the writer of the tensorboard package, which needs no TensorFlow."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._proto, self._summary = event_pb2, summary_pb2
        self._tensor, self._string = tensor_pb2.TensorProto, types_pb2.DT_STRING
        self._writer = EventFileWriter(str(directory / "tensorboard"), flush_secs=10)
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(resumed_step + 1, session_log=start)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        rows = [self._summary.Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._add(step, summary=self._summary.Summary(value=rows))

    def text(self, step: int, name: str, text: str) -> None:
        shown = "    " + text.replace("\n", "\n    ")  # the page reads Markdown: as code
        tensor = self._tensor(dtype=self._string, string_val=[shown.encode()])
        tensor.tensor_shape.dim.add(size=1)
        kind = self._summary.SummaryMetadata.PluginData(plugin_name="text")
        row = self._summary.Summary.Value(
            tag=name, tensor=tensor, metadata=self._summary.SummaryMetadata(plugin_data=kind)
        )
        self._add(step, summary=self._summary.Summary(value=[row]))

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **what: Any) -> None:
        self._writer.add_event(self._proto.Event(wall_time=time.time(), step=step, **what))


class Wandb:
    """A W&B run. Steps are a number of their own, since W&B's must rise."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None:
        import wandb

        self._wandb = wandb
        kept = _Kept(directory / "wandb_id.txt", resumed_step)
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_name or config.run_name,
            dir=str(directory),
            config=config_to_dict(config),
            id=kept.text,
            resume="allow" if kept.text else None,
            mode=config.wandb_mode,
            settings=wandb.Settings(
                console="off",
                init_timeout=OPENING,
                # Otherwise the process waits at its end until a server that is away is back.
                finish_timeout=0.8 * PATIENCE,
                finish_timeout_raises=True,
            ),
        )
        kept.write(self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def text(self, step: int, name: str, text: str) -> None:
        table = self._wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._run.log({name: table, "step": step})

    def close(self) -> None:
        self._run.finish()


def _require_login(config: Config) -> None:
    """Raises UserError where W&B would ask for a key: nobody may be there to answer."""
    import wandb

    mode = config.wandb_mode or wandb.setup().settings.mode
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise UserError(
            "report_to = wandb: is not logged in: run `wandb login`, or set wandb_mode = offline"
        )


class Aim:
    """A run in an Aim repository."""

    def __init__(self, config: Config, directory: Path, resumed_step: int) -> None:
        import aim

        self._aim = aim
        repository = config.aim_repo or str(directory)
        if "://" not in repository and not (Path(repository) / ".aim").is_dir():
            aim.Repo.from_path(repository, init=True)
        kept = _Kept(directory / "aim_run_hash.txt", resumed_step)
        self._run = aim.Run(
            kept.text,
            repo=repository,
            experiment=config.aim_experiment,
            force_resume=kept.text is not None,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        kept.write(self._run.hash)
        self._run.name = config.aim_name or config.run_name
        self._run["config"] = config_to_dict(config)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._run.track(value, name=name, step=step)

    def text(self, step: int, name: str, text: str) -> None:
        self._run.track(self._aim.Text(text), name=name, step=step)

    def close(self) -> None:
        self._run.close()


class _Kept(NamedTuple):
    """The file that names a tracker's run: read when a run goes on, written when it is open."""

    file: Path
    resumed_step: int

    @property
    def text(self) -> str | None:
        """The name of the run to go on in; None for a new one."""
        known = self.resumed_step > 0 and self.file.is_file()
        return self.file.read_text().strip() or None if known else None

    def write(self, text: str) -> None:
        """Keeps the name for the next start."""
        self.file.write_text(text + "\n")
