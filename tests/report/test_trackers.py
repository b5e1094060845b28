"""Trackers with stand-ins for the packages: what reaches them, and what a missing one says.

The real ones (tensorboard 2.21, wandb 0.31, trackio 0.43) were driven once by hand.
"""

import importlib
import sys
import tomllib
import types
from pathlib import Path

import pytest

from llmq_nb.core.errors import UserError
from llmq_nb.report.trackers import PACKAGES, open_trackers

NAMES = ["tensorboard", "wandb", "trackio"]


class FakeRun:
    def __init__(self, **options) -> None:
        self.options, self.logged, self.finished = options, [], 0

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


class FakeTracker(types.ModuleType):
    """wandb or trackio."""

    def __init__(self, name: str, key: str | None = None) -> None:
        super().__init__(name)
        self.runs: list[FakeRun] = []
        self.api = types.SimpleNamespace(api_key=key)

    def init(self, **options) -> FakeRun:
        self.runs.append(FakeRun(**options))
        return self.runs[-1]

    def login(self, *args, **kwargs):
        raise AssertionError("asked for a login")


class Message(types.SimpleNamespace):
    """A protobuf message."""


class Summary(Message):
    Value = Message


class SessionLog(Message):
    START = 1


class FakeWriter:
    writers: list["FakeWriter"] = []

    def __init__(self, folder: str) -> None:
        self.folder, self.events, self.closed = folder, [], 0
        self.writers.append(self)

    def add_event(self, event):
        self.events.append(event)

    def close(self):
        self.closed += 1


@pytest.fixture
def packages(monkeypatch):
    """All three packages as stand-ins."""
    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    FakeWriter.writers = []
    contents = {
        "tensorboard": {},
        "tensorboard.summary": {},
        "tensorboard.summary.writer": {},
        "tensorboard.summary.writer.event_file_writer": {"EventFileWriter": FakeWriter},
        "tensorboard.compat": {},
        "tensorboard.compat.proto": {},
        "tensorboard.compat.proto.event_pb2": {"Event": Message, "SessionLog": SessionLog},
        "tensorboard.compat.proto.summary_pb2": {"Summary": Summary},
    }
    for name, attributes in contents.items():
        fake = types.ModuleType(name)
        fake.__dict__.update(attributes, __path__=[])
        monkeypatch.setitem(sys.modules, name, fake)
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, FakeTracker(name))


def open_one(name: str, folder: Path, **options):
    config = {"batch": {"seq_len": 8}}
    (writer,) = open_trackers([name], run_name="r", out_dir=folder, config=config, **options)
    return writer


def use(writer) -> None:
    writer.log(1, {"loss": 2.5, "norm": 0.5})
    writer.log(3, {"loss": 2.0})
    writer.close()


def test_tensorboard(packages, tmp_path):
    use(open_one("tensorboard", tmp_path))
    (writer,) = FakeWriter.writers
    assert writer.folder == str(tmp_path / "tensorboard")
    got = [(e.step, [(v.tag, v.simple_value) for v in e.summary.value]) for e in writer.events]
    assert got == [(1, [("loss", 2.5), ("norm", 0.5)]), (3, [("loss", 2.0)])]
    assert writer.closed == 1


def test_resumed_tensorboard_hides_the_steps_to_come(packages, tmp_path):
    open_one("tensorboard", tmp_path, resumed_step=7)
    (event,) = FakeWriter.writers[0].events
    assert (event.step, event.session_log.status) == (8, SessionLog.START)


def test_wandb(packages, tmp_path):
    use(open_one("wandb", tmp_path / "new"))
    (run,) = sys.modules["wandb"].runs
    assert run.options == {
        "project": "llmq-nb", "name": "r", "dir": str(tmp_path / "new"), "mode": "offline",
        "config": {"batch": {"seq_len": 8}},
    }  # fmt: skip
    assert run.logged == [(1, {"loss": 2.5, "norm": 0.5}), (3, {"loss": 2.0})]
    assert run.finished == 1
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("environment", "login", "mode"),
    [
        ({}, None, "offline"),
        ({}, "key", "online"),
        ({"WANDB_API_KEY": "key"}, None, "online"),
        ({"WANDB_MODE": "offline", "WANDB_API_KEY": "key"}, "key", "offline"),
        ({"WANDB_MODE": "disabled"}, None, "disabled"),
    ],
)
def test_wandb_is_online_only_where_it_need_not_ask(
    packages, tmp_path, monkeypatch, environment, login, mode
):
    monkeypatch.setitem(sys.modules, "wandb", FakeTracker("wandb", login))
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    open_one("wandb", tmp_path)
    assert sys.modules["wandb"].runs[0].options["mode"] == mode


@pytest.mark.parametrize(("resumed_step", "resume"), [(0, "never"), (5, "allow")])
def test_trackio(packages, tmp_path, resumed_step, resume):
    use(open_one("trackio", tmp_path, resumed_step=resumed_step))
    (run,) = sys.modules["trackio"].runs
    assert run.options == {
        "project": "llmq-nb", "name": "r", "config": {"batch": {"seq_len": 8}}, "resume": resume,
    }  # fmt: skip
    assert run.logged == [(1, {"loss": 2.5, "norm": 0.5}), (3, {"loss": 2.0})]
    assert run.finished == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_package_is_named_with_its_command(packages, tmp_path, monkeypatch, name):
    original = importlib.import_module

    def missing(path):
        if path.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {path!r}")
        return original(path)

    monkeypatch.setattr("importlib.import_module", missing)
    others = [n for n in NAMES if n != name]
    with pytest.raises(UserError) as caught:
        open_trackers([*others, name], run_name="r", out_dir=tmp_path, config={})
    assert str(caught.value).endswith(f": pip install '{PACKAGES[name]}'")
    assert f"the tracker {name!r} is not installed in log.trackers" in str(caught.value)
    assert not FakeWriter.writers and not sys.modules["wandb"].runs  # no other was opened
    assert not list(tmp_path.iterdir())


def test_the_command_installs_what_the_extra_does():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {name: [text] for name, text in PACKAGES.items()} == {
        name: project["optional-dependencies"][name] for name in PACKAGES
    }


def test_no_tracker_imports_nothing(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr("importlib.import_module", refuse)
    assert open_trackers([], run_name="r", out_dir=tmp_path, config={}) == []
