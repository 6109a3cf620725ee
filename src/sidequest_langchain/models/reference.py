"""Finds out what the user means by `model=`, and has its files here.

    smollm2-135m               a catalogue name: never the Hub
    ./my-model, /models/x      a local directory: never the Hub
    ./model.Q4_K_M.gguf        a file: never the Hub
    owner/name                 a Hub id, unless it is a directory here

It must not know torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from sidequest_langchain.errors import ConfigError, ModelFilesError
from sidequest_langchain.models.catalogue import CATALOGUE, CatalogueEntry, unknown_model
from sidequest_langchain.models.gguf_file import from_gguf
from sidequest_langchain.models.home import model_folder
from sidequest_langchain.models.manifest import damage, read_manifest
from sidequest_langchain.models.progress import Report, shown
from sidequest_langchain.models.pulling import installed, pull

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model that is on this machine, whole as far as names and sizes tell."""

    folder: Path
    name: str
    """What to call it."""
    revision: str | None = None
    """The commit, if it is from the Hub."""
    digest: str | None = None
    """The sha256 of the `.gguf` file it was made from, if it was made here."""


Judge: TypeAlias = Callable[[Path], None]
"""Looks at a folder that holds config.json, before weights are fetched from the Hub or loaded;
raises if the model is not wanted."""


def ensure(reference: str, *, revision: str | None = None, progress: Report | None = None) -> Path:
    """Have a model's files on this machine; quick if they are there already.

    Args:
        reference: A catalogue name, a local directory, a `.gguf` file, or a Hub id.
        revision: Branch, tag or commit of a Hub id.
        progress: Hears the progress; `None` shows bars on a terminal, and logs elsewhere.

    Returns:
        A directory that transformers can load.

    Raises:
        UnknownModelError: The reference means nothing here.
        ModelFilesError: The files are absent, damaged or unreachable, or there is no room.
        ConfigError: A revision was given for what has none.
    """
    return obtain(reference, revision=revision, progress=progress).folder


def obtain(
    reference: str,
    *,
    revision: str | None = None,
    progress: Report | None = None,
    judge: Judge | None = None,
) -> ModelFiles:
    """Have a model's files here, and say what they are; arguments and errors as in `ensure`."""
    judged = judge or _accept
    if _is_hub_id(reference):
        return _from_hub(reference, revision, judged)
    if revision is not None:
        msg = f"revision={revision!r} is for Hub ids only, but the model is {reference!r}"
        raise ConfigError(msg)
    with shown(progress) as told:
        files = _from_here(reference, told)
    judged(files.folder)
    return files


def _accept(folder: Path) -> None:
    """Judges nothing."""


def _is_hub_id(reference: str) -> bool:
    return (
        _HUB_ID.fullmatch(reference) is not None
        and not reference.endswith(".gguf")
        and not Path(reference).exists()
    )


def _from_hub(repo: str, revision: str | None, judge: Judge) -> ModelFiles:
    # imported when it is needed: the Hub's client takes a while, and most models need no Hub
    from sidequest_langchain.models.hub import from_hub  # noqa: PLC0415

    snapshot = from_hub(repo, revision, judge=judge)
    return ModelFiles(folder=snapshot.folder, name=repo, revision=snapshot.commit)


def _from_here(reference: str, progress: Report) -> ModelFiles:
    """A catalogue name or a path."""
    entry = CATALOGUE.get(reference)
    if entry is not None:
        return _from_catalogue(entry, progress)
    if not reference.strip():
        raise unknown_model(reference)
    path = Path(reference).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        folder = from_gguf(path, progress=progress)
        return _described(folder, path.stem)
    if _looks_like_path(reference):
        found = "a file that is no .gguf" if path.is_file() else "nothing"
        msg = (
            f"no model at {path.absolute()}: found {found} there; give a directory with "
            "config.json, a tokenizer and safetensors, or a .gguf file"
        )
        raise ModelFilesError(msg)
    raise unknown_model(reference)


def _looks_like_path(reference: str) -> bool:
    return (
        reference.startswith((".", "~"))
        or reference.endswith(".gguf")
        or any(sign in reference for sign in {"/", os.sep})
    )


def _from_catalogue(entry: CatalogueEntry, progress: Report) -> ModelFiles:
    if not installed(entry):
        pull(entry, progress=progress)
    return _described(model_folder(entry.name), entry.name)


def _from_folder(folder: Path) -> ModelFiles:
    """A directory of the user's; what is plainly wrong with it is said now."""
    names = sorted(path.name for path in folder.iterdir())
    if "config.json" in names:
        return _described(folder.absolute(), folder.absolute().name)
    msg = f"{folder} has no config.json, so it is no model directory; "
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        msg += f"for its GGUF file, give the file itself: {folder / ggufs[0]}"
    elif "adapter_config.json" in names:
        msg += "it holds an adapter: merge it into its base model first (merge_and_unload)"
    else:
        msg += f"found there: {', '.join(names[:8]) or 'nothing'}"
    raise ModelFilesError(msg)


def _described(folder: Path, name: str) -> ModelFiles:
    """A folder with what its manifest says, if it has one.

    Raises:
        ModelFilesError: It does not hold what the manifest says.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return ModelFiles(folder=folder, name=name)
    found = damage(folder, manifest)
    if found is not None:
        msg = f"the files of {name} at {folder} are damaged: {found}; make the directory anew"
        raise ModelFilesError(msg)
    return ModelFiles(folder=folder, name=name, digest=manifest.sha256)
