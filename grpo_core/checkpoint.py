"""Checkpoints: all that a run needs to go on as if it had never stopped, written so that a kill cannot damage them.

A file is written beside its place and then moved there in one step. What is on disk is the old file or the new one,
never half of either.
"""

import copy
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import torch

FORMAT = "grpo_core checkpoint 1"
KEYS = {"format", "config", "parts", "generator", "rows"}


class CheckpointError(RuntimeError):
    """A file of weights or of a run's state is missing, damaged, of another program, or of other settings."""


def write_atomically(path: Path | str, write: Callable[[BinaryIO], None]) -> None:
    """Call `write(file)` on a new file beside `path`, then move that to `path` in one step.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_file(path: Path | str):
    """What `torch.save` wrote, read as plain data: no code in the file can run."""
    try:
        with zipfile.ZipFile(path) as archive:
            if archive.testzip() is not None:  # torch does not look at the checksums that it writes.
                raise zipfile.BadZipFile("a checksum is wrong")
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (PermissionError, IsADirectoryError) as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # On a foreign file torch may raise anything, with advice that does not fit here.
        raise CheckpointError(f"{path} is damaged, or was not written by this program") from error


def save_checkpoint(path: Path | str, config, parts: dict, generator: torch.Generator, rows: list[dict]) -> None:
    """Write the state of a run: its settings, rows and generator, and each of `parts` that has a `state_dict`."""
    state = {
        "format": FORMAT,
        "config": asdict(config),
        "parts": {name: part.state_dict() for name, part in parts.items()},
        "generator": generator.get_state(),
        "rows": rows,
    }
    write_atomically(path, lambda file: torch.save(state, file))


def load_checkpoint(path: Path | str | None, config, parts: dict, generator: torch.Generator) -> list[dict]:
    """Put the state of a run back into `parts` and `generator`, and return its rows.

    With a constant schedule the number of iterations may have grown, so that a finished run can go on. Every other
    setting must be the same.

    Raises:
        CheckpointError: says what is wrong with the file, or which settings differ.
        ValueError: there is no path.
    """
    if path is None:
        raise ValueError("resume needs the path of a checkpoint")
    state = read_file(path)
    if not isinstance(state, dict) or state.keys() != KEYS or state["format"] != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version of grpo_core: start without resume")
    check_same_settings(path, state["config"], asdict(config))
    try:
        for part in (copy.deepcopy(parts), parts):  # On a copy first: what does not fit must not be loaded by half.
            for name in part:
                part[name].load_state_dict(state["parts"][name])
    except (KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} does not fit this policy: resume with the policy that the run began with") from error
    generator.set_state(state["generator"])
    return state["rows"]


def check_same_settings(path: Path | str, there: dict, here: dict) -> None:
    """Refuse to go on with other settings than the run in `path` has; only a constant schedule may become longer."""
    longer = here["schedule"] == "constant" and here["iterations"] >= there.get("iterations", 0)
    free = {"iterations"} if longer else set()
    differing = [name for name in here if name not in free and there.get(name) != here[name]]
    if differing:
        details = ", ".join(f"{name} is {there.get(name)!r} there and {here[name]!r} here" for name in differing)
        raise CheckpointError(f"{path} is of a run with other settings: {details}. Use its settings, or start without resume")
