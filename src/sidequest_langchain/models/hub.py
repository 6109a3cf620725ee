"""Has a model of the Hugging Face Hub in the Hub's own cache, pinned to one commit.

The Hub is asked once, with a short time-out; if it cannot be reached, the cache serves. The
only file that imports huggingface_hub; it must not know how a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from sidequest_langchain.errors import ModelFilesError, UnknownModelError
from sidequest_langchain.models.catalogue import CATALOGUE

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 5.0
_SMALL = (".json", ".jinja", ".model", ".txt", ".tiktoken")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSnapshot:
    """A model's files in the Hub's cache."""

    folder: Path
    commit: str
    """The commit that the files are of."""


def from_hub(
    repo: str, revision: str | None = None, *, judge: Callable[[Path], None]
) -> HubSnapshot:
    """Have the files of a Hub model here.

    Args:
        repo: `owner/name`.
        revision: Branch, tag or commit; `None` is the default branch.
        judge: Called with a folder that holds config.json, before any weights are fetched; it
            raises if the model is not wanted.

    Raises:
        UnknownModelError: The Hub knows no such model, or no such revision.
        ModelFilesError: The Hub cannot be reached and the cache does not have it, access is
            not granted, or the download failed.
    """
    try:
        answer = _ask(repo, revision)
    except _Unreachable as error:
        snapshot = _from_cache(repo, revision, str(error))
        judge(snapshot.folder)
        return snapshot
    wanted = wanted_files(answer.files)
    if not any(name.endswith((".safetensors", ".bin")) for name in wanted):
        raise ModelFilesError(_no_weights(repo, answer.files))
    config = _download(repo, answer.commit, ["config.json"])
    judge(config)
    return HubSnapshot(folder=_download(repo, answer.commit, wanted), commit=answer.commit)


def wanted_files(files: Sequence[str]) -> list[str]:
    """Which of a repository's files are loaded: one format of the weights, and the small ones."""
    top = [name for name in files if "/" not in name]
    weights = [name for name in top if name.startswith("model") and name.endswith(".safetensors")]
    if not weights:
        weights = [
            name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")
        ]
    templates = [name for name in files if name.startswith("additional_chat_templates/")]
    return weights + templates + [name for name in top if name.endswith(_SMALL)]


class _Unreachable(Exception):
    """The Hub gave no answer about the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    commit: str
    files: tuple[str, ...]


def _ask(repo: str, revision: str | None) -> _Answer:
    """What the Hub says about a model."""
    at = f" at revision {revision!r}" if revision else ""
    try:
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=_ASK_TIMEOUT_S)
    except GatedRepoError as error:
        msg = (
            f"the Hub asks for your consent before it gives {repo}: accept its terms on the "
            "model's page, then log in (hf auth login) or set HF_TOKEN"
        )
        raise ModelFilesError(msg) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        msg = (
            f"the Hub has no model {repo!r}{at} that you may read; check the spelling, and set "
            f"HF_TOKEN if it is private. Without the Hub there are: {', '.join(CATALOGUE)}"
        )
        raise UnknownModelError(msg) from error
    except Exception as error:  # the client raises those of its HTTP library, which changes
        raise _Unreachable(_first_line(error)) from error
    files = tuple(sibling.rfilename for sibling in info.siblings or ())
    return _Answer(commit=info.sha or revision or "main", files=files)


def _from_cache(repo: str, revision: str | None, why: str) -> HubSnapshot:
    """What an earlier download left in the Hub's cache."""
    try:
        found = huggingface_hub.snapshot_download(repo, revision=revision, local_files_only=True)
    except Exception as error:
        msg = (
            f"{repo!r} was asked for from the Hugging Face Hub, which cannot be reached ({why}), "
            "and it is not in the local cache. Check the network, or use what needs no Hub: a "
            f"catalogue name ({', '.join(CATALOGUE)}), a local directory or a .gguf file"
        )
        raise ModelFilesError(msg) from error
    folder = Path(found)
    logger.warning("the Hub cannot be reached (%s): %s is loaded from the cache", why, repo)
    return HubSnapshot(folder=folder, commit=folder.name)


def _download(repo: str, commit: str, files: list[str]) -> Path:
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=commit, allow_patterns=files))
    except Exception as error:
        msg = f"could not download {repo} from the Hub: {_first_line(error)}; try again"
        raise ModelFilesError(msg) from error


def _no_weights(repo: str, files: Sequence[str]) -> str:
    ggufs = [name for name in files if name.endswith(".gguf")]
    if ggufs:
        return (
            f"{repo} holds .gguf files only; download one ({ggufs[0]}, for instance) and give "
            "its path as the model"
        )
    return f"{repo} holds no weights that can be loaded (model*.safetensors or pytorch_model*.bin)"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
